"""Pages of large tensors are there before anybody writes to them."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading

import pytest
import torch

from kv_store.host_pages import prepare_pages

NUM_BYTES = 32 << 20


def num_resident(tensor: torch.Tensor) -> int:
    """Bytes of whole pages under `tensor` that are in memory, from the first page boundary on."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    pages = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages) == 0, ctypes.get_errno()
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def page_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kv-pages"}


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for pages")
@pytest.mark.slow
def test_pages_are_made_and_keep_what_was_written() -> None:
    # Fresh from the kernel: `torch.empty` may give memory that a test before has touched.
    tensor = torch.frombuffer(mmap.mmap(-1, NUM_BYTES), dtype=torch.uint8)
    tensor[: 4 << 20] = 7  # written before, and while the thread runs
    assert num_resident(tensor) < NUM_BYTES // 2
    others = page_threads()  # of tests before
    prepare_pages(tensor, delay_s=0.0)
    tensor[-(4 << 20) :] = 9
    for thread in page_threads() - others:
        thread.join(60.0)
        assert not thread.is_alive()
    assert num_resident(tensor) >= NUM_BYTES - mmap.PAGESIZE
    assert tensor[: 4 << 20].eq(7).all()
    assert tensor[-(4 << 20) :].eq(9).all()


def test_other_memory_is_left_alone() -> None:
    others = page_threads()
    prepare_pages(torch.empty(0))
    prepare_pages(torch.empty(10))
    prepare_pages(torch.empty(NUM_BYTES, dtype=torch.uint8, device="meta"))
    assert page_threads() <= others
