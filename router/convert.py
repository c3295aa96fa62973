"""Between protobuf messages and Baton's own types, for everything that a router sends or receives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.types import FinishReason, SampledToken, SamplingParams, TokenLogprob, WorkerLoad, WorkerRole, WorkerState
from common.validation import SamplingFields
from protos.baton.v1 import types_pb2, worker_pb2

_ROLES: dict[int, WorkerRole] = {
    worker_pb2.WORKER_ROLE_PREFILL: WorkerRole.PREFILL,
    worker_pb2.WORKER_ROLE_DECODE: WorkerRole.DECODE,
    worker_pb2.WORKER_ROLE_BOTH: WorkerRole.BOTH,
}
_ROLES_TO_PROTO = {
    WorkerRole.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: worker_pb2.WORKER_ROLE_DECODE,
    WorkerRole.BOTH: worker_pb2.WORKER_ROLE_BOTH,
}
_STATES: dict[int, WorkerState] = {
    worker_pb2.WORKER_STATE_READY: WorkerState.READY,
    worker_pb2.WORKER_STATE_DRAINING: WorkerState.DRAINING,
}
_STATES_TO_PROTO = {
    WorkerState.READY: worker_pb2.WORKER_STATE_READY,
    WorkerState.DRAINING: worker_pb2.WORKER_STATE_DRAINING,
    WorkerState.UNREACHABLE: worker_pb2.WORKER_STATE_UNREACHABLE,
}
_FINISH_REASONS: dict[int, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_FINISH_REASONS_TO_PROTO = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}


def role_of(value: int) -> WorkerRole | None:
    """None for a role that this version does not know."""
    return _ROLES.get(value)


def role_to_proto(role: WorkerRole) -> worker_pb2.WorkerRole.ValueType:
    return _ROLES_TO_PROTO[role]


def state_of(value: int) -> WorkerState:
    """A state that this version does not know is one that gets no requests."""
    return _STATES.get(value, WorkerState.UNREACHABLE)


def state_to_proto(state: WorkerState) -> worker_pb2.WorkerState.ValueType:
    return _STATES_TO_PROTO[state]


def finish_reason_of(value: int) -> FinishReason | None:
    return _FINISH_REASONS.get(value)


def finish_reason_to_proto(reason: FinishReason | None) -> types_pb2.FinishReason.ValueType:
    return types_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS_TO_PROTO[reason]


def load_of(load: worker_pb2.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        num_requests_running=load.num_requests_running,
        num_requests_waiting=load.num_requests_waiting,
        num_queued_prompt_tokens=load.num_queued_prompt_tokens,
        num_blocks=load.num_blocks,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_leases=load.num_leases,
    )


def sampling_fields_of(params: types_pb2.SamplingParams) -> SamplingFields:
    """What the client set, and nothing else."""

    def given(name: str) -> bool:
        return params.HasField(name)  # type: ignore[arg-type]

    return SamplingFields(
        temperature=params.temperature if given("temperature") else None,
        top_p=params.top_p if given("top_p") else None,
        top_k=params.top_k if given("top_k") else None,
        min_p=params.min_p if given("min_p") else None,
        seed=params.seed if given("seed") else None,
        max_tokens=params.max_tokens if given("max_tokens") else None,
        min_tokens=params.min_tokens if given("min_tokens") else None,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos if given("ignore_eos") else None,
        logprobs=params.logprobs if given("logprobs") else None,
        presence_penalty=params.presence_penalty if given("presence_penalty") else None,
        frequency_penalty=params.frequency_penalty if given("frequency_penalty") else None,
        repetition_penalty=params.repetition_penalty if given("repetition_penalty") else None,
        logit_bias=dict(params.logit_bias),
    )


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
    )


def tokens_of(tokens: Iterable[types_pb2.SampledToken]) -> list[SampledToken]:
    return [
        SampledToken(
            token.token_id,
            token.logprob if token.HasField("logprob") else None,
            tuple(TokenLogprob(top.token_id, top.logprob) for top in token.top_logprobs),
        )
        for token in tokens
    ]


def tokens_to_proto(tokens: Sequence[SampledToken]) -> list[types_pb2.SampledToken]:
    return [
        types_pb2.SampledToken(
            token_id=token.token_id,
            logprob=token.logprob,
            top_logprobs=[types_pb2.TokenLogprob(token_id=t.token_id, logprob=t.logprob) for t in token.top_logprobs],
        )
        for token in tokens
    ]
