"""What the live page is told of each worker: a row of values, so that two rows tell whether anything has changed."""

from __future__ import annotations

from collections.abc import Iterable

from common.types import WorkerState
from protos.baton.v1 import worker_pb2
from router.api.worker_views import WorkerView
from router.fleet.endpoint import Endpoint

Row = tuple[object, ...]
COLUMNS = (
    "address", "role", "state", "problem", "is_excluded", "breaker", "running", "waiting", "queued_tokens", "blocks",
    "free_blocks", "cached_blocks", "leases", "sent", "tokens_per_s", "hit_rate", "pinned",
)  # fmt: skip


def row_of(endpoint: Endpoint, view: WorkerView) -> Row:
    """In the order of `COLUMNS`. `view`: of all processes of the router together."""
    load, taken = endpoint.load, endpoint.taken
    return (
        endpoint.address,
        endpoint.role.value,
        endpoint.state.value,
        endpoint.excluded or endpoint.suspended,
        bool(endpoint.excluded),
        view.breaker,
        load.num_requests_running,
        load.num_requests_waiting,
        load.num_queued_prompt_tokens,
        load.num_blocks,
        load.num_free_blocks,
        load.num_cached_blocks,
        load.num_leases,
        view.num_requests,
        round(view.tokens_per_second, 1),
        round(view.hit_rate, 3),
        taken is not None and taken.is_pinned,
    )


def info_of(info: worker_pb2.WorkerInfo) -> dict[str, object]:
    """What a worker said of itself when the router connected to it."""
    return {
        "worker_id": info.worker_id,
        "device": info.device,
        "dtype": info.dtype,
        "kernels": info.kernels,
        "connector": info.connector,
        "block_size": info.block_size,
        "max_model_len": info.max_model_len,
        "step_times": info.batch_time.source,
        "version": info.version,
        "epoch": info.epoch,
    }


def kv_in_use(endpoints: Iterable[Endpoint]) -> float | None:
    """The share of these workers' KV blocks that requests, leases and transfers own; None if no worker is ready."""
    loads = [one.load for one in endpoints if one.state is not WorkerState.UNREACHABLE]
    num_blocks = sum(load.num_blocks for load in loads)
    num_owned = sum(load.num_blocks - load.num_free_blocks - load.num_cached_blocks for load in loads)
    return round(num_owned / num_blocks, 4) if num_blocks else None
