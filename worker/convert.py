"""What workers alone convert; `protos.convert` has what all services share."""

from __future__ import annotations

from common.types import SamplingParams, WorkerLoad, WorkerState
from common.validation import ModelLimits, SamplingFields, validate_sampling
from kv_store.base import BlockRef
from protos.baton.v1 import types_pb2, worker_pb2
from protos.convert import state_to_proto


def sampling_params(
    message: types_pb2.SamplingParams, limits: ModelLimits, *, num_prompt_tokens: int
) -> SamplingParams:
    """Unset fields take the defaults of `SamplingParams`. Raises `InvalidArgumentError`: a router has checked them, but
    one that has not must not spoil a step, which many requests share."""
    fields = {descriptor.name: value for descriptor, value in message.ListFields()}  # scalars: those that are set
    return validate_sampling(
        SamplingFields(**{**fields, "logit_bias": dict(message.logit_bias)}),
        limits,
        num_prompt_tokens=num_prompt_tokens,
        draw_seed=lambda: 0,
        default_max_tokens=SamplingParams().max_tokens,
        name=lambda field: f"sampling_params.{field}",
    )


def block_ref(message: types_pb2.BlockRef) -> BlockRef:
    return BlockRef(
        index=message.index,
        block_hash=message.block_hash,
        peer=message.peer,
        epoch=message.epoch,
        block_id=message.block_id,
        checksums=tuple(message.checksums),
        staged_slots=tuple(message.staged_slots),
    )


def block_ref_message(ref: BlockRef) -> types_pb2.BlockRef:
    return types_pb2.BlockRef(
        index=ref.index,
        block_hash=ref.block_hash,
        peer=ref.peer,
        epoch=ref.epoch,
        block_id=ref.block_id,
        checksums=ref.checksums,
        staged_slots=ref.staged_slots,
    )


def load_message(load: WorkerLoad, state: WorkerState, epoch: str) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(
        state=state_to_proto(state),
        num_requests_running=load.num_requests_running,
        num_requests_waiting=load.num_requests_waiting,
        num_queued_prompt_tokens=load.num_queued_prompt_tokens,
        num_blocks=load.num_blocks,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_leases=load.num_leases,
        epoch=epoch,
    )
