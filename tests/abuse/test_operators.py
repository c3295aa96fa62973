"""What operators and clusters do to a fleet that serves: an emptied keys file, a disk that is full to the last byte.

Other such cases have tests where they can be made:
- clients' certificates are no fleet certificates: `tests/helm/test_security.py`, `tests/kube/test_security.py`;
- the autoscaler may patch pods only if it sets deletion costs: `tests/helm/test_chart.py`,
  `tests/kube/test_permissions.py`;
- channels and labels of workers that are gone: `tests/router/test_registry.py`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.abuse.conftest import Guarded
from tests.abuse.rude import RUDE_KEY, Target, at_once
from tests.abuse.vitals import SETTLE_S, Vitals
from tests.faults import watch
from tests.faults.disk import FILLER, Disk
from tests.integration.stack import wait_for

NEW_KEY = "newer" * 8
NUM_ASKED = 24
PROMPT_CHARS = 400


def ask(target: Target, key: str = RUDE_KEY, prompt: str = "Hello") -> int:
    with target.http_client(key) as client:
        return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).status_code


def num_reloads(target: Target, outcome: str) -> float:
    return watch.total(
        watch.scrape(f"{target.http}/metrics"), "baton_file_reloads_total", what="api_keys", outcome=outcome
    )


@contextmanager
def kept_full(disk: Disk) -> Iterator[None]:
    """Whatever becomes free is taken at once, as by others who write to it."""
    stop = threading.Event()

    def fill() -> None:
        while not stop.wait(0.002):
            disk.fill()

    disk.fill()
    filling = threading.Thread(target=fill)
    filling.start()
    try:
        yield
    finally:
        stop.set()
        filling.join()
        (disk.path / FILLER).unlink()


@pytest.fixture
def keys(fleet: Guarded) -> Iterator[str]:
    """What the keys file holds, before and after."""
    text = fleet.keys_file.read_text()
    yield text
    fleet.keys_file.write_text(text)


def test_an_emptied_keys_file_locks_nobody_out(fleet: Guarded, target: Target, vitals: Vitals, keys: str) -> None:
    """The former keys go on; the file's next version counts as any other."""
    failed_before = num_reloads(target, "failed")
    assert ask(target, NEW_KEY) == 401
    for wrong in (b"", b"# nobody\n", b"one two three\n", b"no text: \xe9\n"):
        fleet.keys_file.write_bytes(wrong)
        assert set(at_once(40, lambda _: ask(target), 8)) == {200}
        assert ask(target, NEW_KEY) == 401
    assert num_reloads(target, "failed") == failed_before + 4
    fleet.keys_file.write_text(f"{keys}{NEW_KEY} name=new\n")
    assert ask(target, NEW_KEY) == 200
    assert ask(target) == 200


def test_a_full_disk_is_cleaned_and_costs_nobody_an_answer(target: Target, vitals: Vitals, disk: Disk) -> None:
    if disk.why_not:
        pytest.skip(disk.why_not)
    fleet, rng = vitals.fleet, random.Random(8)

    def ask_new() -> None:
        """Prompts that no store holds."""
        prompts = ["".join(rng.choices("abcdefgh ", k=PROMPT_CHARS)) for _ in range(NUM_ASKED)]
        assert set(at_once(NUM_ASKED, lambda n: ask(target, prompt=prompts[n]), 8)) == {200}

    def num_evicted() -> float:
        pages = [watch.scrape(f"http://127.0.0.1:{one.metrics_port}/metrics") for one in fleet.members]
        return sum(watch.total(page, "baton_kv_store_evicted_runs_total") for page in pages)

    ask_new()
    wait_for("the store has blocks", disk.num_bytes, SETTLE_S)
    evicted_before = num_evicted()
    with kept_full(disk):

        def is_cleaned() -> bool:
            ask_new()
            return num_evicted() > evicted_before

        wait_for("the full store is cleaned", is_cleaned, SETTLE_S)
    before = {path.name for path in disk.files()}
    ask_new()
    wait_for("blocks are stored again", lambda: {path.name for path in disk.files()} - before, SETTLE_S)
