"""Decisions of the policies, as text: a fleet, and what comes of it."""

from __future__ import annotations

import json
from collections import Counter
from typing import ClassVar

import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from baton.settings import DEMO_SETTINGS, UP_SETTINGS, RouterCommandSettings
from common.errors import ConfigError, UnavailableError
from common.types import WorkerLoad, WorkerRole, WorkerState
from router.fleet.endpoint import Endpoint
from router.policy import registry
from router.policy.base import Policy, RoutingDecision, RoutingRequest
from router.policy.least_load import LeastLoad
from router.policy.registry import create_policy
from tools import values_schema


def fleet(text: str) -> list[Endpoint]:
    """One worker a line: `name role running/waiting free/blocks [key=value ...]`."""
    endpoints = []
    for line in text.strip().splitlines():
        name, role, queue, blocks, *more = line.split()
        running, waiting = map(int, queue.split("/"))
        free, total = map(int, blocks.split("/"))
        extra = dict(word.split("=") for word in more)
        endpoints.append(
            Endpoint(
                worker_id=name,
                role=WorkerRole(role),
                address=name,
                epoch=extra.get("epoch", "e"),
                fingerprint=extra.get("fingerprint", "f"),
                block_size=16,
                max_model_len=int(extra["context"]) if "context" in extra else None,
                load=WorkerLoad(
                    num_requests_running=running,
                    num_requests_waiting=waiting,
                    num_blocks=total,
                    num_free_blocks=free,
                    num_queued_prompt_tokens=int(extra.get("queued", "0")),
                ),
                state=WorkerState(extra.get("state", "ready")),
                excluded=extra.get("excluded", ""),
                suspended=extra.get("suspended", ""),
                num_unreported=int(extra.get("unreported", "0")),
                num_unreported_tokens=int(extra.get("unreported_tokens", "0")),
            )
        )
    return endpoints


def decisions(
    text: str, num: int = 1, tried: frozenset[tuple[str, str]] = frozenset(), name: str = "least_load"
) -> str:
    policy, endpoints = create_policy(name), fleet(text)
    request = RoutingRequest(num_prompt_tokens=100, num_tokens=116, fingerprint="f", tried=tried)
    lines = []
    for _ in range(num):
        decision = policy.pick(request, endpoints)
        lines.append(f"{decision.decode.address} <- {' '.join(e.address for e in decision.prefill) or 'in place'}")
    return "; ".join(lines)


GOLDEN = [
    ("waiting weighs four times", "a decode 7/0 9/9\nb decode 0/2 9/9", "a <- in place"),
    ("running counts once", "a decode 7/0 9/9\nb decode 0/1 9/9", "b <- in place"),
    ("unreported requests wait", "a decode 0/0 9/9 unreported=1\nb decode 3/0 9/9", "b <- in place"),
    ("KV headroom breaks a tie", "a decode 1/0 1/9\nb decode 1/0 9/9", "b <- in place"),
    ("prefill least loaded first", "d decode 0/0 9/9\np prefill 0/2 9/9\nq prefill 1/0 9/9", "d <- q p"),
    ("at most three prefill workers", "d decode 0/0 9/9\n" + "".join(f"p{i} prefill {i}/0 9/9\n" for i in range(5)),
     "d <- p0 p1 p2"),
    ("both roles only: in place", "a both 0/0 9/9\nb both 1/0 9/9", "a <- in place"),
    ("both roles beside a prefill worker", "a both 0/0 9/9\nb both 1/0 9/9\np prefill 9/9 9/9", "a <- p"),
    ("decode worker beside one of both roles", "d decode 0/0 9/9\nb both 1/0 9/9", "d <- b"),
    ("draining prefill", "d decode 0/0 9/9\np prefill 0/0 9/9 state=draining", "d <- in place"),
    ("other KV", "d decode 0/0 9/9\np prefill 0/0 9/9 fingerprint=x", "d <- in place"),
    ("excluded", "a decode 0/0 9/9 excluded=why\nb decode 9/9 9/9", "b <- in place"),
    ("a context too short for the answer", "a decode 0/0 9/9 context=115\nb decode 9/9 9/9 context=116",
     "b <- in place"),
    ("a context too short for the prompt",
     "d decode 0/0 9/9\np prefill 0/0 9/9 context=100\nq prefill 9/9 9/9 context=101", "d <- q"),
    ("unreachable", "a decode 0/0 9/9 state=unreachable\nb decode 9/9 9/9", "b <- in place"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in GOLDEN], ids=[case[0] for case in GOLDEN])
def test_golden(text: str, expected: str) -> None:
    assert decisions(text) == expected


@pytest.mark.parametrize(
    ("num_tokens", "min_remote_tokens", "expected"),
    [(15, 0, "d <- in place"), (16, 0, "d <- p"), (16, 40, "d <- in place"), (40, 40, "d <- p"), (1, 1, "d <- p")],
)
def test_short_prompts_are_computed_in_place(num_tokens: int, min_remote_tokens: int, expected: str) -> None:
    request = RoutingRequest(num_prompt_tokens=num_tokens, fingerprint="f")
    policy = create_policy("least_load", min_remote_tokens=min_remote_tokens)
    decision = policy.pick(request, fleet("d decode 0/0 9/9\np prefill 0/0 9/9"))
    assert f"d <- {' '.join(e.address for e in decision.prefill) or 'in place'}" == expected
    assert decision.min_remote_tokens == min_remote_tokens, "the decode worker applies it to what it lacks"
    assert any("too short" in reason for reason in decision.reasons.lines()) is ("in place" in expected)


def test_equals_take_turns() -> None:
    text = "a decode 0/0 9/9\nb decode 0/0 9/9\np prefill 0/0 9/9\nq prefill 0/0 9/9"
    assert decisions(text, 3) == "a <- p q; b <- q p; a <- p q"


def test_a_worker_tried_before_is_passed_over_until_it_restarts() -> None:
    text = "a decode 0/0 9/9\nb decode 9/0 9/9"
    assert decisions(text, tried=frozenset({("a", "e")})) == "b <- in place"
    assert decisions(text, tried=frozenset({("a", "older")})) == "a <- in place"


def test_nobody_left_names_each_reason() -> None:
    text = "a decode 0/0 9/9 state=draining\nb decode 0/0 9/9 fingerprint=x\nc decode 0/0 9/9\np prefill 0/0 9/9"
    with pytest.raises(UnavailableError) as caught:
        decisions(text, tried=frozenset({("c", "e")}))
    assert str(caught.value) == (
        "no decode worker can take the request "
        "(a: draining; b: holds KV of another kind (x); c: already failed this request)"
    )
    with pytest.raises(UnavailableError, match="none is configured"):
        decisions("")


def test_round_robin_looks_at_no_load() -> None:
    text = "a decode 9/9 9/9\nb decode 0/0 9/9\np prefill 9/9 9/9\nq prefill 0/0 9/9\nc decode 0/0 9/9 state=draining"
    assert decisions(text, 3, name="round_robin") == "a <- p q; b <- q p; a <- p q"


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"policy: 'best' is not one of least_load, power_of_two, prefix_aware, round_robin, session"
    ):
        create_policy("best")


def test_help_and_the_chart_have_each_policy_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[type[BaseModel]] = [RouterCommandSettings, UP_SETTINGS, DEMO_SETTINGS]
    chart = json.loads(values_schema.PATH.read_text())["definitions"]["routerSettings"]
    for name, about in (("least_load", "the least load"), ("session", "a session's own worker")):
        for settings in offered:
            assert f"{name} ({about})" in (settings.model_fields["policy"].description or "")
        assert f"{name} ({about})" in chart["properties"]["policy"]["description"]

    class Postal(LeastLoad):
        name: ClassVar[str] = "postal"
        about: ClassVar[str] = "by postal code"

    monkeypatch.setattr(registry, "_RANKINGS", [*registry._RANKINGS, Postal])
    assert ", postal (by postal code), power_of_two (" in registry.policies_in_words()
    assert where(pick("a decode 0/0 9/9", name="postal")) == "a <- in place"


def pick(
    text: str,
    num_prompt_tokens: int = 1000,
    cached: dict[str, int] | None = None,
    *,
    policy: Policy | None = None,
    name: str = "prefix_aware",
    session: str = "",
) -> RoutingDecision:
    """`cached`: blocks of 16 tokens that each worker has."""
    request = RoutingRequest(
        num_prompt_tokens=num_prompt_tokens, fingerprint="f", cached_blocks=cached or {}, session=session
    )
    return (policy or create_policy(name)).pick(request, fleet(text))


@pytest.mark.parametrize("name", ["least_load", "round_robin", "prefix_aware"])
def test_answers_to_one_prompt_stay_together(name: str) -> None:
    endpoints = fleet("a decode 9/9 9/9\nb decode 0/0 9/9\np prefill 0/0 9/9")
    request = RoutingRequest(num_prompt_tokens=1000, fingerprint="f", beside=("a", "e"))
    policy = create_policy(name)
    decided = [policy.pick(request, endpoints) for _ in range(3)]
    assert [where(one) for one in decided] == ["a <- p"] * 3
    assert "a: other answers to this prompt are there" in decided[0].reasons.lines()
    # If the worker is gone, or has refused, another one takes the answer.
    assert where(policy.pick(replace(request, tried=frozenset({("a", "e")})), endpoints)) == "b <- p"
    assert where(policy.pick(replace(request, beside=("a", "before it started again")), endpoints[1:])) == "b <- p"


def where(decision: RoutingDecision) -> str:
    return f"{decision.decode.address} <- " + ("in place" if decision.in_place else decision.prefill[0].address)


PREFIX_GOLDEN: list[tuple[str, str, dict[str, int], str]] = [
    ("nothing cached: least load",
     "a decode 3/0 9/9\nb decode 1/0 9/9\np prefill 2/0 9/9 queued=500\nq prefill 0/0 9/9", {}, "b <- q"),
    ("a long prefix outweighs a short queue", "d decode 0/0 9/9\np prefill 1/0 9/9 queued=300\nq prefill 0/0 9/9",
     {"p": 50}, "d <- p"),
    ("no prefix outweighs a long queue", "d decode 0/0 9/9\np prefill 9/9 9/9 queued=900\nq prefill 0/0 9/9",
     {"p": 50}, "d <- q"),
    ("tokens on their way count", "d decode 0/0 9/9\np prefill 0/0 9/9 unreported_tokens=900\nq prefill 0/0 9/9",
     {"p": 50}, "d <- q"),
    ("decode has the prefix", "a decode 0/0 9/9\nb decode 2/0 9/9\np prefill 0/0 9/9", {"b": 40}, "b <- p"),
    ("decode has all but a few tokens", "a decode 0/0 9/9\nb decode 1/0 9/9\np prefill 0/0 9/9", {"b": 62},
     "b <- in place"),
    ("decode is busy", "a decode 0/0 9/9\nb decode 0/9 9/9\np prefill 0/0 9/9", {"b": 40}, "a <- p"),
    ("workers of both roles", "a both 0/0 9/9\nb both 2/0 9/9", {"b": 50}, "b <- in place"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "cached", "expected"), [case[1:] for case in PREFIX_GOLDEN], ids=[case[0] for case in PREFIX_GOLDEN]
)
def test_prefix_aware(text: str, cached: dict[str, int], expected: str) -> None:
    assert where(pick(text, 1000, cached)) == expected


def test_a_full_prefill_side_leaves_work_to_decode() -> None:
    text = "d decode 0/0 9/9\np prefill 0/0 9/9 queued={}"
    assert where(pick(text.format(0), name="least_load")) == "d <- p"
    assert where(pick(text.format(1500), name="least_load")) == "d <- p"
    decision = pick(text.format(9000), name="least_load")
    assert where(decision) == "d <- in place"
    assert [e.address for e in decision.prefill] == ["p"], "the decode worker may find that it lacks more"
    assert decision.min_remote_tokens == 1016
    assert "prefill in place: 1000 tokens are missing; remote costs 10250, in place 2000" in decision.reasons.lines()


def test_what_decode_is_thought_to_have_is_checked_by_decode() -> None:
    decision = pick("d decode 0/0 9/9\np prefill 0/0 9/9", 1000, {"d": 62}, name="least_load")
    assert where(decision) == "d <- in place"
    assert ([e.address for e in decision.prefill], decision.min_remote_tokens) == (["p"], 0)
    assert (decision.num_cached_tokens, decision.num_missing_tokens) == (992, 8)


def test_reasons_name_the_choices() -> None:
    text = "a decode 3/0 9/9\nb decode 1/0 9/9 state=draining\nc decode 9/0 9/9\np prefill 0/0 9/9"
    assert pick(text, name="least_load").reasons.lines() == (
        "b: draining",
        "decode by a (load 3), before c (load 9)",
        "prefill remote: 1000 tokens are missing; remote costs 1250, in place 2192",
        "prefill by p (load 0)",
    )
    many = "".join(f"d{number} decode {number}/0 9/9\n" for number in range(9))
    assert "d3 (load 3) and 5 more" in pick(many, name="least_load").reasons.lines()[0]


def test_suspended_workers_are_the_last_resort() -> None:
    text = "a decode 0/0 9/9 suspended=tripped\nb decode 9/9 9/9\np prefill 0/0 9/9 suspended=slow\nq prefill 9/9 9/9"
    decision = pick(text, name="least_load")
    assert where(decision) == "b <- q"
    assert "a: tripped" in decision.reasons.lines()
    assert where(pick("a decode 0/0 9/9 suspended=tripped", name="least_load")) == "a <- in place"


def test_power_of_two_takes_the_better_of_two() -> None:
    text = "".join(f"d{number} decode {number}/0 9/9\n" for number in range(4))
    policy = create_policy("power_of_two", seed=1)
    picked = Counter(pick(text, policy=policy).decode.address for _ in range(600))
    assert picked["d3"] == 0, "the worst of all never wins"
    line = pick(text, policy=policy).reasons.lines()[0]
    assert line.count("drawn, load") == 2
    assert line.startswith("decode by d")
    assert 250 < picked["d0"] < 350, "it is in half of all pairs"
    assert pick("a decode 0/0 9/9", policy=policy).decode.address == "a"
    other = create_policy("power_of_two", seed=2)
    assert [pick(text, policy=policy).decode.address for _ in range(20)] != [
        pick(text, policy=other).decode.address for _ in range(20)
    ]


def test_a_session_stays_where_it_is() -> None:
    text = "".join(f"d{number} decode 0/0 9/9\n" for number in range(4))
    policy = create_policy("session")
    sessions = [f"s{number}" for number in range(200)]
    homes = {session: pick(text, policy=policy, session=session).decode.address for session in sessions}
    assert homes == {session: pick(text, policy=policy, session=session).decode.address for session in sessions}
    assert min(Counter(homes.values()).values()) > 25, "sessions spread"
    fewer = text.replace("d3 decode", "d3 prefill")
    moved = [s for s in sessions if pick(fewer, policy=policy, session=s).decode.address != homes[s]]
    assert {homes[session] for session in moved} == {"d3"}, "only sessions of the worker that is gone move"


def test_an_overloaded_worker_sends_its_sessions_on() -> None:
    policy = create_policy("session")
    quiet = "a decode 0/0 9/9\nb decode 0/0 9/9"
    home = pick(quiet, policy=policy, session="s").decode.address
    other = "b" if home == "a" else "a"
    busy = quiet.replace(f"{home} decode 0/0", f"{home} decode 0/20")
    decision = pick(busy, policy=policy, session="s")
    assert decision.decode.address == other
    assert f"{home} (overloaded, load 80 above 68)" in decision.reasons.lines()[0]
    assert pick(quiet.replace("0/0 9/9", "40/0 9/9"), policy=policy, session="s").decode.address == home
    assert "no session, load 0" in pick(quiet, policy=policy).reasons.lines()[0]


def test_a_policy_for_each_role() -> None:
    policy = create_policy("least_load", prefill="prefix_aware", decode="round_robin")
    text = "a decode 9/9 9/9\nb decode 0/0 9/9\np prefill 1/0 9/9\nq prefill 0/0 9/9"
    cached = {"p": 60}
    assert [where(pick(text, 1000, cached, policy=policy)) for _ in range(2)] == ["a <- p", "b <- p"]
    with pytest.raises(ConfigError, match="decode_policy: 'best' is not one of"):
        create_policy("least_load", decode="best")


@pytest.mark.parametrize(
    ("second", "may_hedge"),
    [("q prefill 1/0 9/9", True), ("q prefill 1/0 9/9 queued=1124", True), ("q prefill 1/0 9/9 queued=1125", False),
     ("q prefill 1/0 9/9 state=draining", False)],
)  # fmt: skip
def test_only_a_worker_that_has_little_to_do_is_asked_beside_a_late_one(second: str, may_hedge: bool) -> None:
    """A prompt of 100 tokens; the first worker has 50 before it."""
    request = RoutingRequest(num_prompt_tokens=100, fingerprint="f")
    endpoints = fleet(f"d decode 0/0 9/9\np prefill 0/0 9/9 queued=50\n{second}")
    decision = create_policy("least_load", hedges=True).pick(request, endpoints)
    assert (decision.prefill[0].address, decision.prefill_cost) == ("p", 150)
    assert decision.may_hedge is may_hedge
    assert not create_policy("least_load").pick(request, endpoints).may_hedge


def test_no_hedge_in_place() -> None:
    request = RoutingRequest(num_prompt_tokens=10, fingerprint="f")
    endpoints = fleet("d decode 0/0 9/9\np prefill 0/0 9/9\nq prefill 0/0 9/9")
    assert not create_policy("least_load", hedges=True).pick(request, endpoints).may_hedge
