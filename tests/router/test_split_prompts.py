"""Which prompts a router splits, and how long it thinks that a full decode worker keeps a request waiting. A token of a
prompt takes a millisecond, and a step 10 ms beside."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router.fleet.endpoint import Endpoint
from router.policy.base import FirstTokenTarget, RoutingDecision, RoutingRequest
from router.policy.costs import first_token_s, room_s, step_s
from router.policy.registry import create_policy
from router.running.routes import load_of
from tests.examples import examples
from tests.router.test_costs import workers

BUSY = "d decode 0/0 9/9\np prefill 0/0 9/9 queued=4000"


def knowing(text: str, *, queued_prompts: int = 2) -> list[Endpoint]:
    """Workers that know split prompts."""
    return [
        replace(
            one,
            splits=True,
            load=replace(one.load, num_queued_prompts=queued_prompts if one.load.num_queued_prompt_tokens else 0),
        )
        for one in workers(text)
    ]


def pick(endpoints: Sequence[Endpoint], num_tokens: int, left_s: float | None = None, **cached: int) -> RoutingDecision:
    request = RoutingRequest(
        num_prompt_tokens=num_tokens,
        fingerprint="f",
        cached_blocks={address: tokens // 16 for address, tokens in cached.items()},
        first_token=None if left_s is None else FirstTokenTarget(left_s),
        handoff_token_s=1e-5,
    )
    return create_policy("round_robin").pick(request, endpoints)


def why(decision: RoutingDecision) -> str:
    return "".join(line for line in decision.reasons.lines() if "split" in line)


def test_what_a_busy_worker_has_cached_is_handed_over_and_the_rest_computed_in_place() -> None:
    decision = pick(knowing(BUSY), 4000, p=3200)
    assert (decision.split_at, decision.num_tail_tokens, decision.num_missing_tokens) == (3200, 800, 0)
    assert [one.address for one in decision.prefill] == ["p"]
    assert not decision.in_place
    assert load_of(decision) == {"d": 800, "p": 0}
    assert decision.min_remote_tokens <= 3200, "or the decode worker would not ask for it"
    assert why(decision) == (
        "prefill split: costs 1672 ms instead of 3892 ms: 3200 tokens that p has (handoff 32 ms), the rest by d "
        "(computing 820 ms, lost by its decodes 820 ms)"
    )


def test_blocks_that_are_about_to_be_there_wait_for_their_turn() -> None:
    """The worker has told of 3,200 of the 3,280 tokens: only these are handed over before all that waits."""
    request = RoutingRequest(
        num_prompt_tokens=4000,
        fingerprint="f",
        cached_blocks={"p": 205},
        num_told_blocks={"p": 200}.__getitem__,
        handoff_token_s=1e-5,
    )
    policy = create_policy("round_robin")
    assert policy.pick(request, knowing(BUSY)).split_at == 3200
    assert policy.pick(replace(request, num_told_blocks={"p": 0}.__getitem__), knowing(BUSY)).split_at == 0


def test_a_worker_that_has_more_is_asked_before_one_that_is_sooner() -> None:
    decision = pick(
        knowing("d decode 0/0 9/9\nq prefill 0/0 9/9 queued=3000\np prefill 0/0 9/9 queued=5000"), 4000, p=3200
    )
    assert decision.split_at == 3200
    assert [one.address for one in decision.prefill] == ["p", "q"]


@pytest.mark.parametrize("who", ["d", "p", "nobody's"])
def test_workers_that_know_no_split_prompts_are_not_asked(who: str) -> None:
    endpoints = [replace(one, splits=one.address != who) for one in knowing(BUSY)]
    assert (pick(endpoints, 4000, p=3200).split_at > 0) is (who == "nobody's")


def test_others_that_know_none_are_not_named() -> None:
    endpoints = [replace(one, splits=one.address != "q") for one in knowing(BUSY + "\nq prefill 0/0 9/9 queued=9000")]
    assert [one.address for one in pick(endpoints, 4000, p=3200).prefill] == ["p"]


@pytest.mark.parametrize(
    ("text", "num_tokens", "cached"),
    [
        ("d decode 0/0 9/9\np prefill 0/0 9/9", 4000, 3200),  # it goes on with the rest at once
        (BUSY, 100, 64),  # a short prompt
        ("d decode 8/0 9/9\np prefill 0/0 9/9 queued=100", 4000, 0),  # eight answers would wait for the rest
    ],
)
def test_prompts_that_are_not_split(text: str, num_tokens: int, cached: int) -> None:
    decision = pick(knowing(text), num_tokens, p=cached)
    assert (decision.split_at, decision.num_tail_tokens, why(decision)) == (0, 0, "")


def test_a_target_that_only_a_split_meets_is_met() -> None:
    """The policy wants p. In place takes 4 s, and by p longer."""
    endpoints = knowing("d decode 0/0 9/9\np prefill 0/0 9/9 queued=4000")
    decision = pick(endpoints, 4000, 1.0, p=3200)
    assert (decision.split_at, decision.late) == (3200, None)
    assert decision.first_token_s == pytest.approx(0.852)
    assert pick([replace(one, splits=False) for one in endpoints], 4000, 1.0, p=3200).late is not None


@settings(max_examples=examples(200))
@given(st.integers(0, 6000), st.integers(200, 6000), st.integers(0, 20), st.integers(0, 6000), st.integers(0, 6000))
def test_a_split_is_predicted_to_cost_less(
    queued: int, num_tokens: int, running: int, cached_there: int, cached_here: int
) -> None:
    endpoints = knowing(f"d decode {running}/0 9/9\np prefill 0/0 9/9 queued={queued}")
    there, here = (min(one, num_tokens - 1) // 16 * 16 for one in (cached_there, cached_here))
    decision = pick(endpoints, num_tokens, 1e9, p=there, d=here)
    whole = pick([replace(one, splits=False) for one in endpoints], num_tokens, 1e9, p=there, d=here)
    if not decision.split_at:
        assert decision.in_place == whole.in_place
        return
    assert here < decision.split_at < num_tokens
    assert decision.split_at % 16 == 0
    assert decision.num_missing_tokens == 0
    assert decision.split_at <= there
    assert whole.first_token_s is not None
    assert decision.first_token_s is not None


# ------------------------------------------------------------------------------------------------- room


def full(num_unreported: int, *after: int) -> Endpoint:
    (one,) = workers("d decode 8/3 9/9")
    return replace(one, load=replace(one.load, room_after=after), num_unreported=num_unreported)


def test_a_full_worker_keeps_newcomers_waiting_until_answers_end() -> None:
    """The 1st, 2nd, 4th and 8th newcomer have room after 10, 20, 40 and 72 tokens."""
    for num_unreported, tokens in ((0, 10), (1, 20), (2, 30), (3, 40), (5, 56), (7, 72), (8, 80), (15, 136)):
        one = full(num_unreported, 10, 20, 40, 72)
        assert room_s(one) == pytest.approx(tokens * step_s(one)), num_unreported
    assert room_s(full(2, 10)) == pytest.approx(10 * step_s(full(2)))
    assert room_s(full(3)) == 0


def test_by_slack_best_effort_makes_room_after_half_of_a_newcomer_s_time() -> None:
    one = full(7, 10, 20, 40, 72)
    urgent = replace(one, load=replace(one.load, goes_by_slack=True))
    assert room_s(urgent, 1.0) == 0.5
    assert room_s(urgent, -1.0) == 0
    assert room_s(urgent, 1e9) == room_s(urgent) == room_s(one, 1.0)


def test_room_counts_for_a_pair_and_in_place() -> None:
    one = full(0, 10, 20, 40, 72)
    assert first_token_s(one, 1000, 0) == pytest.approx(room_s(one) + first_token_s(full(0), 1000, 0))
    (helper,) = workers("p prefill 0/0 9/9")
    request = RoutingRequest(num_prompt_tokens=1000, fingerprint="f", first_token=FirstTokenTarget(1e9))
    decision = create_policy("round_robin").pick(request, [one, helper])
    assert not decision.in_place
    assert decision.first_token_s == pytest.approx(room_s(one) + 1.02)
    request = replace(request, first_token=FirstTokenTarget(room_s(one)))
    late = create_policy("round_robin").pick(request, [one, helper]).late
    assert late is not None
    assert late.alone_s == pytest.approx(1.02)


def test_what_waits_for_room_is_computed_meanwhile() -> None:
    one = full(1, 100, 100)
    busy = replace(one, load=replace(one.load, num_queued_prompt_tokens=50, num_queued_prompts=1))
    assert first_token_s(busy, 1000, 0) == pytest.approx(first_token_s(one, 1000, 0))


def test_false_loads_end_no_decision() -> None:
    for after in ((0,), (5, 3), (1,) * 100, (2**32 - 1,)):
        for num_unreported in (0, 1, 1000):
            assert room_s(full(num_unreported, *after)) >= 0


# ------------------------------------------------------------------------------------------- going on decoding


def test_a_prefill_worker_goes_on_decoding_if_all_decode_workers_are_worse_off() -> None:
    """d has no room for 200 steps. p takes prompts alone, and could have answers, too."""
    busy = replace(full(0, 200), address="d")
    (helper,) = workers("p prefill 0/0 9/9")
    both = replace(helper, has_both=True)
    request = RoutingRequest(num_prompt_tokens=1000, fingerprint="f", first_token=FirstTokenTarget(1.5))
    policy = create_policy("round_robin")
    decision = policy.pick(request, [busy, both])
    assert (decision.decode.address, decision.prefill, decision.in_place) == ("p", (), True)
    assert decision.late is None
    assert decision.first_token_s == pytest.approx(1.02)
    assert decision.step_s == pytest.approx(0.011)
    assert decision.reasons.lines()[-1].endswith("in 4620 ms: all decode workers are worse off")
    assert load_of(decision) == {"p": 1000}
    assert policy.pick(request, [busy, helper]).late is not None, "it has one role alone"
    tried = replace(request, tried=frozenset([both.incarnation]))
    assert policy.pick(tried, [busy, both]).late is not None
    patient = replace(request, first_token=FirstTokenTarget(1e9))
    assert policy.pick(patient, [busy, both]).decode.address == "d"
    assert policy.pick(replace(request, first_token=FirstTokenTarget(0.5)), [busy, both]).late is not None
    roomy = replace(busy, load=replace(busy.load, room_after=()))
    assert policy.pick(request, [roomy, both]).decode.address == "d"
