"""Collectives of ranks on several hosts: Gloo over TCP, which notices that a rank is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from common.errors import LostRankError
from engine.ranks.group import LONGEST_WAIT_S, GlooCollectives

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, Work
    from torch.distributed import ProcessGroupGloo

_LOOK = timedelta(seconds=0.25)
_MEET_LOOK_S = 0.1
_REASON_S = 2.0  # that the reason for a broken connection may take to come


class HostGroup(GlooCollectives):
    """A `RankGroup`. Raises `LostRankError` if a rank will not come: the group is of no use then."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        address: str,
        problem: Callable[[], str],
        *,
        timeout_s: float,
        num_here: int = 1,
    ) -> None:
        """Meets the other ranks by `store`, within `timeout_s`. `address` is this host's, as the others reach it.
        `problem`: why no further value will come, in one line; empty if it may. `num_here`: ranks of this host."""
        from torch.distributed import ProcessGroupGloo

        self.rank, self.size, self.num_here = rank, size, num_here
        self._problem = problem
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=LONGEST_WAIT_S)
        self._group = self._meet(lambda: ProcessGroupGloo(store, rank, size, options), timeout_s)

    def _meet(self, build: Callable[[], ProcessGroupGloo], timeout_s: float) -> ProcessGroupGloo:
        """Gloo waits for all ranks, whatever has become of them. So a thread waits, which is left to itself if one is
        lost."""
        built: list[ProcessGroupGloo | RuntimeError] = []

        def run() -> None:
            try:
                built.append(build())
            except RuntimeError as error:
                built.append(error)

        thread = threading.Thread(target=run, name="gloo", daemon=True)
        thread.start()
        give_up = time.monotonic() + timeout_s
        while not built:
            thread.join(_MEET_LOOK_S)
            if reason := self._problem():
                raise LostRankError(reason)
            if time.monotonic() > give_up:
                raise LostRankError(
                    f"the ranks of other hosts cannot be reached within {timeout_s:g} s (--ranks-timeout)"
                )
        if isinstance(built[0], RuntimeError):
            raise LostRankError(self._reason_for(built[0])) from built[0]
        return built[0]

    def _wait(self, work: Work) -> None:
        while True:
            # Asked before: a wait may fail because it took too long, and the work end just after that.
            had_ended = work.is_completed()
            try:
                work.wait(_LOOK)
            except RuntimeError as error:
                if had_ended:
                    raise LostRankError(self._reason_for(error)) from error
                if reason := self._problem():
                    raise LostRankError(reason) from error
            else:
                return

    def _reason_for(self, error: RuntimeError) -> str:
        give_up = time.monotonic() + _REASON_S
        while time.monotonic() < give_up:
            if reason := self._problem():
                return reason
            time.sleep(0.05)
        return f"the ranks of other hosts cannot be reached: {str(error).splitlines()[0]}"
