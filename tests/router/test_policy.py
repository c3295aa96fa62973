"""Decisions of the least-load policy, as text: a fleet, and what comes of it."""

from __future__ import annotations

import pytest

from common.errors import ConfigError, UnavailableError
from common.types import WorkerLoad, WorkerRole, WorkerState
from router.fleet.endpoint import Endpoint
from router.policy.base import RoutingRequest
from router.policy.registry import create_policy


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
                ),
                state=WorkerState(extra.get("state", "ready")),
                excluded=extra.get("excluded", ""),
                num_unreported=int(extra.get("unreported", "0")),
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
    assert any("too short" in reason for reason in decision.reasons) is ("in place" in expected)


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
    with pytest.raises(ConfigError, match=r"policy: 'best' is not one of least_load, round_robin"):
        create_policy("best")
