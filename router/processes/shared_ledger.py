"""The counts of limits, in memory that all processes of a router share, so that limits hold exactly for the router as a
whole.

    file `numbers`     a row for each name:  | process 0 | process 1 | ... | gone | state | state | state |
    file `names`       the names, one a line, in the order of the rows; rows are added and never removed

A process writes its own column and the states; `gone` has what processes that ended have counted. One lock is held
around each look and change, for microseconds. The kernel gives it back if its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
from collections.abc import Iterator, MutableSequence
from pathlib import Path
from typing import cast

from common.errors import StartupError

NUM_STATES = 3
ROWS_AT_ONCE = 1024
TOTAL = "total "  # names that begin so are counted for good: what a process that ended has counted stays


class SharedLedger:
    """`process` is the number of this process's column, from 0; None if it only reads. Raises `StartupError` if the
    files are not those that other processes use."""

    def __init__(self, directory: str, num_processes: int, process: int | None = None) -> None:
        self.num_processes = num_processes
        self._process = process
        self._width = num_processes + 1 + NUM_STATES
        folder = Path(directory)
        try:
            self._names = (folder / "names").open("a+b")
            self._numbers = (folder / "numbers").open("a+b")
        except OSError as error:
            raise StartupError(f"the router's shared limits cannot be opened: {error}") from error
        # A name is written before its row: numbers without names are of files that somebody removed in part.
        if self._numbers.seek(0, os.SEEK_END) and not self._names.seek(0, os.SEEK_END):
            self.close()
            raise StartupError(f"the router's shared limits in {directory} have rows and no names: a file was removed")
        self._rows: dict[str, memoryview[float]] = {}
        self._mapped: list[memoryview[float]] = []  # ROWS_AT_ONCE each

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.flock(self._numbers, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._numbers, fcntl.LOCK_UN)

    def take(self, name: str, num: int, most: float) -> bool:
        with self.locked():
            row = self._row(name)
            if sum(row[: self.num_processes]) + num > most:
                return False
            row[self._own()] += num
            return True

    def give(self, name: str, num: int) -> None:
        with self.locked():
            self._row(name)[self._own()] -= num

    def total(self, name: str) -> int:
        """The sum over all processes, including those that ended."""
        with self.locked():
            return int(sum(self._row(name)[: self.num_processes + 1]))

    def put(self, numbers: dict[str, float]) -> None:
        """Writes this process's numbers, by name."""
        with self.locked():
            for name, number in numbers.items():
                self._row(name)[self._own()] = number

    def by_process(self, name: str) -> list[int]:
        """Each process's number under `name`."""
        with self.locked():
            return [int(number) for number in self._row(name)[: self.num_processes]]

    def state(self, name: str) -> MutableSequence[float]:
        return cast("MutableSequence[float]", self._row(f"state {name}")[-NUM_STATES:])

    def forget_state(self, name: str) -> None:
        state = self.state(name)
        for index in range(NUM_STATES):
            state[index] = 0.0

    def process_ended(self, process: int) -> bool:
        """Clears what a process that ended had in flight. Returns False and changes nothing while another process has
        the lock."""
        try:
            fcntl.flock(self._numbers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with self.locked():  # which is had already
            self._read_names()
            for name, row in self._rows.items():
                if name.startswith(TOTAL):
                    row[self.num_processes] += row[process]
                row[process] = 0.0
        return True

    def close(self) -> None:
        self._names.close()
        self._numbers.close()

    def _own(self) -> int:
        if self._process is None:
            raise ValueError("this ledger belongs to no process")
        return self._process

    def _row(self, name: str) -> memoryview[float]:
        """Inside of the lock."""
        row = self._rows.get(name)
        if row is None:
            self._read_names()
            row = self._rows.get(name)
        if row is None:
            self._names.write(json.dumps(name).encode() + b"\n")
            self._names.flush()
            row = self._add_row(name)
        return row

    def _read_names(self) -> None:
        """Reads the names of rows that other processes have added."""
        self._names.seek(0)
        for line in self._names.readlines()[len(self._rows) :]:
            self._add_row(json.loads(line))

    def _add_row(self, name: str) -> memoryview[float]:
        part, number = divmod(len(self._rows), ROWS_AT_ONCE)
        if part == len(self._mapped):
            self._mapped.append(self._map(part))
        begin = number * self._width
        self._rows[name] = row = self._mapped[part][begin : begin + self._width]
        return row

    def _map(self, part: int) -> memoryview[float]:
        size = 8 * self._width * ROWS_AT_ONCE
        size += -size % mmap.ALLOCATIONGRANULARITY
        if self._numbers.seek(0, 2) < (part + 1) * size:
            self._numbers.truncate((part + 1) * size)
        return memoryview(mmap.mmap(self._numbers.fileno(), size, offset=part * size)).cast("d")
