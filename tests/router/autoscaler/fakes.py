"""Notices, a cluster that remembers, and certificates of another CA."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from common.types import WorkerRole
from router.autoscaler.board import Board
from router.autoscaler.kubernetes import Lease, Workload
from router.autoscaler.signals import ROLES, FleetSignals, RoleSignals, ScaleDecision
from router.fleet.discovery.kubernetes import KubernetesError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def decisions(prefill: int, decode: int) -> dict[WorkerRole, ScaleDecision]:
    return {
        role: ScaleDecision(role=role, desired=desired, previous=desired, needed=desired, reasons=("as told",))
        for role, desired in zip(ROLES, (prefill, decode), strict=True)
    }


SIGNALS = FleetSignals(
    prefill=RoleSignals(num_ready=2, queued_tokens=4000),
    decode=RoleSignals(num_ready=4, num_requests=30, kv_used=1.5),
    arrival_tokens_per_s=123.4567,
)


def put(board: Board, prefill: int = 3, decode: int = 5, signals: FleetSignals = SIGNALS) -> None:
    board.put(signals, decisions(prefill, decode))


class FakeCluster:
    """What `Cluster` does, in memory. `away` makes every call fail."""

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}
        self.counts: dict[Workload, int] = {}
        self.costs: dict[str, int] = {}
        self.calls: list[str] = []
        self.away = False
        self.gone: set[str] = set()
        self._version = 0

    def _call(self, text: str) -> None:
        self.calls.append(text)
        if self.away:
            raise KubernetesError("no answer")

    async def read_lease(self, name: str) -> Lease | None:
        self._call("read lease")
        return self.leases.get(name)

    async def write_lease(self, name: str, lease: Lease) -> bool:
        self._call("write lease")
        current = self.leases.get(name)
        if (current.version if current else None) != lease.version:
            return False
        self._version += 1
        self.leases[name] = replace(lease, version=str(self._version))
        return True

    async def replicas(self, workload: Workload) -> int:
        self._call(f"read {workload.name}")
        return self.counts[workload]

    async def scale(self, workload: Workload, replicas: int) -> None:
        self._call(f"scale {workload.name} {replicas}")
        self.counts[workload] = replicas

    async def set_deletion_cost(self, pod: str, cost: int) -> bool:
        self._call(f"cost {pod} {cost}")
        if pod in self.gone:
            return False
        self.costs[pod] = cost
        return True


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def make_ca(folder: Path, name: str) -> Path:
    """`NAME.crt` and `NAME.key`."""
    folder.mkdir(exist_ok=True)
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt"), "-subj", f"/CN={name}",
    )  # fmt: skip
    return folder / f"{name}.crt"


def make_client(folder: Path, ca: str, name: str) -> tuple[Path, Path]:
    """(certificate, key) of a client called `name`."""
    request, certificate, key = (folder / f"{ca}-{name}.{kind}" for kind in ("csr", "crt", "key"))
    openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", str(key), "-out", str(request), "-subj", f"/CN={name}",
    )  # fmt: skip
    openssl(
        "x509", "-req", "-in", str(request), "-CA", str(folder / f"{ca}.crt"), "-CAkey", str(folder / f"{ca}.key"),
        "-CAcreateserial", "-days", "2", "-out", str(certificate),
    )  # fmt: skip
    return certificate, key
