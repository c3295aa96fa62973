"""Requests that want their first token by some time: which workers they go to, and which no workers can serve in
time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.batch_time import BatchTime
from common.batch_time_file import encode
from common.errors import OverloadedError
from common.targets import LatencyTargets
from common.types import SLACKS_S, WorkerLoad, WorkerRole
from protos.baton.v1 import inference_pb2, types_pb2, worker_pb2
from router.fleet.endpoint import Endpoint
from router.fleet.fleet import Fleet
from router.fleet.worker import Sent, SentTokens
from router.policy.base import FirstTokenTarget, Late, RoutingDecision, RoutingRequest
from router.policy.costs import CHUNK, STEP, first_token_s
from router.policy.registry import create_policy
from router.running.first_token_times import FORGET_S, MIN_REQUESTS, MOST_HIGH, MOST_LOW, SORT_EVERY, FirstTokenTimes
from router.running.late import MAX_DELAY_S, MIN_DELAY_S, LateRequests
from tests.examples import examples
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, sample
from tests.router.test_costs import model, workers
from tests.router.test_fleet_scale import MODELS, busy, depths, worker
from tests.router.test_metrics import ask


def pick(
    endpoints: Sequence[Endpoint], left_s: float, num_tokens: int = 1000, name: str = "round_robin"
) -> RoutingDecision:
    request = RoutingRequest(num_prompt_tokens=num_tokens, fingerprint="f", first_token=FirstTokenTarget(left_s))
    return create_policy(name).pick(request, endpoints)


def queued(endpoints: Sequence[Endpoint], **prompts: int) -> list[Endpoint]:
    """Tells of how many prompts the queued tokens are, by worker."""
    return [replace(one, load=replace(one.load, num_queued_prompts=prompts.get(one.address, 0))) for one in endpoints]


def way(decision: RoutingDecision) -> str:
    place = "in place" if decision.in_place else " ".join(one.address for one in decision.prefill)
    return f"{decision.decode.address} <- {place}"


def last_reason(decision: RoutingDecision) -> str:
    return decision.reasons.lines()[-1]


BUSY = "d decode 0/0 9/9\np prefill 0/0 9/9 queued=1500\nq prefill 0/0 9/9"


def test_the_policy_decides_as_long_as_its_choice_is_in_time() -> None:
    """`round_robin` takes p, behind 1,500 tokens."""
    decision = pick(workers(BUSY), 10.0)
    assert (way(decision), decision.late) == ("d <- p q", None)
    assert decision.first_token_s == pytest.approx(1.51 + 1.02)
    assert last_reason(decision) == "first token: due in 10000 ms, d after p in 2530 ms"


def test_another_prefill_worker_is_asked_first_if_the_policy_s_would_be_late() -> None:
    decision = pick(workers(BUSY), 2.0)
    assert (way(decision), decision.late) == ("d <- q p", None)
    assert decision.prefill_s == pytest.approx(1.02)
    assert last_reason(decision) == "first token: due in 2000 ms, d after q in 1020 ms instead of d after p in 2530 ms"
    assert decision.num_missing_tokens == 1000


def test_a_prompt_is_computed_in_place_if_prefill_workers_would_be_late() -> None:
    behind = workers("d decode 2/0 9/9\ne decode 0/0 9/9\np prefill 0/0 9/9 queued=2000")
    assert way(pick(behind, 10.0)) == "d <- p"
    decision = pick(behind, 2.0)
    assert way(decision) == "e <- in place", "nobody waits for its prompt there"
    assert decision.prefill == ()
    assert decision.min_remote_tokens == 1016, "unless it lacks more than the router thinks"
    assert last_reason(decision) == "first token: due in 2000 ms, e in place in 1020 ms instead of d after p in 3030 ms"


def test_of_those_in_time_the_one_that_takes_least_from_others_is_chosen() -> None:
    """d is a little sooner, but four answers would wait for the prompt."""
    decision = pick(workers("d decode 4/0 9/9\np prefill 0/0 9/9 queued=1500\nq prefill 0/0 9/9 queued=200"), 1.5)
    assert way(decision) == "d <- q p"


def test_a_target_that_nobody_can_meet_is_late_and_says_why() -> None:
    decision = pick(workers(BUSY), 0.5)
    assert decision.late is not None
    soonest_s: Any = pytest.approx(1.02)
    assert decision.late == Late(soonest_s, soonest_s, 3)
    assert way(decision) == "d <- p q", "the policy's, for those that serve it all the same"
    assert last_reason(decision) == "first token: due in 500 ms, too soon for all; the soonest is d after q in 1020 ms"
    overdue = pick(workers(BUSY), -0.5)
    assert overdue.late is not None
    assert "was due 500 ms ago" in last_reason(overdue)


def test_nobody_is_late_without_models_of_time_or_targets() -> None:
    unsure = [replace(one, batch_time=None) for one in workers(BUSY)]
    decision = pick(unsure, 0.001)
    assert (decision.late, decision.first_token_s) == (None, None)
    request = RoutingRequest(num_prompt_tokens=1000, fingerprint="f")
    assert create_policy("round_robin").pick(request, workers(BUSY)).first_token_s is None


def test_predictions_that_were_too_high_make_nobody_late() -> None:
    """First tokens come in half the predicted time now and then, so one that is predicted after 1.02 s may be in
    time."""
    request = RoutingRequest(num_prompt_tokens=1000, fingerprint="f", first_token=FirstTokenTarget(0.6, low=0.5))
    decision = create_policy("round_robin").pick(request, workers(BUSY))
    assert (decision.late, way(decision)) == (None, "d <- p q"), "nor does it go elsewhere, for no good reason"
    assert last_reason(decision) == "first token: due in 600 ms, d after p in 2530 ms, and no other is in time for sure"


def test_predictions_that_were_too_low_move_requests_earlier() -> None:
    for high, expected in ((1.0, "d <- p q"), (1.5, "d <- q p")):
        target = FirstTokenTarget(3.0, high=high)
        request = RoutingRequest(num_prompt_tokens=1000, fingerprint="f", first_token=target)
        assert way(create_policy("round_robin").pick(request, workers(BUSY))) == expected


def test_answers_that_run_keep_their_pace() -> None:
    """e would compute the prompt in time, in steps of half a second. Two answers run there."""
    text = "d decode 2/0 9/9\ne decode 2/0 9/9\np prefill 0/0 9/9 queued=1700"
    for token_s, expected in ((None, "in place"), (0.6, "in place"), (0.1, "p")):
        target = FirstTokenTarget(1.1, token_s)
        request = RoutingRequest(num_prompt_tokens=1000, fingerprint="f", first_token=target)
        decision = create_policy("round_robin").pick(request, workers(text))
        assert way(decision).endswith(expected), token_s
        assert decision.late is None


def test_a_prompt_beside_answers_is_cut_to_steps_that_keep_their_pace() -> None:
    """Of 0.1 s each, of which two answers and the step itself take 12 ms: 88 tokens in each, and 12 of such steps."""
    text = "d decode 2/0 9/9\ne decode 2/0 9/9\np prefill 0/0 9/9 queued=1700"
    for left_s, token_s, expected in ((1.3, 0.1, 1.2), (9.0, 0.1, 2.73), (1.3, 0.02, 2.73)):
        target = FirstTokenTarget(left_s, token_s)
        request = RoutingRequest(num_prompt_tokens=1000, fingerprint="f", first_token=target)
        decision = create_policy("round_robin").pick(request, workers(text))
        assert decision.first_token_s == pytest.approx(expected, rel=0.01)


# ------------------------------------------------------------------------------------- one worker's time


def test_a_newcomer_shares_steps_with_the_prompts_before_it() -> None:
    """By arrival: a step has chunks of four prompts, so the fourth begins at once."""
    (one,) = queued(workers("p prefill 0/0 9/9 queued=3000"), p=3)
    chunk_s, others = 0.01 + CHUNK * 0.001, STEP - CHUNK
    assert first_token_s(one, CHUNK, 0) == pytest.approx(chunk_s + others * 0.001)
    (long,) = queued(workers("p prefill 0/0 9/9 queued=3000"), p=6)
    assert first_token_s(long, CHUNK, 0) == pytest.approx(0.01 + 1.5 + chunk_s + 1.5)
    (unknown,) = workers("p prefill 0/0 9/9 queued=3000")  # of an older worker
    assert first_token_s(unknown, CHUNK, 0) == pytest.approx(2 * 0.01 + 3.0 + chunk_s)


def test_by_slack_only_more_urgent_prompts_come_first() -> None:
    """1,000 tokens have to begin within a second, 3,000 more within two; the others are best effort."""
    by_slack = tuple(0 if slack < 1 else 1000 if slack < 2 else 4000 for slack in SLACKS_S)
    load = WorkerLoad(num_queued_prompt_tokens=9000, num_queued_prompts=9, queued_by_slack=by_slack, goes_by_slack=True)
    (one,) = [replace(one, load=load) for one in workers("p prefill 0/0 9/9")]
    alone_s = 0.11
    for slack_s, num_before in ((0.2, 0), (1.0, 1000), (1.5, 2500), (100.0, 4000)):
        steps = -(-num_before // CHUNK) * 0.01
        expected = alone_s + num_before * 0.001 + steps
        assert first_token_s(one, 100, 0, slack_s + alone_s) == pytest.approx(expected, rel=0.02), slack_s
    assert first_token_s(one, 100, 0, -1.0) == pytest.approx(alone_s)
    assert first_token_s(one, 100, 0) == pytest.approx(alone_s + 9.0 + 18 * 0.01)


def test_a_burst_of_patient_prompts_makes_no_urgent_one_late() -> None:
    """Three prompts of 3,000 tokens were sent, and no worker has reported them: each may begin within six seconds."""
    idle = WorkerLoad(queued_by_slack=(0,) * len(SLACKS_S))
    (both,) = [replace(one, load=idle) for one in workers("b both 0/0 9/9")]
    long = RoutingRequest(num_prompt_tokens=3000, fingerprint="f", first_token=FirstTokenTarget(9.0))
    sent, policy = SentTokens(), create_policy("prefix_aware")
    for number in range(3):
        told = replace(both, num_unreported=number, num_unreported_tokens=sent.num, unreported_by_slack=sent.by_slack)
        decision = policy.pick(long, [told])
        assert decision.late is None or number == 2, "the third one comes after the two"
        assert decision.slack_s == pytest.approx(6.0, abs=0.1)
        sent.add(Sent(0.0, 3000, slack_s=decision.slack_s))
    told = replace(both, num_unreported=3, num_unreported_tokens=sent.num, unreported_by_slack=sent.by_slack)
    short = RoutingRequest(num_prompt_tokens=100, fingerprint="f", first_token=FirstTokenTarget(0.7))
    urgent, chunk_s = policy.pick(short, [told]), 0.01 + 0.001 * CHUNK  # of the step that may be under way
    assert urgent.late is None
    assert urgent.first_token_s == pytest.approx(chunk_s + 0.11)
    assert policy.pick(short, [replace(told, unreported_by_slack=())]).late is not None, "if nobody knows how urgent"


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 2**32), num_workers=st.sampled_from((1, 2, 3, 10, 60)), is_shared=st.booleans())
def test_nobody_is_called_late_whom_a_worker_would_serve_in_time(seed: int, num_workers: int, is_shared: bool) -> None:
    """Beside a look at every worker."""
    draw = Random(seed)
    times: Sequence[BatchTime] = draw.choice((MODELS[:1], MODELS))
    fleet = []
    for number in range(num_workers):
        one = busy(draw, worker(draw, number, times))
        num_prompts = -(-one.load.num_queued_prompt_tokens // draw.choice((200, 1000))) if is_shared else 0
        usual = replace(one, suspended="", excluded="", fingerprint="f", max_model_len=None, block_size=16)
        fleet.append(replace(usual, load=replace(one.load, num_queued_prompts=num_prompts), parameters=frozenset()))
    request = RoutingRequest(
        num_prompt_tokens=draw.choice((100, 900, 3000)), fingerprint="f", cached_blocks=depths(draw, fleet)
    )
    left_s = draw.choice((0.05, 0.5, 2.0, 5.0))
    target = FirstTokenTarget(left_s, low=MOST_LOW)
    ready = [one for one in fleet if one.state.value == "ready"]
    if not any(one.can_decode for one in ready):
        return
    decision = create_policy("prefix_aware").pick(replace(request, first_token=target), Fleet(fleet))

    def seconds(one: Endpoint) -> float:
        cached = request.cached_blocks.get(one.address, 0) * 16
        return first_token_s(one, max(request.num_prompt_tokens - cached, 1), cached, left_s)

    may_help = {WorkerRole.PREFILL}
    if decision.decode.role is WorkerRole.DECODE:
        may_help.add(WorkerRole.BOTH)
    if request.num_prompt_tokens - 16 * request.cached_blocks.get(decision.decode.address, 0) < 16:
        may_help.clear()  # a decode worker does not ask for less than a block
    soonest_s = min(seconds(one) for one in ready if one.can_decode or one.role in may_help)
    if decision.late is not None:
        assert soonest_s > left_s
    elif soonest_s * MOST_LOW > left_s:
        pytest.fail(f"the soonest first token comes after {soonest_s} s, {left_s} s are left, and nobody says so")


# ------------------------------------------------------------------------------------- what is learned, and refused


def test_what_first_tokens_took_makes_predictions_careful() -> None:
    times = FirstTokenTimes()
    before = times.target(1.0)
    assert (before.low, before.high) == (0.5, 1.0)
    for number in range(2 * MIN_REQUESTS):
        times.came(2.0, 2.0 * (0.6 + 0.01 * number))
    after = times.target(1.0)
    assert 0.6 <= after.low < 0.65
    assert 1.1 < after.high < 1.3
    for _ in range(256):
        times.came(0.1, 3.0)
    assert (times.target(1.0).low, times.target(1.0).high) == (MOST_LOW, MOST_HIGH)


def test_a_token_s_handoff_is_that_of_the_last_chunk() -> None:
    times = FirstTokenTimes()
    for number in range(SORT_EVERY):
        assert times.handoff_token_s(5.0) is None
        times.handed_over(10_000, 0.512 if number % 3 else 60.0, 5.0)
        times.handed_over(1, 0.01, 5.0)  # says nothing of long ones
    assert times.handoff_token_s(6.0) == pytest.approx(0.001)


def test_slow_handoffs_are_forgotten() -> None:
    """They keep prompts in place, so nothing better would be learned."""
    times = FirstTokenTimes()
    for _ in range(SORT_EVERY):
        times.handed_over(10_000, 60.0, 5.0)
    assert times.handoff_token_s(5.0 + FORGET_S) is not None
    assert times.handoff_token_s(6.0 + FORGET_S) is None


def late(soonest_s: float = 3.0, alone_s: float = 1.0, num_workers: int = 2) -> Late:
    return Late(soonest_s, alone_s, num_workers)


def test_a_refusal_says_when_the_queues_will_be_short_enough() -> None:
    """Each that was refused before takes half a second of the two workers when it comes back."""
    now = 100.0
    requests = LateRequests(refuses=True, clock=lambda: now)
    counted = {"outcome": "refused", "reason": "queue"}
    before = sample("baton_router_late_requests_total", **counted)
    delays = []
    for _ in range(3):
        with pytest.raises(OverloadedError, match="wanted 1500 ms after it came \\(ttft_ms\\)") as caught:
            requests.take("r", LatencyTargets(ttft_ms=1500), 0.2, late())
        delays.append(caught.value.retry_after_s)
    assert delays == [pytest.approx(1.5), pytest.approx(2.0), pytest.approx(2.5)]
    assert sample("baton_router_late_requests_total", **counted) == before + 3
    now = 1000.0
    with pytest.raises(OverloadedError) as caught:
        requests.take("r", LatencyTargets(ttft_ms=2900), 0.2, late())
    assert caught.value.retry_after_s == MIN_DELAY_S


def test_a_prompt_that_no_idle_worker_computes_in_time_is_told_to_stay_away() -> None:
    before = sample("baton_router_late_requests_total", outcome="refused", reason="prompt")
    with pytest.raises(OverloadedError, match="computing the prompt takes 1000 ms") as caught:
        LateRequests(refuses=True).take("r", LatencyTargets(ttft_ms=900), 0.0, late())
    assert caught.value.retry_after_s == MAX_DELAY_S
    assert sample("baton_router_late_requests_total", outcome="refused", reason="prompt") == before + 1


def test_best_effort_goes_on_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    counted = {"outcome": "best_effort", "reason": "queue"}
    before = sample("baton_router_late_requests_total", **counted)
    LateRequests().take("r7", LatencyTargets(ttft_ms=1500), 0.2, late())
    assert sample("baton_router_late_requests_total", **counted) == before + 1
    (line,) = [one for one in caplog.records if one.message.startswith("no worker can give a first token in time")]
    assert (line.__dict__["request_id"], line.__dict__["refused"]) == ("r7", False)
    assert "in 3000 ms" in line.__dict__["reason"]


# ----------------------------------------------------------------------------------------------- of a whole router

SECONDS = worker_pb2.BatchTime(model=encode(model(floor_s=1.0)), source="file", version=1)
"""Of a worker that says it takes a second for each step."""


async def until_predicted(router: RunningRouter, ttft_ms: float) -> httpx.Response:
    """Asks until the router knows the worker's times, and has called a request late."""
    before = sample_of_late()
    async with asyncio.timeout(20):
        while sample_of_late() == before:
            answer = await ask(router, slo={"ttft_ms": ttft_ms}, request_id="wanted")
    return answer


def sample_of_late() -> float:
    pairs = itertools.product(("refused", "best_effort"), ("queue", "prompt"))
    return sum(sample("baton_router_late_requests_total", outcome=one, reason=other) for one, other in pairs)


async def test_a_router_refuses_what_comes_too_late(start_worker: StartWorker, start_router: StartRouter) -> None:
    decode = await start_worker()
    decode.change(batch_time=SECONDS)
    decode.report(num_queued_prompt_tokens=9000, num_queued_prompts=18)
    router = await start_router(decode, slo_late="refuse", slo_ttft_ms=86_400_000)
    refused = await until_predicted(router, 2_000)
    assert refused.status_code == 429
    assert 6 <= int(refused.headers["retry-after"]) <= 30, "four steps of a second, and nine of others"
    error = refused.json()["error"]
    assert "its first token is wanted 2000 ms after it came (ttft_ms)" in error["message"]
    num_asked = len(decode.requests)
    never = await ask(router, slo={"ttft_ms": 100})
    assert (never.status_code, never.headers["retry-after"]) == (429, "60")
    both = await ask(router, slo={"ttft_ms": 2_000}, n=2)
    assert both.status_code == 429
    request = inference_pb2.GenerateRequest(prompt="Hello?", slo=types_pb2.LatencyTargets(ttft_ms=2_000))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(router.inference.Generate(request)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(decode.requests) == num_asked, "no worker was asked"
    assert (await ask(router)).status_code == 200
    async with httpx.AsyncClient(base_url=router.url) as client:
        decisions = (await client.get("/decisions?limit=50")).json()["decisions"]
    (told, *_) = [one for one in decisions if one["request_id"] == "wanted" and one["cause"] == "refused"]
    assert told["reasons"][-1].startswith("first token: due in ")
    assert f"too soon for all; the soonest is {decode.address} in place in " in told["reasons"][-1]


async def test_a_router_serves_what_comes_too_late(start_worker: StartWorker, start_router: StartRouter) -> None:
    decode = await start_worker()
    decode.change(batch_time=SECONDS)
    router = await start_router(decode)
    before = sample("baton_router_late_requests_total", outcome="best_effort", reason="prompt")
    answer = await until_predicted(router, 100)
    assert answer.status_code == 200
    assert sample("baton_router_late_requests_total", outcome="best_effort", reason="prompt") == before + 1
