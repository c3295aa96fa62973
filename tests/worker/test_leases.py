"""The lease: blocks of a prefill worker are held while the decode worker's stream lives, and not longer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import grpc
import pytest

import prefill_service.servicer
from common.types import WorkerRole
from protos.baton.v1 import prefill_pb2, types_pb2
from tests.support.fake_engine import SPEC, Script, answer_to
from tests.worker.fronts import Front, front, read, request_of, until

pytestmark = pytest.mark.usefixtures("fake_engines")

PROMPT = list(range(80, 94))  # four blocks, the last one partial
NUM_BLOCKS = 4


async def test_a_handoff(prefill: Front, decode: Front) -> None:
    told = await read(decode.decode.Decode(request_of(PROMPT, [prefill])))
    assert told.token_ids == answer_to(PROMPT, 5)
    assert (told.report.prefill_worker, told.report.num_blocks_moved) == (prefill.address, NUM_BLOCKS)
    assert told.report.fallback_reason == ""
    await prefill.settled()
    await decode.settled()
    assert [command["type"] for command in prefill.commands() if command["type"] != "GetStatus"] == [
        "AddRequest",
        "Release",
    ]


async def test_both_workers_hear_what_to_retain(prefill: Front, decode: Front) -> None:
    retain = types_pb2.Retain(seconds=60, num_tokens=8)
    await read(decode.decode.Decode(request_of(PROMPT, [prefill], retain=retain, tenant="tenant t")))
    await read(decode.decode.Decode(request_of(PROMPT, [prefill])))
    for one in (prefill, decode):
        told = [(command["retain"], command["tenant"]) for command in one.told("AddRequest")]
        assert told == [({"seconds": 60.0, "num_tokens": 8}, "tenant t"), (None, "")]


async def test_both_workers_hear_of_targets_and_age(prefill: Front, decode: Front) -> None:
    targets, age_s, begin = types_pb2.LatencyTargets(tpot_ms=50), 5.0, time.monotonic()
    asked = request_of(PROMPT, [prefill], targets=targets, age_ms=1000 * age_s)
    await read(decode.decode.Decode(asked))
    await read(decode.decode.Decode(request_of(PROMPT, [prefill])))
    end, asked_times = time.monotonic(), []
    for one in (decode, prefill):
        first, second = one.told("AddRequest")
        assert (first["targets"], second["targets"]) == ({"ttft_ms": None, "tpot_ms": 50.0}, None)
        assert begin - age_s <= first["asked_time"] <= end - age_s
        assert begin <= second["asked_time"] <= end
        asked_times.append(first["asked_time"])
    assert asked_times[0] <= asked_times[1]  # the way to the prefill worker is no part of what it is told


async def test_the_first_token_does_not_wait_for_blocks(prefill: Front, decode: Front) -> None:
    call = decode.decode.Decode(request_of(PROMPT, [prefill], Script(late_blocks_s=3600)))
    told = await read(call, num_tokens=1)
    assert told.token_ids == answer_to(PROMPT, 1)
    assert (await prefill.load()).num_requests_running == 1
    call.cancel()
    await prefill.settled()
    await decode.settled()


DEADLINES_S = (1.0, 5.0, 25.0)  # the next one if the moment came too late


@pytest.mark.parametrize(
    ("script", "num_tokens"),
    [
        (Script(prefill_stalls=True), 0),
        (Script(late_blocks_s=3600), 1),
        (Script(fetch_s=3600), 1),
        (Script(stall_at=3), 3),
    ],
    ids=["before the first chunk", "before its blocks", "in mid-transfer", "in mid-decode"],
)
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_who_goes_away_frees_everything(
    prefill: Front, decode: Front, script: Script, num_tokens: int, how: str
) -> None:
    for timeout_s in DEADLINES_S if how == "deadline" else (None,):
        num_released = len(prefill.told("Release"))
        call = decode.decode.Decode(request_of(PROMPT, [prefill], script), timeout=timeout_s)
        try:
            if num_tokens:
                await read(call, num_tokens=num_tokens)
            else:
                await until(lambda: prefill.told("AddRequest"), "the prefill worker was asked")
        except grpc.aio.AioRpcError:
            assert timeout_s is not None
            await decode.settled()
            await prefill.settled()
            continue  # the deadline passed before the moment came
        break
    else:
        pytest.fail("the moment never came in time")
    if how == "cancel":
        call.cancel()
    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
        await read(call)
    await decode.settled()
    await prefill.settled()
    assert len(prefill.told("Release")) == num_released + 1


async def test_a_second_prefill_worker_is_asked_when_the_first_refuses(
    prefill: Front, decode: Front, tmp_path: Path
) -> None:
    async with front(WorkerRole.PREFILL, tmp_path / "other", connector="lmcache") as other:
        told = await read(decode.decode.Decode(request_of(PROMPT, [other, prefill])))
        assert not other.told("AddRequest")
    assert told.token_ids == answer_to(PROMPT, 5)
    assert (told.report.prefill_worker, told.report.num_retries) == (prefill.address, 1)
    await prefill.settled()


@pytest.mark.parametrize("fault", ["nobody is there", "the engine dies", "the engine fails"])
async def test_without_a_prefill_worker_the_prompt_is_computed_here(prefill: Front, decode: Front, fault: str) -> None:
    script = Script(prefill_fails=fault == "the engine fails", prefill_stalls=True)
    request = request_of(PROMPT, [prefill], script)
    if fault == "nobody is there":
        request.prefill_addresses[:] = ["127.0.0.1:1"]
    call = decode.decode.Decode(request)
    if fault == "the engine dies":
        await until(lambda: prefill.told("AddRequest"), "the prefill worker was asked")
        os.kill(prefill.engine_pid, signal.SIGKILL)
    told = await read(call)
    assert told.token_ids == answer_to(PROMPT, 5)
    assert told.report.prefill_worker == ""
    assert told.report.fallback_reason
    await decode.settled()


async def test_a_prefill_worker_that_dies_after_the_first_token(prefill: Front, decode: Front) -> None:
    """The token that was sent is not computed again; the rest is, here."""
    call = decode.decode.Decode(request_of(PROMPT, [prefill], Script(late_blocks_s=3600)))
    first = await read(call, num_tokens=1)
    os.kill(prefill.engine_pid, signal.SIGKILL)
    rest = await read(call)
    assert first.token_ids + rest.token_ids == answer_to(PROMPT, 5)
    assert rest.report.fallback_reason
    assert decode.told("PrefillLeaseEnded")
    assert decode.told("RemotePrefillFailed")
    assert await prefill.task == 1


async def test_blocks_that_are_not_published_or_lost_are_computed(prefill: Front, decode: Front) -> None:
    told = await read(decode.decode.Decode(request_of(PROMPT, [prefill], Script(unpublished=(1,), lost=(2,)))))
    assert told.token_ids == answer_to(PROMPT, 5)
    assert told.report.num_blocks_moved == NUM_BLOCKS - 2
    assert told.report.fallback_reason
    await prefill.settled()


async def test_a_decode_worker_that_vanishes_may_still_read(prefill: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream broke off without a release: blocks in memory stay for a while, and no more is computed."""
    monkeypatch.setattr(prefill_service.servicer, "lease_grace_s", lambda settings: 0.5)
    call = prefill.prefill.Prefill()
    start = prefill_pb2.PrefillStart(
        request_id="r",
        fingerprint=SPEC.fingerprint(),
        prompt_token_ids=PROMPT,
        sampling_params=types_pb2.SamplingParams(max_tokens=5),
        connector="shared_storage",
    )
    await call.write(prefill_pb2.PrefillRequest(start=start))
    async for event in call:
        if event.HasField("blocks_ready") or event.first_token.HasField("blocks_ready"):
            break
    call.cancel()
    await until(lambda: prefill.told("StopPrefill"), "no more is computed")
    assert not prefill.told("Release")
    await prefill.settled()
    assert len(prefill.told("Release")) == 1


async def test_who_half_closes_after_a_release_keeps_nothing(prefill: Front) -> None:
    call = prefill.prefill.Prefill()
    start = prefill_pb2.PrefillStart(
        request_id="r", prompt_token_ids=PROMPT, sampling_params=types_pb2.SamplingParams(max_tokens=5)
    )
    await call.write(prefill_pb2.PrefillRequest(start=start))
    async for event in call:
        if event.HasField("blocks_ready") or event.first_token.HasField("blocks_ready"):
            break
    await call.write(prefill_pb2.PrefillRequest(release=prefill_pb2.ReleaseBlocks()))
    await call.done_writing()
    assert [event async for event in call] == []
    await prefill.settled()
    assert not prefill.told("StopPrefill")
