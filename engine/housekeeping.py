"""What a step does beside computing: the work that time brings, and the work that fills idle time, in a fixed order.

`due` comes before the scheduler decides, since it changes what the scheduler sees; `rest` comes after, since it takes
only what the scheduler left. Both run between steps alone: they take and free blocks, which a step may be writing.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.blocks.block_manager import BlockManager
from engine.blocks.counts import NOTHING
from engine.cache_hints import CacheHints
from engine.device import Device
from engine.remote_kv import RemoteKV
from engine.reports import report_counts, report_retained
from engine.scheduling.scheduler import Scheduler


class Housekeeping:
    def __init__(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        remote_kv: RemoteKV,
        hints: CacheHints,
        device: Device,
        take_back: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        """`take_back` gives the scheduler requests whose wait for KV is over. `wake` has the next step come at once."""
        self._scheduler = scheduler
        self._blocks = blocks
        self._remote_kv = remote_kv
        self._hints = hints
        self._device = device
        self._take_back = take_back
        self._wake = wake
        self._num_retained: int | None = None  # as reported

    def due(self, now: float) -> None:
        """Before the scheduler decides. Most steps have nothing to do here, and ask that once."""
        retention, remote_kv = self._blocks.retention, self._remote_kv
        retention.now = now
        is_waited_for = retention.ends or self._hints.evicting or now >= remote_kv.verify_at
        if is_waited_for or not (remote_kv.is_idle and self._scheduler.has_work):
            self._do(now)

    def _do(self, now: float) -> None:
        """1. Overdue transfers are given up, and their requests taken back: this step may go on with them.
        2. Retention expires before anything evicts: what is over is evicted like any other block.
        3. Evictions of the store are answered, and what it took long ago is to be verified when it is used next.
        4. If there is nothing to compute, blocks of host memory are brought to the store. They come last, since
           they take device blocks in the order of eviction that is now right.
        """
        if not self._remote_kv.is_idle:
            self._remote_kv.give_up_overdue()
            self._take_back()
        self._blocks.expire_retention(now)
        if self._hints.evicting:
            self._hints.report(now)
        if now >= self._remote_kv.verify_at:
            self._remote_kv.age_stored(now)
        if not self._scheduler.has_work:
            self._remote_kv.write_back_from_host(self._device.copy)

    def rest(self, now: float) -> None:
        """After the scheduler has decided, and what it decided is carried out, unless remote KV is idle: prefetches go
        on with the blocks that are left, while no request waits."""
        may_move = not self._scheduler.num_waiting
        if self._remote_kv.go_on_prefetching(now, self._device.copy, may_move=may_move):
            self._wake()  # the next group comes with the next step, which is not to wait for anything else

    def report(self) -> None:
        """Adds to the metrics what was counted since the last step."""
        if self._blocks.counts != NOTHING:
            report_counts(self._blocks.counts.take())
        if self._blocks.retention.ends or self._num_retained != 0:
            self._report_retained(len(self._blocks.retention))

    def _report_retained(self, num_retained: int) -> None:
        if num_retained != self._num_retained:
            report_retained(num_retained)
            self._num_retained = num_retained
