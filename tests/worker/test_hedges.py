"""A prefill worker that is late: the next one is asked beside it, and the first to give something goes on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from common import metrics
from common.retry_budget import RetryBudget
from common.types import WorkerRole
from decode_service import prefill_leg
from protos.baton.v1 import decode_pb2, prefill_pb2
from tests.support.fake_engine import Script, answer_to
from tests.support.fake_prefill_worker import FakePrefillWorker, prefill_workers
from tests.worker.fronts import Front, front, read, request_of, until
from worker import shell

pytestmark = pytest.mark.usefixtures("fake_engines")

PROMPT = list(range(80, 94))
NUM_BLOCKS = 4
LATE_S = 0.01


FIRST_TOKEN = answer_to(PROMPT, 1)[0]


def gives_all(worker: FakePrefillWorker) -> None:
    worker.gives(*range(NUM_BLOCKS), token=FIRST_TOKEN)


def hedged(
    *workers: FakePrefillWorker | Front, script: Script | None = None, late_s: float = LATE_S, **fields: object
) -> decode_pb2.DecodeRequest:
    return request_of(PROMPT, workers, script, hedge_after_s=late_s, **fields)


def hedges(outcome: str) -> float:
    count: float = metrics.worker_hedges.labels(outcome)._value.get()
    return count


async def late_enough(other: FakePrefillWorker, num_refused: float) -> None:
    """Until the second one is asked, or may not be."""
    await until(lambda: other.num_asked or hedges("refused") > num_refused, "it is late")


async def test_the_second_one_goes_on_if_the_first_stalls(decode: Front, prefill: Front) -> None:
    num_asked, num_won = hedges("asked"), metrics.worker_hedges_won._value.get()
    async with prefill_workers(FakePrefillWorker()) as (stalled,):
        told = await read(decode.decode.Decode(hedged(stalled, prefill)))
        await until(lambda: stalled.has_ended, "the first stream has ended")
        assert stalled.heard_of("release")
    report = told.report
    assert told.token_ids == answer_to(PROMPT, 5)
    assert (report.num_hedges, report.num_hedges_won, report.num_retries) == (1, 1, 0)
    assert (report.prefill_worker, report.fallback_reason) == (prefill.address, "")
    assert told.blamed == [stalled.address]
    assert (hedges("asked"), metrics.worker_hedges_won._value.get()) == (num_asked + 1, num_won + 1)
    await decode.settled()
    await prefill.settled()


@pytest.mark.parametrize("token_first", [True, False])
async def test_the_first_one_goes_on_if_it_gives_something_before_the_second(decode: Front, token_first: bool) -> None:
    async with prefill_workers(FakePrefillWorker(), FakePrefillWorker()) as (late, other):
        call = decode.decode.Decode(hedged(late, other))
        await until(lambda: other.num_asked, "the second one is asked")
        late.gives(*() if token_first else (0, 1), token=FIRST_TOKEN if token_first else None)
        await until(lambda: other.has_ended, "the second one is released")
        gives_all(other)
        late.gives(*range(NUM_BLOCKS) if token_first else (2, 3), token=None if token_first else FIRST_TOKEN)
        told = await read(call)
        assert other.heard_of("release")
    assert told.token_ids == answer_to(PROMPT, 5)
    assert (told.report.num_hedges, told.report.num_hedges_won) == (1, 0)
    assert (told.report.prefill_worker, told.blamed) == (late.address, [])
    assert len(decode.told("RemoteFirstToken")) == 1
    indexes = [ref["index"] for command in decode.told("RemoteBlocksPublished") for ref in command["blocks"]]
    assert sorted(indexes) == list(range(NUM_BLOCKS))  # of one worker
    await decode.settled()


async def test_what_both_give_at_once_counts_once(decode: Front) -> None:
    async with prefill_workers(FakePrefillWorker(), FakePrefillWorker()) as workers:
        call = decode.decode.Decode(hedged(*workers))
        await until(lambda: workers[1].num_asked, "the second one is asked")
        for worker in workers:
            gives_all(worker)
        told = await read(call)
        await until(lambda: all(worker.has_ended for worker in workers), "both streams have ended")
    assert told.token_ids == answer_to(PROMPT, 5)
    assert len(decode.told("RemoteFirstToken")) == len(decode.told("RemoteBlocksPublished")) == 1
    await decode.settled()


async def test_who_has_given_a_block_is_not_late(decode: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    time_is_over = asyncio.Event()

    async def wait(
        tasks: Iterable[asyncio.Task[None]], *, timeout: float | None = None, **options: Any
    ) -> tuple[set[asyncio.Task[None]], set[asyncio.Task[None]]]:
        if timeout != LATE_S:
            return await asyncio.wait(tasks, timeout=timeout, **options)
        await until(lambda: decode.told("RemoteBlocksPublished"), "a block")  # on any machine it is here in time
        time_is_over.set()
        return set(), set(tasks)

    monkeypatch.setattr(prefill_leg, "asyncio", SimpleNamespace(**{**vars(asyncio), "wait": wait}))
    async with prefill_workers(FakePrefillWorker(), FakePrefillWorker()) as (slow, other):
        slow.gives(0)  # as soon as it is asked
        call = decode.decode.Decode(hedged(slow, other))
        await time_is_over.wait()
        slow.gives(1, 2, 3, token=FIRST_TOKEN)
        told = await read(call)
        assert other.num_asked == 0
    assert told.report.num_hedges == 0


async def test_nobody_else_is_asked_unless_the_router_says_when(decode: Front) -> None:
    async with prefill_workers(FakePrefillWorker(), FakePrefillWorker()) as (slow, other):
        call = decode.decode.Decode(request_of(PROMPT, [slow, other]))
        await until(lambda: slow.num_asked, "it is asked")
        await asyncio.sleep(0.05)
        assert other.num_asked == 0
        gives_all(slow)
        assert (await read(call)).report.num_hedges == 0


async def test_one_other_is_asked_at_most(decode: Front) -> None:
    async with prefill_workers(FakePrefillWorker(), FakePrefillWorker(), FakePrefillWorker()) as workers:
        call = decode.decode.Decode(hedged(*workers))
        await until(lambda: workers[1].num_asked, "the second one is asked")
        await asyncio.sleep(0.05)
        gives_all(workers[0])
        await read(call)
        assert [worker.num_asked for worker in workers] == [1, 1, 0]


async def test_no_more_are_asked_than_the_budget_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def one_a_quarter_of_an_hour() -> RetryBudget:
        return RetryBudget(ratio=0.0, floor_per_s=1e-3, window_s=1e3)

    monkeypatch.setattr(shell, "hedge_budget", one_a_quarter_of_an_hour)
    async with front(WorkerRole.DECODE, tmp_path) as decode:
        for num_hedges in (1, 0):
            async with prefill_workers(FakePrefillWorker(), FakePrefillWorker()) as (late, other):
                num_refused = hedges("refused")
                call = decode.decode.Decode(hedged(late, other, request_id=f"r{num_hedges}"))
                await late_enough(other, num_refused)
                gives_all(late)
                told = await read(call)
                assert (told.report.num_hedges, other.num_asked) == (num_hedges, num_hedges)


@pytest.mark.parametrize("failing", [0, 1])
async def test_one_that_fails_leaves_it_to_the_other(decode: Front, failing: int) -> None:
    async with prefill_workers(FakePrefillWorker(), FakePrefillWorker(), FakePrefillWorker()) as workers:
        call = decode.decode.Decode(hedged(*workers))
        await until(lambda: workers[1].num_asked, "the second one is asked")
        workers[failing].fails()
        await until(lambda: decode.told("PrefillLeaseEnded"), "it has failed")
        gives_all(workers[1 - failing])
        told = await read(call)
        assert workers[2].num_asked == 0
    assert told.report.prefill_worker == workers[1 - failing].address
    assert (told.report.num_hedges, told.report.num_hedges_won, told.report.num_retries) == (1, failing == 0, 0)
    assert told.report.fallback_reason == ""
    assert told.blamed == [workers[failing].address]
    await decode.settled()


async def test_if_both_fail_a_third_one_is_asked(decode: Front) -> None:
    async with prefill_workers(FakePrefillWorker(), FakePrefillWorker(), FakePrefillWorker()) as workers:
        call = decode.decode.Decode(hedged(*workers))
        await until(lambda: workers[1].num_asked, "the second one is asked")
        for worker in workers[:2]:
            worker.fails()
        await until(lambda: workers[2].num_asked, "the third one is asked")
        gives_all(workers[2])
        told = await read(call)
    assert (told.report.prefill_worker, told.report.num_retries) == (workers[2].address, 1)
    assert sorted(told.blamed) == sorted(worker.address for worker in workers[:2])
    assert (told.report.num_hedges, told.report.num_hedges_won) == (1, 0)


async def test_who_asks_first_is_lent_the_blocks(decode: Front) -> None:
    async with prefill_workers(FakePrefillWorker(), FakePrefillWorker()) as workers:
        call = decode.decode.Decode(hedged(*workers, script=Script(num_cached=2)))
        await until(lambda: workers[1].num_asked, "the second one is asked")
        for worker in reversed(workers):
            worker.says(wanted=prefill_pb2.BlocksWanted(first=0, stop=2))
            await until(partial(worker.heard_of, "lent"), "an answer")
        refused, lent = (worker.heard_of("lent")[0].lent for worker in workers)
        assert (list(refused.failed_indexes), len(refused.blocks)) == ([0, 1], 0)
        assert [ref.index for ref in lent.blocks] == [0, 1]
        workers[0].gives(2, 3, token=FIRST_TOKEN)
        told = await read(call)
    assert (told.report.num_hedges_won, told.report.num_blocks_lent) == (0, 0)
    await decode.settled()
    assert len(decode.told("LendBlocks")) == len(decode.told("EndLoan")) == 1


async def test_a_cancelled_request_releases_both(decode: Front) -> None:
    async with prefill_workers(FakePrefillWorker(), FakePrefillWorker()) as workers:
        call = decode.decode.Decode(hedged(*workers))
        await until(lambda: workers[1].num_asked, "the second one is asked")
        call.cancel()
        await until(lambda: all(worker.has_ended for worker in workers), "both streams have ended")
        assert all(worker.heard_of("release") for worker in workers)
    await decode.settled()


@pytest.mark.parametrize("late_s", [-1.0, math.nan, math.inf])
async def test_a_time_that_is_none_is_refused(decode: Front, late_s: float) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="hedge_after_s: must be a number of seconds") as failed:
        await read(decode.decode.Decode(hedged(late_s=late_s)))
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
