"""Workers of both roles take work of another one while requests run: none is lost, whoever is killed meanwhile."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.client.admin import Target
from baton.client.report import Result
from common.types import WorkerRole
from tests.chaos.tiny_model import random_prompt
from tests.integration.ask import Salt
from tests.integration.stack import Fleet, alive, kill, running, wait_for
from tests.integration.test_drain import ask_directly, engine_of, held_in_prefill
from tests.integration.tiny import Case, make_cases, tiny_fleet

pytestmark = pytest.mark.timeout(600)

NUM_STREAMS = 4
PREFILL, DECODE, BOTH = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.BOTH


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = ("--role-handover=0", "--engine-timeout=100", "--chunk-size=16")
    router_flags = ("--min-remote-tokens=1",)
    folder = tmp_path_factory.mktemp("fleet")
    fleet = tiny_fleet(folder, *flags, prefill=0, decode=0, both=3, router_flags=router_flags)
    with running(fleet):
        yield fleet


@pytest.fixture(scope="module")
def cases(fleet: Fleet) -> list[Case]:
    return make_cases(fleet, 600)


@pytest.fixture(autouse=True)
def both_again(fleet: Fleet) -> Iterator[None]:
    yield
    wait_for("every worker is ready", fleet.all_ready)
    take(fleet, *[BOTH] * len(fleet.members))


def take(fleet: Fleet, *roles: WorkerRole) -> None:
    """Has each worker take work of a role; returns once the router knows."""
    with fleet.client() as client:
        # One that takes requests is left at any time.
        for member, role in sorted(zip(fleet.members, roles, strict=True), key=lambda one: one[1] is PREFILL):
            client.admin.set_role(role, Target(worker=member.address))
        wanted = dict(zip([member.address for member in fleet.members], roles, strict=True))
        wait_for("the router knows", lambda: {one.address: one.takes for one in client.admin.state().workers} == wanted)


def ask(fleet: Fleet, case: Case, salt: str, request_id: str = "") -> Result:
    with fleet.client() as client:
        return client.generate(case.prompt, cache_salt=salt, request_id=request_id, **case.options).result()


def test_requests_outlive_shifts(fleet: Fleet, cases: list[Case], salt: Salt) -> None:
    """Every role of every worker, while answers stream and prompts are computed."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(ask, fleet, cases[number % 2], salt()) for number in range(NUM_STREAMS)]
        for roles in itertools.cycle(itertools.permutations((PREFILL, DECODE, BOTH))):
            take(fleet, *roles)
            if all(one.done() for one in running):
                break
        take(fleet, PREFILL, DECODE, DECODE)
        done = [one.result() for one in running] + [ask(fleet, case, salt()) for case in cases]
    for number, result in enumerate(done):
        assert result.token_ids == cases[number % 2].answer, result.report
        assert result.report.num_retries == 0
    assert {one.report.prefill_worker for one in done[-2:]} == {fleet.members[0].address}
    assert fleet.members[0].address not in {one.report.decode_worker for one in done[-2:]}


def test_a_worker_is_killed_in_mid_shift(fleet: Fleet, cases: list[Case], salt: Salt) -> None:
    """It was told to take prompts alone, and its answers are about to go elsewhere; its engine stands still, so none
    ends before."""
    take(fleet, PREFILL, DECODE, DECODE)
    with fleet.client() as client, ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = [
            client.generate(cases[number % 2].prompt, cache_salt=salt(), **cases[number % 2].options)
            for number in range(NUM_STREAMS)
        ]
        for answer in answers:
            next(iter(answer))
        results = [pool.submit(answer.result) for answer in answers]
        victim = fleet.busy("both")
        if victim is fleet.members[0]:
            victim = fleet.members[1]
        engine = engine_of(victim)
        os.kill(engine, signal.SIGSTOP)
        client.admin.set_role(PREFILL, Target(worker=victim.address))
        kill(victim.process)
        wait_for("its engine is gone", lambda: not alive({engine}))
        fleet.replace(victim)
        done = [result.result() for result in results]
    for number, result in enumerate(done):
        assert result.token_ids == cases[number % 2].answer, result.report
    with fleet.client() as client:
        started = {one.address: one for one in client.admin.state().workers}[victim.address]
    assert (started.takes, started.num_role_shifts, started.role_pinned) == (BOTH, 0, False)  # as configured


def test_the_last_one_that_takes_requests_is_killed(fleet: Fleet, cases: list[Case], salt: Salt) -> None:
    """Those that take prompts alone go on with its answers."""
    take(fleet, PREFILL, PREFILL, DECODE)
    victim = fleet.members[2]
    with fleet.client() as client:
        answer = client.generate(cases[0].prompt, cache_salt=salt(), **cases[0].options)
        next(iter(answer))
        kill(victim.process)
        result = answer.result()
        assert (result.token_ids, result.report.num_migrations) == (cases[0].answer, 1)
        assert ask(fleet, cases[1], salt()).token_ids == cases[1].answer
    fleet.replace(victim)


def test_a_lease_lasts_though_its_worker_takes_requests_alone(fleet: Fleet, salt: Salt) -> None:
    """And a prompt that is still sent there is computed."""
    take(fleet, PREFILL, DECODE, DECODE)
    first, decode, _ = fleet.members
    prompt = random_prompt(random.Random(8), 3000)
    with held_in_prefill(fleet, first, decode, prompt, salt()) as taken:
        take(fleet, DECODE, DECODE, DECODE)
    done = taken.result()
    late = ask_directly(decode, prompt[:500], salt(), [first.address])
    for report in (done, late):
        assert (report.prefill_worker, report.num_retries, report.fallback_reason) == (first.address, 0, "")
