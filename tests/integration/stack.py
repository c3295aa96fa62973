"""Real processes for tests: a stack under `baton up`, or workers and a router one by one, so that one can be killed.

Each worker computes with one thread: two that are given less than two whole cores spend their time waiting for each
other, and tests run on busy machines.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, TypedDict

from baton.client.report import FleetWorker
from baton.client.sync_client import Client
from baton.stack.stack_plan import free_ports
from common.errors import BatonError
from common.types import WorkerState
from tests.kube.processes import Process

START_TIMEOUT_S = 180.0
SETTLE_TIMEOUT_S = 90.0  # a lease whose stream broke is kept for 13 s after that was noticed; machines are busy
CALL_TIMEOUT_S = 280.0  # below pytest's own limit, so that a request that hangs says so itself
FLAGS = ("--dtype=float32", "--num-threads=1", "--num-blocks=512", "--log-level=info")

RUNNING: list[Stack | Fleet] = []
"""Everything that serves now. Each is looked at after each test, and shows its logs if one fails."""


def baton(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "baton", *arguments]


def wait_for(what: str, done: Callable[[], object], timeout_s: float = SETTLE_TIMEOUT_S) -> None:
    """Polls `done` until it is true. Raises AssertionError."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)


def ready_fields(process: Process) -> dict[str, str]:
    """Waits for the line that says that a process serves; what it says."""

    def is_ready() -> bool:
        is_running = process.running  # before the log: it may end between the two looks
        has_begun = process.ready_line() is not None
        assert has_begun or is_running, f"{process.name} ended:\n{process.tail(40)}"
        return has_begun

    wait_for(f"{process.name} is ready", is_ready, START_TIMEOUT_S)
    return dict(word.split("=", 1) for word in (process.ready_line() or "").split())


def descendants(pid: int) -> set[int]:
    """Processes below `pid`, at this moment."""
    try:
        children = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return children | {below for child in children for below in descendants(child)}


def engines(pid: int) -> set[int]:
    """Engine processes below `pid`, without those that check grammars for them."""
    return {one for one in descendants(pid) if b"engine.process" in command(one)}


def ranks_of(pid: int) -> list[int]:
    """Processes of the ranks but the first below a worker, or its engine."""
    return sorted(one for one in descendants(pid) if b"engine.ranks.process" in command(one))


def command(pid: int) -> bytes:
    """The command line, with a NUL after each argument; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def alive(pids: set[int]) -> set[int]:
    """Those that run; a zombie does not."""
    found = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            found.add(pid)
    return found


class ClientOptions(TypedDict, total=False):
    """What a client needs to be let in."""

    tls_ca: str
    tls_cert: str
    tls_key: str
    tls_server_name: str
    api_key: str


class Service:
    """What answers at a gRPC and an HTTP address."""

    grpc: str
    http: str
    client_options: ClassVar[ClientOptions] = {}

    def client(self) -> Client:
        return Client(self.grpc, timeout=CALL_TIMEOUT_S, **self.client_options)

    def workers(self) -> list[FleetWorker]:
        return self.seen_by(self.grpc)

    def seen_by(self, router: str) -> list[FleetWorker]:
        with Client(router, timeout=30, **self.client_options) as client:
            return client.fleet()

    def settle(self) -> None:
        """Waits until no worker has anything in hand: every block is free or cached, and the books are right."""
        last: list[str] = []

        def is_settled() -> bool:
            try:
                last[:] = [reason for worker in self.workers() if (reason := self._unsettled(worker))]
            except BatonError as error:
                last[:] = [error.message]
            return not last

        try:
            wait_for("settled", is_settled)
        except AssertionError as error:
            raise AssertionError(f"{error}: {'; '.join(last)}") from None

    def _unsettled(self, worker: FleetWorker) -> str:
        num_owned = worker.num_blocks - worker.num_free_blocks - worker.num_cached_blocks
        num_requests = worker.num_requests_running + worker.num_requests_waiting
        if worker.state is not WorkerState.READY or worker.integrity != "ok":
            return f"{worker.address} is {worker.state.value}, integrity {worker.integrity}"
        if num_owned or num_requests or worker.num_leases:
            return f"{worker.address} has {num_requests} requests, {num_owned} blocks, {worker.num_leases} leases"
        return ""


class Stack(Service):
    """A running `baton up`."""

    def __init__(self, folder: Path, *flags: str, variables: Mapping[str, str] | None = None) -> None:
        """`variables`: of its environment, beside the test's own."""
        self.kv_dir = folder / "kv"
        ports = ("--http-port=0", "--grpc-port=0", f"--kv-dir={self.kv_dir}")
        environ = {**os.environ, **variables} if variables else None
        self.process = Process("baton up", baton("up", *FLAGS, *ports, *flags), folder / "up.log", environ)
        try:
            fields = ready_fields(self.process)
        except BaseException:
            self.stop()
            raise
        self.http, self.grpc = fields["http"], fields["grpc"]
        self.family = descendants(self.process.popen.pid)

    def logs(self) -> str:
        return self.process.tail(60)

    def stop(self) -> int:
        """Ends it as an operator would. Returns the exit code."""
        self.process.popen.send_signal(signal.SIGTERM)
        try:
            return self.process.popen.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@dataclass(slots=True)
class Member:
    """One worker of a `Fleet`."""

    name: str  # prefill-0, decode-1, worker-2, …
    role: str  # the command's name: of both roles it is `worker`
    address: str  # as the router and other workers reach it
    admin: str  # as a test reaches it
    metrics_port: int
    process: Process

    @property
    def pids(self) -> set[int]:
        """Front and engine."""
        return {self.process.popen.pid} | descendants(self.process.popen.pid)


@dataclass(slots=True)
class RouterMember:
    """One router of a `Fleet`."""

    name: str  # router, router-1, …
    http_port: int
    grpc_port: int
    http: str  # as a test reaches it
    grpc: str
    process: Process


class Hosts(Protocol):
    """Where the processes of a fleet run; `tests.faults.network.Network` gives each a host of its own."""

    def host(self, name: str) -> str: ...
    def admin_host(self, name: str) -> str: ...
    def command(self, name: str, argv: Sequence[str]) -> list[str]: ...


class OneHost:
    """All on this machine's loopback interface."""

    def host(self, name: str) -> str:
        return "127.0.0.1"

    def admin_host(self, name: str) -> str:
        return "127.0.0.1"

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        return list(argv)


class Fleet(Service):
    """Workers and routers that nobody watches over. A test asks one router: the first, until `next_router`."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        prefill: int,
        decode: int,
        both: int = 0,
        routers: int = 1,
        router_flags: Sequence[str] = (),
        hosts: Hosts | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.kv_dir = folder / "kv"
        self.kv_dir.mkdir(exist_ok=True)
        self._folder, self._flags, self._router_flags = folder, flags, router_flags
        self._hosts: Hosts = hosts or OneHost()
        self._environ = {**os.environ, **(environ or {})}
        names = worker_names(prefill=prefill, decode=decode, both=both)
        ports = free_ports(2 * (len(names) + routers))
        self.members = [self._start(name, ports.pop(), ports.pop()) for name in names]
        self.routers = [self._new_router(name, ports.pop(), ports.pop()) for name in router_names(routers)]
        self.asked = self.routers[0]
        self._more_routers: list[RouterMember] = []
        try:
            for router in self.routers:
                ready_fields(router.process)
            wait_for("every worker is ready", self.all_ready, START_TIMEOUT_S)
        except BaseException:
            print(self.logs())
            self.stop()
            raise

    def _start(self, name: str, port: int, metrics_port: int) -> Member:
        role, _, _ = name.partition("-")
        address, admin = f"{self._hosts.host(name)}:{port}", f"{self._hosts.admin_host(name)}:{port}"
        # Reached by two addresses, it has to listen on all.
        listen = f"--listen={address}" if address == admin else f"--listen=0.0.0.0:{port}"
        places = (listen, f"--advertise={address}", f"--metrics-port={metrics_port}", f"--kv-dir={self.kv_dir}")
        command = self._hosts.command(name, baton(role, *FLAGS, *places, *self._flags, *self.flags_of(address)))
        process = Process(name, command, self._folder / f"{name}.log", {**self._environ, **self.environ_of(name)})
        return Member(name, role, address, admin, metrics_port, process)

    @property
    def router(self) -> Process:
        return self.asked.process

    @property
    def http(self) -> str:  # type: ignore[override]
        return self.asked.http

    @property
    def grpc(self) -> str:  # type: ignore[override]
        return self.asked.grpc

    def next_router(self) -> None:
        """From now on the next one is asked."""
        self.asked = self.routers[(self.routers.index(self.asked) + 1) % len(self.routers)]

    def _new_router(self, name: str, http: int, grpc: int) -> RouterMember:
        process = self._start_router(name, http, grpc, *self._router_flags, host=name)
        host = self._hosts.admin_host(name)
        return RouterMember(name, http, grpc, f"http://{host}:{http}", f"{host}:{grpc}", process)

    def _start_router(self, name: str, http: int, grpc: int, *flags: str, host: str) -> Process:
        by_role = {
            role: ",".join(m.address for m in self.members if m.role in (role, "worker"))
            for role in ("prefill", "decode")
        }
        address = "127.0.0.1" if self._hosts.host(host) == self._hosts.admin_host(host) else "0.0.0.0"
        listen = (f"--http-listen={address}:{http}", f"--grpc-listen={address}:{grpc}")
        workers = (f"--prefill={by_role['prefill']}", f"--decode={by_role['decode']}")
        command = self._hosts.command(host, baton("router", *workers, *listen, *flags))
        return Process(name, command, self._folder / f"{name}.log", {**self._environ, **self.environ_of(name)})

    def restart_router(self) -> None:
        """Starts the asked router again, at the same addresses, after it was killed; waits until it serves."""
        router = self.asked
        router.process.kill()
        router.process.log.rename(router.process.log.with_suffix(f".{time.monotonic_ns()}.log"))
        flags = self._router_flags
        router.process = self._start_router(router.name, router.http_port, router.grpc_port, *flags, host=router.name)
        ready_fields(router.process)

    def another_router(self, name: str, *flags: str) -> str:
        """Starts one more router, where the first one is; its URL."""
        http, grpc = free_ports(2)
        process, host = self._start_router(name, http, grpc, *flags, host="router"), self._hosts.admin_host("router")
        router = RouterMember(name, http, grpc, f"http://{host}:{http}", f"{host}:{grpc}", process)
        self._more_routers.append(router)
        ready_fields(process)
        return router.http

    @property
    def every_router(self) -> list[RouterMember]:
        """Those that a test may ask, and those of `another_router`."""
        return [*self.routers, *self._more_routers]

    def flags_of(self, address: str) -> Sequence[str]:
        """Further flags of one worker."""
        return ()

    def environ_of(self, name: str) -> Mapping[str, str]:
        """Further environment of one worker or router."""
        return {}

    def all_ready(self) -> bool:
        ended = [member.process for member in self.members if not member.process.running]
        assert not ended, "\n".join(f"{process.name} ended:\n{process.tail()}" for process in ended)
        return all(worker.state is WorkerState.READY for router in self.routers for worker in self.seen_by(router.grpc))

    def member(self, address: str) -> Member:
        return next(member for member in self.members if member.address == address)

    def busy(self, role: str) -> Member:
        """The worker of `role` that computes something; waits for one."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [w.address for w in self.workers() if w.role.value == role and w.num_requests_running]
            return bool(found)

        wait_for(f"a {role} worker is busy", look, CALL_TIMEOUT_S)
        return self.member(found[0])

    def restart(self, member: Member) -> None:
        """Starts a worker again at the address of one that was killed."""
        port = int(member.address.rpartition(":")[2])
        self.members[self.members.index(member)] = self._start(member.name, port, member.metrics_port)

    def replace(self, member: Member) -> None:
        """The same, and waits until the router uses it."""
        self.restart(member)
        wait_for("every worker is ready", self.all_ready, START_TIMEOUT_S)

    def logs(self) -> str:
        return "\n".join(p.tail(40) for p in [*self._router_processes(), *(member.process for member in self.members)])

    def _router_processes(self) -> list[Process]:
        return [router.process for router in self.routers]

    def stop(self) -> None:
        routers = (router.process for router in self.every_router)
        processes = [*routers, *(member.process for member in self.members)]
        for process in processes:
            process.popen.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.popen.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def worker_names(*, prefill: int, decode: int, both: int = 0) -> list[str]:
    numbers = {"prefill": prefill, "decode": decode, "worker": both}
    return [f"{role}-{n}" for role, number in numbers.items() for n in range(number)]


def router_names(number: int) -> list[str]:
    """Of the hosts of a fleet's routers, too."""
    return ["router", *(f"router-{n}" for n in range(1, number))]


@contextmanager
def running(service: Stack | Fleet) -> Iterator[None]:
    """While inside, `service` must be settled after each test. It is ended afterwards."""
    RUNNING.append(service)
    try:
        yield
    finally:
        RUNNING.remove(service)
        service.stop()


def kill(process: Process) -> None:
    """SIGKILL, as from the kernel when memory runs out: the process itself gets no word in."""
    os.kill(process.popen.pid, signal.SIGKILL)
    process.popen.wait()
