"""A prefill worker that lies harms its own stream: the decode worker asks the next one, or computes the prompt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import grpc
import pytest

from common.errors import OverloadedError
from protos.baton.v1 import decode_pb2, prefill_pb2, types_pb2
from tests.support.fake_prefill_worker import ACCEPTED, FakePrefillWorker, prefill_workers
from tests.worker.conftest import StartWorker, decode_request
from tests.worker.words import REMOTE, VOCAB_SIZE

Event = prefill_pb2.PrefillEvent
Ref = types_pb2.BlockRef
FULL = OverloadedError("full")


def blocks(*refs: Ref, **fields: object) -> prefill_pb2.PrefillEvent:
    return Event(blocks_ready=prefill_pb2.BlocksReady(blocks=refs, **fields))  # type: ignore[arg-type]


def token(token_id: int = 5, **fields: object) -> prefill_pb2.PrefillEvent:
    return Event(first_token=prefill_pb2.FirstToken(token=types_pb2.SampledToken(token_id=token_id), **fields))  # type: ignore[arg-type]


LIES: dict[str, list[prefill_pb2.PrefillEvent]] = {
    "accepted: came twice": [ACCEPTED, ACCEPTED],
    "accepted.peer: 2097152 bytes": [Event(accepted=prefill_pb2.PrefillAccepted(peer=bytes(2 << 20)))],
    "blocks_ready.blocks: block 2 was not asked for": [blocks(Ref(index=2))],
    "blocks_ready.blocks: block 4294967295 was not": [blocks(Ref(index=2**32 - 1))],
    "or was published before": [blocks(Ref(index=0)), blocks(Ref(index=0))],
    "blocks_ready.failed_indexes: block 4294967295": [blocks(failed_indexes=[2**32 - 1])],
    "too many checksums": [blocks(Ref(index=0, checksums=[0] * 5000))],
    "the name of its peer": [blocks(Ref(index=0, peer="x" * 5000))],
    "first_token.token.token_id: 100 is outside": [token(VOCAB_SIZE)],
    "first_token.token.token_id: 4294967295 is outside": [token(2**32 - 1)],
    "first_token: came twice": [token(), token()],
    "wanted: blocks 0 to 1 of 0": [Event(wanted=prefill_pb2.BlocksWanted(first=0, stop=1))],
    "top_logprobs: 5000 are too many": [
        Event(
            first_token=prefill_pb2.FirstToken(
                token=types_pb2.SampledToken(token_id=1, top_logprobs=[types_pb2.TokenLogprob()] * 5000)
            )
        )
    ],
}


async def answer(
    call: grpc.aio.UnaryStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeEvent],
) -> decode_pb2.DecodeEvent:
    """The last event."""
    events = [event async for event in call]
    assert events[-1].finish_reason
    return events[-1]


@pytest.mark.parametrize("words", LIES)
async def test_a_lie_ends_the_lie_tellers_stream_alone(
    start_worker: StartWorker, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await start_worker()
    liar, honest = FakePrefillWorker(LIES[words]), FakePrefillWorker(refuses=FULL)
    async with prefill_workers(liar, honest):
        request = decode_request(REMOTE, 8, prefill_addresses=[liar.address, honest.address])
        await answer(worker.decode.Decode(request, timeout=60))
    failures = [str(getattr(record, "reason", "")) for record in caplog.records]
    assert any(words in failure for failure in failures)
    assert honest.num_asked == (0 if words == "first_token: came twice" else 1)  # nobody is asked for a second one
    assert not worker.process.done()
    assert (await worker.status()).integrity.count("RemoteBlocksPublished") == (1 if "before" in words else 0)


async def test_a_full_prefill_worker_is_followed_by_the_next_and_then_by_ourselves(start_worker: StartWorker) -> None:
    worker = await start_worker()
    full = [FakePrefillWorker(refuses=FULL) for _ in range(2)]
    async with prefill_workers(*full):
        request = decode_request(REMOTE, 8, prefill_addresses=[one.address for one in full])
        last = await answer(worker.decode.Decode(request, timeout=60))
    assert [peer.num_asked for peer in full] == [1, 1]
    assert "RESOURCE_EXHAUSTED: full" in last.report.fallback_reason
    assert last.report.num_retries == 1
    assert [*last.refused_prefill_addresses] == [one.address for one in full]
    assert not last.blamed_prefill_addresses


async def test_times_and_counts_that_no_clock_gives_are_taken_for_none(start_worker: StartWorker) -> None:
    worker = await start_worker()
    odd = token(num_cached_tokens=2**32 - 1, queue_ms=math.nan, prefill_ms=-math.inf)
    odd.first_token.blocks_ready.publish_ms = math.inf
    async with prefill_workers(FakePrefillWorker([ACCEPTED, odd, token()])) as (peer,):  # the second token ends it
        request = decode_request(REMOTE, 8, prefill_addresses=[peer.address])
        last = await answer(worker.decode.Decode(request, timeout=60))
    assert last.usage.cached_tokens == 8
    assert last.report.timings.prefill_ms == 0
    assert last.report.timings.queue_ms >= 0
    assert last.report.timings.transfer_ms == 0


async def test_a_leg_that_fails_by_a_defect_leaves_nobody_waiting(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Callable[..., object]:
        raise ValueError("a defect of ours")

    monkeypatch.setattr("decode_service.prefill_leg.PrefillLeg._take_in", broken)
    worker = await start_worker()
    async with prefill_workers(FakePrefillWorker()) as (peer,):
        call = worker.decode.Decode(decode_request(REMOTE, 8, prefill_addresses=[peer.address]), timeout=60)
        last = await asyncio.wait_for(answer(call), 60)
    assert "ValueError: a defect of ours" in last.report.fallback_reason
