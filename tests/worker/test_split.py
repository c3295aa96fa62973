"""A split prompt: the prefill worker is asked for whole blocks of its beginning, and for no token."""

from __future__ import annotations

import pytest

from common.types import WorkerRole
from protos.baton.v1 import prefill_pb2, types_pb2, worker_pb2
from tests.support.fake_engine import Script, answer_to
from tests.support.fake_prefill_worker import ACCEPTED, FakePrefillWorker, prefill_workers
from tests.worker.fronts import Front, read, request_of
from tests.worker.words import BLOCK_SIZE

pytestmark = pytest.mark.usefixtures("fake_engines")

PROMPT = list(range(80, 94))  # four blocks, the last one partial
SPLIT_AT = 2 * BLOCK_SIZE + 1  # within a block: whole ones are asked for


async def test_each_worker_has_its_part(prefill: Front, decode: Front) -> None:
    told = await read(decode.decode.Decode(request_of(PROMPT, [prefill], split_at=SPLIT_AT)))
    assert told.token_ids == answer_to(PROMPT, 5)
    report = told.report
    assert (report.num_blocks_moved, report.num_tail_tokens) == (2, len(PROMPT) - 2 * BLOCK_SIZE)
    assert (report.prefill_worker, report.fallback_reason) == (prefill.address, "")
    assert report.timings.tail_ms > 0
    (asked,) = prefill.told("AddRequest")
    assert (asked["prompt_token_ids"], asked["is_part"]) == (PROMPT[: 2 * BLOCK_SIZE], True)
    (decoded,) = decode.told("AddRequest")
    assert decoded["split_at"] == SPLIT_AT
    assert not decode.told("RemoteFirstToken"), "it draws that itself"
    for one in (prefill, decode):
        await one.settled()


async def test_a_part_needs_no_grammar(prefill: Front, decode: Front) -> None:
    guided = types_pb2.Guided(regex="[a-z]+")
    request = request_of(PROMPT, [prefill], split_at=SPLIT_AT)
    request.sampling_params.guided.CopyFrom(guided)
    await read(decode.decode.Decode(request))
    (asked,), (decoded,) = prefill.told("AddRequest"), decode.told("AddRequest")
    assert decoded["sampling_params"]["guided"]
    assert not asked["sampling_params"].get("guided")


async def test_a_worker_that_fails_is_followed_by_the_next(prefill: Front, decode: Front) -> None:
    async with prefill_workers(FakePrefillWorker()) as (broken,):
        broken.fails()
        told = await read(decode.decode.Decode(request_of(PROMPT, [broken, prefill], split_at=SPLIT_AT)))
    assert told.token_ids == answer_to(PROMPT, 5)
    (asked,) = prefill.told("AddRequest")
    assert asked["is_part"]
    assert (told.report.num_retries, told.blamed) == (1, [broken.address])


async def test_if_nobody_computes_the_part_it_is_computed_here(prefill: Front, decode: Front) -> None:
    script = Script(prefill_fails=True)
    told = await read(decode.decode.Decode(request_of(PROMPT, [prefill], script, split_at=SPLIT_AT)))
    assert told.token_ids == answer_to(PROMPT, 5)
    assert "the script says so" in told.report.fallback_reason
    assert told.report.num_tail_tokens == 0


@pytest.mark.parametrize("is_split", [True, False])
async def test_what_was_not_asked_for_ends_the_stream(decode: Front, is_split: bool) -> None:
    """A token of a part, as workers of before would send it; or none of a whole prompt."""
    first = prefill_pb2.FirstToken(token=types_pb2.SampledToken(token_id=5) if is_split else None)
    events = [ACCEPTED, prefill_pb2.PrefillEvent(first_token=first)]
    async with prefill_workers(FakePrefillWorker(events)) as (liar,):
        told = await read(decode.decode.Decode(request_of(PROMPT, [liar], split_at=SPLIT_AT if is_split else 0)))
    assert told.token_ids == answer_to(PROMPT, 5)
    assert "first_token.token: is " in told.report.fallback_reason
    assert told.blamed == [liar.address]


async def test_workers_say_that_they_know_split_prompts(prefill: Front, decode: Front) -> None:
    for one in (prefill, decode):
        info = await one.worker.GetInfo(worker_pb2.GetInfoRequest())
        assert info.splits_prompts
        assert one.role in (WorkerRole.PREFILL, WorkerRole.DECODE)
