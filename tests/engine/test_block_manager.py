"""Who owns which block."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from common.block_hash import block_hashes, extra_keys, root_hash
from common.types import SamplingParams
from engine.batch import BlockCopy
from engine.block_manager import BlockManager
from engine.request import Request

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
    prefix = blocks.find_prefix(request)
    assert blocks.allocate(request, len(token_ids), prefix)
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


def test_allocation_is_all_or_nothing() -> None:
    blocks = manager(num_blocks=3)
    request = make_request(list(range(16)))
    assert not blocks.allocate(request, 16)
    assert request.block_ids == []
    assert blocks.num_available_blocks == 3
    assert blocks.allocate(request, 12)
    assert not blocks.append(request, 13)
    assert len(request.block_ids) == 3


def test_names_are_those_of_common_block_hash() -> None:
    blocks = manager()
    request = computed(blocks, list(range(10)), salt="x")
    assert request.block_hashes == block_hashes(ROOT, list(range(10)), 4, extra_keys(cache_salt="x"))
    assert (
        blocks.tail_hash(request)
        == block_hashes(ROOT, list(range(10)), 4, extra_keys(cache_salt="x"), partial=True)[-1]
    )


def test_the_tail_name_does_not_depend_on_the_answer() -> None:
    blocks = manager()
    request = computed(blocks, list(range(10)))
    before = blocks.tail_hash(request)
    request.token_ids += [1, 2, 3]
    assert blocks.tail_hash(request) == before


def test_one_token_is_always_left_to_compute() -> None:
    blocks = manager()
    blocks.free(computed(blocks, list(range(8))))
    assert len(blocks.find_prefix(make_request(list(range(8))))) == 1
    assert len(blocks.find_prefix(make_request(list(range(9))))) == 2


def test_least_recently_freed_goes_first_and_the_tail_before_the_root() -> None:
    blocks = manager(num_blocks=4)
    old = computed(blocks, [1, 1, 1, 1, 2, 2, 2, 2])
    young = computed(blocks, [3, 3, 3, 3, 4, 4, 4, 4])
    order = [old.block_ids[1], old.block_ids[0], young.block_ids[1], young.block_ids[0]]
    blocks.free(old)
    blocks.free(young)
    taken = make_request(list(range(16)))
    assert blocks.allocate(taken, 16)
    assert taken.block_ids == order


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
    prefix = blocks.find_prefix(request)
    assert len(prefix) == 2
    assert not blocks.allocate(request, 12, prefix)
    assert blocks.num_cached_blocks == 2


def test_of_equal_blocks_the_first_keeps_the_name() -> None:
    blocks = manager()
    first = computed(blocks, list(range(4)))
    second = make_request(list(range(4)))
    blocks.allocate(second, 4)
    second.num_computed_tokens = 4
    blocks.name_computed(second)
    assert blocks.find_prefix(make_request(list(range(5)))) == first.block_ids
    blocks.free(second)
    assert blocks.num_empty_blocks == 7
    blocks.free(first)
    assert blocks.num_cached_blocks == 1


def test_fork_then_write_copies_once() -> None:
    blocks = manager()
    parent = computed(blocks, list(range(6)))
    child = make_request(list(range(6)), "child")
    blocks.fork(parent, child)
    shared = parent.block_ids[1]
    copy = blocks.copy_on_write(child, 1)
    assert copy == BlockCopy(shared, child.block_ids[1])
    assert child.block_ids[0] == parent.block_ids[0]
    assert blocks.copy_on_write(parent, 1) is None
    assert blocks.check_integrity([parent, child]) == []


def test_copy_on_write_without_room_says_so() -> None:
    blocks = manager(num_blocks=1)
    parent, child = computed(blocks, [1, 2]), make_request([1, 2], "child")
    blocks.fork(parent, child)
    with pytest.raises(MemoryError, match="copy-on-write"):
        blocks.copy_on_write(child, 0)


def test_swap_out_and_in() -> None:
    blocks = manager(num_blocks=3, num_host_blocks=3)
    request = computed(blocks, list(range(9)))
    device = list(request.block_ids)
    outs = blocks.swap_out(request)
    assert outs is not None
    assert [swap.device_block for swap in outs] == device
    assert blocks.num_available_blocks == 3
    assert blocks.check_integrity([request]) == []
    other = make_request([7] * 4)
    assert blocks.allocate(other, 4)
    assert blocks.swap_in(request) is None
    blocks.free(other)
    ins = blocks.swap_in(request)
    assert ins is not None
    assert [swap.host_block for swap in ins] == [swap.host_block for swap in outs]
    assert blocks.check_integrity([request]) == []


def test_a_full_host_refuses_a_swap() -> None:
    blocks = manager(num_host_blocks=1)
    request = computed(blocks, list(range(9)))
    assert blocks.swap_out(request) is None
    assert len(request.block_ids) == 3


def test_reset_forgets_names_and_keeps_owners() -> None:
    blocks = manager()
    blocks.free(computed(blocks, list(range(8))))
    user = computed(blocks, [5] * 8)
    blocks.reset_prefix_cache()
    assert blocks.num_cached_blocks == 0
    assert blocks.find_prefix(make_request([5] * 9)) == []
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


def test_integrity_names_a_leak_and_a_double_free() -> None:
    blocks = manager()
    request = computed(blocks, [1, 2, 3])
    assert "owners" in blocks.check_integrity([])[0]
    blocks.free(request)
    blocks._empty.append(0)
    assert any("free lists" in problem for problem in blocks.check_integrity([]))


class Lifecycle(RuleBasedStateMachine):
    """Any order of operations keeps every block accounted for."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(12, 4, ROOT, num_host_blocks=6)
        self.requests: dict[str, Request] = {}
        self.held: list[int] = []
        self.number = 0

    @rule(target=live, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30))
    def allocate(self, tokens: list[int]) -> str:
        self.number += 1
        request = make_request(tokens, str(self.number))
        prefix = self.blocks.find_prefix(request)
        if self.blocks.allocate(request, len(tokens), prefix):
            request.num_computed_tokens = len(tokens)
            self.blocks.name_computed(request)
        self.requests[request.request_id] = request
        return request.request_id

    @rule(name=live, num_more=st.integers(1, 9))
    def append(self, name: str, num_more: int) -> None:
        request = self.requests[name]
        if request.block_ids and self.blocks.append(request, request.num_tokens + num_more):
            request.token_ids += [2] * num_more
            request.num_computed_tokens = request.num_tokens
            self.blocks.name_computed(request)

    @rule(target=live, name=live)
    def fork(self, name: str) -> str:
        self.number += 1
        parent = self.requests[name]
        child = make_request(list(parent.token_ids), str(self.number))
        self.blocks.fork(parent, child)
        self.requests[child.request_id] = child
        return child.request_id

    @rule(name=live)
    def write(self, name: str) -> None:
        request = self.requests[name]
        if request.block_ids and self.blocks.num_available_blocks:
            self.blocks.copy_on_write(request, len(request.block_ids) - 1)

    @rule(name=live)
    def swap(self, name: str) -> None:
        request = self.requests[name]
        if request.host_block_ids:
            self.blocks.swap_in(request)
        elif request.block_ids:
            self.blocks.swap_out(request)

    @rule(name=live)
    def hold(self, name: str) -> None:
        if block_ids := self.requests[name].block_ids:
            self.blocks.hold(block_ids[:1])
            self.held.append(block_ids[0])

    @rule()
    def unhold(self) -> None:
        if self.held:
            self.blocks.unhold(self.held.pop())

    @rule(name=consumes(live))
    def free(self, name: str) -> None:
        self.blocks.free(self.requests.pop(name))

    @rule()
    def reset(self) -> None:
        self.blocks.reset_prefix_cache()

    @invariant()
    def accounted(self) -> None:
        assert self.blocks.check_integrity(self.requests.values()) == []

    def teardown(self) -> None:
        for request in self.requests.values():
            self.blocks.free(request)
        while self.held:
            self.blocks.unhold(self.held.pop())
        assert self.blocks.num_available_blocks == 12


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
