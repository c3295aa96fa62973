"""Requests of equal prefixes at the same time: each block is fetched once and computed once, whoever ends meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling import SamplingParams
from engine import messages as m
from kv_store.base import BlockRef, ConnectorConfig, FetchBlock, LocalBlock, TransferKind, TransferResult
from kv_store.memory import MemoryConnector
from kv_store.results import fetched
from tests.engine.test_remote_kv import GREEDY, Pair
from tests.support.fake_device import BLOCK_SIZE, add, assert_idle, make_core, reference, run, tokens_of

PROMPT = list(range(42))  # ten full blocks and a tail of two tokens


class SlowMemory(MemoryConnector):
    """P2P whose fetches wait for the test."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.waiting: list[tuple[int, FetchBlock]] = []
        self.hung: list[tuple[int, FetchBlock]] = []  # of those
        self.num_fetched = 0

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        self.waiting += [(job_id, block) for block in blocks]
        self.num_fetched += len(blocks)

    def deliver(self, number: int = 10**9) -> None:
        """Ends the oldest fetches, well or not, as the lease on their source says."""
        for job_id, block in self.take_due(number):
            super().fetch(job_id, [block])

    def hang(self, number: int) -> None:
        """The oldest fetches are overdue."""
        late = [one for one in self.waiting if one not in self.hung][:number]
        self.hung += late
        results = [fetched(job_id, block, error="hangs") for job_id, block in late]
        self._results.add(msgspec.structs.replace(result, is_final=False) for result in results)

    def take_due(self, number: int) -> list[tuple[int, FetchBlock]]:
        """The oldest fetches. Those that were overdue end here: bytes of whatever kind land, and that is that."""
        due, self.waiting = self.waiting[:number], self.waiting[number:]
        for job_id, block in due:
            if (job_id, block) in self.hung:
                self.hung.remove((job_id, block))
                self._view.rows[block.block_id].fill_(0xAA)
                self._results.add([fetched(job_id, block, error="was late")])
                due = [one for one in due if one != (job_id, block)]
        return due


class HeedlessMemory(SlowMemory):
    """As a transport reads: whatever lies there by now, whoever holds it."""

    source: MemoryConnector  # of which it reads

    def deliver(self, number: int = 10**9) -> None:
        for job_id, block in self.take_due(number):
            self._view.rows[block.block_id].copy_(self.source._view.rows[block.ref.block_id])
            self._results.add([fetched(job_id, block, error=None, num_bytes=self._view.block_bytes)])


class SlowStore(SlowMemory):
    """A store that engines share by `contents`; its fetches wait for the test, or don't."""

    name = "slow_store"
    is_store = True

    def __init__(self, config: ConnectorConfig, contents: dict[bytes, bytes], *, is_slow: bool = True) -> None:
        super().__init__(config)
        self.contents = contents
        self._is_slow = is_slow

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        super().fetch(job_id, blocks)
        if not self._is_slow:
            self.deliver()

    def lookup(self, block_hashes: Sequence[bytes]) -> int:
        return next((n for n, name in enumerate(block_hashes) if name not in self.contents), len(block_hashes))

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        for block in blocks:
            self.contents[block.block_hash] = self._view.rows[block.block_id].numpy().tobytes()
            ref = BlockRef(index=block.index, block_hash=block.block_hash)
            self._results.add([self._result(job_id, TransferKind.PUBLISH, block.index, block.block_id, ref=ref)])

    def deliver(self, number: int = 10**9) -> None:
        import torch

        for job_id, block in self.take_due(number):
            data = self.contents.get(block.ref.block_hash)
            if data is not None:
                row = self._view.rows[block.block_id]
                row.copy_(torch.frombuffer(bytearray(data), dtype=row.dtype).view_as(row))
            error = "gone" if data is None else None
            self._results.add([self._result(job_id, TransferKind.FETCH, block.ref.index, block.block_id, error=error)])

    def _result(
        self,
        job_id: int,
        kind: TransferKind,
        index: int,
        block_id: int,
        *,
        ref: BlockRef | None = None,
        error: str | None = None,
    ) -> TransferResult:
        return TransferResult(
            job_id=job_id, kind=kind, index=index, block_id=block_id, ref=ref, error=error, num_bytes=1
        )


def make_slow_pair(
    *, contents: dict[bytes, bytes] | None = None, decode_blocks: int = 64, **fields: object
) -> tuple[Pair, SlowMemory]:
    """Prefill and decode engine; the decode engine's fetches are slow. Over a store if there are `contents`."""
    config = ConnectorConfig(epoch="decode", worker_id="test-decode")
    slow = SlowMemory(config) if contents is None else SlowStore(config, contents)
    other = (
        None if contents is None else SlowStore(ConnectorConfig(epoch="p", worker_id="test-p"), contents, is_slow=False)
    )
    decode, _ = make_core(num_blocks=decode_blocks, connector=slow, **fields)
    prefill, _ = make_core(num_blocks=64, epoch="prefill", connector=other, **fields)
    return Pair(prefill, decode), slow


def make_heedless_pair() -> tuple[Pair, HeedlessMemory]:
    """Two full blocks in a chunk."""
    slow = HeedlessMemory(ConnectorConfig(epoch="decode", worker_id="test-decode"))
    slow.source = MemoryConnector(ConnectorConfig(epoch="prefill", worker_id="test-prefill"))
    decode, _ = make_core(connector=slow)
    prefill, _ = make_core(connector=slow.source, chunk_size=2 * BLOCK_SIZE)
    return Pair(prefill, decode), slow


def filled(prompt: Sequence[int]) -> dict[bytes, bytes]:
    """A store's contents after a prefill worker computed `prompt`."""
    contents: dict[bytes, bytes] = {}
    core, _ = make_core(connector=SlowStore(ConnectorConfig(epoch="f", worker_id="fill"), contents))
    add(core, "fill", prompt, mode=m.RequestMode.PREFILL, params=SamplingParams(temperature=0))
    run(core)
    return contents


def settle(pair: Pair) -> None:
    """Rounds until nothing happens any more, without any fetch ending."""
    for _ in range(500):
        if not pair.round():
            return
    raise AssertionError("not quiet")


def finish(pair: Pair, slow: SlowMemory) -> None:
    for _ in range(500):
        settle(pair)
        if (
            not slow.waiting and not pair.decode.remote_kv._transfers.num_in_flight
        ):  # writes to the store end by themselves
            return
        slow.deliver(1)
    raise AssertionError("not done")


@pytest.mark.parametrize("num_requests", [2, 5])
def test_equal_prompts_are_fetched_once(num_requests: int) -> None:
    pair, slow = make_slow_pair()
    for number in range(num_requests):
        pair.add(str(number), PROMPT)
    finish(pair, slow)
    assert all(pair.answers[str(number)] == reference(PROMPT, 8) for number in range(num_requests))
    assert slow.num_fetched == 11
    assert list(pair.first_blocks) == ["0"]  # only one asks a prefill worker
    assert pair.received == {str(number) for number in range(num_requests)}
    pair.assert_idle()


def test_a_longer_prompt_asks_at_once_for_what_nobody_fetches() -> None:
    pair, slow = make_slow_pair()
    longer = [*PROMPT[:40], *range(60, 80)]
    pair.add("a", PROMPT)
    pair.add("b", longer)
    settle(pair)
    assert pair.first_blocks == {"a": 0, "b": 10}
    finish(pair, slow)
    assert pair.answers == {"a": reference(PROMPT, 8), "b": reference(longer, 8)}
    assert pair.fallbacks == {"a": "", "b": ""}
    assert slow.num_fetched == 11 + 5
    pair.assert_idle()


def test_a_stored_prefix_is_fetched_once() -> None:
    pair, slow = make_slow_pair(contents=filled(PROMPT))
    for name in "abc":
        pair.add(name, PROMPT)
    finish(pair, slow)
    assert all(pair.answers[name] == reference(PROMPT, 8) for name in "abc")
    assert slow.num_fetched == 10
    assert pair.first_blocks == {}
    pair.assert_idle()


def test_a_follower_that_comes_when_half_has_arrived() -> None:
    pair, slow = make_slow_pair(contents=filled(PROMPT))
    pair.add("a", PROMPT)
    settle(pair)
    slow.deliver(5)
    settle(pair)
    pair.add("b", PROMPT)
    finish(pair, slow)
    assert pair.answers["a"] == pair.answers["b"] == reference(PROMPT, 8)
    assert slow.num_fetched == 10
    pair.assert_idle()


def test_the_leader_is_cancelled_and_its_store_fetches_go_on_for_the_others() -> None:
    """The others have more to ask for, so they are under way too."""
    pair, slow = make_slow_pair(contents=filled(PROMPT))
    longer = {"b": [*PROMPT[:40], *range(60, 70)], "c": [*PROMPT[:40], *range(70, 80)]}
    pair.add("a", PROMPT)
    for name, prompt in longer.items():
        pair.add(name, prompt)
    settle(pair)
    slow.deliver(3)
    settle(pair)
    pair.decode.handle(m.Release("a"))
    settle(pair)
    slow.deliver(2)
    pair.decode.handle(m.Release("b"))  # the heir too
    finish(pair, slow)
    assert pair.answers["c"] == reference(longer["c"], 8)
    assert slow.num_fetched == 10 + 3 + 3  # of each of the others what the store lacked
    pair.prefill.handle(m.Release("b"))
    settle(pair)
    pair.assert_idle()


def test_who_is_held_back_has_no_blocks_and_fetches_what_is_left_if_the_leader_is_cancelled() -> None:
    pair, slow = make_slow_pair(contents=filled(PROMPT))
    for name in "abc":
        pair.add(name, PROMPT)
    settle(pair)
    blocks = pair.decode.blocks
    assert blocks.num_blocks - blocks.num_available_blocks == 11
    slow.deliver(3)
    settle(pair)
    pair.decode.handle(m.Release("a"))
    finish(pair, slow)
    assert pair.answers == {"b": reference(PROMPT, 8), "c": reference(PROMPT, 8)}
    assert slow.num_fetched == 10 + 7
    pair.assert_idle()


def test_the_leader_is_cancelled_in_mid_prefill_and_the_next_one_asks() -> None:
    """What a prefill worker is about to overwrite must not be taken for what it was."""
    pair, slow = make_slow_pair()
    pair.add("a", PROMPT)
    pair.add("b", PROMPT)
    settle(pair)
    slow.deliver(4)
    settle(pair)
    pair.prefill.handle(m.Release("a"))
    pair.decode.handle(m.Release("a"))
    finish(pair, slow)
    assert pair.answers["b"] == reference(PROMPT, 8)
    assert pair.first_blocks == {"a": 0, "b": 4}
    assert pair.fallbacks["b"] == ""
    pair.prefill.handle(m.Release("a"))
    settle(pair)
    pair.assert_idle()


@pytest.mark.parametrize("known", ["at once", "when the reads have ended", "by the time that has passed"])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_what_is_read_after_the_lease_has_ended_is_not_believed(is_replaced: bool, known: str) -> None:
    """The prefill worker has overwritten it, and the transport saw nothing wrong. Another worker brings it, or none."""
    pair, slow = make_heedless_pair()
    pair.add("a", PROMPT)
    while slow.num_fetched < 6:
        pair.round()
    slow.deliver(2)
    pair.round()
    pair.prefill.handle(m.Release("a"))
    pair.prefill.blocks.reset_prefix_cache()
    pair.prefill._device.kv_cache.fill_(-7.0)
    ended = m.PrefillLeaseEnded("a", "prefill worker: cut off")
    match known:
        case "at once":
            pair.decode.handle(ended)
        case "when the reads have ended":  # it came before them, but nobody looked
            unread = [ended]

            def read_commands() -> None:
                while unread:
                    pair.decode.handle(unread.pop())

            pair.decode._read_commands = read_commands
        case _:
            pair.decode.stood_still(9.0)
    if is_replaced:
        slow.deliver()
        pair.round()
        add(pair.prefill, "a", PROMPT, params=GREEDY, mode=m.RequestMode.PREFILL, first_block=2)
    else:
        pair.decode.handle(m.RemotePrefillFailed("a", "no other"))
    finish(pair, slow)
    assert pair.answers["a"] == reference(PROMPT, 8)
    assert pair.fallbacks["a"] == ("" if is_replaced else "no other")
    pair.add("b", PROMPT)  # nothing wrong is found by its name, either
    finish(pair, slow)
    assert pair.answers["b"] == reference(PROMPT, 8)
    pair.prefill.handle(m.Release("a"))
    settle(pair)
    pair.assert_idle()


def test_a_lost_block_is_computed_once_and_what_came_after_it_is_kept() -> None:
    contents = filled(PROMPT)
    pair, slow = make_slow_pair(contents=contents)
    core, runner = pair.decode, pair.decode._device
    add(core, "a", PROMPT)
    add(core, "b", PROMPT)
    core.step()
    del contents[slow.waiting[4][1].ref.block_hash]
    slow.deliver()
    answers = tokens_of(run(core))
    assert answers == {"a": reference(PROMPT, 8), "b": reference(PROMPT, 8)}
    steps = runner.num_tokens_per_step  # type: ignore[attr-defined] # FakeDevice's record
    assert steps[0] == BLOCK_SIZE  # the hole
    assert sum(steps) == BLOCK_SIZE + 2 * (2 + 7)  # then each its tail and its answer
    assert_idle(core)


@pytest.mark.parametrize("mode", [m.RequestMode.LOCAL, m.RequestMode.PREFILL])
@pytest.mark.parametrize("chunk_size", [3, 4, 8, 100])
def test_equal_prompts_that_come_together_are_computed_once(mode: m.RequestMode, chunk_size: int) -> None:
    core, runner = make_core(chunk_size=chunk_size)
    for name in "abc":
        add(core, name, PROMPT, max_tokens=1, mode=mode)
    events = run(core)
    assert tokens_of(events) == {name: reference(PROMPT, 1) for name in "abc"}
    shared = 40 if chunk_size != 3 else 0  # chunks that end within blocks overlap in part
    assert sum(runner.num_tokens_per_step) <= 42 + 2 * (42 - shared)
    if mode is m.RequestMode.PREFILL:
        published: dict[str, list[int]] = {}
        for event in events:
            if isinstance(event, m.BlocksPublished):
                published.setdefault(event.request_id, []).extend(ref.index for ref in event.blocks)
        assert published == {name: list(range(11)) for name in "abc"}
        for name in "abc":
            core.handle(m.Release(name))
    run(core)
    assert_idle(core)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("round"), st.integers(1, 4)),
        st.tuples(st.just("deliver"), st.integers(1, 6)),
        st.tuples(st.just("hang"), st.integers(1, 12)),
        st.tuples(st.just("not published"), st.integers(0, 65)),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
        st.tuples(st.just("wipe"), st.integers(0, 9)),
        st.tuples(st.just("end prefill"), st.integers(0, 5)),
    ),
    max_size=25,
)


ANY_ORDER_OF_EVENTS = given(
    cuts=st.lists(st.tuples(st.integers(1, 42), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6),
    actions=ACTIONS,
    with_store=st.booleans(),
    chunk_size=st.integers(1, 16),
    decode_blocks=st.integers(14, 60),
    host_cache_gb=st.sampled_from([0.0, 1e-6]),  # some thirty blocks
)


def any_order_of_events(
    cuts: list[tuple[int, int, int]],
    actions: list[tuple[str, int]],
    with_store: bool,
    chunk_size: int,
    decode_blocks: int,
    host_cache_gb: float,
) -> None:
    """Prompts that share beginnings of many lengths; blocks that come late or never; requests that end."""
    contents = filled(PROMPT) if with_store else None
    pair, slow = make_slow_pair(
        contents=contents, chunk_size=chunk_size, decode_blocks=decode_blocks, host_cache_gb=host_cache_gb
    )
    requests = {
        str(number): ([*PROMPT[:cut], *range(80, 80 + extra)], max_tokens)
        for number, (cut, extra, max_tokens) in enumerate(cuts)
    }
    cancelled: set[str] = set()
    for name, (prompt, max_tokens) in requests.items():
        pair.add(name, prompt, max_tokens)
    for action, number in actions:
        name = str(number % len(requests))
        match action:
            case "round":
                for _ in range(number):
                    pair.round()
            case "deliver":
                slow.deliver(number)
            case "hang":
                slow.hang(number)
            case "not published":  # by another prefill worker, which was asked after the first one had announced some
                pair.decode.handle(m.RemoteBlocksPublished(name, [], [number % 11], "disk full"))
            case "cancel":
                cancelled.add(name)
                pair.decode.handle(m.Release(name))
                pair.prefill.handle(m.Release(name))
            case "wipe" if contents:
                del contents[sorted(contents)[number % len(contents)]]
            case "end prefill":
                pair.prefill.handle(m.Release(name))
                pair.decode.handle(m.RemotePrefillFailed(name, "prefill worker died"))
        assert pair.decode.scheduler.check_integrity() == []
    finish(pair, slow)
    for name, (prompt, max_tokens) in requests.items():
        if name not in cancelled:
            assert pair.answers[name] == reference(prompt, max_tokens)
        pair.prefill.handle(m.Release(name))
    finish(pair, slow)
    pair.assert_idle()


test_any_order_of_events_gives_the_reference_answers = settings(max_examples=15, deadline=None)(
    ANY_ORDER_OF_EVENTS(any_order_of_events)
)
test_any_order_of_events_gives_the_reference_answers_many_times = pytest.mark.slow(
    settings(max_examples=150, deadline=None)(ANY_ORDER_OF_EVENTS(any_order_of_events))
)
