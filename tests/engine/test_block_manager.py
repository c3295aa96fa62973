"""Who owns which block."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from common.block_hash import block_hashes, extra_keys, root_hash
from common.sampling import SamplingParams
from engine.blocks.block_manager import BlockManager
from engine.blocks.counts import CacheCounts
from engine.blocks.host_tier import BlockCopy, BlockCopyKind
from engine.request import Request
from tests.examples import examples

ROOT = root_hash("test")


def make_request(token_ids: list[int], request_id: str = "r", salt: str = "") -> Request:
    return Request(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(),
        arrival_time=0.0,
        extra_keys=extra_keys(cache_salt=salt),
    )


def manager(num_blocks: int = 8, **options: object) -> BlockManager:
    return BlockManager(num_blocks, 4, ROOT, **options)  # type: ignore[arg-type]


def computed(blocks: BlockManager, token_ids: list[int], **fields: str) -> Request:
    """A request whose KV is all computed."""
    request = make_request(token_ids, **fields)
    assert blocks.allocate(request, len(token_ids), blocks.find_prefix(request))
    request.num_computed_tokens = len(token_ids)
    blocks.name_computed(request)
    return request


def test_waste_is_in_the_last_block_only() -> None:
    blocks = manager()
    request = make_request(list(range(9)))
    assert blocks.allocate(request, 9)
    assert len(request.block_ids) == 3
    assert blocks.append(request, 12)
    assert len(request.block_ids) == 3
    assert blocks.append(request, 13)
    assert len(request.block_ids) == 4


def test_blocks_that_no_layer_sees_any_more_are_free_for_others() -> None:
    blocks = manager(num_blocks=6)
    request = computed(blocks, list(range(20)))
    first = list(request.block_ids)
    blocks.free_unseen(request, 11)  # the third block is seen
    assert list(request.block_ids) == [first[2], first[2], *first[2:]]
    assert blocks.num_available_blocks == 1 + 2
    blocks.free_unseen(request, 11)
    blocks.free_unseen(request, 12)
    assert list(request.block_ids) == [first[3], first[3], first[3], *first[3:]]
    assert blocks.num_available_blocks == 1 + 3
    assert blocks.check_integrity([request]) == []
    other = make_request(list(range(50, 66)), "other")
    assert blocks.allocate(other, 16)
    assert not set(other.block_ids) & set(request.block_ids)
    blocks.free(request)
    blocks.free(other)
    assert blocks.num_available_blocks == 6
    assert blocks.check_integrity([]) == []


def test_a_block_that_is_not_full_stands_for_no_other() -> None:
    blocks = manager()
    request = computed(blocks, list(range(10)))
    before = list(request.block_ids)
    blocks.free_unseen(request, 8)
    assert list(request.block_ids) == before


def test_blocks_that_are_not_seen_any_more_are_still_found_by_name() -> None:
    blocks = manager()
    request = computed(blocks, list(range(20)))
    first = list(request.block_ids)
    blocks.free_unseen(request, 17 - 4)
    same = make_request(list(range(21)), "same")
    assert blocks.find_prefix(same) == 5
    assert blocks.allocate(same, 21, 5)
    assert list(same.block_ids[:5]) == first
    assert blocks.check_integrity([request, same]) == []


@pytest.mark.parametrize("is_finished", [False, True])
def test_the_beginning_of_what_a_window_has_left_behind_is_evicted_last(is_finished: bool) -> None:
    """The others are of no use without it."""
    blocks = manager(num_blocks=8)
    request = computed(blocks, list(range(28)))
    for first_seen in (4, 8, 16):
        blocks.free_unseen(request, first_seen)
    if is_finished:
        blocks.free(request)
    same = make_request(list(range(29)), "same")
    found = [blocks.find_prefix(same)]
    for number in range(4):
        other = make_request(list(range(100 * number + 100, 100 * number + 104)), f"other-{number}")
        assert blocks.allocate(other, 4)
        found.append(blocks.find_prefix(same))
    assert found == ([7, 7, 6, 5, 4] if is_finished else [7, 7, 3, 2, 1])


def test_a_swapped_request_takes_along_what_it_sees() -> None:
    blocks = manager(num_host_blocks=8)
    request = computed(blocks, list(range(20)))
    blocks.free_unseen(request, 12)
    blocks.reset_prefix_cache()
    assert blocks.swap_out(request)
    assert len(request.host_block_ids) == 2
    assert blocks.check_integrity([request]) == []
    assert blocks.swap_in(request)
    assert len(request.block_ids) == 5
    assert len(set(request.block_ids)) == 2
    assert blocks.check_integrity([request]) == []
    blocks.name_computed(request)  # of what is gone nothing gets a name
    assert blocks.find_prefix(make_request(list(range(21)))) == 0
    blocks.free(request)
    assert blocks.num_available_blocks == blocks.num_blocks


def test_allocation_is_all_or_nothing() -> None:
    blocks = manager(num_blocks=3)
    request = make_request(list(range(16)))
    assert not blocks.allocate(request, 16)
    assert not request.block_ids
    assert blocks.num_available_blocks == 3
    assert blocks.allocate(request, 12)
    assert not blocks.append(request, 13)
    assert len(request.block_ids) == 3


def test_names_are_those_of_common_block_hash() -> None:
    blocks = manager()
    request = computed(blocks, list(range(10)), salt="x")
    assert request.block_hashes == block_hashes(ROOT, list(range(10)), 4, extra_keys(cache_salt="x"))
    assert (
        blocks.cache.tail_hash(request)
        == block_hashes(ROOT, list(range(10)), 4, extra_keys(cache_salt="x"), partial=True)[-1]
    )


def test_the_tail_name_does_not_depend_on_the_answer() -> None:
    blocks = manager()
    request = computed(blocks, list(range(10)))
    before = blocks.cache.tail_hash(request)
    request.token_ids += [1, 2, 3]
    assert blocks.cache.tail_hash(request) == before


def test_one_token_is_always_left_to_compute() -> None:
    blocks = manager()
    blocks.free(computed(blocks, list(range(8))))
    assert blocks.find_prefix(make_request(list(range(8)))) == 1
    assert blocks.find_prefix(make_request(list(range(9)))) == 2


def test_least_recently_freed_goes_first_and_the_tail_before_the_root() -> None:
    blocks = manager(num_blocks=4)
    old = computed(blocks, [1, 1, 1, 1, 2, 2, 2, 2])
    young = computed(blocks, [3, 3, 3, 3, 4, 4, 4, 4])
    order = [old.block_ids[1], old.block_ids[0], young.block_ids[1], young.block_ids[0]]
    blocks.free(old)
    blocks.free(young)
    taken = make_request(list(range(16)))
    assert blocks.allocate(taken, 16)
    assert list(taken.block_ids) == order


def test_a_shared_prefix_is_not_evicted_while_it_is_used() -> None:
    blocks = manager(num_blocks=4)
    blocks.free(computed(blocks, list(range(9))))
    user = make_request(list(range(9)))
    assert blocks.allocate(user, 9, blocks.find_prefix(user))
    assert not blocks.allocate(make_request([9] * 8), 8)
    assert blocks.check_integrity([user]) == []


def test_allocation_counts_cached_blocks_of_its_own_prefix_once() -> None:
    blocks = manager(num_blocks=2)
    blocks.free(computed(blocks, list(range(8))))
    request = make_request(list(range(12)))
    assert blocks.find_prefix(request) == 2
    assert not blocks.allocate(request, 12, 2)
    assert blocks.num_cached_blocks == 2


def test_of_equal_blocks_the_first_keeps_the_name() -> None:
    blocks = manager()
    first = computed(blocks, list(range(4)))
    second = make_request(list(range(4)))
    blocks.allocate(second, 4)
    second.num_computed_tokens = 4
    blocks.name_computed(second)
    third = make_request(list(range(5)))
    assert blocks.allocate(third, 4, blocks.find_prefix(third))
    assert third.block_ids == first.block_ids
    blocks.free(third)
    blocks.free(second)
    assert blocks.num_empty_blocks == 7
    blocks.free(first)
    assert blocks.num_cached_blocks == 1


def test_swap_out_and_in() -> None:
    blocks = manager(num_blocks=3, num_host_blocks=3)
    request = computed(blocks, list(range(9)))
    device = list(request.block_ids)
    assert blocks.swap_out(request)
    outs = blocks.take_copies()
    assert [(copy.kind, copy.device_block) for copy in outs] == [(BlockCopyKind.SWAP_OUT, block) for block in device]
    assert blocks.num_available_blocks == 3
    assert blocks.check_integrity([request]) == []
    other = make_request([7] * 4)
    assert blocks.allocate(other, 4)
    assert not blocks.swap_in(request)
    blocks.free(other)
    assert blocks.swap_in(request)
    ins = blocks.take_copies()
    assert [copy.kind for copy in ins] == [BlockCopyKind.SWAP_IN] * 3
    assert [copy.host_block for copy in ins] == [copy.host_block for copy in outs]
    assert blocks.check_integrity([request]) == []


def test_a_full_host_refuses_a_swap() -> None:
    blocks = manager(num_host_blocks=1)
    request = computed(blocks, list(range(9)))
    assert not blocks.swap_out(request)
    assert len(request.block_ids) == 3
    assert blocks.take_copies() == []


def test_reset_forgets_names_and_keeps_owners() -> None:
    blocks = manager()
    blocks.free(computed(blocks, list(range(8))))
    user = computed(blocks, [5] * 8)
    blocks.reset_prefix_cache()
    assert blocks.num_cached_blocks == 0
    assert blocks.find_prefix(make_request([5] * 9)) == 0
    assert blocks.check_integrity([user]) == []
    blocks.free(user)
    assert blocks.num_empty_blocks == 8


def test_held_blocks_outlive_their_request() -> None:
    blocks = manager()
    request = computed(blocks, [1, 2, 3])
    (block_id,) = request.block_ids
    blocks.hold([block_id])
    blocks.free(request)
    assert blocks.num_available_blocks == 7
    assert blocks.check_integrity([]) == []
    blocks.unhold(block_id)
    assert blocks.num_available_blocks == 8
    with pytest.raises(ValueError, match="not held"):
        blocks.unhold(block_id)


def test_blocks_that_a_step_writes_outlive_their_request() -> None:
    blocks = manager()
    request, other = computed(blocks, [1, 2, 3]), computed(blocks, [5, 6, 7])
    (block_id,), (others,) = request.block_ids, other.block_ids
    blocks.begin_writes([block_id, others])
    blocks.begin_writes([block_id])  # the next step, which is begun ahead
    blocks.free(request)
    assert blocks.num_available_blocks == 6
    assert blocks.check_integrity([other]) == []
    blocks.end_writes([block_id, others])
    assert blocks.num_available_blocks == 6, "the next step writes it, too"
    blocks.end_writes([block_id])
    assert blocks.num_available_blocks == 7
    assert blocks.check_integrity([other]) == []
    blocks.free(other)
    assert blocks.num_available_blocks == 8, "no step writes any more"


def test_a_written_block_that_is_shared_again_is_not_given_up() -> None:
    blocks = manager()
    request = computed(blocks, list(range(4)))
    (block_id,) = request.block_ids
    blocks.begin_writes([block_id])
    blocks.free(request)
    again = make_request([*range(4), 9], "again")
    assert blocks.allocate(again, 5, blocks.find_prefix(again))
    assert again.block_ids[0] == block_id
    blocks.end_writes([block_id])
    assert blocks.check_integrity([again]) == []
    blocks.free(again)
    assert blocks.num_available_blocks == 8
    assert blocks.check_integrity([]) == []


def test_integrity_names_a_leak_and_a_double_free() -> None:
    blocks = manager()
    request = computed(blocks, [1, 2, 3])
    assert "owners" in blocks.check_integrity([])[0]
    blocks.free(request)
    blocks.pool._empty.append(0)
    assert any("free lists" in problem for problem in blocks.check_integrity([]))


def kinds(copies: list[BlockCopy]) -> list[str]:
    return [copy.kind.value for copy in copies]


def test_what_is_evicted_goes_to_host_memory_and_comes_back() -> None:
    blocks = manager(num_blocks=3, num_host_blocks=4, keep_evicted=True)
    blocks.free(computed(blocks, list(range(9))))
    other = make_request([7] * 8)
    assert blocks.allocate(other, 8)  # one empty block, and the tail's
    (down,) = blocks.take_copies()
    assert (down.kind, down.device_block) == (BlockCopyKind.DEMOTE, 1)
    blocks.free(other)
    back = make_request(list(range(9)))
    assert blocks.find_prefix(back) == 2
    assert blocks.allocate(back, 9, 2)
    (up,) = blocks.take_copies()
    assert (up.kind, up.host_block) == (BlockCopyKind.PROMOTE, down.host_block)
    assert list(back.block_ids[:2]) == [0, up.device_block]
    assert blocks.check_integrity([back]) == []


def test_what_host_memory_holds_already_is_not_copied_down_again() -> None:
    blocks = manager(num_blocks=2, num_host_blocks=4, keep_evicted=True)
    blocks.free(computed(blocks, list(range(8))))
    for _ in range(3):
        blocks.free(computed(blocks, [7] * 8))
        blocks.free(computed(blocks, list(range(8))))
    copies = kinds(blocks.take_copies())
    assert copies.count("demote") == 4  # each block once
    assert copies.count("promote") == 5  # the first time, and each prompt's last block, is computed


def test_a_prefix_may_alternate_between_tiers() -> None:
    blocks = manager(num_blocks=4, num_host_blocks=8, keep_evicted=True)
    blocks.free(computed(blocks, list(range(16))))
    blocks.free(computed(blocks, [7] * 12))  # leaves the first block on the device
    blocks.take_copies()
    request = make_request([*range(16), 1])
    assert blocks.find_prefix(request) == 4
    assert not blocks.allocate(request, 17, 4)  # five blocks are more than there are
    request = make_request(list(range(16)))
    assert blocks.allocate(request, 16, blocks.find_prefix(request))
    assert kinds(blocks.take_copies()).count("promote") == 2
    assert blocks.check_integrity([request]) == []


def test_swapped_requests_displace_what_host_memory_caches() -> None:
    blocks = manager(num_blocks=4, num_host_blocks=2, keep_evicted=True)
    blocks.free(computed(blocks, list(range(8))))
    request = computed(blocks, [7] * 16)
    assert len(blocks.host.names()) == 2
    blocks.free(request)
    swapped = computed(blocks, [5] * 8)
    assert blocks.swap_out(swapped)
    assert len(blocks.host.names()) == 0
    blocks.free(computed(blocks, [6] * 16))  # evicts, with no room below
    assert blocks.check_integrity([swapped]) == []
    assert blocks.swap_in(swapped)
    assert blocks.check_integrity([swapped]) == []


def test_what_the_store_lacks_comes_up_from_host_memory_to_be_written() -> None:
    blocks = manager(num_blocks=4, num_host_blocks=8, keep_evicted=True, has_store=True)
    request = computed(blocks, list(range(16)))
    blocks.write_back.offer(request)
    blocks.free(request)
    other = computed(blocks, [7] * 16)
    assert len(blocks.write_back) == 4
    assert list(blocks.write_back.next_run(8)) == []
    blocks.free(other)
    blocks.take_copies()
    written = []
    for _ in range(2):
        blocks.named.load_for_write_back(8)
        assert kinds(blocks.take_copies()).count("promote") == 2
        run = blocks.write_back.next_run(8)
        written += [block.index for block in run]
        for block in run:
            blocks.write_back.end(block.block_hash, is_stored=True, is_new=True)
        assert blocks.check_integrity([]) == []
    assert written == [2, 3, 0, 1]  # in groups, in the order in which they left the device
    assert len(blocks.write_back) == 0
    blocks.write_back.offer(computed(blocks, list(range(16))))
    assert len(blocks.write_back) == 0  # known to be there
    assert blocks.counts.take().stored == 4


def test_gone_from_all_tiers_before_its_turn_is_counted() -> None:
    blocks = manager(num_blocks=4, num_host_blocks=1, keep_evicted=True, has_store=True)
    request = computed(blocks, list(range(16)))
    blocks.write_back.offer(request)
    blocks.free(request)
    blocks.free(computed(blocks, [7] * 16))
    assert blocks.check_integrity([]) == []
    counts = blocks.counts.take()
    assert (counts.dropped, counts.demoted) == (3, 4)
    assert blocks.counts.take() == CacheCounts()


class Lifecycle(RuleBasedStateMachine):
    """Any order of operations keeps every block accounted for, and every byte where its name says.

    A block's bytes are played by the tokens up to its end, on the device and in host memory.
    """

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(
            12,
            4,
            ROOT,
            num_host_blocks=6,
            keep_evicted=True,
            has_store=True,
            retain_share=0.5,
            retain_tenant_share=0.34,
        )
        self.device: list[object] = [None] * 12
        self.in_host: list[object] = [None] * 6
        self.requests: dict[str, Request] = {}
        self.held: list[int] = []
        self.heard: set[bytes] = set()
        self.writing: list[tuple[int, bytes]] = []
        self.steps: list[list[int]] = []
        self.number = 0

    def carry_out(self) -> None:
        for copy in self.blocks.take_copies():
            if copy.to_host:
                self.in_host[copy.host_block] = self.device[copy.device_block]
            else:
                self.device[copy.device_block] = self.in_host[copy.host_block]

    def compute(self, request: Request) -> None:
        """All that is missing."""
        self.carry_out()
        for index in range(request.num_computed_tokens // 4, len(request.block_ids)):
            if (end := min(index * 4 + 4, request.num_tokens)) > request.num_computed_tokens:
                self.device[request.block_ids[index]] = tuple(request.token_ids[:end])
        request.num_computed_tokens = request.num_tokens
        self.blocks.name_computed(request)

    @rule(target=live, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30))
    def allocate(self, tokens: list[int]) -> str:
        self.number += 1
        request = make_request(tokens, str(self.number))
        num_found = self.blocks.find_prefix(request)
        if self.blocks.allocate(request, len(tokens), num_found):
            request.num_computed_tokens = num_found * 4
            self.compute(request)
        self.requests[request.request_id] = request
        return request.request_id

    @rule(name=live, num_more=st.integers(1, 9))
    def append(self, name: str, num_more: int) -> None:
        request = self.requests[name]
        if request.block_ids and self.blocks.append(request, request.num_tokens + num_more):
            request.token_ids += [2] * num_more
            self.compute(request)

    @rule(name=live)
    def swap(self, name: str) -> None:
        request = self.requests[name]
        if request.host_block_ids:
            self.blocks.swap_in(request)
        elif request.block_ids:
            self.blocks.swap_out(request)

    @rule(name=live)
    def offer(self, name: str) -> None:
        if self.requests[name].block_ids:
            self.blocks.write_back.offer(self.requests[name])

    @rule()
    def store(self) -> None:
        if not self.writing:
            self.blocks.named.load_for_write_back(8)
            self.carry_out()
            run = self.blocks.write_back.next_run(8)
            self.blocks.hold(block.block_id for block in run)
            self.writing = [(block.block_id, block.block_hash) for block in run]

    @rule(is_stored=st.booleans())
    def stored(self, is_stored: bool) -> None:
        if self.writing:
            block_id, name = self.writing.pop()
            self.blocks.unhold(block_id)
            self.blocks.write_back.end(name, is_stored=is_stored, is_new=True)

    @rule(name=live)
    def hold(self, name: str) -> None:
        if block_ids := self.requests[name].block_ids:
            self.blocks.hold(block_ids[:1])
            self.held.append(block_ids[0])

    @rule()
    def unhold(self) -> None:
        if self.held:
            self.blocks.unhold(self.held.pop())

    @rule(name=live)
    def begin_step(self, name: str) -> None:
        if (block_ids := self.requests[name].block_ids) and len(self.steps) < 2:
            self.steps.append(list(block_ids[-2:]))
            self.blocks.begin_writes(self.steps[-1])

    @rule()
    def end_step(self) -> None:
        if self.steps:
            self.blocks.end_writes(self.steps.pop(0))

    @rule(name=consumes(live))
    def free(self, name: str) -> None:
        self.blocks.free(self.requests.pop(name))

    @rule()
    def hear(self) -> None:
        """A router that hears of all changes knows what is here."""
        here, gone = self.blocks.news.take()
        for names, change in ((here, self.heard.add), (gone, self.heard.discard)):
            for start in range(0, len(names), 16):
                change(names[start : start + 16])
        assert self.heard == self.blocks.names()

    @rule(name=live, tenant=st.sampled_from("ab"), seconds=st.integers(0, 20))
    def retain(self, name: str, tenant: str, seconds: int) -> None:
        self.blocks.named.retain(tenant, self.requests[name].block_hashes, seconds)

    @rule(name=live, first=st.integers(0, 3))
    def evict(self, name: str, first: int) -> None:
        names = self.requests[name].block_hashes[first:]
        self.blocks.named.evict(names)
        assert not self.blocks.names() & set(names)

    @rule(name=live)
    def prefetch(self, name: str) -> None:
        request = self.requests[name]
        num_here = self.blocks.named.count_on_device(request.block_hashes)
        missing = request.block_hashes[num_here:]
        if not missing or self.blocks.named.num_spare_blocks(request.block_hashes[:num_here]) <= 0:
            return
        self.blocks.named.touch(request.block_hashes[:num_here])
        if self.blocks.named.count_in_host(missing):
            self.blocks.named.bring_up(missing[:1])
        else:
            (block_id,) = self.blocks.pool.take_held(1)
            self.carry_out()
            self.device[block_id] = tuple(request.token_ids[: (num_here + 1) * 4])
            self.blocks.named.keep_prefetched(block_id, missing[0])
        assert self.blocks.named.count_on_device(request.block_hashes) > num_here

    @rule(name=live, tenant=st.sampled_from("ab"))
    def end_retention(self, name: str, tenant: str) -> None:
        self.blocks.named.end_retention(tenant, self.requests[name].block_hashes)

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        self.blocks.expire_retention(self.blocks.retention.now + seconds)

    @rule()
    def reset(self) -> None:
        self.blocks.reset_prefix_cache()

    @invariant()
    def accounted(self) -> None:
        self.carry_out()
        assert self.blocks.check_integrity(self.requests.values()) == []

    @invariant()
    def bytes_are_right(self) -> None:
        for request in self.requests.values():
            for memory, block_ids in ((self.device, request.block_ids), (self.in_host, request.host_block_ids)):
                for index, block_id in enumerate(block_ids):
                    if (end := min(index * 4 + 4, request.num_computed_tokens)) > index * 4:
                        assert memory[block_id] == tuple(request.token_ids[:end])
        for names, memory in ((self.blocks.cache._by_name, self.device), (self.blocks.host.pool._cached, self.in_host)):
            for name, block_id in names.items():
                assert block_hashes(ROOT, memory[block_id], 4)[-1] == name  # type: ignore[call-overload]

    def teardown(self) -> None:
        for request in self.requests.values():
            self.blocks.free(request)
        while self.held:
            self.blocks.unhold(self.held.pop())
        while self.steps:
            self.end_step()
        for block_id, _ in self.writing:
            self.blocks.unhold(block_id)
        assert self.blocks.num_available_blocks == 12
        assert self.blocks.host.pool.num_available_blocks == 6


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
