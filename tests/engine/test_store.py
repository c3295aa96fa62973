"""What one engine left in a shared store is a hit for every other engine, and for the next life of the same one."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import Counter

from common import metrics
from common.block_hash import block_hashes, extra_keys, root_hash
from common.cache_hints import Retain
from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from engine.remote_kv import VERIFY_STORED_S
from kv_store.base import ConnectorConfig, LocalBlock, Lookup
from kv_store.memory import MemoryConnector
from kv_store.shared_storage.connector import SharedStorageConnector
from kv_store.shared_storage.sharded_files import ShardedFiles
from tests.examples import examples
from tests.kv_store.stored import hanging, hanging_writes, path_of
from tests.support.fake_device import PATIENCE_S, SPEC, FakeDevice, add, assert_idle, make_core, reference, tokens_of

PROMPT = list(range(30))  # seven full blocks and a tail of two tokens


def store_in(
    folder: Path, *, transfer_timeout_s: float = 10.0, lookup_timeout_s: float = PATIENCE_S
) -> SharedStorageConnector:
    """Its lookups end when they know, however slow this machine is."""
    config = ConnectorConfig(
        section={"kv_dir": str(folder)}, epoch="e", worker_id="w", transfer_timeout_s=transfer_timeout_s
    )
    return SharedStorageConnector(config, lookup_timeout_s=lookup_timeout_s)


@contextmanager
def engine(
    folder: Path, *, lookup_timeout_s: float = PATIENCE_S, **settings: object
) -> Iterator[tuple[EngineCore, FakeDevice]]:
    connector = store_in(folder, lookup_timeout_s=lookup_timeout_s)
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
        waits = core.scheduler.num_running > 0 or core.remote_kv._transfers.num_in_flight > 0
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
        wipe(tmp_path)
        events = run(core)
        assert tokens_of(events)["a"] == reference(PROMPT, 4)
        assert runner.num_tokens_per_step[0] == 30
        assert all(event.fallback_reason == "" for event in events if isinstance(event, m.TokensGenerated))
        assert_idle(core)


@pytest.mark.parametrize("retains", [True, False])
def test_what_is_retained_counts_as_used(tmp_path: Path, retains: bool) -> None:
    with engine(tmp_path) as (core, _):
        add(core, "a", PROMPT, max_tokens=2, retain=Retain(10_000.0) if retains else None)
        run(core)
        (stored,) = tmp_path.glob("*/runs/*.run")
        os.utime(stored, (1000.0, 1000.0))
        for _ in range(int(2 * VERIFY_STORED_S)):  # the clock goes on by a second each time that it is read
            core.step()
        give_up = time.monotonic() + (PATIENCE_S if retains else 0.05)
        while stored.stat().st_mtime == 1000.0 and time.monotonic() < give_up:
            time.sleep(0.002)
        assert (stored.stat().st_mtime > 1000.0) is retains


class LateLookups(SharedStorageConnector):
    """Answers lookups when the test says so."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.open: list[tuple[Sequence[bytes], Lookup]] = []

    def start_lookup(self, block_hashes: Sequence[bytes]) -> Lookup:
        self.open.append((block_hashes, Lookup()))
        return self.open[-1][1]

    def answer(self, number: int) -> None:
        block_hashes, lookup = self.open[number]
        lookup.num_blocks = self.lookup(block_hashes)


def test_a_lookup_that_takes_its_time_holds_up_nobody_else(tmp_path: Path) -> None:
    fill(tmp_path, PROMPT)
    connector = LateLookups(ConnectorConfig(section={"kv_dir": str(tmp_path)}, epoch="e", worker_id="w"))
    core, runner = make_core(connector=connector)
    for name in ("late", "quick", "gone"):
        add(core, name, PROMPT if name == "late" else PROMPT[::-1], max_tokens=4, waits_for_lookup=False)
    assert not core.step()
    assert (core.load.num_requests_waiting, core.load.num_queued_prompt_tokens) == (3, 90)
    assert core.has_work
    core.handle(m.Release("gone"))
    connector.answer(1)
    assert tokens_of(run(core)) == {"quick": reference(PROMPT[::-1], 4)}
    assert core.load.num_requests_waiting == 1
    runner.num_tokens_per_step.clear()
    connector.answer(0)
    connector.answer(2)
    assert tokens_of(run(core)) == {"late": reference(PROMPT, 4)}
    assert runner.num_tokens_per_step[0] == 2
    assert not core.has_work
    assert_idle(core)
    core.close()


def test_a_store_that_hangs_holds_up_only_who_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, PROMPT)
    with engine(tmp_path, lookup_timeout_s=2.0) as (core, runner):
        add(core, "stream", [1, 2, 3], max_tokens=20)
        core.step()
        goes_on, asked = threading.Event(), threading.Event()
        contains = ShardedFiles.contains

        def hang(files: ShardedFiles, block_hash: bytes) -> bool:
            asked.set()
            return goes_on.wait(PATIENCE_S) and contains(files, block_hash)

        monkeypatch.setattr(ShardedFiles, "contains", hang)
        try:
            for name in ("asks", "gone"):
                add(core, name, PROMPT, max_tokens=4, waits_for_lookup=False)
            assert asked.wait(PATIENCE_S)
            core.handle(m.Release("gone"))
            assert core.load.num_requests_waiting == 1
            core.step()
            assert tokens_of(core.take_events())["stream"]
            runner.num_tokens_per_step.clear()
            give_up = time.monotonic() + PATIENCE_S
            while "asks" not in core.scheduler.requests:
                assert time.monotonic() < give_up
                time.sleep(0.01)
                core._queue_ready()
            events = run(core)
            assert tokens_of(events)["asks"] == reference(PROMPT, 4)
            assert runner.num_tokens_per_step[0] == 31, "the prompt, and the stream's next token"
        finally:
            goes_on.set()
        assert_idle(core)


@contextmanager
def a_hanging_fetch(folder: Path, **settings: object) -> Iterator[tuple[EngineCore, Callable[[], None]]]:
    """An engine that reads the prompt's stored blocks for request "a", and a function that lets the read go on: all
    blocks but the first are good then, however late."""
    fill(folder, PROMPT)
    (first, *_) = block_hashes(root_hash(SPEC.fingerprint()), PROMPT, SPEC.block_size)
    connector = store_in(folder, transfer_timeout_s=0.5)
    core, _ = make_core(connector=connector, **settings)
    add(core, "a", PROMPT, max_tokens=4)
    with hanging(path_of(folder, first, SPEC)) as go_on:
        core.step()
        assert core.remote_kv._transfers.num_in_flight == 7
        yield core, go_on
    run(core)
    assert_idle(core)
    core.close()


def until_answered(core: EngineCore, *names: str) -> list[m.Event]:
    """Steps while a transfer hangs."""
    events: list[m.Event] = []
    give_up = time.monotonic() + PATIENCE_S
    while any(name in core.scheduler.requests for name in names):
        assert time.monotonic() < give_up
        if not core.step():
            time.sleep(0.002)
        assert core.scheduler.check_integrity() == []
        running = [request for request in core.scheduler.requests.values() if request.num_computed_tokens]
        assert not any(core.blocks.pool._held.keys() & set(request.block_ids) for request in running)
        events += core.take_events()
    return events


def test_a_read_that_hangs_is_computed_elsewhere(tmp_path: Path) -> None:
    with a_hanging_fetch(tmp_path) as (core, go_on):
        held = [block_id for block_id, block in enumerate(core.blocks.pool._blocks) if block.ref_cnt > 1]
        assert len(held) == 7
        assert tokens_of(until_answered(core, "a")) == {"a": reference(PROMPT, 4)}
        assert core.blocks.num_available_blocks == core.blocks.num_blocks - 7, "bytes may land in those"
        go_on()
        run(core)
        assert core.blocks.num_available_blocks == core.blocks.num_blocks
        add(core, "again", PROMPT, max_tokens=4)
        assert tokens_of(run(core)) == {"again": reference(PROMPT, 4)}


def test_who_follows_a_read_that_hangs_goes_on_too(tmp_path: Path) -> None:
    with a_hanging_fetch(tmp_path) as (core, _):
        longer = [*PROMPT, 1, 2, 3, 4, 5]
        add(core, "follows", longer, max_tokens=4)
        core.step()
        answers = tokens_of(until_answered(core, "a", "follows"))
        assert answers == {"a": reference(PROMPT, 4), "follows": reference(longer, 4)}


def test_the_heir_of_a_read_that_hangs_gets_other_blocks(tmp_path: Path) -> None:
    with a_hanging_fetch(tmp_path) as (core, _):
        add(core, "heir", PROMPT, max_tokens=4)
        core.step()
        core.handle(m.Release("a"))
        assert tokens_of(until_answered(core, "heir")) == {"heir": reference(PROMPT, 4)}
        assert core.blocks.num_available_blocks == core.blocks.num_blocks - 7


def test_who_is_gone_before_its_read_is_given_up(tmp_path: Path) -> None:
    with a_hanging_fetch(tmp_path) as (core, _):
        core.handle(m.Release("a"))
        add(core, "b", PROMPT[::-1], max_tokens=4)
        assert tokens_of(until_answered(core, "b")) == {"b": reference(PROMPT[::-1], 4)}
        give_up = time.monotonic() + PATIENCE_S
        while not core.remote_kv._transfers.overdue():
            assert time.monotonic() < give_up
            time.sleep(0.002)
            core.take_in_transfers()
        core.step()
        assert core.remote_kv._transfers.overdue() == {}
        assert core.blocks.num_available_blocks == core.blocks.num_blocks - 7


def test_without_other_blocks_a_read_that_hangs_is_waited_for(tmp_path: Path) -> None:
    with a_hanging_fetch(tmp_path, num_blocks=12) as (core, go_on):
        give_up = time.monotonic() + PATIENCE_S
        while sum(len(one.results) for one in core.remote_kv._transfers.overdue().values()) < 7:
            assert time.monotonic() < give_up
            time.sleep(0.01)
            assert not core.step()
        for _ in range(20):
            assert not core.step()
            assert core.scheduler.check_integrity() == []
        assert "a" in core.scheduler.requests
        assert len(core.remote_kv._transfers.overdue()["a"].results) == 7, "there is no room for all of them"
        assert core.blocks.num_available_blocks == 4
        go_on()
        assert tokens_of(run(core)) == {"a": reference(PROMPT, 4)}


def test_a_publication_that_hangs_is_announced_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = store_in(tmp_path, transfer_timeout_s=0.5)
    core, _ = make_core(connector=connector)
    with hanging_writes(monkeypatch) as go_on:
        add(core, "a", PROMPT, mode=m.RequestMode.PREFILL)
        events: list[m.Event] = []
        give_up = time.monotonic() + PATIENCE_S
        while not (lost := [event for event in events if isinstance(event, m.BlocksPublished)]):
            assert time.monotonic() < give_up
            if not core.step():
                time.sleep(0.002)
            events += core.take_events()
        assert sorted(index for event in lost for index in event.failed_indexes) == list(range(8))
        assert all("kv_dir hangs" in event.failure for event in lost)
        core.handle(m.Release("a"))
        assert core.blocks.num_available_blocks == core.blocks.num_blocks - 8, "somebody reads them"
        go_on()
        assert run(core) == [], "it was told before"
    assert_idle(core)
    core.close()


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


def serve(folder: Path, prompt: list[int], num_tokens: int, **settings: object) -> list[int]:
    """Another worker's life, at whose end all is stored; prompt and answer."""
    with engine(folder, **settings) as (core, _):
        add(core, "a", prompt, max_tokens=num_tokens)
        answer = tokens_of(run(core))["a"]
        assert answer == reference(prompt, num_tokens)
        assert core.load.num_unstored_blocks == 0
        assert_idle(core)
    return [*prompt, *answer]


def num_computed_first(folder: Path, prompt: list[int], **fields: object) -> int:
    """Tokens that a fresh engine computes before it answers."""
    with engine(folder) as (core, runner):
        add(core, "b", prompt, max_tokens=2, **fields)
        assert tokens_of(run(core))["b"] == reference(prompt, 2)
        assert_idle(core)
        return runner.num_tokens_per_step[0]


def test_a_second_turn_finds_prompt_and_answer_of_the_first(tmp_path: Path) -> None:
    turn = serve(tmp_path, PROMPT, 11)  # KV of 40 of its 41 tokens was computed
    assert num_computed_first(tmp_path, [*turn, 7, 7, 7]) == 4


def test_an_aborted_answer_is_stored_as_far_as_it_came(tmp_path: Path) -> None:
    with engine(tmp_path) as (core, _):
        add(core, "a", PROMPT, max_tokens=100)
        while core.scheduler.requests["a"].num_computed_tokens < 36:
            core.step()
        core.handle(m.Release("a"))
        run(core)
        assert_idle(core)
    assert num_computed_first(tmp_path, [*PROMPT, *reference(PROMPT, 8)]) == 2


def test_a_prompt_is_stored_while_its_answer_goes_on(tmp_path: Path) -> None:
    with engine(tmp_path) as (core, _):
        add(core, "a", PROMPT, max_tokens=100)
        core.step()
        while core.load.num_unstored_blocks:
            core.take_in_transfers()
        assert num_computed_first(tmp_path, PROMPT) == 2


def test_nothing_is_written_while_a_handoff_is_under_way(tmp_path: Path) -> None:
    with engine(tmp_path) as (core, _):
        written = record_writes(core)
        with unhurried(core) as let_go:
            add(core, "handoff", list(range(60, 80)), mode=m.RequestMode.PREFILL)
            add(core, "a", PROMPT, max_tokens=3)
            for _ in range(10):
                core.step()
            assert "a" not in core.scheduler.requests
            assert written == []
            assert core.load.num_unstored_blocks == 8  # of 33 tokens the last has no KV
            let_go()
        run(core)
        assert written == list(range(8))


def test_what_is_stored_is_not_written_again(tmp_path: Path) -> None:
    turn = serve(tmp_path, PROMPT, 11)
    with engine(tmp_path) as (core, _):
        written = record_writes(core)
        add(core, "b", [*turn, *range(50, 60)], max_tokens=2)
        run(core)
        assert written == [10, 11, 12]


def wipe(folder: Path) -> None:
    """As when others filled the store meanwhile."""
    for layout in folder.iterdir():
        shutil.rmtree(layout, ignore_errors=True)


def pass_time(core: EngineCore, clock: list[float]) -> None:
    clock[0] += VERIFY_STORED_S
    core.step()


@contextmanager
def engine_at(folder: Path, **settings: object) -> Iterator[tuple[EngineCore, FakeDevice, list[float]]]:
    """Its clock moves only when the test moves it."""
    with engine(folder, **settings) as (core, runner):
        clock = [1e6]
        core._clock = lambda: clock[0]
        pass_time(core, clock)
        yield core, runner, clock


def test_what_the_store_evicts_is_written_again_when_it_is_used(tmp_path: Path) -> None:
    """All of the prompt is found on the device, so that nobody asks the store for it."""
    with engine_at(tmp_path) as (core, runner, clock):
        written = record_writes(core)
        for turn, expected in enumerate([range(8), [], range(8), range(8)]):
            add(core, str(turn), PROMPT, max_tokens=3)
            assert tokens_of(run(core)) == {str(turn): reference(PROMPT, 3)}
            assert written == [*expected], turn
            assert core.load.num_unstored_blocks == 0
            written.clear()
            if turn == 1:
                wipe(tmp_path)
                pass_time(core, clock)
            elif turn == 2:  # nothing is gone: it is looked at, and no byte moves
                assert num_computed_first(tmp_path, PROMPT) == 2
                pass_time(core, clock)
        assert runner.num_tokens_per_step[0] == 30
        assert max(runner.num_tokens_per_step[1:]) == 2
        assert_idle(core)


def test_looking_again_counts_as_no_write(tmp_path: Path) -> None:
    with engine_at(tmp_path) as (core, _, clock):
        counts = []
        for turn in range(2):
            before = count(metrics.worker_kv_tier_moves, "stored")
            add(core, str(turn), PROMPT, max_tokens=3)
            run(core)
            core.step()
            counts.append(count(metrics.worker_kv_tier_moves, "stored") - before)
            pass_time(core, clock)
        assert counts == [8, 0]


def test_a_lookup_that_misses_what_was_stored_has_it_written_again(tmp_path: Path) -> None:
    """At once: no time passes."""
    longer = [*PROMPT, *range(50, 70)]
    with engine_at(tmp_path) as (core, runner, _):
        add(core, "a", PROMPT, max_tokens=3)
        run(core)
        wipe(tmp_path)
        written = record_writes(core)
        runner.num_tokens_per_step.clear()
        add(core, "b", longer, max_tokens=2)
        assert tokens_of(run(core)) == {"b": reference(longer, 2)}
        assert runner.num_tokens_per_step[0] == 22  # the device still had seven blocks
        assert written == list(range(12))
    assert num_computed_first(tmp_path, longer) == 2


def test_a_store_that_does_not_answer_is_not_taken_to_have_lost_anything(tmp_path: Path) -> None:
    longer = [*PROMPT, *range(50, 70)]
    connector = LateLookups(ConnectorConfig(section={"kv_dir": str(tmp_path)}, epoch="e", worker_id="w"))
    core, _ = make_core(connector=connector)
    core._clock = lambda: 1e6
    core.step()
    for number, prompt in enumerate([PROMPT, longer]):
        written = record_writes(core)
        add(core, str(number), prompt, max_tokens=2, waits_for_lookup=False)
        connector.open[number][1].num_blocks = 0
        assert tokens_of(run(core))[str(number)] == reference(prompt, 2)
    assert written == [*range(7, 12)]
    core.close()


def test_blocks_evicted_before_their_turn_are_counted(tmp_path: Path) -> None:
    before = count(metrics.worker_kv_tier_moves, "dropped")
    with engine(tmp_path, num_blocks=16) as (core, _):
        with unhurried(core) as let_go:
            add(core, "handoff", [1, 2, 3], mode=m.RequestMode.PREFILL)
            for number in range(5):
                add(core, str(number), [number] * 30, max_tokens=8)
                for _ in range(20):
                    core.step()
                    assert core.scheduler.check_integrity() == []
            core._housekeeping.report()
            num_waiting = core.load.num_unstored_blocks
            assert num_waiting <= 16
            assert count(metrics.worker_kv_tier_moves, "dropped") - before == 5 * 9 - num_waiting
            let_go()
        run(core)
        assert core.load.num_unstored_blocks == 0


def test_a_store_that_takes_nothing_disturbs_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = count(metrics.worker_kv_tier_moves, "dropped")
    with engine(tmp_path) as (core, _):
        poll = core._connector.poll
        core._connector.poll = lambda: [  # type: ignore[method-assign]
            msgspec.structs.replace(result, ref=None, error="no space left on device") for result in poll()
        ]
        add(core, "a", PROMPT, max_tokens=11)
        assert tokens_of(run(core))["a"] == reference(PROMPT, 11)
        assert count(metrics.worker_kv_tier_moves, "dropped") - before >= 10  # the prompt's are offered a second time
        assert_idle(core)
    assert "the store does not take computed KV" in caplog.text


def run_to_end(core: EngineCore) -> list[m.Event]:
    """Also if a write to the store holds the blocks that a request needs to go on."""
    events = run(core)
    deadline = time.monotonic() + PATIENCE_S
    while core.scheduler.has_work:
        assert time.monotonic() < deadline
        time.sleep(0.001)
        events += run(core)
    return events


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 25), st.integers(1, 9)), min_size=3, max_size=12),
    num_blocks=st.integers(20, 26),  # of one conversation at its longest: 19
    host_cache_gb=st.sampled_from([0.0, 2e-7, 1e-6]),  # none, 6 or 33 blocks
    swaps=st.booleans(),
)
def test_all_tiers_together_give_the_reference_answers(
    tmp_path: Path, turns: list[tuple[int, int, int]], num_blocks: int, host_cache_gb: float, swaps: bool
) -> None:
    """Conversations that go on and on, in a cache that holds one of them."""
    options = {
        "num_blocks": num_blocks,
        "host_cache_gb": host_cache_gb,
        "preemption_mode": "swap" if swaps else "recompute",
        "swap_space_gb": 3e-7,
        "chunk_size": 7,
    }
    history: dict[int, list[int]] = {}
    for life in range(2):  # the second finds what the first has stored
        with engine(tmp_path, **options) as (core, _):
            for start in range(0, len(turns), 2):
                wanted = {}
                for number, (talk, num_new, num_tokens) in enumerate(turns[start : start + 2]):
                    prompt = [*history.get(talk, [talk])[:40], *range(num_new)]
                    wanted[f"{life}.{start}.{number}"] = reference(prompt, num_tokens)
                    history[talk] = [*prompt, *wanted[f"{life}.{start}.{number}"]]
                    add(core, f"{life}.{start}.{number}", prompt, num_tokens)
                assert tokens_of(run_to_end(core)) == wanted
            assert_idle(core)
            assert core.load.num_unstored_blocks == 0


def test_hits_are_counted_by_tier(tmp_path: Path) -> None:
    serve(tmp_path, PROMPT, 2)
    before = {tier: count(metrics.worker_kv_cache_hits, tier) for tier in ("device", "host", "store")}
    before |= {move: count(metrics.worker_kv_tier_moves, move) for move in ("demoted", "promoted", "stored", "dropped")}
    with engine(tmp_path, num_blocks=16, host_cache_gb=1e-6) as (core, _):
        prompts = [PROMPT, [50] * 40, PROMPT, PROMPT]  # from the store; evicts it; from host memory; from the device
        for number, prompt in enumerate(prompts):
            add(core, str(number), prompt, 2)
            events = run(core)
            assert tokens_of(events)[str(number)] == reference(prompt, 2)
            cached = [event.num_cached_tokens for event in events if isinstance(event, m.TokensGenerated)]
            assert cached[0] == (0 if number == 1 else 28)
        core.step()
    device, host, store = (
        count(metrics.worker_kv_cache_hits, tier) - before[tier] for tier in ("device", "host", "store")
    )
    demoted, promoted, stored, dropped = (
        count(metrics.worker_kv_tier_moves, move) - before[move]
        for move in ("demoted", "promoted", "stored", "dropped")
    )
    assert store == 7
    assert host + device == 14
    assert host == promoted > 0
    assert demoted >= promoted
    assert (stored, dropped) == (10, 0)  # of the second prompt


def count(counter: Counter, label: str) -> float:
    return counter.labels(label)._value.get()


def test_another_model_layout_or_adapter_finds_nothing(tmp_path: Path) -> None:
    fill(tmp_path, PROMPT)
    specs = [
        replace(SPEC, model_id="another"),
        replace(SPEC, dtype="bfloat16"),
        replace(SPEC, block_size=8),
        replace(SPEC, num_layers=2),
    ]
    for spec in [SPEC, *specs]:
        store = store_in(tmp_path)
        store.register_kv_cache(torch.zeros((4, *spec.block_shape), dtype=getattr(torch, spec.dtype)), spec, int)
        names = block_hashes(root_hash(spec.fingerprint()), PROMPT, spec.block_size)
        adapted = block_hashes(root_hash(spec.fingerprint()), PROMPT, spec.block_size, extra_keys(lora_id="a"))
        assert store.lookup(names) == (7 if spec is SPEC else 0)
        assert store.lookup(adapted) == 0
        # Even a name of the other kind finds nothing: what is stored says whose it is.
        own = block_hashes(root_hash(SPEC.fingerprint()), PROMPT, SPEC.block_size)
        assert store.lookup(own) == (7 if spec is SPEC else 0)
        store.close()


@pytest.mark.parametrize("keeps_blocks", [False, True])
def test_only_a_store_that_keeps_blocks_is_given_any(keeps_blocks: bool) -> None:
    given: list[str] = []

    class Store(MemoryConnector):
        def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
            given.extend(block.block_hash.hex() for block in blocks)
            super().publish(job_id, blocks)

    Store.keeps_blocks = keeps_blocks
    core, _ = make_core(store=Store(ConnectorConfig(epoch="e1", worker_id="store")))
    add(core, "a", PROMPT)
    run(core)
    assert bool(given) == keeps_blocks
    core.close()


def test_a_store_beside_another_connector(tmp_path: Path) -> None:
    """A prefill hands over through its connector and leaves its blocks in the store all the same."""
    for mode in (m.RequestMode.PREFILL, m.RequestMode.LOCAL):
        handoff = MemoryConnector(ConnectorConfig(epoch="e", worker_id="w"))
        store = store_in(tmp_path)
        core, runner = make_core(connector=handoff, store=store)
        try:
            add(core, "a", PROMPT, params=SamplingParams(temperature=0, max_tokens=2), mode=mode)
            events = run(core)
            published = [ref for event in events if isinstance(event, m.BlocksPublished) for ref in event.blocks]
            if mode is m.RequestMode.PREFILL:
                assert [ref.index for ref in published] == list(range(8))
                assert {ref.peer for ref in published} == {"w"}
                assert runner.num_tokens_per_step[0] == 30
            else:
                assert runner.num_tokens_per_step[0] == 2
            core.handle(m.Release("a"))
            run(core)
            assert_idle(core)
        finally:
            core.close()


@contextmanager
def unhurried(core: EngineCore) -> Iterator[Callable[[], None]]:
    """The connector keeps all results to itself until it is let go."""
    connector = core._connector
    poll = connector.poll
    connector.poll = list  # type: ignore[method-assign]

    def let_go() -> None:
        connector.poll = poll  # type: ignore[method-assign]

    yield let_go


def record_writes(core: EngineCore) -> list[int]:
    """Indexes of the blocks that go to the store from here on."""
    written: list[int] = []
    write = core.remote_kv._transfers.write

    def recorded(blocks: Sequence[LocalBlock]) -> None:
        written.extend(block.index for block in blocks)
        write(blocks)

    core.remote_kv._transfers.write = recorded  # type: ignore[method-assign]
    return written
