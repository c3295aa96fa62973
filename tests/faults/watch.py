"""What processes show of themselves: load, counters, processor time. Nothing here changes anything."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import grpc
from prometheus_client.parser import text_string_to_metric_families

from protos.baton.v1 import worker_pb2, worker_pb2_grpc
from tests.faults.matrix import Counted
from tests.integration.stack import Fleet, Member, engines

NUM_LOOKS = 3  # on a busy machine one may come too late
LOOK_TIMEOUT_S = 5.0

_UCX_ABORTS = ("Assertion `0' failed", "Fatal: unexpected error: Endpoint timeout")  # what it says then

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(slots=True, frozen=True)
class Load:
    """A worker's own gauges."""

    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_leases: int
    num_owned_blocks: int

    @property
    def is_idle(self) -> bool:
        return not any((self.num_running, self.num_waiting, self.num_leases, self.num_owned_blocks))


def scrape(url: str) -> Samples:
    """/metrics; empty if nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=LOOK_TIMEOUT_S) as response:
            text = response.read().decode()
    except (urllib.error.URLError, OSError):
        return {}
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum of the samples of that name whose labels include `labels`."""
    wanted = set(labels.items())
    return sum(value for (found, have), value in samples.items() if found == name and wanted <= have)


def worker_metrics(member: Member) -> Samples:
    host = member.admin.rpartition(":")[0]
    return scrape(f"http://{host}:{member.metrics_port}/metrics")


def load(member: Member) -> Load:
    """As the front knows it: after the engine's last step."""
    samples = next(filter(None, (worker_metrics(member) for _ in range(NUM_LOOKS))), None)
    assert samples, f"{member.name} shows no metrics"

    def gauge(name: str, **labels: str) -> int:
        return int(total(samples, f"baton_worker_{name}", **labels))

    return Load(
        num_running=gauge("requests_running"),
        num_waiting=gauge("requests_waiting"),
        num_queued_tokens=gauge("queued_prompt_tokens"),
        num_leases=gauge("leases"),
        num_owned_blocks=gauge("kv_blocks", state="owned"),
    )


def status(member: Member) -> worker_pb2.WorkerStatus:
    """The engine's books, between two steps. Raises `grpc.RpcError`."""
    with grpc.insecure_channel(member.admin, options=(("grpc.enable_http_proxy", 0),)) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return stub.GetStatus(worker_pb2.GetWorkerStatusRequest(), timeout=LOOK_TIMEOUT_S)


def unsettled(member: Member) -> str:
    """What keeps a worker from being idle with its books right; empty if nothing does."""
    try:
        found = status(member)
    except grpc.RpcError as error:
        return f"{member.name}: {error.code().name if isinstance(error, grpc.Call) else error}"
    load = found.load
    num_owned = load.num_blocks - load.num_free_blocks - load.num_cached_blocks
    num_requests = load.num_requests_running + load.num_requests_waiting
    if found.integrity != "ok":
        return f"{member.name}: {found.integrity}"
    if num_owned or num_requests or load.num_leases:
        return f"{member.name}: {num_requests} requests, {num_owned} blocks, {load.num_leases} leases"
    return ""


def places(router: str) -> set[str]:
    """Addresses of the workers on which a router has a request: a decode worker, and the first prefill worker."""
    samples = scrape(f"{router}/metrics")
    name = "baton_router_endpoint_requests"
    return {dict(labels)["address"] for (found, labels), value in samples.items() if found == name and value}


def engine_pid(member: Member) -> int:
    (pid,) = engines(member.process.popen.pid)
    return pid


def cpu_s(pid: int) -> float:
    """Processor time of a process's first thread, in seconds: an engine computes in it."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


class Counters:
    """Counters of a whole fleet, as differences from when this was made. Processes that end take theirs with them."""

    def __init__(self, fleet: Fleet, router: str) -> None:
        """`router` is the URL of the one that is asked."""
        self._fleet, self._router = fleet, router
        self._before = self._read()
        self._ended_before = self._read_ended()

    def num_ended(self) -> float:
        """Requests that the router has ended, in whatever way."""
        return self._read_ended() - self._ended_before

    def since(self) -> dict[Counted, float]:
        after = self._read()
        counted = dict.fromkeys(Counted, 0.0)
        for process, values in after.items():
            for what, value in values.items():
                counted[what] += value - self._before.get(process, {}).get(what, 0.0)
        return counted

    def _read_ended(self) -> float:
        return total(scrape(f"{self._router}/metrics"), "baton_router_requests_total")

    def _read(self) -> dict[str, dict[Counted, float]]:
        """By process and its life."""
        fleet, router = self._fleet, scrape(f"{self._router}/metrics")

        def of_router(name: str, **labels: str) -> float:
            return total(router, f"baton_router_{name}_total", **labels)

        found = {
            f"router {fleet.router.popen.pid}": {
                Counted.RETRY: of_router("retries"),
                Counted.MIGRATION: of_router("migrations"),
                Counted.FALLBACK: of_router("fallbacks"),
                Counted.CANCELLED: of_router("requests", outcome="cancelled"),
                Counted.DEADLINE: of_router("requests", outcome="deadline_exceeded"),
            }
        }
        for member in fleet.members:
            if member.process.running:
                samples = worker_metrics(member)
                found[f"{member.name} {member.process.popen.pid}"] = {
                    Counted.PREFILL_RETRY: total(samples, "baton_worker_prefill_failures_total"),
                    Counted.LOST_BLOCKS: total(samples, "baton_worker_kv_blocks_lost_total"),
                }
        return found


def is_ended_by_ucx(member: Member) -> bool:
    """Whether the engine's last life ended in UCX, which over TCP aborts a producer whose connection broke in
    mid-transfer (docs/kv-plane.md)."""
    return last_life(member, *_UCX_ABORTS) and last_life(member, f"killed by signal {signal.SIGABRT:d}")


def last_life(member: Member, *words: str) -> bool:
    """Whether the log says any of `words` since the worker was ready the last time."""
    log = member.process.log.read_text(errors="replace").rpartition("\nready ")[2]
    return any(word in log for word in words)
