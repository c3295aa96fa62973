"""What a decode worker lends: its prefill worker asks for blocks, and they stay until nobody reads them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc
import pytest

import decode_service.prefill_leg
from common.types import WorkerRole
from protos.baton.v1 import prefill_pb2, types_pb2
from tests.support.calls import received
from tests.support.fake_engine import Script, answer_to
from tests.worker.fronts import Front, front, read, request_of, until

pytestmark = pytest.mark.usefixtures("fake_engines")

PROMPT = list(range(80, 94))  # four blocks, the last one partial
NUM_BLOCKS, NUM_CACHED = 4, 2
SCRIPT = Script(num_cached=NUM_CACHED)


async def test_a_prefill_worker_is_lent_what_it_lacks(prefill: Front, decode: Front) -> None:
    told = await read(decode.decode.Decode(request_of(PROMPT, [prefill], SCRIPT)))
    assert told.token_ids == answer_to(PROMPT, 5)
    assert (told.report.num_blocks_lent, told.report.num_blocks_moved) == (NUM_CACHED, NUM_BLOCKS - NUM_CACHED)
    (lent,) = prefill.told("RemoteBlocksPublished")
    assert [ref["index"] for ref in lent["blocks"]] == [0, 1]
    (peer,) = prefill.told("AddPeer")
    assert peer["peer"] == "ZmFrZQ=="  # b"fake"
    await decode.settled()
    assert len(decode.told("EndLoan")) == 1


async def test_a_decode_worker_that_does_not_answer_is_not_waited_for(decode: Front, tmp_path: Path) -> None:
    script = Script(num_cached=NUM_CACHED, lends_nothing=True)
    async with front(WorkerRole.PREFILL, tmp_path / "patient", transfer_timeout_s=1.0) as prefill:
        told = await read(decode.decode.Decode(request_of(PROMPT, [prefill], script)))
        (given_up,) = prefill.told("RemoteBlocksPublished")
        await prefill.settled()
    assert told.token_ids == answer_to(PROMPT, 5)
    assert (told.report.num_blocks_lent, told.report.fallback_reason) == (0, "")
    assert given_up["failed_indexes"] == [0, 1]
    assert given_up["failure"] == "the decode worker did not lend it within 1 s"
    await decode.settled()


async def test_a_worker_that_does_not_lend_offers_nothing(prefill: Front, tmp_path: Path) -> None:
    async with front(WorkerRole.DECODE, tmp_path / "mean", lend_blocks=False) as decode:
        told = await read(decode.decode.Decode(request_of(PROMPT, [prefill], SCRIPT)))
    assert told.token_ids == answer_to(PROMPT, 5)
    assert [command["num_lendable_blocks"] for command in prefill.told("AddRequest")] == [0]


async def test_a_stream_that_breaks_off_keeps_what_it_was_lent_for_a_while(
    prefill: Front, decode: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill worker may read on. The next one is lent nothing: its answers would be taken for the first one's."""
    monkeypatch.setattr(decode_service.prefill_leg, "lease_grace_s", lambda settings: 1.0)
    script = Script(num_cached=NUM_CACHED, late_blocks_s=3600)
    async with front(WorkerRole.PREFILL, tmp_path / "next") as follower:
        call = decode.decode.Decode(request_of(PROMPT, [prefill, follower], script))
        await read(call, num_tokens=1)
        assert not decode.told("EndLoan")
        os.kill(prefill.engine_pid, signal.SIGKILL)
        told = await read(call)
        assert told.report.fallback_reason
        assert not follower.told("AddRequest")  # the first token was known
    assert not decode.told("EndLoan")
    await until(lambda: decode.told("EndLoan"), "the loan ends")
    await decode.settled()


async def test_a_cancelled_request_ends_its_loan(prefill: Front, decode: Front) -> None:
    """The prefill worker has ended the stream, so it believes nothing any more."""
    call = decode.decode.Decode(request_of(PROMPT, [prefill], Script(num_cached=NUM_CACHED, late_blocks_s=3600)))
    await read(call, num_tokens=1)
    call.cancel()
    await until(lambda: decode.told("EndLoan"), "the loan ends")
    await decode.settled()
    await prefill.settled()


@pytest.mark.parametrize("lie", ["not asked for", "twice", "long name"])
async def test_who_lends_nonsense_loses_its_stream(prefill: Front, lie: str) -> None:
    call = prefill.prefill.Prefill()
    start = prefill_pb2.PrefillStart(
        request_id="r",
        prompt_token_ids=PROMPT,
        sampling_params=types_pb2.SamplingParams(max_tokens=5),
        first_block=NUM_CACHED,
        peer=b"" if lie == "not asked for" else b"fake",
        cache_salt=Script(prefill_stalls=True).salt(),
    )
    await call.write(prefill_pb2.PrefillRequest(start=start))
    if start.peer:
        while not (await received(call)).HasField("wanted"):
            pass
    indexes = [0, 0] if lie == "twice" else [0]
    refs = [types_pb2.BlockRef(index=index, peer="x" * 5000 if lie == "long name" else "") for index in indexes]
    await call.write(prefill_pb2.PrefillRequest(lent=prefill_pb2.BlocksReady(blocks=refs)))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await _read_to_end(call)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (failed.value.details() or "").startswith("lent: ")
    assert not prefill.told("RemoteBlocksPublished")
    await prefill.settled()


async def _read_to_end(call: grpc.aio.StreamStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
