"""Workers whose ranks are on several hosts, here processes that meet at an address: the same answers, with KV that
comes and goes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.client.sync_client import Answer
from baton.stack.stack_plan import free_ports
from tests.integration.ask import Salt, ask, check
from tests.integration.prompts import BY_NAME
from tests.integration.reference import Expected
from tests.integration.stack import FLAGS, Fleet, Member, baton, running
from tests.kube.processes import Process
from tests.nixl import needs_nixl

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

NUM_HOSTS = 3  # the embedded model has 9 heads, and 3 for K and V
NAMES = ("one-token", "capital", "story", "chat-capital", "ledger-1200")

Answers = dict[str, Expected]


class HostsFleet(Fleet):
    """Some of its workers are on several hosts."""

    def __init__(self, folder: Path, connector: str, on_hosts: Sequence[str], *, decode: int = 1) -> None:
        """`on_hosts`: names of those workers."""
        self._on_hosts = on_hosts
        self.followers: dict[str, list[Process]] = {}  # by the worker's name, in the order of their ranks
        self._secret = folder / "secret"
        self._secret.write_bytes(os.urandom(32))
        flags = (f"--connector={connector}", "--chunk-size=64")
        super().__init__(folder, *flags, prefill=1, decode=decode, router_flags=("--min-remote-tokens=1",))

    def _start(self, name: str, port: int, metrics_port: int) -> Member:
        self._of_group: tuple[str, ...] = ()
        if name in self._on_hosts:
            [meeting] = free_ports(1)
            self._of_group = (
                f"--num-hosts={NUM_HOSTS}",
                f"--tensor-parallel-size={NUM_HOSTS}",
                f"--ranks-address=127.0.0.1:{meeting}",
                f"--ranks-secret-file={self._secret}",
            )
            role, _, _ = name.partition("-")
            common = baton(role, *FLAGS, *self._flags, f"--kv-dir={self.kv_dir}", *self._of_group)
            self.followers[name] = [
                Process(
                    f"{name}-host-{index}",
                    [*common, f"--host-index={index}"],
                    self._folder / f"{name}-host-{index}.log",
                    self._environ,
                )
                for index in range(1, NUM_HOSTS)
            ]
        return super()._start(name, port, metrics_port)

    def flags_of(self, address: str) -> Sequence[str]:
        return (*self._of_group, "--host-index=0") if self._of_group else ()

    def logs(self) -> str:
        followers = [process.tail(40) for processes in self.followers.values() for process in processes]
        return "\n".join([super().logs(), *followers])

    def stop(self) -> None:
        super().stop()
        for processes in self.followers.values():
            for process in processes:
                try:
                    process.popen.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()


@pytest.mark.parametrize(
    ("connector", "on_hosts"),
    [
        ("shared_storage", ("prefill-0",)),
        ("shared_storage", ("decode-0",)),
        pytest.param("nixl", ("prefill-0", "decode-0"), marks=needs_nixl),
    ],
)
def test_hosts_hand_over_and_take_over(
    connector: str, on_hosts: Sequence[str], expected: Answers, salt: Salt, model_dir: object, tmp_path: Path
) -> None:
    fleet = HostsFleet(tmp_path, connector, on_hosts)
    with running(fleet):
        results = ask(fleet, expected, NAMES, salt)
        assert results["ledger-1200"].report.num_blocks_moved >= 1200 // 16
        assert not any(result.report.fallback_reason for result in results.values())
        fleet.settle()
    for processes in fleet.followers.values():
        assert [process.popen.wait(30) for process in processes] == [0] * len(processes), "they end with rank 0"
        assert not any("error" in process.log.read_text().lower() for process in processes)


def test_a_host_that_is_lost_ends_its_worker_and_the_answer_goes_on(
    expected: Answers, salt: Salt, model_dir: object, tmp_path: Path
) -> None:
    case = BY_NAME["story"]
    prompt = expected[case.name].prompt_token_ids
    fleet = HostsFleet(tmp_path, "shared_storage", ("decode-0",), decode=2)
    with running(fleet):
        group = next(member for member in fleet.members if member.name == "decode-0")

        def group_is_busy() -> bool:
            return any(worker.num_requests_running for worker in fleet.workers() if worker.address == group.address)

        with fleet.client() as client:
            answers: list[Answer] = []
            while not group_is_busy():  # the router chooses
                assert len(answers) < 20
                answers.append(client.generate(prompt, temperature=0.0, max_tokens=case.max_tokens, cache_salt=salt()))
                next(iter(answers[-1]))
            victim, other = fleet.followers["decode-0"]
            os.kill(victim.popen.pid, signal.SIGKILL)
            results = [answer.result() for answer in answers]
        for result in results:
            check({case.name: result}, expected)
        assert sum(result.report.num_migrations for result in results) >= 1
        assert group.process.popen.wait(60) == 1
        assert "rank 1 (127.0.0.1) has ended" in group.process.tail(40)
        assert [other.popen.wait(60), victim.popen.wait(60)] == [1, -signal.SIGKILL]
        fleet.replace(group)
