"""Decode workers are replaced one by one, those of the release before, which know only `Decode`, by today's; under load
from a router of each release, so that every router meets every worker."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from baton.client.sync_client import Client
from tests import release_before
from tests.chaos.tiny_model import write_tiny_model
from tests.faults import watch
from tests.integration.stack import CALL_TIMEOUT_S, START_TIMEOUT_S, Fleet, Member, running, wait_for
from tests.integration.tiny import Case, make_cases
from tests.kube.load import at_once

pytestmark = pytest.mark.timeout(600)

NUM_CLIENTS = 4
NUM_MORE = 20  # answers, between two steps


class TwoReleases(Fleet):
    """`older` names the processes that are started as those of the release before."""

    def __init__(self, folder: Path) -> None:
        self.older = {"decode-0", "decode-1", "router-1"}
        write_tiny_model(folder / "model")
        flags = (f"--model={folder / 'model'}", "--num-blocks=2048", "--connector=nixl", "--drain-timeout=30")
        super().__init__(folder, *flags, prefill=1, decode=2, routers=2)

    def environ_of(self, name: str) -> Mapping[str, str]:
        component = name.partition("-")[0]
        return {release_before.VARIABLE: str(release_before.folder(component))} if name in self.older else {}

    def decode_workers(self) -> list[Member]:
        return [member for member in self.members if member.role == "decode"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoReleases]:
    fleet = TwoReleases(tmp_path_factory.mktemp("fleet"))
    with running(fleet):
        yield fleet


class Clients:
    """One after another they ask each router, and count answers by router."""

    def __init__(self, fleet: Fleet, cases: list[Case]) -> None:
        self.num_answers = dict.fromkeys([router.grpc for router in fleet.routers], 0)
        self.wrong: list[str] = []
        self._cases = cases
        self._lock = threading.Lock()

    def ask(self, number: int, stop: threading.Event) -> None:
        address = list(self.num_answers)[number % len(self.num_answers)]
        with Client(address, timeout=CALL_TIMEOUT_S) as client:
            while not stop.is_set():
                number += NUM_CLIENTS
                case = self._cases[number // NUM_CLIENTS % len(self._cases)]
                result = client.generate(case.prompt, cache_salt=f"client {number}", **case.options).result()
                with self._lock:
                    self.num_answers[address] += 1
                    if result.token_ids != case.answer:
                        self.wrong.append(f"{result.token_ids}: {result.report}")

    def more_answers(self) -> None:
        goals = {address: number + NUM_MORE for address, number in self.num_answers.items()}
        wait_for(
            "more answers from each router",
            lambda: all(self.num_answers[address] >= goal for address, goal in goals.items()),
            CALL_TIMEOUT_S,
        )


def calls(member: Member, method: str) -> int:
    """That brought requests to a worker."""
    return int(watch.total(watch.worker_metrics(member), "baton_worker_decode_calls_total", method=method))


def all_are_called(members: list[Member], *methods: str) -> None:
    """Waits until each of them was, by each of `methods`."""
    wait_for(
        f"each worker called by {' and '.join(methods)}",
        lambda: all(calls(member, method) for member in members for method in methods),
        CALL_TIMEOUT_S,
    )


def test_workers_of_the_release_before_are_replaced_under_load(fleet: TwoReleases) -> None:
    clients = Clients(fleet, make_cases(fleet, 60))
    with at_once(NUM_CLIENTS, clients.ask):
        all_are_called(fleet.decode_workers(), "Decode")
        clients.more_answers()
        assert not any(calls(member, "DecodeMany") for member in fleet.decode_workers())
        for member in fleet.decode_workers():
            os.kill(member.process.popen.pid, signal.SIGTERM)
            assert member.process.popen.wait(START_TIMEOUT_S) == 0, "nothing was cut"
            fleet.older.remove(member.name)
            fleet.replace(member)
            clients.more_answers()
        # The older router goes on by Decode with today's workers; today's router has found out what these can do.
        all_are_called(fleet.decode_workers(), "Decode", "DecodeMany")
    assert clients.wrong == []
    num_alone = [calls(member, "Decode") for member in fleet.decode_workers()]
    todays = fleet.routers[0].grpc
    goal = clients.num_answers[todays] + NUM_MORE
    with at_once(1, clients.ask):  # today's router alone
        wait_for("more answers", lambda: clients.num_answers[todays] >= goal, CALL_TIMEOUT_S)
    assert [calls(member, "Decode") for member in fleet.decode_workers()] == num_alone
    assert clients.wrong == []
