"""Metrics of several processes on one page. Each process here counts a little and ends."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from common.metric_aliases import ROUTER, CacheFacts, with_aliases
from common.metric_page import render
from router.processes import scrape

COUNT = """
import json, os
from common import metrics
metrics.router_requests.labels("rest", "ok").inc({num})
metrics.router_ttft.observe({num})
metrics.router_requests_running.set({num})
metrics.router_endpoints.labels("decode", "ready").set({num})
print(os.getpid())
"""


def count(directory: Path, num: int) -> int:
    """In a process of its own; its pid."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT.format(num=num)],
        env={**os.environ, scrape.VARIABLE: str(directory)},
        capture_output=True,
        check=True,
        timeout=60,
    )
    return int(done.stdout)


def samples(directory: Path) -> dict[str, float]:
    facts = CacheFacts(model="m", block_size=16, num_blocks=10, num_used_blocks=4)
    families = with_aliases(scrape.families(str(directory), lambda: [os.getpid()]), ROUTER, lambda: facts)
    page = render(families).decode()
    found = {}
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            found[one.name + json.dumps(one.labels, sort_keys=True)] = one.value
    return found


def test_counters_are_summed_and_stay(tmp_path: Path) -> None:
    pids = [count(tmp_path, num) for num in (1, 2)]
    for has_ended in (False, True):
        if has_ended:
            for pid in pids:
                assert scrape.keep_totals(str(tmp_path), pid)
        found = samples(tmp_path)
        assert found['baton_router_requests_total{"interface": "rest", "outcome": "ok"}'] == 3
        assert found["baton_router_time_to_first_token_seconds_count{}"] == 2
        assert found["baton_router_time_to_first_token_seconds_sum{}"] == 3
        assert found['baton_router_time_to_first_token_seconds_bucket{"le": "1.0"}'] == 1
        assert found['baton_router_time_to_first_token_seconds_bucket{"le": "2.5"}'] == 2
        of_vllm = 'vllm:time_to_first_token_seconds_bucket{"engine": "0", "le": "2.5", "model_name": "m"}'
        assert found[of_vllm] == 2, "aliases are of all processes together"
        assert found.get("baton_router_requests_running{}") == (None if has_ended else 3)
        assert found.get('baton_router_endpoints{"role": "decode", "state": "ready"}') == (None if has_ended else 2)
        assert found["process_resident_memory_bytes{}"] > 0
        assert not any("pid" in name for name in found)


def test_whoever_makes_a_page_holds_nobody_up(tmp_path: Path) -> None:
    """It may hang with the lock: others make theirs, and who would change the files is told at once to come later."""
    pid = count(tmp_path, 3)
    files = sorted(tmp_path.iterdir())
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        name = 'baton_router_requests_total{"interface": "rest", "outcome": "ok"}'
        assert samples(tmp_path)[name] == 3
        assert not scrape.keep_totals(str(tmp_path), pid)
        assert sorted(tmp_path.iterdir()) == files
    finally:
        os.close(handle)
    assert scrape.keep_totals(str(tmp_path), pid)
    assert samples(tmp_path)[name] == 3
