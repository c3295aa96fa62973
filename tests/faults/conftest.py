"""One fleet for each connector: two prefill and two decode workers and a router, each on a host of its own if this
machine allows it, with a store that can be full."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from common.types import WorkerRole
from tests.faults import network as networks
from tests.faults import watch
from tests.faults.client_process import Ask, Told
from tests.faults.clients import ClientProcess
from tests.faults.disk import Disk
from tests.faults.matrix import ONE_HOST, Moment
from tests.faults.network import Network
from tests.faults.reference import NUM_TOKENS, Reference
from tests.faults.scene import CHUNK_SIZE, NUM_CHUNKS, Setting, new_id
from tests.faults.shifts import Shifts, roles_now
from tests.integration.stack import CALL_TIMEOUT_S, Fleet, OneHost, router_names, worker_names
from tests.kv_store.lmcache_process import LMCacheProcess
from tests.nixl import skip_without_nixl

NUM_ROUTERS = int(os.environ.get("FAULTS_ROUTERS", "1"))  # on the same workers; each cell asks the next one
QUEUE_POLICY = os.environ.get("FAULTS_QUEUE_POLICY", "")  # empty: the workers' own, and no request has targets
ROLE_SHIFTS = bool(os.environ.get("FAULTS_ROLE_SHIFTS"))  # workers of both roles, whose roles move: see `shifts`
TTFT_MS, TPOT_MS = 30_000.0, 1_000.0  # of each request, with a queue policy
NUM_RANKS = int(os.environ.get("FAULTS_RANKS", "1"))  # of each worker; two at least where a rank is harmed
NUM_CALIBRATIONS = 4  # prompts: more than pairs of workers that have to connect; twice as many if roles move
HASTY_TIMEOUT_S = 8  # --request-timeout of the router that is asked over REST for deadlines
FLAGS = (
    f"--chunk-size={CHUNK_SIZE}",
    "--num-blocks=700",
    "--transfer-timeout-s=3",
    "--drain-timeout=1",
    "--engine-timeout=10",  # longer than any engine is held, see `scene`
)
# Answers stay where they are while a cell lasts, so that only a fault moves any: handovers have tests of their own.
SHIFT_FLAGS = ("--role-handover=600",)


@dataclass(slots=True, frozen=True)
class Kind:
    """Of a fleet."""

    connector: str
    queue_policy: str = QUEUE_POLICY
    role_shifts: bool = ROLE_SHIFTS
    num_ranks: int = NUM_RANKS


@dataclass(slots=True)
class Stage:
    """A fleet and what can happen to it."""

    kind: Kind
    setting: Setting
    network: Network | None
    why_no_network: str
    reference: Reference
    hasty: str  # URL of a router with a short --request-timeout
    folder: Path
    clients: list[ClientProcess] = field(default_factory=list)

    @property
    def fleet(self) -> Fleet:
        return self.setting.fleet

    def client(self) -> ClientProcess:
        """The client; another one if it was killed."""
        if not self.clients or not self.clients[-1].running:
            hosts = self.network or OneHost()
            self.clients.append(ClientProcess(lambda argv: hosts.command("client", argv), self.folder / "client.log"))
        return self.clients[-1]

    def router(self, url: str = "") -> str:
        """Where clients reach a router, as they need it: the address of gRPC or, of the one at `url`, of REST."""
        name = "router" if url == self.hasty else self.fleet.asked.name  # on whose host that one is
        host = (self.network or OneHost()).host(name)
        port = (url or self.fleet.grpc).rpartition(":")[2]
        return f"http://{host}:{port}" if url else f"{host}:{port}"

    def ask(self, name: str, *, max_tokens: int = NUM_TOKENS, timeout_s: float = CALL_TIMEOUT_S, url: str = "") -> Ask:
        request_id = new_id(name)
        return Ask(
            router=self.router(url),
            request_id=request_id,
            prompt=self.reference.prompt,
            max_tokens=max_tokens,
            cache_salt=request_id,
            timeout_s=timeout_s,
            ttft_ms=TTFT_MS if self.kind.queue_policy else None,
            tpot_ms=TPOT_MS if self.kind.queue_policy else None,
        )

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def answer(self, name: str) -> Told:
        """One whole request over gRPC."""
        client = self.client()
        client.ask(self.ask(name))
        return client.outcome()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Made by a process of its own: neither torch nor its warnings come into this one."""
    folder = tmp_path_factory.mktemp("model")
    command = [sys.executable, "-m", "tests.faults.reference", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True)
    return msgspec.json.decode(done.stdout, type=Reference)


class Stages:
    """One stage at a time. (A parametrized fixture would be made anew for each cell.)"""

    def __init__(self, reference: Reference, new_folder: Callable[[str], Path]) -> None:
        self._reference, self._new_folder = reference, new_folder
        self._open = contextlib.ExitStack()
        self.stage: Stage | None = None

    def get(self, kind: Kind) -> Stage:
        stage = self.stage
        if stage is None or stage.kind != kind:
            self.close()
            opened = _opened(kind, self._reference, self._new_folder(kind.connector))
            self.stage = stage = self._open.enter_context(opened)
        return stage

    def close(self) -> None:
        self.stage = None
        self._open.close()


@pytest.fixture(scope="module")
def stages(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    """Until the end of the matrix: four engines hold 5 GiB, which other stacks of the same run need."""
    stages = Stages(reference, tmp_path_factory.mktemp)
    yield stages
    stages.close()


@contextlib.contextmanager
def _opened(kind: Kind, reference: Reference, folder: Path) -> Iterator[Stage]:
    connector, queue_policy = kind.connector, kind.queue_policy
    skip_without_nixl(connector)
    num_of_one, num_both = (0, 4) if kind.role_shifts else (2, 0)
    with contextlib.ExitStack() as stack:
        disk = Disk(folder / "kv")
        stack.callback(disk.close)
        server = LMCacheProcess() if connector == "lmcache" else None
        if server is not None:
            stack.callback(server.close)
        why = networks.why_not(folder) if server is None else ONE_HOST.why
        hosts = [
            *router_names(NUM_ROUTERS),
            *worker_names(prefill=num_of_one, decode=num_of_one, both=num_both),
            "client",
        ]
        network = None if why else Network(folder, hosts)
        if network is not None:
            stack.callback(network.close)
        # As between machines, whatever else is there between these processes.
        environ = networks.UCX_ENVIRON if network is not None else {"UCX_TLS": "tcp"}
        flags = [f"--model={reference.model_dir}", f"--connector={connector}", *FLAGS]
        if kind.num_ranks > 1:
            flags.append(f"--tensor-parallel-size={kind.num_ranks}")
        if queue_policy:
            cache_dir = folder / "cache"
            write = [sys.executable, "-m", "tests.integration.written_times", reference.model_dir, str(cache_dir)]
            subprocess.run(write, check=True)  # neither torch nor its warnings come into this process
            flags += [f"--queue-policy={queue_policy}", f"--cache-dir={cache_dir}"]
        if kind.role_shifts:
            flags += SHIFT_FLAGS
        if server is not None:
            flags.append(f"--lmcache-address={server.address}")
        fleet = Fleet(
            folder,
            *flags,
            prefill=num_of_one,
            decode=num_of_one,
            both=num_both,
            routers=NUM_ROUTERS,
            hosts=network,
            environ=environ,
        )
        stack.callback(fleet.stop)
        hasty = fleet.another_router("hasty", f"--request-timeout={HASTY_TIMEOUT_S}")
        shifts = Shifts(fleet) if kind.role_shifts else None
        setting = Setting(fleet, disk, reference.prompt, 0.0, connector != "nixl", server, shifts)
        stage = Stage(kind, setting, network, why, reference, hasty, folder)
        stack.callback(stage.close)
        stage.setting = replace(setting, chunk_cpu_s=_chunk_cpu_s(stage))
        yield stage


def _chunk_cpu_s(stage: Stage) -> float:
    """What a chunk costs here, in seconds of processor time: the least of some prompts, since the first ones connect
    workers with each other, too."""
    fleet, shifts = stage.fleet, stage.setting.shifts
    costs = []
    for _ in range(NUM_CALIBRATIONS if shifts is None else 2 * NUM_CALIBRATIONS):
        if shifts is not None:
            shifts.rearrange()
            stage.setting.disk.empty()  # it has room for few prompts
        roles = roles_now(fleet)
        engines = [watch.engine_pid(one) for one in fleet.members if roles[one.address] is WorkerRole.PREFILL]
        before = sum(map(watch.cpu_s, engines))
        told = stage.answer("calibrate")
        costs.append((sum(map(watch.cpu_s, engines)) - before) / NUM_CHUNKS)
        assert told.token_ids == stage.reference.token_ids, told
        assert told.num_blocks_moved == len(stage.reference.prompt) // 16, f"KV does not move here: {told}"
    return min(costs)


_SUMMARY: dict[tuple[str, str], dict[str, str]] = {}  # what of which fault by which connector; moment: how it went


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fixtures = getattr(item, "funcargs", {})
    stages, case = fixtures.get("stages"), fixtures.get("case")
    if report.failed and isinstance(stages, Stages) and stages.stage is not None:
        report.sections.append(("logs of the fleet", stages.stage.fleet.logs()))
    if case is not None and (call.when == "call" or report.outcome != "passed"):
        went = f"{report.duration:.0f} s" if report.passed else report.outcome.upper()
        _SUMMARY.setdefault((case.connector, case.title()), {})[case.cell.moment.value] = went
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each row of the matrix, with what each of its cells took."""
    if not _SUMMARY:
        return
    terminalreporter.section("fault matrix")
    moments = [moment.value for moment in Moment]
    terminalreporter.line(f"{'':46}" + "".join(f"{moment:>23}" for moment in moments))
    for (connector, title), went in _SUMMARY.items():
        cells = "".join(f"{went.get(moment, ''):>23}" for moment in moments)
        terminalreporter.line(f"{connector:15} {title:30}{cells}")
