"""Starts the processes of a worker's ranks, and says what each of them gets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch

from common.config import EngineSettings
from common.errors import ConfigError
from common.logs import shown_format, shown_level
from common.model_files import model_identity
from engine.kernels.library import choose_kernels
from engine.loading.dtype import resolve_dtype
from engine.local.device_choice import choose_device
from engine.local.memory import DEFAULT_CPU_KV_CACHE_GB
from engine.ranks.layout import Layout
from engine.ranks.messages import Channel, Join

_END_S = 5.0  # how long a rank that was told to end may take


class Process(Protocol):
    """What a rank runs in."""

    pid: int

    def kill(self) -> None: ...

    def wait(self, timeout: float) -> object:
        """Raises `subprocess.TimeoutExpired`."""


@dataclass(slots=True, frozen=True)
class Rank:
    """Another process, as rank 0 knows it."""

    number: int
    process: Process
    channel: Channel

    def end(self) -> None:
        """Closes the channel, which ends the process. Kills it if it does not end."""
        self.channel.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_END_S)


StartRank: TypeAlias = Callable[[int, int], Rank]
"""Starts the process of a rank: its number, and how many threads it computes with."""


def start_rank(number: int, num_threads: int) -> Rank:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "engine.ranks.process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"OMP_NUM_THREADS": str(num_threads)},
        )
    return Rank(number, process, Channel(ours))


def layout_of(settings: EngineSettings) -> Layout:
    if settings.data_parallel_size > 1:
        return Layout(1, settings.data_parallel_size, has_one_cache=True)
    return Layout(settings.pipeline_parallel_size, settings.tensor_parallel_size)


def check_supported(settings: EngineSettings) -> None:
    """Raises `ConfigError` for what ranks cannot do."""
    flag, dealt = settings.flag_of_ranks, settings.expert_parallel_size
    if settings.data_parallel_size > 1:
        for other, size in (
            ("--tensor-parallel-size", settings.tensor_parallel_size),
            ("--pipeline-parallel-size", settings.pipeline_parallel_size),
        ):
            if size > 1:
                raise ConfigError(flag, f"does not go with {other}")
    of = "--tensor-parallel-size" if settings.data_parallel_size == 1 else flag
    if dealt not in (1, num_ranks := layout_of(settings).ranks_per_stage):
        raise ConfigError("--expert-parallel-size", f"is 1 or as many as {of}, which is {num_ranks}: not {dealt}")
    device = choose_device(settings.device).device
    if device != "cpu":
        raise ConfigError(flag, f"needs --device cpu, not {device}: ranks on other devices are not supported yet")
    if settings.speculation not in ("none", "ngram"):
        raise ConfigError(flag, "does not go with a draft model: take --speculation none or ngram")


def share_of_rank(settings: EngineSettings, model_dir: Path) -> EngineSettings:
    """The settings of rank 0: its share of threads and memory. Kernels and dtype are chosen once, here: processes
    that measured them at the same time could choose differently. Raises `StartupError` as loading does."""
    layout = layout_of(settings)
    num_caches = layout.num_caches  # the stages have one together
    num_threads = settings.num_threads or len(settings.cpu_cores) or torch.get_num_threads()
    dtype = resolve_dtype(settings.dtype, model_dir, "cpu", settings.kernels).dtype
    choice, _ = choose_kernels(
        settings.kernels,
        device=torch.device("cpu"),
        dtype=getattr(torch, dtype),
        cache_dir=settings.cache_dir,
        quantization=settings.quantization,
        model=model_identity(model_dir),
    )
    return EngineSettings.model_validate(
        {
            **{name: getattr(settings, name) for name in EngineSettings.model_fields},
            "device": "cpu",
            "dtype": dtype,
            "kernels": choice.instruction_set,
            "num_threads": max(1, num_threads // layout.size),
            "kv_cache_memory_gb": (settings.kv_cache_memory_gb or DEFAULT_CPU_KV_CACHE_GB) / num_caches,
            "host_cache_gb": settings.host_cache_gb / num_caches,
            "swap_space_gb": settings.swap_space_gb / num_caches,
        }
    )


def cores_of_rank(settings: EngineSettings, rank: int) -> list[int]:
    """Cores that the rank is pinned to: neighbours, as many as the others have; all if there are fewer than ranks."""
    return part_of_cores(settings.cpu_cores, rank, settings.num_ranks)


def part_of_cores(cores: Sequence[int], number: int, count: int) -> list[int]:
    """Those of rank `number` of `count` ranks on these cores, as `cores_of_rank` has them."""
    if len(cores) < count:
        return list(cores)
    return list(cores[len(cores) * number // count : len(cores) * (number + 1) // count])


def has_cores(settings: EngineSettings) -> bool:
    """Whether there is a core for each rank."""
    return (len(settings.cpu_cores) or len(os.sched_getaffinity(0))) >= settings.num_ranks


def join_of_rank(
    settings: EngineSettings,
    share: EngineSettings,
    model_dir: Path,
    rank: int,
    pids: list[int],
    files: Sequence[str] = (),
) -> Join:
    """What another rank is told: as rank 0, but for the host memory, which rank 0 has for all. `files`: names of the
    descriptors that it gets."""
    share = share.model_copy(update={"host_cache_gb": 0.0, "preemption_mode": "recompute"})
    return Join(
        rank=rank,
        layout=layout_of(settings),
        files=list(files),
        pids=pids,
        name=f"rank {rank}",
        model_dir=str(model_dir),
        settings=share.model_dump_json(),
        cores=cores_of_rank(settings, rank),
        has_core=has_cores(settings),
        log_level=shown_level(),
        log_format=shown_format(),
    )
