"""What workers alone convert; `protos.messages` and `protos.convert` have what all services share."""

from __future__ import annotations

from common.cache_hints import Retain
from common.sampling import SamplingParams, resolve
from common.targets import LatencyTargets
from common.validation import ModelLimits
from engine import messages as m
from kv_store.base import BlockRef
from protos.baton.v1 import decode_pb2, prefill_pb2, types_pb2
from protos.messages import given_fields, value_of


def sampling_params(
    message: types_pb2.SamplingParams, limits: ModelLimits, *, num_prompt_tokens: int
) -> SamplingParams:
    """Unset fields take the defaults of `SamplingParams`. Raises `InvalidArgumentError`: a router has checked them, but
    one that has not must not spoil a step, which many requests share."""
    return resolve(
        given_fields(message),
        limits,
        num_prompt_tokens=num_prompt_tokens,
        draw_seed=lambda: 0,
        default_max_tokens=SamplingParams().max_tokens,
        name=lambda field: f"sampling_params.{field}",
    )


def retain_of(message: decode_pb2.DecodeRequest | prefill_pb2.PrefillStart) -> Retain | None:
    if not message.HasField("retain"):
        return None
    return Retain(message.retain.seconds, message.retain.num_tokens)


def targets_of(message: decode_pb2.DecodeRequest | prefill_pb2.PrefillStart) -> LatencyTargets | None:
    return value_of(message.targets, LatencyTargets) if message.HasField("targets") else None


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


def blocks_ready(event: m.BlocksPublished) -> prefill_pb2.BlocksReady:
    return prefill_pb2.BlocksReady(
        blocks=[block_ref_message(ref) for ref in event.blocks],
        failed_indexes=event.failed_indexes,
        failure=event.failure,
        publish_ms=event.elapsed_s * 1000,
    )
