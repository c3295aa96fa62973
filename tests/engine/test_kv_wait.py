"""When the wait for remote KV is over."""

from __future__ import annotations

from engine.remote_kv.kv_wait import BlockState, KVWait
from kv_store.base import BlockRef


def refs(*indexes: int) -> list[BlockRef]:
    return [BlockRef(index=index, block_hash=bytes([index]) * 16) for index in indexes]


def test_the_wait_ends_with_the_last_block_and_the_first_token() -> None:
    remote = KVWait(first_block=1, num_blocks=3)
    assert remote.published(refs(0, 1)) == refs(1)
    remote.arrive(1)
    assert not remote.is_settled
    remote.published(refs(2))
    remote.has_first_token = True
    assert not remote.is_settled
    remote.arrive(2)
    assert remote.is_settled
    assert remote.is_complete
    assert remote.num_ready_blocks == 3


def test_a_block_is_fetched_once_however_often_it_is_published() -> None:
    remote = KVWait(first_block=0, num_blocks=4)
    assert remote.published(refs(0, 1)) == refs(0, 1)
    remote.arrive(0)
    assert remote.published(refs(0, 1, 2, 9)) == refs(2)


def test_a_failure_waits_for_what_is_in_flight() -> None:
    remote = KVWait(first_block=0, num_blocks=4)
    remote.published(refs(0, 1, 2))
    remote.arrive(0)
    remote.end("the worker died")
    assert not remote.is_settled
    remote.lose([1], "checksum")
    remote.arrive(2)
    assert remote.is_settled
    assert not remote.is_complete
    assert remote.num_ready_blocks == 1
    assert remote.failure == "the worker died"


def test_a_lost_block_can_be_published_again() -> None:
    remote = KVWait(first_block=0, num_blocks=1, has_first_token=True)
    remote.published(refs(0))
    remote.lose([0], "corrupt")
    assert remote.is_settled
    assert remote.published(refs(0)) == refs(0)
    assert not remote.is_settled
    remote.arrive(0)
    assert remote.is_complete


def test_an_ended_lease_concerns_what_the_worker_has_in_flight() -> None:
    remote = KVWait(first_block=0, num_blocks=4, ask_from=1)
    remote.fetch_stored([0])
    assert remote.published(refs(0, 1, 2)) == refs(1, 2)
    remote.arrive(1)
    remote.end_lease("cut off")
    assert remote.indexes(BlockState.UNLEASED) == [2]  # block 0 comes from the store
    assert remote.lease_failure == "cut off"
    remote.lose([2], "cut off")
    assert remote.published(refs(2)) == refs(2)
    assert remote.indexes(BlockState.UNLEASED) == []  # another worker's


def test_an_end_after_everything_arrived_is_no_failure() -> None:
    remote = KVWait(first_block=0, num_blocks=1, has_first_token=True)
    remote.published(refs(0))
    remote.arrive(0)
    remote.end("stream closed")
    assert remote.is_complete
    assert remote.failure == ""


def test_what_only_the_store_gives_needs_no_first_token() -> None:
    remote = KVWait(first_block=1, num_blocks=3, ask_from=3)
    assert not remote.asks_worker
    remote.fetch_stored([1, 2])
    remote.arrive(1)
    assert not remote.is_settled
    remote.lose([2], "evicted")
    assert remote.is_settled
    assert remote.num_ready_blocks == 2
