"""Keeps a store's directory below its size limit while any number of processes write to it.

No process counts for all others. Each process that has written SHARE of the limit makes a pass before it writes on: it
counts the files and evicts down to TARGET of the limit. So several processes that write at full speed stay below the
limit; with more than ten, each further process may exceed it by SHARE for a moment. Writes wait for a pass, but not
long; reads go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common import metrics
from kv_store.shared_storage.cleaner import PassEndedError, PassReport, StoreCleaner
from kv_store.shared_storage.file_clock import FileClock

log = logging.getLogger(__name__)

TARGET = 0.9
SHARE = 0.01
MAX_WAIT_S = 2.0  # a pass that takes longer (or its killed cleaner's lease) holds up no write beyond this
IDLE_PASS_S = 300.0  # without writes: others' files count too, and what killed writers left goes
NAMES_PASS_S = 3600.0  # names without a run are rare, and looking for them is slow
# Between passes for a full disk: if others fill the disk, the store must not lose all its blocks at once.
FULL_DISK_PASS_S = 5.0
_RETRY_S = 0.05  # while another process cleans


class StoreSpace:
    """Limits the writes of one process, with a thread that makes the passes. Any thread may call any method."""

    def __init__(self, kv_dir: Path, clock: FileClock, limit_bytes: int, on_room: Callable[[], None]) -> None:
        """`on_room` is called from the thread when `has_room` may have become true."""
        self._cleaner = StoreCleaner(kv_dir, clock)
        self._kv_dir = kv_dir
        self._limit = limit_bytes
        self._on_room = on_room
        self._changed = threading.Condition()
        self._num_writing = 0  # bytes of writes under way
        self._num_written = 0  # bytes since the last pass began
        self._waits_since: float | None = None  # time.monotonic(): writes are held up
        self._disk_is_full = False
        self._full_pass_at = 0.0  # time.monotonic()
        self._names_pass_at = 0.0
        self._has_links = True
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-cleaner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """False if the thread still waits for the file system."""
        self._cleaner.stop()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def has_room(self) -> bool:
        """Whether the next write may begin. To be asked again every second or so if not."""
        with self._changed:
            if not self._is_out_of_share():
                self._waits_since = None
                return True
            now = time.monotonic()
            self._waits_since = self._waits_since or now
            self._changed.notify_all()
            return now - self._waits_since >= MAX_WAIT_S

    def begin(self, num_bytes: int) -> None:
        """A write of at most `num_bytes` begins."""
        with self._changed:
            self._num_writing += num_bytes

    def end(self, num_bytes: int, num_written: int, *, disk_is_full: bool = False, has_links: bool = True) -> None:
        """A write has ended, with `num_written` new bytes on the disk, or because the disk is full."""
        with self._changed:
            self._num_writing -= num_bytes
            self._num_written += num_written
            self._disk_is_full = self._disk_is_full or disk_is_full
            self._has_links = has_links
            if self._is_due():
                self._changed.notify_all()

    # ------------------------------------------------------------------------------------------ the thread

    def _is_out_of_share(self) -> bool:
        used = self._num_writing + self._num_written
        return used > 0 and used >= SHARE * self._limit

    def _is_due(self) -> bool:
        is_full = self._disk_is_full and time.monotonic() >= self._full_pass_at
        return is_full or self._num_written >= SHARE * self._limit / 2 or self._waits_since is not None

    def _run(self) -> None:
        is_made = False  # the first pass is made at once: nothing is known of the directory yet
        while True:
            with self._changed:
                if is_made:
                    self._changed.wait_for(lambda: self._is_closed or self._is_due(), IDLE_PASS_S)
                if self._is_closed:
                    return
            is_made = self._make_pass()
            if is_made:
                self._on_room()
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, _RETRY_S)

    def _make_pass(self) -> bool:
        """False if it has to be tried again."""
        now = time.monotonic()
        with self._changed:
            num_counted = self._num_written
            for_full_disk = self._disk_is_full and now >= self._full_pass_at
            with_names = now >= self._names_pass_at or not self._has_links
        report: PassReport | None = None
        try:
            report = self._cleaner.make_pass(
                lambda in_use: int(TARGET * min(self._limit, in_use if for_full_disk else self._limit)),
                with_names=with_names,
            )
        except PassEndedError:
            return False
        except OSError as error:
            # The directory was wiped, or its file system is gone: writes will fail by themselves.
            log.warning("cannot clean the store", extra={"directory": str(self._kv_dir), "reason": str(error)})
        else:
            if report is None:
                return False
            self._tell(report)
        with self._changed:
            self._num_written -= num_counted
            self._waits_since = None
            if for_full_disk:
                self._disk_is_full = False
                self._full_pass_at = time.monotonic() + FULL_DISK_PASS_S
            if with_names:
                self._names_pass_at = now + NAMES_PASS_S
        return True

    def _tell(self, report: PassReport) -> None:
        metrics.kv_store_bytes.set(report.left.num_bytes)
        metrics.kv_store_runs.set(report.left.num_runs)
        metrics.kv_store_evicted_bytes.inc(report.evicted.num_bytes)
        metrics.kv_store_evicted_runs.inc(report.evicted.num_runs)
        if report.evicted.num_runs or report.num_stale_temps:
            log.info(
                "evicted stored KV",
                extra={
                    "num_bytes": report.evicted.num_bytes,
                    "num_runs": report.evicted.num_runs,
                    "num_bytes_left": report.left.num_bytes,
                    "num_stale_temps": report.num_stale_temps,
                },
            )
