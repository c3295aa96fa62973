"""An engine that stops while the front of its worker lives: noticed, ended, and its requests go on elsewhere."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from common.sampling import SamplingOptions
from tests.chaos.tiny_model import random_prompt
from tests.integration.ask import Salt
from tests.integration.stack import START_TIMEOUT_S, Fleet, alive, descendants, engines, kill, running, wait_for
from tests.integration.tiny import Case, make_cases, tiny_fleet

pytestmark = pytest.mark.timeout(600)
ENGINE_TIMEOUT_S = 3  # engines say something every second


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = tiny_fleet(tmp_path_factory.mktemp("fleet"), f"--engine-timeout={ENGINE_TIMEOUT_S}", prefill=1, decode=2)
    with running(fleet):
        yield fleet


@pytest.fixture(scope="module")
def cases(fleet: Fleet) -> list[Case]:
    return make_cases(fleet, 1000)


@pytest.mark.parametrize("number", [0, 1])
def test_a_decode_engine_that_hangs_in_mid_stream(fleet: Fleet, cases: list[Case], salt: Salt, number: int) -> None:
    case = cases[number]
    with fleet.client() as client:
        answer = client.generate(case.prompt, cache_salt=salt(), **case.options)
        next(iter(answer))
        victim = fleet.busy("decode")
        (engine,) = engines(victim.process.popen.pid)
        os.kill(engine, signal.SIGSTOP)
        result = answer.result()
    assert victim.process.popen.wait(START_TIMEOUT_S) == 1
    fleet.replace(victim)
    assert result.token_ids == case.answer
    assert (result.report.num_migrations, result.report.num_handovers) == (1, 0)
    assert f"no sign of life for {ENGINE_TIMEOUT_S} s" in victim.process.log.read_text()
    assert not alive({engine})


def test_a_prefill_engine_that_hangs(fleet: Fleet, salt: Salt) -> None:
    """The decode worker computes the prompt itself."""
    victim = next(member for member in fleet.members if member.role == "prefill")
    (engine,) = engines(victim.process.popen.pid)
    os.kill(engine, signal.SIGSTOP)
    with fleet.client() as client:
        options: SamplingOptions = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
        prompt = random_prompt(random.Random(3), 700)
        result = client.generate(prompt, cache_salt=salt(), **options).result()
        assert victim.process.popen.wait(START_TIMEOUT_S) == 1
        fleet.replace(victim)
        undisturbed = client.generate(prompt, cache_salt=salt(), **options).result()
    assert victim.address in result.report.fallback_reason
    assert undisturbed.report.fallback_reason == ""
    assert result.token_ids == undisturbed.token_ids


def test_a_whole_worker_that_was_stopped_does_not_blame_its_engine(fleet: Fleet, salt: Salt) -> None:
    """The worker is stopped for longer than the engine's timeout; afterwards its front and its engine go on."""
    victim = next(member for member in fleet.members if member.role == "decode")
    pids = {victim.process.popen.pid} | descendants(victim.process.popen.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    with fleet.client() as client:
        result = client.generate([1, 2, 3], max_tokens=3, ignore_eos=True, cache_salt=salt()).result()
        time.sleep(ENGINE_TIMEOUT_S + 0.5)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert len(result.token_ids) == 3
    wait_for("the stopped worker is back", fleet.all_ready, START_TIMEOUT_S)
    assert alive(pids) == pids


def test_an_engine_that_hangs_ends_with_its_front(fleet: Fleet) -> None:
    """The engine is stopped, so it cannot see its standard input close."""
    victim = next(member for member in fleet.members if member.role == "prefill")
    (engine,) = engines(victim.process.popen.pid)
    os.kill(engine, signal.SIGSTOP)
    kill(victim.process)
    wait_for("the engine is gone", lambda: not alive({engine}))
    fleet.replace(victim)
