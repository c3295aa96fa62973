"""Pages under large tensors in host memory: huge ones if Linux has some, and made before a request needs them.

Reading another process's memory costs the kernel one look-up per page: with pages of 2 MiB instead of 4 KiB, blocks
move about twice as fast through shared memory (9.5 GB/s, not 4.1, in blocks of 1 MiB).

Linux makes a page when it is first written to, so a transfer into a fresh part of the cache waits for its pages. In a
virtual machine, whose host has to find the memory, making pages is many times slower than the transfer: 0.4 GB/s, not
10.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; changes no content
_SLICE_BYTES = 2 << 20  # of one call, which holds a lock that allocations of other threads need
_NICE = 10  # whatever has work to do comes first
DELAY_S = 5.0  # a worker that starts has better things to do, and its first answers, too
# Shares of a core's time. If others want the core, the smaller one: it makes 40 MB/s on the slowest machines, and
# prompts fill a cache more slowly. If the core is idle, the larger one, so that pages are made before many requests
# come.
_SHARE, _LONE_SHARE = 0.1, 0.5
_IS_LONE = 0.9  # the part of a slice's time that the thread ran, from which on it was alone


def prepare_pages(tensor: torch.Tensor, *, delay_s: float = DELAY_S) -> None:
    """Asks for huge pages under `tensor`, which has to be contiguous, and has a thread of low priority make them, after
    `delay_s`.

    For memory that was not written yet: existing pages stay as they are. `tensor` may be used meanwhile. Does nothing
    on devices and on other systems, or if the kernel declines.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    if end - start < mmap.PAGESIZE:
        return
    if error := _advise(start, end, mmap.MADV_HUGEPAGE):
        log.debug("no huge pages", extra={"reason": error})
    # The thread keeps `tensor` alive, so that no other memory takes its address.
    threading.Thread(target=_populate, args=(tensor, start, end, delay_s), name="kv-pages", daemon=True).start()


def _populate(tensor: torch.Tensor, start: int, end: int, delay_s: float) -> None:  # noqa: ARG001
    time.sleep(delay_s)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    for begin in range(start, end, _SLICE_BYTES):
        wall_s, own_s = time.perf_counter(), time.thread_time()
        if error := _advise(begin, min(begin + _SLICE_BYTES, end), _POPULATE_WRITE):
            log.debug("pages are made when they are first used", extra={"reason": error})
            return
        wall_s, own_s = time.perf_counter() - wall_s, time.thread_time() - own_s
        share = _LONE_SHARE if own_s >= _IS_LONE * wall_s else _SHARE
        time.sleep(wall_s * (1 / share - 1))
    log.debug("the cache's pages are made")


def _advise(start: int, end: int, advice: int) -> str:
    """The kernel's reason if it declines; else empty."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice) == 0:
        return ""
    return os.strerror(ctypes.get_errno())
