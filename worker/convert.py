"""Between the wire's messages and the engine's types, both ways, for everything that workers say to each other."""

from __future__ import annotations

from common.types import FinishReason, SampledToken, SamplingParams, TokenLogprob, WorkerLoad, WorkerRole, WorkerState
from kv_store.base import BlockRef
from protos.baton.v1 import types_pb2, worker_pb2

_FINISH_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}
_ROLES = {
    WorkerRole.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: worker_pb2.WORKER_ROLE_DECODE,
    WorkerRole.BOTH: worker_pb2.WORKER_ROLE_BOTH,
}
_STATES = {
    WorkerState.READY: worker_pb2.WORKER_STATE_READY,
    WorkerState.DRAINING: worker_pb2.WORKER_STATE_DRAINING,
    WorkerState.UNREACHABLE: worker_pb2.WORKER_STATE_UNREACHABLE,
}


def sampling_params(message: types_pb2.SamplingParams) -> SamplingParams:
    """Unset fields take the defaults of `SamplingParams`."""
    fields = {descriptor.name: value for descriptor, value in message.ListFields()}  # scalars: those that are set
    for name in ("stop", "stop_token_ids"):
        fields[name] = tuple(fields.get(name, ()))
    return SamplingParams(**{**fields, "logit_bias": dict(message.logit_bias)})


def sampled_token(message: types_pb2.SampledToken) -> SampledToken:
    return SampledToken(
        message.token_id,
        message.logprob if message.HasField("logprob") else None,
        tuple(TokenLogprob(top.token_id, top.logprob) for top in message.top_logprobs),
    )


def sampled_token_message(token: SampledToken) -> types_pb2.SampledToken:
    return types_pb2.SampledToken(
        token_id=token.token_id,
        logprob=token.logprob,
        top_logprobs=[types_pb2.TokenLogprob(token_id=top.token_id, logprob=top.logprob) for top in token.top_logprobs],
    )


def finish_reason_message(reason: FinishReason | None) -> types_pb2.FinishReason.ValueType:
    return types_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason]


def block_ref(message: types_pb2.BlockRef) -> BlockRef:
    return BlockRef(
        index=message.index,
        block_hash=message.block_hash,
        peer=message.peer,
        epoch=message.epoch,
        block_id=message.block_id,
        checksum=message.checksum if message.HasField("checksum") else None,
    )


def block_ref_message(ref: BlockRef) -> types_pb2.BlockRef:
    return types_pb2.BlockRef(
        index=ref.index,
        block_hash=ref.block_hash,
        peer=ref.peer,
        epoch=ref.epoch,
        block_id=ref.block_id,
        checksum=ref.checksum,
    )


def role_message(role: WorkerRole) -> worker_pb2.WorkerRole.ValueType:
    return _ROLES[role]


def load_message(load: WorkerLoad, state: WorkerState, epoch: str) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(
        state=_STATES[state],
        num_requests_running=load.num_requests_running,
        num_requests_waiting=load.num_requests_waiting,
        num_queued_prompt_tokens=load.num_queued_prompt_tokens,
        num_blocks=load.num_blocks,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_leases=load.num_leases,
        epoch=epoch,
    )
