"""What a worker tells of how long its steps take."""

from __future__ import annotations

import pytest

from common import metrics
from protos.baton.v1 import worker_pb2
from tests.support.calls import received
from tests.worker.conftest import StartWorker


async def test_the_model_is_told_with_the_worker_s_facts_and_how_good_it_is_with_its_status(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker()
    call = worker.worker.WatchLoad(worker_pb2.WatchLoadRequest())
    while (await received(call)).batch_time_version != 1:
        pass
    status = (await worker.worker.GetStatus(worker_pb2.GetWorkerStatusRequest())).batch_time  # after both events
    info = (await worker.worker.GetInfo(worker_pb2.GetInfoRequest())).batch_time
    call.cancel()
    assert (info.model, info.source, info.version) == (b"a model", "file", 1)
    assert (status.model, status.num_steps, status.drifts) == (b"", 64, True)
    assert status.error_median == pytest.approx(0.02)
    assert 0 <= status.age_s < 60
    assert metrics.worker_step_time_error.labels("90")._value.get() == 0.25
    assert metrics.worker_step_time_drifts._value.get() == 1
