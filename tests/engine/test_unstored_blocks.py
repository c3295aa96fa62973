"""What becomes of blocks that the store held once."""

from __future__ import annotations

from engine.blocks.counts import CacheCounts
from engine.blocks.unstored_blocks import UnstoredBlocks

A, B, C = b"a", b"b", b"c"


def stored(*names: bytes, counts: CacheCounts | None = None) -> UnstoredBlocks:
    """These were written, one after the other."""
    blocks = UnstoredBlocks(counts or CacheCounts())
    write(blocks, *names)
    return blocks


def write(blocks: UnstoredBlocks, *names: bytes) -> list[bytes]:
    """Offers them; those that were written."""
    for index, name in enumerate(names):
        blocks.offer(name, index)
    written = [name for name, _ in blocks.next_run(16)]
    for name in written:
        blocks.end(name, is_stored=True)
    blocks.mark_stored(written)
    return written


def test_what_is_stored_is_offered_again_after_a_while() -> None:
    blocks = stored(A, B)
    assert write(blocks, A, B) == []
    blocks.age()
    assert len(blocks) == 0  # but only when it is used
    assert write(blocks, A, B, C) == [A, B, C]
    assert write(blocks, A, B, C) == []


def test_what_is_seen_to_be_gone_is_offered_again_at_once() -> None:
    blocks = stored(A, B, C)
    blocks.recheck([B, C])
    assert write(blocks, A, B, C) == [B, C]


def test_what_was_stored_is_not_dropped_when_it_goes() -> None:
    blocks = stored(A, B, C, counts=(counts := CacheCounts()))
    blocks.age()
    blocks.recheck([C])
    for index, name in enumerate([A, B, C]):
        blocks.offer(name, index)
    assert len(blocks) == 3
    blocks.forget(A)
    assert counts.dropped == 0
    blocks.clear()
    assert counts.dropped == 1  # the store seems to lack it
    assert (len(blocks), blocks.names()) == (0, set())


def test_what_was_stored_is_not_brought_up_to_be_verified() -> None:
    blocks = stored(A)
    blocks.age()
    for index, name in enumerate([A, B]):
        blocks.offer(name, index)
        blocks.demote(name)
    assert blocks.next_below(16, 16) == [B]
    blocks.promote(A)
    assert write(blocks, A) == [A]


def test_a_write_that_fails_is_tried_again_with_the_next_use() -> None:
    blocks = stored(A)
    blocks.age()
    blocks.offer(A, 0)
    ((name, _),) = blocks.next_run(16)
    blocks.offer(A, 0)
    assert blocks.next_run(16) == []  # it is in flight
    blocks.end(name, is_stored=False)
    assert write(blocks, A) == [A]
