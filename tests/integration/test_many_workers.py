"""Forty simulated workers under `baton up`, and what a router and a stack make of them: load on all, kills, a drain."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.client.sync_client import Client
from common.errors import BatonError
from common.types import WorkerState
from router.autoscaler.signals import ROLES
from tests.integration.simulated import simulated_answer, write_simulated_model
from tests.integration.stack import Stack, alive, baton, command, descendants, ready_fields, running, wait_for
from tests.kube.processes import Process

NUM_PREFILL, NUM_DECODE = 24, 16
NUM_TOKENS = 16
NUM_LONG, NUM_LONG_TOKENS = 48, 150  # 9 ms each
MAX_WORKER_MIB = 80  # of memory, its share of what it has in common with others included; an engine with torch has 300
NUM_FAULTS, FAULT_S, NUM_CLIENTS = 12, 0.7, 8
NUM_VOCABULARY = 300  # the tokenizer has some more


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated") / "model"
    write_simulated_model(folder)
    return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stack]:
    device = ("--device=simulated", "--simulated-time=xeon-135m", f"--model={model_dir}", "--max-model-len=1024")
    fleet = (f"--prefill={NUM_PREFILL}", f"--decode={NUM_DECODE}", "--min-remote-tokens=1", "--log-level=warning")
    one = Stack(tmp_path_factory.mktemp("stack"), *device, *fleet)
    with running(one):
        yield one


def named(stack: Stack, name: str) -> int:
    """The process that `ps` shows as `name`."""
    for pid in descendants(stack.process.popen.pid):
        if Path(f"/proc/{pid}/comm").read_text().strip() == name[:15]:
            return pid
    raise AssertionError(f"no process is called {name}")


def pss_mib(pid: int) -> float:
    """Memory of a process, of which it has only its share where several use the same."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) / 1024


def ask(client: Client, prompt: list[int], num_tokens: int) -> list[int]:
    answer = client.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True).result()
    return list(answer.token_ids)


def ask_or_fail(client: Client, prompt: list[int], num_tokens: int) -> list[int] | BatonError:
    try:
        return ask(client, prompt, num_tokens)
    except BatonError as error:
        return error


def prompts(seed: int, number: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(NUM_VOCABULARY) for _ in range(20 + draw.randrange(60))] for _ in range(number)]


def test_every_worker_is_used_and_every_answer_is_right(stack: Stack, model_dir: Path) -> None:
    assert len(stack.workers()) == NUM_PREFILL + NUM_DECODE
    idle: list[str] = []
    for seed in range(20):
        asked = prompts(seed, 3 * NUM_PREFILL)
        with stack.client() as client, ThreadPoolExecutor(NUM_PREFILL) as pool:
            answers = list(pool.map(lambda prompt: ask(client, prompt, NUM_TOKENS), asked))
        assert answers == [simulated_answer(model_dir, prompt, NUM_TOKENS) for prompt in asked]
        idle = [worker.address for worker in stack.workers() if not worker.num_cached_blocks]
        if not idle:
            break
    assert not idle


def test_a_worker_is_two_small_processes(stack: Stack) -> None:
    """Each is killed, drained and looked at like any other's."""
    (fork_server,) = (pid for pid in children(stack.process.popen.pid) if b"forked_workers" in command(pid))
    workers = children(fork_server)
    assert len(workers) == NUM_PREFILL + NUM_DECODE
    processes = [one for worker in workers for one in (worker, *children(worker))]
    assert len(processes) == 2 * len(workers)
    assert sum(map(pss_mib, processes)) < MAX_WORKER_MIB * len(workers)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def autoscaler(stack: Stack, folder: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """One that watches the stack and may ask for more workers than it has; gives what asks for its decisions."""
    of_role = {role: [one.address for one in stack.workers() if one.role is role] for role in ROLES}
    fleet = [f"--{role.value}={','.join(addresses)}" for role, addresses in of_role.items()]
    limits = ("--prefill-max=100", "--decode-max=100", "--target-requests=1", "--scale-up-delay=0")
    flags = (*fleet, f"--routers={stack.grpc}", "--http-listen=127.0.0.1:0", *limits)
    process = Process("autoscaler", baton("autoscaler", *flags), folder / "autoscaler.log")
    try:
        url = ready_fields(process)["http"]

        def decisions() -> dict[str, Any]:
            with urllib.request.urlopen(f"{url}/decisions", timeout=30) as answer:
                found: dict[str, Any] = json.load(answer)["decisions"]
            return found

        yield decisions
    finally:
        process.kill()


def test_an_autoscaler_counts_them_and_follows_their_load(stack: Stack, tmp_path: Path) -> None:
    with autoscaler(stack, tmp_path) as decisions, stack.client() as client, ThreadPoolExecutor(NUM_LONG) as pool:

        def knows_all() -> bool:
            with contextlib.suppress(urllib.error.HTTPError):  # until it has heard from the workers
                found = decisions()
                return (found["prefill"]["workers"], found["decode"]["workers"]) == (NUM_PREFILL, NUM_DECODE)
            return False

        wait_for("the autoscaler knows all workers", knows_all)
        answers = [pool.submit(ask, client, prompt, NUM_LONG_TOKENS) for prompt in prompts(55, NUM_LONG)]
        wait_for("it asks for more", lambda: decisions()["decode"]["desired"] > NUM_DECODE)
        assert [len(answer.result()) for answer in answers] == [NUM_LONG_TOKENS] * NUM_LONG


def test_what_is_killed_comes_back_and_no_answer_is_wrong(stack: Stack, model_dir: Path) -> None:
    asked = prompts(99, NUM_LONG)
    victims = [named(stack, name) for name in ("decode-1", "decode-2.engine", "prefill-1")]
    with stack.client() as client, ThreadPoolExecutor(NUM_LONG) as pool:
        answers = [pool.submit(ask_or_fail, client, prompt, NUM_LONG_TOKENS) for prompt in asked]
        wait_for("all are served", lambda: sum(one.num_requests_running for one in stack.workers()) >= NUM_LONG // 2)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        ended = [answer.result() for answer in answers]
    for prompt, answer in zip(asked, ended, strict=True):
        if isinstance(answer, BatonError):
            assert answer.message
        else:
            assert answer == simulated_answer(model_dir, prompt, NUM_LONG_TOKENS)
    assert sum(isinstance(answer, list) for answer in ended) >= NUM_LONG - 6  # others go on elsewhere

    def is_whole() -> bool:
        return not alive(set(victims)) and all(one.state is WorkerState.READY for one in stack.workers())

    wait_for("the killed workers are back", is_whole)


def test_a_storm_of_faults(stack: Stack, model_dir: Path) -> None:
    """Workers and engines are killed or stopped one after the other; one decode worker is left alone."""
    draw, is_over = random.Random(8), threading.Event()
    names = [f"prefill-{n + 1}" for n in range(NUM_PREFILL)] + [f"decode-{n + 1}" for n in range(NUM_DECODE - 1)]

    def keep_asking(number: int) -> tuple[int, list[str]]:
        """How many answers were right, and why others ended."""
        num_right, reasons = 0, []
        with stack.client() as client:
            for prompt in prompts(1000 + number, 10_000):
                if is_over.is_set():
                    break
                answer = ask_or_fail(client, prompt, NUM_TOKENS)
                if isinstance(answer, BatonError):
                    reasons.append(answer.message)
                else:
                    assert answer == simulated_answer(model_dir, prompt, NUM_TOKENS)
                    num_right += 1
        return num_right, reasons

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(keep_asking, number) for number in range(NUM_CLIENTS)]
        try:
            for _ in range(NUM_FAULTS):
                name = draw.choice(names)
                victim = named(stack, name if draw.random() < 0.5 else f"{name}.engine")
                os.kill(victim, draw.choice([signal.SIGKILL, signal.SIGSTOP]))
                time.sleep(FAULT_S)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGCONT)
                names.remove(name)  # it may be starting
        finally:
            is_over.set()
        found = [client.result() for client in clients]
    num_right, reasons = sum(right for right, _ in found), [reason for _, some in found for reason in some]
    assert num_right > NUM_CLIENTS
    assert all(reasons)
    assert len(reasons) <= NUM_FAULTS, reasons
    wait_for("all workers are back", lambda: all(one.state is WorkerState.READY for one in stack.workers()))


def test_the_stack_drains_and_leaves_nothing_behind(tmp_path: Path, model_dir: Path) -> None:
    device = ("--device=simulated", f"--model={model_dir}", "--max-model-len=1024", "--log-level=warning")
    stack = Stack(tmp_path, *device, "--prefill=2", "--decode=2")
    family = stack.family | descendants(stack.process.popen.pid)
    assert len(family) >= 2 + 2 * 4  # router, fork server, workers
    assert stack.stop() == 0
    wait_for("nothing is left", lambda: not alive(family))
