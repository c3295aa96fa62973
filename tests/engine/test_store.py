"""What one engine left in a shared store is a hit for every other engine, and for the next life of the same one."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.types import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from kv_store.base import ConnectorConfig
from kv_store.shared_storage import SharedStorageConnector
from tests.engine.fakes import FakeRunner, add, assert_idle, make_core, reference, tokens_of

PROMPT = list(range(30))  # seven full blocks and a tail of two tokens


@contextmanager
def engine(folder: Path, **settings: object) -> Iterator[tuple[EngineCore, FakeRunner]]:
    connector = SharedStorageConnector(ConnectorConfig(kv_dir=str(folder), epoch="e", worker_id="w"))
    core, runner = make_core(connector=connector, **settings)
    try:
        yield core, runner
    finally:
        core.close()


def run(core: EngineCore) -> list[m.Event]:
    """Steps until the engine has nothing to do and no transfer is under way."""
    events: list[m.Event] = []
    pause = threading.Event()
    for _ in range(5000):
        worked = core.step()
        events += core.take_events()
        assert core.scheduler.check_integrity() == []
        waits = core.scheduler.num_running > 0 or core._transfers.num_in_flight > 0
        if not worked and not waits:
            return events
        if not worked:
            pause.wait(0.002)
    raise AssertionError("not done")


def fill(folder: Path, prompt: list[int], **fields: object) -> None:
    """A prefill worker's life: computes, publishes, ends."""
    with engine(folder) as (core, _):
        add(core, "fill", prompt, mode=m.RequestMode.PREFILL, params=SamplingParams(temperature=0), **fields)
        run(core)
        core.handle(m.Release("fill"))
        run(core)
        assert_idle(core)


@pytest.mark.parametrize("mode", [m.RequestMode.LOCAL, m.RequestMode.PREFILL])
def test_another_engine_computes_only_the_tail(tmp_path: Path, mode: m.RequestMode) -> None:
    fill(tmp_path, PROMPT)
    with engine(tmp_path) as (core, runner):
        add(core, "a", PROMPT, max_tokens=4, mode=mode)
        events = run(core)
        num_tokens = 4 if mode is m.RequestMode.LOCAL else 1
        assert tokens_of(events)["a"] == reference(PROMPT, num_tokens)
        assert runner.num_tokens_per_step[0] == 2
        (first, *_) = [event for event in events if isinstance(event, m.TokensGenerated)]
        assert first.num_cached_tokens == 28
        core.handle(m.Release("a"))
        run(core)
        assert_idle(core)


def test_a_longer_prompt_asks_a_prefill_worker_for_the_rest_only(tmp_path: Path) -> None:
    fill(tmp_path, PROMPT)
    with engine(tmp_path) as (core, _):
        add(core, "a", [*PROMPT[:28], *range(50, 70)], mode=m.RequestMode.REMOTE)
        for _ in range(3):
            core.step()
        needed = [event for event in core.take_events() if isinstance(event, m.RemotePrefillNeeded)]
        assert [event.first_block for event in needed] == [7]
        core.handle(m.Release("a"))
        run(core)
        assert_idle(core)


def test_what_is_gone_since_the_lookup_is_computed(tmp_path: Path) -> None:
    fill(tmp_path, PROMPT)
    with engine(tmp_path) as (core, runner):
        add(core, "a", PROMPT, max_tokens=4)
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        events = run(core)
        assert tokens_of(events)["a"] == reference(PROMPT, 4)
        assert runner.num_tokens_per_step[0] == 30
        assert all(event.fallback_reason == "" for event in events if isinstance(event, m.TokensGenerated))
        assert_idle(core)


def test_another_salt_finds_nothing(tmp_path: Path) -> None:
    fill(tmp_path, PROMPT, cache_salt="red")
    with engine(tmp_path) as (core, runner):
        add(core, "a", PROMPT, cache_salt="blue")
        assert tokens_of(run(core))["a"] == reference(PROMPT, 8)
        assert runner.num_tokens_per_step[0] == 30


def test_without_prefix_caching_the_store_is_not_asked(tmp_path: Path) -> None:
    fill(tmp_path, PROMPT)
    with engine(tmp_path, enable_prefix_caching=False) as (core, runner):
        add(core, "a", PROMPT)
        assert tokens_of(run(core))["a"] == reference(PROMPT, 8)
        assert runner.num_tokens_per_step[0] == 30
