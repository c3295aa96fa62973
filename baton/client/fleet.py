"""From what a router says of its workers to plain values."""

from __future__ import annotations

from baton.client.report import FleetWorker
from common.types import WorkerRole
from protos.baton.v1 import router_pb2
from protos.convert import role_of, state_of


def fleet_worker(worker: router_pb2.FleetWorker) -> FleetWorker:
    load = worker.load
    return FleetWorker(
        role=role_of(worker.info.role) or role_of(worker.role) or WorkerRole.BOTH,
        takes=role_of(load.role),
        role_pinned=load.role_pinned,
        num_role_shifts=load.num_role_shifts,
        address=worker.address,
        epoch=worker.info.epoch or load.epoch,
        state=state_of(worker.state),
        num_requests_running=load.num_requests_running,
        num_requests_waiting=load.num_requests_waiting,
        num_blocks=load.num_blocks,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_leases=load.num_leases,
        goes_by_slack=load.goes_by_slack,
        integrity=worker.integrity,
        dtype=worker.info.dtype,
        dtype_reason=worker.info.dtype_reason,
        device=worker.info.device,
        device_reason=worker.info.device_reason,
        kernels=worker.info.kernels,
        kernels_reason=worker.info.kernels_reason,
        breaker=worker.breaker,
        num_queued_prompt_tokens=load.num_queued_prompt_tokens,
        num_known_blocks=worker.num_known_blocks,
        hit_rate=worker.hit_rate,
        tokens_per_second=worker.tokens_per_second,
        time_source=worker.batch_time.source,
        time_age_s=worker.batch_time.age_s,
        time_error_median=worker.batch_time.error_median,
        time_error_p90=worker.batch_time.error_p90,
        time_drifts=worker.batch_time.drifts,
    )
