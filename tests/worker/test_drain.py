"""A worker that is told to end: finishes what it has, offers what it cannot finish, takes nothing new."""

from __future__ import annotations

import asyncio

import grpc
import pytest

import worker.drain
from tests.support.fake_engine import Script, answer_to
from tests.worker.fronts import Front, read, request_of, until

pytestmark = pytest.mark.usefixtures("fake_engines")

PROMPT = list(range(40))


async def test_streams_end_by_themselves(decode: Front) -> None:
    call = decode.decode.Decode(request_of(PROMPT, script=Script(token_s=0.4)))
    await read(call, num_tokens=1)
    await decode.drain(30)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await read(decode.decode.Decode(request_of(PROMPT, request_id="late")))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in (refused.value.details() or "")
    assert (await read(call)).token_ids == answer_to(PROMPT, 5)[1:]
    assert await decode.task == 0


async def test_what_cannot_end_is_offered_and_handed_over(decode: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.drain, "HANDOVER_AT", 0.01)
    call = decode.decode.Decode(request_of(PROMPT, script=Script(stall_at=2)))
    await read(call, num_tokens=2)
    await decode.drain(30)
    async for event in call:
        if event.offers_handover:
            break
    call.cancel()  # as a router does that has another worker
    assert await decode.task == 0


async def test_what_nobody_takes_is_cut(decode: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.drain, "OFFER_INTERVAL_S", 0.1)
    call = decode.decode.Decode(request_of(PROMPT, script=Script(stall_at=2)))
    await read(call, num_tokens=2)
    await decode.drain(1.0)
    with pytest.raises(grpc.aio.AioRpcError) as cut:
        await read(call)
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "told to end" in (cut.value.details() or "")
    assert await decode.task == 1


async def test_a_prefill_worker_waits_for_its_leases(prefill: Front, decode: Front) -> None:
    call = decode.decode.Decode(request_of(PROMPT, [prefill], Script(fetch_s=2.0)))
    await read(call, num_tokens=1)
    await until(lambda: decode.told("RemoteBlocksPublished"), "blocks are being fetched")
    await prefill.drain(30)
    await asyncio.sleep(0.1)
    assert not prefill.task.done()
    told = await read(call)
    assert told.token_ids == answer_to(PROMPT, 5)[1:]
    assert told.report.fallback_reason == ""
    assert await prefill.task == 0
