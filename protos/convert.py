"""Between the wire's nouns and `common.types`, both ways, for everyone who speaks `baton.v1`: client, router, workers.

A value that this version does not know becomes None, or what is safe: a worker in an unknown state gets no requests.
"""

from __future__ import annotations

from common.types import FinishReason, SampledToken, TokenLogprob, WorkerRole, WorkerState
from protos.baton.v1 import types_pb2, worker_pb2

_ROLES_TO_PROTO = {
    WorkerRole.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: worker_pb2.WORKER_ROLE_DECODE,
    WorkerRole.BOTH: worker_pb2.WORKER_ROLE_BOTH,
}
_STATES_TO_PROTO = {
    WorkerState.READY: worker_pb2.WORKER_STATE_READY,
    WorkerState.DRAINING: worker_pb2.WORKER_STATE_DRAINING,
    WorkerState.UNREACHABLE: worker_pb2.WORKER_STATE_UNREACHABLE,
    WorkerState.PAUSED: worker_pb2.WORKER_STATE_PAUSED,
}
_FINISH_REASONS_TO_PROTO = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: types_pb2.FINISH_REASON_TOOL_CALLS,
}
_ROLES: dict[int, WorkerRole] = {value: role for role, value in _ROLES_TO_PROTO.items()}
_STATES: dict[int, WorkerState] = {value: state for state, value in _STATES_TO_PROTO.items()}
_FINISH_REASONS: dict[int, FinishReason] = {value: reason for reason, value in _FINISH_REASONS_TO_PROTO.items()}

SAMPLING_PARAMETERS = frozenset(field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields)
_LAST_OF_FIRST = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name["logit_bias"].number
LATER_PARAMETERS = tuple(
    field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields if field.number > _LAST_OF_FIRST
)
"""Those that a worker may be too old for."""


def sampling_parameters_of(info: worker_pb2.WorkerInfo) -> frozenset[str]:
    """The sampling parameters known here that the worker knows too."""
    told = SAMPLING_PARAMETERS.intersection(info.sampling_parameters)
    return told or SAMPLING_PARAMETERS.difference(LATER_PARAMETERS)


def role_of(value: int) -> WorkerRole | None:
    return _ROLES.get(value)


def role_to_proto(role: WorkerRole) -> worker_pb2.WorkerRole.ValueType:
    return _ROLES_TO_PROTO[role]


def state_of(value: int) -> WorkerState:
    return _STATES.get(value, WorkerState.UNREACHABLE)


def state_to_proto(state: WorkerState) -> worker_pb2.WorkerState.ValueType:
    return _STATES_TO_PROTO[state]


def finish_reason_of(value: int) -> FinishReason | None:
    return _FINISH_REASONS.get(value)


def finish_reason_to_proto(reason: FinishReason | None) -> types_pb2.FinishReason.ValueType:
    return types_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS_TO_PROTO[reason]


def token_of(token: types_pb2.SampledToken) -> SampledToken:
    if not token.HasField("logprob") and not token.top_logprobs:
        return SampledToken(token.token_id)  # of most answers
    return SampledToken(
        token.token_id,
        token.logprob if token.HasField("logprob") else None,
        tuple(TokenLogprob(top.token_id, top.logprob) for top in token.top_logprobs),
    )


def token_to_proto(token: SampledToken) -> types_pb2.SampledToken:
    return types_pb2.SampledToken(
        token_id=token.token_id,
        logprob=token.logprob,
        top_logprobs=[types_pb2.TokenLogprob(token_id=top.token_id, logprob=top.logprob) for top in token.top_logprobs],
    )
