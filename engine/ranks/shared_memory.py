"""Ranks of one host that exchange values in memory which they share: `engine/kernels/source/exchange.cpp`.

The memory has no name, so two workers never meet in it and nothing is left when they end, however they end: it belongs
to the file descriptor that each rank inherits.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch

from common.errors import InternalError, LostRankError, StartupError
from engine.kernels.build import EXCHANGE, library_file

SLOT_BYTES = 1 << 20  # values of one turn; more are exchanged slot by slot, while they are in a core's cache


_IS_LOST = ctypes.CFUNCTYPE(c_int, c_int)
"""Asked of a rank that others have waited for in vain: not 0 if it will never come."""


@cache
def exchange_library() -> ctypes.CDLL | None:
    """None if it was not built."""
    file = library_file(EXCHANGE)
    if not file.exists():
        return None
    library = ctypes.CDLL(str(file))
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "baton_exchange_bytes": (c_int64, (c_int, c_int64)),
        "baton_exchange": (c_void_p, (c_void_p, c_int, c_int, c_int64, c_int, _IS_LOST)),
        "baton_exchange_end": (None, (c_void_p,)),
        "baton_exchange_fail": (None, (c_void_p,)),
        "baton_add_up": (c_int, (c_void_p, c_void_p, c_int, c_int64)),
        "baton_gather": (c_int, (c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
        "baton_send": (c_int, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p)),
        "baton_receive": (c_int, (c_void_p, c_void_p, c_int64, c_void_p)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def make_segment(size: int) -> int:
    """A file descriptor of memory in which `size` ranks can meet. Raises `StartupError` if there is no way to here."""
    library = exchange_library()
    if library is None or not hasattr(os, "memfd_create"):
        why = "a library that was not built (make install does, with a C++ compiler)" if library is None else "Linux"
        raise StartupError(f"{size} ranks need {why}: ranks of a host meet in shared memory")
    try:
        segment = os.memfd_create("baton-ranks")
        os.ftruncate(segment, library.baton_exchange_bytes(size, SLOT_BYTES))
    except OSError as error:
        raise StartupError(f"{size} ranks have no memory to share: {error.strerror}") from error
    return segment


class SharedMemoryGroup:
    """A `RankGroup`. Ranks that keep pace wait for each other on their cores, if each has one, for some tens of
    microseconds; who waits longer sleeps."""

    over_network = False

    def __init__(
        self, segment: int, rank: int, size: int, problem: Callable[[int], str], *, has_core: bool = True
    ) -> None:
        """`segment` is what `make_segment` made; it may be closed then. `problem` is asked ten times a second for why a
        rank that is waited for will never come (`RankWatch.problem`). `has_core`: each rank has a core, so none takes
        one away from the other by waiting on it."""
        library = exchange_library()
        if library is None:
            raise StartupError("the library that ranks of a host meet in was not built")
        self.rank, self.size, self.num_here = rank, size, size
        self._library = library
        self._problem = problem
        self._reason = ""
        self._is_lost = _IS_LOST(self._ask)  # as long as the library may call it
        memory = mmap.mmap(segment, library.baton_exchange_bytes(size, SLOT_BYTES))
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._exchange = ctypes.c_void_p(
            library.baton_exchange(self._memory.data_ptr(), rank, size, SLOT_BYTES, has_core, self._is_lost)
        )
        weakref.finalize(self, library.baton_exchange_end, self._exchange).atexit = False

    def all_reduce(self, values: torch.Tensor) -> None:
        """Raises `LostRankError` if a rank will not come: the group is of no use then."""
        if values.dtype not in (torch.float32, torch.bfloat16) or not values.is_contiguous():
            plain = values.float().contiguous()
            self.all_reduce(plain)
            values.copy_(plain)
            return
        self._check(
            self._library.baton_add_up(
                self._exchange, values.data_ptr(), values.dtype == torch.bfloat16, values.numel()
            )
        )

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Raises `LostRankError` as `all_reduce` does."""
        values = values.contiguous()
        *shape, width = values.shape
        out = torch.empty((*shape, self.size * width), dtype=values.dtype)
        if out.numel():
            row_bytes = width * values.element_size()
            rows = values.nbytes // row_bytes
            self._check(self._library.baton_gather(self._exchange, values.data_ptr(), rows, row_bytes, out.data_ptr()))
        return out

    def all_to_all(
        self, rows: torch.Tensor, counts: Sequence[int], num_from: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Raises `LostRankError` as `all_reduce` does, and `InternalError` if ranks send other numbers of rows than
        `num_from`."""
        rows = rows.contiguous()
        width = rows.shape[1]
        row_bytes, ints = width * rows.itemsize, c_int64 * self.size
        sent, came = ints(*counts), ints()
        self._check(self._library.baton_send(self._exchange, rows.data_ptr(), sent, row_bytes, came))
        of_ranks = list(came)
        if num_from is not None and of_ranks != list(num_from):
            raise InternalError(f"{of_ranks} rows came from the ranks, not {list(num_from)}")
        out = torch.empty((sum(of_ranks), width), dtype=rows.dtype)
        self._check(self._library.baton_receive(self._exchange, rows.data_ptr(), row_bytes, out.data_ptr()))
        return out, of_ranks

    def fail(self) -> None:
        """Tells the others that this rank will not go on: they wait for it in vain from now on."""
        self._library.baton_exchange_fail(self._exchange)

    def _check(self, lost: int) -> None:
        if lost >= 0:
            raise LostRankError(self._reason or self._problem(lost) or f"rank {lost} has failed")

    def _ask(self, rank: int) -> int:
        try:
            self._reason = self._problem(rank)
        except Exception as error:  # nothing may be raised through the library
            self._reason = f"rank {rank} cannot be watched: {type(error).__name__}: {error}"
        return bool(self._reason)
