"""What a worker tells routers of its load, and of which requests they need not add to it any more."""

from __future__ import annotations

import asyncio
from pathlib import Path

from common.types import WorkerRole, request_tag
from protos.baton.v1 import worker_pb2
from tests.support.calls import received
from tests.support.fake_engine import Script, answer_to
from tests.worker.fronts import front, read, request_of

PROMPT = list(range(40))


async def test_the_first_report_after_a_request_names_it(tmp_path: Path, fake_engines: None) -> None:
    async with front(WorkerRole.DECODE, tmp_path / "decode") as one:
        reports = one.worker.WatchLoad(worker_pb2.WatchLoadRequest())
        assert list((await received(reports)).counted_requests) == []
        request = request_of(PROMPT, script=Script(on_status=True))  # it does not end before it is asked for its load
        call = one.decode.Decode(request)
        async with asyncio.timeout(20):
            while not (report := await received(reports)).counted_requests:
                assert report.num_requests_running == 0
        assert list(report.counted_requests) == [request_tag(request.request_id)]
        assert report.num_requests_running == 1
        reports.cancel()
        assert list((await one.load()).counted_requests) == []  # what it says of itself to people
        for _ in range(4):
            await one.load()
        assert (await read(call)).token_ids == answer_to(PROMPT, 5)
