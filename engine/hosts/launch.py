"""Starts the processes of a host's further ranks, if it has several, and says what each rank of it computes with."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from common.config import EngineSettings
from common.errors import StartupError
from common.logs import LogFormat, shown_format, shown_level
from engine.hosts.place import Place
from engine.ranks.launch import part_of_cores

_END_S = 5.0  # how long a rank may take to end with rank 0

S = TypeVar("S", bound=EngineSettings)


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a further rank is told when it starts."""

    place: Place
    model_dir: str
    settings: str  # WorkerSettings as JSON: this rank's share of threads and cores
    log_level: str
    log_format: LogFormat


def settings_of_rank(settings: S, place: Place) -> S:
    """Its share of threads and cores: those in `settings` are the host's."""
    if place.ranks_per_host == 1:
        return settings
    cores = part_of_cores(settings.cpu_cores, place.number, place.ranks_per_host)
    num_threads = settings.num_threads or len(settings.cpu_cores) or torch.get_num_threads()
    changes = {"cpu_cores": tuple(cores), "num_threads": max(1, num_threads // place.ranks_per_host)}
    return settings.model_copy(update=changes)


class FurtherRanks:
    """All ranks of this host but the one of this process, each in a process of its own that ends with this one."""

    def __init__(self, settings: EngineSettings, model_dir: Path, place: Place) -> None:
        """Starts them. `settings`: the host's, a worker's. `place`: of this process's rank."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        try:
            for number in range(1, place.ranks_per_host):
                self._start(settings, model_dir, place.of_rank(number))
        except BaseException:
            self.kill()
            raise

    def check(self) -> None:
        """Raises `StartupError` if one has ended."""
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                raise StartupError(_ended(rank, code))

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Has `on_failure` called with one line when one ends with another code than 0, on a thread."""

        def wait(rank: int, process: subprocess.Popen[bytes]) -> None:
            if code := process.wait():
                on_failure(_ended(rank, code))

        for rank, process in self._processes.items():
            threading.Thread(target=wait, args=(rank, process), name=f"end of rank {rank}", daemon=True).start()

    def wait(self) -> None:
        """Until they have ended, as they do with rank 0. Kills those that do not."""
        for process in self._processes.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, settings: EngineSettings, model_dir: Path, place: Place) -> None:
        share = settings_of_rank(settings, place)
        told = Told(
            place=place,
            model_dir=str(model_dir),
            settings=share.model_dump_json(),
            log_level=shown_level(),
            log_format=shown_format(),
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.hosts.process"],
            stdin=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": str(share.num_threads)},
        )
        self._processes[place.rank] = process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # if it has ended, `check` says so
                stdin.write(msgspec.msgpack.encode(told))


def _ended(rank: int, code: int) -> str:
    return f"rank {rank} (a process of this host) has ended with code {code}: its log says why"
