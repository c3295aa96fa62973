"""A plugin of pytest for several test processes at a time: they begin with the files that take longest, so that all end
at about the same moment.

pytest-xdist begins with the files that have most tests. Files that start real processes have few, and would come last.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LONG = (
    "newcomer/test_first_calls.py",
    "router/autoscaler/test_process.py",
    "engine/test_hub.py",
    "engine/test_model_engine.py",
    "router/test_refused_uploads.py",
    "router/test_reload.py",
    "router/test_tls.py",
    "router/test_rest_vanished.py",
    "router/processes/test_processes.py",
    "router/test_process.py",
    "baton/test_processes.py",
    "bench/test_kv_command.py",
    "test_forked_processes.py",
    "router/test_openapi.py",
    "simulation/test_fleet.py",
    "engine/test_decode_graphs.py",
    "bench/test_step_bench.py",
    "bench/test_speculation_bench.py",
    "test_sample.py",
    "kv_store/test_nixl_raw.py",
    "faults/test_matrix.py",
    "integration/test_ranks.py",
    "integration/test_killed_workers.py",
    "integration/test_drain.py",
    "integration/test_equality.py",
)
"""They take many seconds for their number of tests."""
_RANKS = {TESTS / name: rank for rank, name in enumerate(LONG)}


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # the order of `pytest_collection_modifyitems` holds


@pytest.hookimpl(trylast=True)  # after what is not asked for was left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_one_of_several = hasattr(config, "workerinput") or config.option.forks is not None
    if not is_one_of_several or config.option.at_most_seconds is not None:  # a sample has its own order
        return
    num_tests = Counter(item.path for item in items)
    paths = {path: number for number, path in enumerate(num_tests)}  # a file's tests stay together
    items.sort(key=lambda item: (_RANKS.get(item.path, len(LONG)), -num_tests[item.path], paths[item.path]))
