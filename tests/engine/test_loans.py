"""The other direction: a prefill engine reads what its decode engine has of a prompt, and computes the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common import metrics
from engine import messages as m
from engine.blocks.counts import CacheCounts
from kv_store.base import BlockRef, ConnectorConfig
from kv_store.memory import MemoryConnector
from tests.engine.test_remote_kv import GREEDY, Pair
from tests.engine.test_shared_fetches import HeedlessMemory, SlowMemory
from tests.examples import examples
from tests.support.fake_device import BLOCK_SIZE, add, assert_idle, make_core, reference, run, tokens_of

FIRST_PROMPT = list(range(10))  # two full blocks, and a tail
NUM_ANSWER_TOKENS = 12
FIRST_TURN = [*FIRST_PROMPT, *reference(FIRST_PROMPT, NUM_ANSWER_TOKENS)]
SECOND_PROMPT = [*FIRST_TURN, *range(50, 60)]  # 32 tokens
NUM_KNOWN = (len(FIRST_TURN) - 1) // BLOCK_SIZE  # that the decode engine has; nobody computed the last token
NUM_PROMPT_BLOCKS = len(FIRST_PROMPT) // BLOCK_SIZE  # those that the prefill engine has
LENT = range(NUM_PROMPT_BLOCKS, NUM_KNOWN)


@dataclass
class LendingPair(Pair):
    """What the services carry when the decode engine lends."""

    loans: dict[str, range] = field(default_factory=dict)
    lent: dict[str, list[BlockRef]] = field(default_factory=dict)
    alter: Callable[[list[BlockRef]], list[BlockRef]] = staticmethod(lambda refs: refs)  # noqa: RUF009
    is_silent: bool = False  # the decode worker does not answer
    read: list[int] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)  # tokens that the prefill engine did not compute

    def from_decode(self) -> bool:
        events = self.decode.take_events()
        for event in events:
            match event:
                case m.RemotePrefillNeeded(request_id, first_block) if not self.is_prefill_dead:
                    self.first_blocks[request_id] = first_block
                    self.decode.handle(m.AddPeer(self.prefill.ready().peer))
                    add(
                        self.prefill,
                        request_id,
                        self.prompts[request_id],
                        params=GREEDY,
                        mode=m.RequestMode.PREFILL,
                        first_block=first_block,
                        num_lendable_blocks=first_block,
                    )
                case m.BlocksPublished(request_id, refs, failed, failure):
                    refs = self.alter(list(refs))
                    self.lent.setdefault(request_id, []).extend(refs)
                    self.prefill.handle(m.RemoteBlocksPublished(request_id, refs, failed, failure))
                case m.PrefillReceived(request_id):
                    self.prefill.handle(m.Release(request_id))
                    self.decode.handle(m.EndLoan(request_id))
                case m.TokensGenerated(request_id=request_id, tokens=tokens):
                    self.answers.setdefault(request_id, []).extend(token.token_id for token in tokens)
                    self.fallbacks[request_id] = event.fallback_reason
        return bool(events)

    def from_prefill(self) -> bool:
        events = self.prefill.take_events()
        for event in events:
            match event:
                case m.LoanNeeded(request_id, first, stop):
                    self.loans[request_id] = range(first, stop)
                    self.prefill.handle(m.AddPeer(self.decode.ready().peer))
                    if not self.is_silent:
                        self.decode.handle(m.LendBlocks(request_id, first, stop))
                case m.BlocksFetched(indexes=indexes):
                    self.read += indexes
                case m.BlocksPublished(request_id, refs, failed, failure):
                    self.decode.handle(m.RemoteBlocksPublished(request_id, refs, failed, failure))
                case m.TokensGenerated(request_id=request_id, tokens=[token]):
                    self.cached[request_id] = event.num_cached_tokens
                    self.answers.setdefault(request_id, []).append(token.token_id)
                    self.decode.handle(m.RemoteFirstToken(request_id, token))
        return bool(events)

    def first_turn(self) -> None:
        self.add("first", FIRST_PROMPT, NUM_ANSWER_TOKENS)
        self.run()
        assert self.answers["first"] == FIRST_TURN[len(FIRST_PROMPT) :]
        self.read.clear()
        self.prefill._device.num_tokens_per_step.clear()  # type: ignore[attr-defined] # FakeDevice's record

    @property
    def num_prefilled(self) -> int:
        return sum(self.prefill._device.num_tokens_per_step)  # type: ignore[attr-defined] # FakeDevice's record

    def end(self, request_id: str) -> None:
        """As the services do when a client has gone."""
        self.decode.handle(m.Release(request_id))
        self.prefill.handle(m.Release(request_id))
        self.decode.handle(m.EndLoan(request_id))

    def assert_second_turn(self) -> None:
        assert self.answers["second"] == reference(SECOND_PROMPT, 8)
        self.assert_idle()


def make_pair(prefill: MemoryConnector | None = None, *, epoch: str = "decode", **settings: object) -> LendingPair:
    decode, _ = make_core(epoch=epoch)
    reader, _ = make_core(connector=prefill, epoch="prefill", **settings)
    return LendingPair(reader, decode)


def slow_pair(kind: type[SlowMemory] = SlowMemory) -> tuple[LendingPair, SlowMemory]:
    """The prefill engine's reads wait for the test."""
    slow = kind(ConnectorConfig(epoch="prefill", worker_id="test-prefill"))
    pair = make_pair(slow)
    if isinstance(slow, HeedlessMemory):
        assert isinstance(pair.decode._connector, MemoryConnector)
        slow.source = pair.decode._connector
    pair.first_turn()
    pair.add("second", SECOND_PROMPT)
    quiet(pair)
    assert [block.ref.index for _, block in slow.waiting] == [*LENT]
    return pair, slow


def quiet(pair: Pair) -> None:
    for _ in range(500):
        if not pair.round():
            return
    raise AssertionError("not quiet")


@pytest.mark.parametrize("chunk_size", [3, 64])
def test_the_answer_of_the_first_turn_is_read_and_not_computed(chunk_size: int) -> None:
    pair = make_pair(chunk_size=chunk_size)
    pair.first_turn()
    pair.add("second", SECOND_PROMPT)
    pair.run()
    assert pair.loans == {"second": LENT}
    assert pair.read == [*LENT]
    assert pair.num_prefilled == len(SECOND_PROMPT) - NUM_KNOWN * BLOCK_SIZE
    assert pair.cached["second"] == NUM_KNOWN * BLOCK_SIZE
    assert pair.first_blocks["second"] == NUM_KNOWN  # what was lent does not come back
    pair.assert_second_turn()


def test_what_was_read_is_found_here_the_next_time() -> None:
    pair = make_pair()
    pair.first_turn()
    pair.add("second", SECOND_PROMPT)
    pair.run()
    pair.add("third", [*SECOND_PROMPT, 1, 2, 3, 4])
    pair.run()
    assert "third" not in pair.loans
    pair.assert_second_turn()


def test_what_is_lent_counts_as_a_hit_of_its_own_tier() -> None:
    pair = make_pair()
    pair.first_turn()
    before = metrics.worker_kv_cache_hits.labels("decode")._value.get()
    pair.add("second", SECOND_PROMPT)
    pair.run()
    assert metrics.worker_kv_cache_hits.labels("decode")._value.get() - before == len(LENT)
    assert pair.prefill.blocks.counts == CacheCounts()


def test_nothing_is_asked_for_if_all_is_here() -> None:
    pair = make_pair()
    pair.add("first", SECOND_PROMPT)
    pair.run()
    pair.decode.blocks.reset_prefix_cache()
    pair.add("second", SECOND_PROMPT)
    pair.run()
    assert not pair.loans
    pair.assert_second_turn()


def test_a_prefill_without_a_cache_of_its_own_reads_all_of_it() -> None:
    pair = make_pair(enable_prefix_caching=False)
    pair.first_turn()
    pair.add("second", SECOND_PROMPT)
    pair.run()
    assert pair.loans == {"second": range(NUM_KNOWN)}
    assert pair.num_prefilled == len(SECOND_PROMPT) - NUM_KNOWN * BLOCK_SIZE
    pair.assert_second_turn()


def test_the_last_token_is_always_computed() -> None:
    """A prompt that the decode engine has whole: only a computed token gives logits."""
    pair = make_pair()
    pair.first_turn()
    prompt = FIRST_TURN[: NUM_KNOWN * BLOCK_SIZE]
    add(
        pair.prefill,
        "p",
        prompt,
        mode=m.RequestMode.PREFILL,
        params=GREEDY,
        first_block=NUM_KNOWN - 1,
        num_lendable_blocks=NUM_KNOWN,
    )
    pair.prefill.step()
    assert [event.stop for event in pair.prefill.take_events() if isinstance(event, m.LoanNeeded)] == [NUM_KNOWN - 1]
    pair.prefill.handle(m.Release("p"))
    pair.assert_idle()


# ------------------------------------------------------------------------------------------------- failures


def swapped(refs: list[BlockRef]) -> list[BlockRef]:
    """The first two blocks change places."""
    first, second, *rest = refs
    return [replace(first, index=second.index), replace(second, index=first.index), *rest]


LIES: dict[str, Callable[[list[BlockRef]], list[BlockRef]]] = {
    "blocks of another prompt": swapped,
    "an earlier life": lambda refs: [replace(ref, epoch="former") for ref in refs],
    "nobody's blocks": lambda refs: [replace(ref, peer="nobody") for ref in refs],
    "another block's place": lambda refs: [replace(ref, block_id=ref.block_id + 20) for ref in refs],
    "wrong checksums": lambda refs: [replace(ref, checksums=(7,)) for ref in refs],
}


@pytest.mark.parametrize("lie", LIES)
def test_who_lends_wrong_blocks_has_them_computed(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    pair = make_pair()
    pair.first_turn()
    pair.alter = LIES[lie]
    pair.add("second", SECOND_PROMPT)
    pair.run()
    assert pair.num_prefilled >= len(SECOND_PROMPT) - NUM_KNOWN * BLOCK_SIZE + BLOCK_SIZE
    assert any(getattr(record, "request_id", "") == "second" for record in caplog.records)
    assert pair.fallbacks["second"] == ""  # of the decode engine, which got all it asked for
    pair.assert_second_turn()


def test_blocks_that_are_not_lent_are_computed() -> None:
    """The decode worker answers nothing, and the prefill worker's front gives it up."""
    pair = make_pair()
    pair.first_turn()
    pair.is_silent = True
    pair.add("second", SECOND_PROMPT)
    quiet(pair)
    assert "second" not in pair.answers
    pair.prefill.handle(m.RemoteBlocksPublished("second", [], [*LENT], "not within 10 s"))
    pair.run()
    assert pair.num_prefilled == len(SECOND_PROMPT) - NUM_PROMPT_BLOCKS * BLOCK_SIZE
    pair.assert_second_turn()


def test_a_request_that_waits_no_more_lends_nothing() -> None:
    pair = make_pair()
    pair.first_turn()
    pair.is_silent = True
    pair.add("second", SECOND_PROMPT)
    quiet(pair)
    pair.decode.handle(m.Release("second"))
    pair.decode.handle(m.LendBlocks("second", LENT.start, LENT.stop))
    (told,) = [event for event in pair.decode.take_events() if isinstance(event, m.BlocksPublished)]
    assert (told.blocks, told.failed_indexes) == ([], [*LENT])
    pair.prefill.handle(m.Release("second"))
    pair.assert_idle()


def test_a_block_that_is_lost_is_computed_and_those_before_it_are_kept() -> None:
    pair, slow = slow_pair()
    slow.deliver(1)
    quiet(pair)
    pair.decode._connector.release(pair.decode.remote_kv._transfers._published["second"][0])
    slow.deliver()
    pair.run()
    assert pair.read == [LENT.start]
    assert pair.num_prefilled == len(SECOND_PROMPT) - (LENT.start + 1) * BLOCK_SIZE
    pair.assert_second_turn()


# ----------------------------------------------------------------------------------------------- the loan's end


def test_what_is_lent_stays_until_the_loan_ends() -> None:
    """The decode engine's request is gone and its cache is wanted for others: what is being read is not touched."""
    pair, slow = slow_pair(HeedlessMemory)
    pair.decode.handle(m.Release("second"))
    num_free = pair.decode.blocks.num_available_blocks
    assert num_free == pair.decode.blocks.num_blocks - len(LENT)
    add(pair.decode, "other", [60] * BLOCK_SIZE * (num_free - 3))
    run(pair.decode)
    slow.deliver()
    quiet(pair)
    assert pair.read == [*LENT]
    assert pair.answers["second"] == reference(SECOND_PROMPT, 1)
    pair.prefill.handle(m.Release("second"))
    pair.decode.handle(m.EndLoan("second"))
    pair.assert_idle()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_nothing_that_arrives_after_its_end_is_believed(first: str) -> None:
    """Cancelled in mid-read, and the decode engine's blocks are overwritten: nobody finds what landed."""
    pair, slow = slow_pair(HeedlessMemory)
    pair.decode.handle(m.Release("second"))
    if first == "prefill":
        pair.prefill.handle(m.Release("second"))
    else:  # it came before the results, but nobody looked
        unread = [m.Release("second")]

        def read_commands() -> None:
            while unread:
                pair.prefill.handle(unread.pop())

        pair.prefill._read_commands = read_commands
    pair.decode.handle(m.EndLoan("second"))
    assert_idle(pair.decode)
    pair.decode.blocks.reset_prefix_cache()
    pair.decode._device.kv_cache.fill_(-7.0)
    slow.deliver()
    quiet(pair)
    pair.assert_idle()
    add(pair.prefill, "alone", SECOND_PROMPT)
    assert tokens_of(run(pair.prefill))["alone"] == reference(SECOND_PROMPT, 8)


def test_a_prefill_engine_that_stood_still_believes_nothing_of_it() -> None:
    pair, slow = slow_pair(HeedlessMemory)
    pair.decode._device.kv_cache.fill_(-7.0)
    pair.decode._device.checks_kv = False  # only the prefill engine's token matters
    pair.prefill.stood_still(20.0)
    slow.deliver()
    quiet(pair)
    assert pair.answers["second"][:1] == reference(SECOND_PROMPT, 1)
    assert pair.num_prefilled == len(SECOND_PROMPT) - NUM_PROMPT_BLOCKS * BLOCK_SIZE
    pair.end("second")
    pair.assert_idle()


def test_a_loan_ends_once_and_unknown_ones_are_ignored() -> None:
    pair, slow = slow_pair()
    slow.deliver()
    pair.run()
    pair.decode.handle(m.EndLoan("second"))
    pair.decode.handle(m.EndLoan("nobody"))
    pair.assert_second_turn()


Moment = st.integers(0, 12)


@settings(max_examples=examples(20), deadline=None)
@given(cancel_at=st.none() | Moment, deliveries=st.lists(st.integers(0, 3), max_size=6), fails=st.booleans())
def test_no_block_leaks_whenever_it_ends(cancel_at: int | None, deliveries: list[int], fails: bool) -> None:
    slow = SlowMemory(ConnectorConfig(epoch="prefill", worker_id="test-prefill"))
    pair = make_pair(slow)
    pair.first_turn()
    pair.add("second", SECOND_PROMPT)
    pair.add("same", SECOND_PROMPT)
    for moment in range(13):
        if moment == cancel_at:
            pair.end("second")
        if moment < len(deliveries):
            slow.deliver(deliveries[moment])
        if fails and moment == 7:
            pair.decode._connector._published.clear()  # type: ignore[attr-defined] # MemoryConnector's
        pair.round()
    slow.deliver()
    pair.run()
    slow.deliver()
    pair.run()
    if cancel_at is None:
        assert pair.answers["second"] == reference(SECOND_PROMPT, 8)
    assert pair.answers["same"] == reference(SECOND_PROMPT, 8)
    pair.assert_idle()
