"""Decisions that look at few workers are those that look at all of them (`tests.router.plain_policy`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.batch_time import FEATURES, BatchTime, BatchTimeKey, Regime, RegimeTime, Table
from common.errors import UnavailableError
from common.types import SLACKS_S, WorkerLoad, WorkerRole, WorkerState
from router.fleet.endpoint import Endpoint
from router.fleet.fleet import Entry, Fleet
from router.fleet.prefix_index import PrefixIndex
from router.policy.base import FirstTokenTarget, RoutingDecision, RoutingRequest
from router.policy.candidates import FEW
from router.policy.embedding import least_loaded
from router.policy.registry import create_policy
from tests.examples import examples
from tests.router.plain_policy import PlainPolicy, plain_least_loaded

POLICIES = ("least_load", "power_of_two", "prefix_aware", "round_robin", "session")
NAMES = [bytes([number]) * 16 for number in range(8)]  # of a prompt's blocks
MAX_WORKERS = 3 * FEW
NUM_REQUESTS = 6
USUAL = 12  # of so many workers or requests, about one has something unusual


def model(step_s: float) -> BatchTime:
    regime = RegimeTime(
        layers=Table((0.0, 64.0), (step_s, 2 * step_s), step_s / 64),
        head=Table((0.0,), (step_s / 100,), step_s / 1000),
        coefficients=tuple(1e-7 for _ in FEATURES),
    )
    key = BatchTimeKey(spec="s", quantization="", device="d", processor="p", kernels="k", num_threads=1)
    return BatchTime(key=key, regimes=dict.fromkeys(Regime, regime))


MODELS = (model(0.01), model(0.01 + 1e-9), model(0.02))


def worker(draw: Random, number: int, times: Sequence[BatchTime | None]) -> Endpoint:
    one = Endpoint(
        worker_id="w",
        role=draw.choice(list(WorkerRole)),
        address=f"w{number}",
        epoch="e",
        fingerprint="f",
        block_size=16,
        batch_time=draw.choice(times),
        splits=draw.choice((True, True, False)),
        state=WorkerState.READY,
    )
    return unusual(draw, busy(draw, one))


def busy(draw: Random, one: Endpoint) -> Endpoint:
    """The same worker with another load: often the one that others have, too."""
    load = WorkerLoad(
        num_requests_running=draw.choice((0, 0, 1, 2)),
        num_requests_waiting=draw.choice((0, 0, 0, 1)),
        num_blocks=100,
        num_free_blocks=draw.choice((0, 99, 100)),
        num_queued_prompt_tokens=(num_queued := draw.choice((0, 0, 1, 100, 5000))),
        num_queued_prompts=draw.choice((0, -(-num_queued // 200), -(-num_queued // 1000))),
        goes_by_slack=draw.choice((True, False)),
        room_after=draw.choice(((), (), (3, 9, 20))),
        queued_by_slack=draw.choice(((), tuple(sorted(draw.randint(0, num_queued) for _ in SLACKS_S)))),
    )
    unreported = draw.choice((0, 0, 1))
    num_tokens = unreported * draw.choice((7, 500))
    by_slack = draw.choice(((), tuple(sorted(draw.randint(0, num_tokens) for _ in SLACKS_S))))
    return replace(
        one,
        load=load,
        num_unreported=unreported,
        num_unreported_tokens=num_tokens,
        num_unreported_context=2 * num_tokens,
        unreported_by_slack=by_slack,
    )


def unusual(draw: Random, one: Endpoint) -> Endpoint:
    changes: Sequence[Callable[[], dict[str, object]]] = (
        lambda: {"state": draw.choice(list(WorkerState))},
        lambda: {"suspended": draw.choice(("", "tripped", "slow"))},
        lambda: {"excluded": draw.choice(("", "another model"))},
        lambda: {"max_model_len": draw.choice((None, 150, 1000))},
        lambda: {"fingerprint": draw.choice("fg")},
        lambda: {"parameters": frozenset(draw.sample(("guided", "bad_words"), draw.randint(0, 2)))},
        lambda: {"epoch": draw.choice(("e", "restarted"))},
        lambda: {"block_size": draw.choice((16, 32))},
    )
    for change in changes:
        if not draw.randrange(USUAL):
            one = replace(one, **change())
    return one


def wanted(draw: Random, workers: Sequence[Endpoint]) -> RoutingRequest:
    num_prompt = draw.choice((1, 15, 16, 100, 130, 900, 3000))
    some = [one.incarnation for one in draw.sample(workers, min(len(workers), draw.choice((0, 0, 1, 5))))]
    return RoutingRequest(
        num_prompt_tokens=num_prompt,
        num_tokens=num_prompt + draw.choice((1, 40)),
        fingerprint="f",
        tried=frozenset(some),
        session=draw.choice(("", "s", "t")),
        parameters=frozenset(("guided",)) if not draw.randrange(USUAL) else frozenset(),
        beside=draw.choice(workers).incarnation if workers and not draw.randrange(USUAL // 2) else None,
        in_place=not draw.randrange(USUAL),
        first_token=draw.choice((None, target(draw))),
        handoff_token_s=draw.choice((None, 1e-4)),
    )


def target(draw: Random) -> FirstTokenTarget:
    left_s, token_s = draw.choice((-1.0, 0.01, 0.1, 0.5, 60.0)), draw.choice((None, 0.01, 0.05, 1.0))
    return FirstTokenTarget(left_s, token_s, low=draw.choice((0.8, 1.0)), high=draw.choice((1.0, 1.2)))


def depths(draw: Random, workers: Sequence[Endpoint]) -> dict[str, int]:
    """All have the same beginning, or few have anything. Sometimes one is not known, and one that has left still is."""
    common = draw.choice((0, 0, 2))
    some = draw.choices(range(len(NAMES) + 1), k=3)
    found = {one.address: draw.choice(some) if not draw.randrange(4) else common for one in workers}
    if found and not draw.randrange(3):
        found[draw.choice(list(found))] = 0
        found["gone"] = max(found.values())
    return {address: num for address, num in found.items() if num}


def told(pick: Callable[..., RoutingDecision | Endpoint], *args: object) -> object:
    """Everything that a decision says."""
    try:
        made = pick(*args)
    except UnavailableError as error:
        return str(error)
    if isinstance(made, Endpoint):
        return made.address
    named = {name: getattr(made, name) for name in RoutingDecision.__struct_fields__ if name != "reasons"}
    return made.decode.address, [one.address for one in made.prefill], made.reasons.lines(), named


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 2**32))
def test_decisions_are_those_of_looking_at_all(name: str, seed: int) -> None:
    draw = Random(seed)
    times = draw.choice(((None,), MODELS[:1], MODELS, (*MODELS, None)))
    workers = [worker(draw, number, times) for number in range(draw.choice((0, 1, 2, 3, 10, MAX_WORKERS)))]
    fleet, min_remote_tokens = Fleet(workers), draw.choice((0, 0, 40))
    policy = create_policy(name, min_remote_tokens=min_remote_tokens, hedges=True, seed=1)
    plain = PlainPolicy(name, name, min_remote_tokens=min_remote_tokens, hedges=True, seed=1)
    for _ in range(NUM_REQUESTS):
        for number in draw.sample(range(len(workers)), draw.randint(0, len(workers))):
            workers[number] = unusual(draw, busy(draw, workers[number]))
            fleet.update(workers[number])
        assert fleet.endpoints() == workers
        request, cached, index = wanted(draw, workers), depths(draw, workers), PrefixIndex()
        for address, num in cached.items():
            index.reset(address)
            index.store(address, b"".join(NAMES[:num]))
        matched = index.match(NAMES, 0.0)
        assert matched == cached
        expected = told(plain.pick, replace(request, cached_blocks=cached), workers)
        assert told(policy.pick, replace(request, cached_blocks=draw.choice((cached, matched))), fleet) == expected
        assert told(least_loaded, request, fleet) == told(plain_least_loaded, request, workers)


def test_a_list_of_workers_will_do() -> None:
    draw = Random(0)
    workers = [worker(draw, number, MODELS) for number in range(MAX_WORKERS)]
    request = RoutingRequest(num_prompt_tokens=100, fingerprint="f")
    kept, listed = create_policy("prefix_aware"), create_policy("prefix_aware")
    fleet = Fleet(workers)
    for _ in range(5):
        assert told(kept.pick, request, fleet) == told(listed.pick, request, workers)


@pytest.mark.parametrize("name", ["least_load", "power_of_two", "prefix_aware", "round_robin"])
@pytest.mark.parametrize("left_s", [None, 0.001, 60.0])
def test_a_decision_looks_at_few_of_a_thousand(name: str, left_s: float | None) -> None:
    num_read = 0

    class Counted(list[Entry]):
        def __getitem__(self, at: SupportsIndex | slice) -> Any:
            nonlocal num_read
            num_read += 1
            return super().__getitem__(at)

        def __iter__(self) -> Iterator[Entry]:
            nonlocal num_read
            num_read += len(self)
            return super().__iter__()

    draw = Random(0)
    roles = (WorkerRole.PREFILL, WorkerRole.DECODE)
    one = Endpoint(
        worker_id="w", role=WorkerRole.BOTH, address="", fingerprint="f", block_size=16, batch_time=MODELS[0]
    )
    alike = replace(one, state=WorkerState.READY)
    workers = [replace(busy(draw, alike), address=f"w{number}", role=roles[number % 2]) for number in range(1000)]
    fleet, policy = Fleet(workers), create_policy(name)
    request = RoutingRequest(
        num_prompt_tokens=500,
        fingerprint="f",
        cached_blocks={one.address: 1 for one in workers} | {"w0": 5, "w1": 5},
        first_token=None if left_s is None else FirstTokenTarget(left_s),
    )
    policy.pick(request, fleet)  # makes the orders
    for group in fleet.groups:
        for order in group.orders():
            order.entries = Counted(order.entries)
    for _ in range(20):
        policy.pick(request, fleet)
    assert num_read < 20 * 200
