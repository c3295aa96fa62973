"""Memory for packed weights."""

from __future__ import annotations

import ctypes
import gc
import sys

import pytest

from engine.kernels.arena import Arena


def test_parts_are_apart_and_in_whole_pages() -> None:
    arena = Arena()
    sizes = [1, 5000, 40 << 20, 3 << 20, 30 << 20, 1]
    parts = [arena.allocate(size) for size in sizes]
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        assert part.address % 4096 == 0
        assert ctypes.string_at(part.address, size) == bytes(size)
        ctypes.memset(part.address, number + 1, size)
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        assert ctypes.string_at(part.address, size) == bytes([number + 1]) * size


def test_memory_that_is_not_there() -> None:
    with pytest.raises(MemoryError, match=f"no room for {2**42} MiB of packed weights"):
        Arena().allocate(2**62)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_goes_back_with_its_last_user() -> None:
    arena = Arena()
    first, second = arena.allocate(31 << 20), arena.allocate(1)
    other = arena.allocate(31 << 20)
    address = first.address
    del first
    assert _is_mapped(address)
    del second
    gc.collect()
    assert not _is_mapped(address)
    assert _is_mapped(other.address)


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)
