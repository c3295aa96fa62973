"""What an engine process is started with."""

from __future__ import annotations

import pytest

from common.config import WorkerSettings
from worker.engine_process import engine_environment


def test_as_many_threads_as_asked_for_or_as_cores() -> None:
    assert engine_environment(WorkerSettings(num_threads=3, cpu_cores=(0, 1)), {})["OMP_NUM_THREADS"] == "3"
    assert engine_environment(WorkerSettings(cpu_cores=(0, 1)), {})["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in engine_environment(WorkerSettings(), {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
)
def test_large_pages_unless_the_user_says_otherwise(given: dict[str, str], expected: str) -> None:
    environment = engine_environment(WorkerSettings(), {"PATH": "/bin", **given})
    assert environment["GLIBC_TUNABLES"] == expected
    assert environment["PATH"] == "/bin"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("1000", "1")),
        ({"GOMP_SPINCOUNT": "7"}, ("7", "1")),
        ({"KMP_BLOCKTIME": "200"}, ("1000", "200")),
        ({"OMP_WAIT_POLICY": "active"}, (None, None)),
    ],
)
def test_threads_without_work_soon_sleep_unless_the_user_says_otherwise(
    given: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    environment = engine_environment(WorkerSettings(), given)
    assert (environment.get("GOMP_SPINCOUNT"), environment.get("KMP_BLOCKTIME")) == expected
