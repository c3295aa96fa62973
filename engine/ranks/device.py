"""Several processes of one host that compute one model together: rank 0 in the engine's own, the others beside it.

All of them compute each step, every rank its part of every layer, or of the layers of its stage. Rank 0 sends the step
and draws the tokens. The KV caches of all ranks lie in memory that rank 0 sees, so it alone moves blocks: its
connectors read and write all caches, and it copies blocks to and from host memory. Stages write to one cache, each to
its own layers, so nobody else sees that there are several.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from common.config import EngineSettings
from common.errors import LostRankError, StartupError
from common.types import SampledToken
from engine.blocks.host_tier import BlockCopy
from engine.device import Device, KVPlane, Ticket, do_nothing
from engine.local.device import LocalDevice, warm_up_rows
from engine.local.host_cache import allocate_host_cache, copy_blocks
from engine.ranks.alive import RankWatch
from engine.ranks.drawn_tokens import ToldTokens
from engine.ranks.launch import (
    Rank,
    StartRank,
    check_supported,
    cores_of_rank,
    has_cores,
    join_of_rank,
    layout_of,
    share_of_rank,
    start_rank,
)
from engine.ranks.meeting import CACHE, Meeting, Place
from engine.ranks.messages import Step, Tokens
from engine.ranks.others import OtherRanks, info_of_all
from engine.ranks.process import checked, ready
from engine.ranks.shared_cache import SharedCache, map_cache
from engine.step import StepInput, StepOutput

log = logging.getLogger(__name__)

_IDLE_LOOK_S = 0.25  # between two looks at whether the ranks live, if none is waited for; else `LOOK_S`


class RankedDevice(Device):
    """A step that fails on one rank ends all: the others wait in it for values that never come."""

    def __init__(self, model_dir: Path, settings: EngineSettings, start: StartRank = start_rank) -> None:
        """Starts the other ranks and loads the model, each rank its part. Raises `StartupError` with one line if a rank
        cannot, and `ConfigError` for settings that ranks do not take."""
        check_supported(settings)
        self._layout = layout = layout_of(settings)
        self._deals_experts = settings.expert_parallel_size > 1
        share = share_of_rank(settings, model_dir)
        self._processes: list[Rank] = []
        self._others = OtherRanks({}, RankWatch([]))
        self._looked_at = time.monotonic()
        self._sending = threading.Lock()  # a step may begin beside the thread that computes another one
        self._told = ToldTokens(self._tell_first_stage)
        self._place: Place | None = None
        try:
            meeting = Meeting(layout)
        except OSError as error:
            raise StartupError(f"{layout.size} ranks have no memory to share: {error.strerror}") from error
        try:
            for number in range(1, layout.size):
                self._processes.append(start(number, share.num_threads or 1))
            pids = [os.getpid(), *(rank.process.pid for rank in self._processes)]
            self._watch = RankWatch(pids)
            self._others = OtherRanks({rank.number: rank.channel for rank in self._processes}, self._watch)
            for rank in self._processes:
                files = meeting.files(rank.number)
                join = join_of_rank(settings, share, model_dir, rank.number, pids, list(files))
                rank.channel.send(join, list(files.values()))
            files = meeting.files(0)
            self._place = Place(layout, 0, files, self._problem_of_any, has_core=has_cores(settings))
            if cores := cores_of_rank(settings, 0):
                os.sched_setaffinity(0, cores)
            pipeline = self._place.pipeline
            if layout.num_stages > 1:
                pipeline = replace(pipeline, tell=self._drew)
            self._local = LocalDevice(
                model_dir,
                share,
                raises=True,
                group=self._place.group,
                pipeline=pipeline,
                allocate=SharedCache(files[CACHE]).allocate if layout.num_caches < layout.size else None,
            )
            planes = [self._plane_of(rank, meeting.files(rank.number)[CACHE]) for rank in self._processes]
            self._joined = planes[: layout.num_caches - 1]  # those of the last stage: the others have the same
            self._host_caches = [allocate_host_cache(share, plane.spec, self._local.device) for plane in self._joined]
        except (LostRankError, OSError) as error:
            self.close()
            raise StartupError(str(error)) from error
        except BaseException:
            self.close()
            raise
        finally:
            meeting.close()
        self.info = replace(
            info_of_all(self._local.info, self._shape),
            overlaps_steps=layout.num_stages > 1,
        )
        self.device = self._local.device
        facts = {
            "num_ranks": layout.size,
            "num_stages": layout.num_stages,
            "threads_of_each": share.num_threads,
            "deals_experts": self._deals_experts,
        }
        log.info("ranks ready", extra=facts)

    @property
    def kernels_name(self) -> str:
        """Of a model of time, which is for as many ranks."""
        dealt = ", experts dealt out" if self._deals_experts else ""
        if self._layout.has_one_cache:
            dealt = ", requests and experts dealt out"
        return f"{self._local.kernels_name}, {self._shape}{dealt}"

    @property
    def _shape(self) -> str:
        stages = f" in {self._layout.num_stages} stages" if self._layout.num_stages > 1 else ""
        return f"{self._layout.size} ranks{stages}"

    def begin(self, step: StepInput) -> Ticket:
        ticket = self._local.begin(step)  # which copies rank 0's own blocks
        if step.copies:
            self._copy_joined(step.copies)
            step = replace(step, copies=())  # the others have no host memory
        with self._sending:
            if self._layout.num_stages > 1:
                self._told.ask(step.rows)
            self._others.send(Step.of(step))
        return ticket

    def _drew(self, step: int, rows: Sequence[int], tokens: Sequence[SampledToken | None]) -> None:
        with self._sending:
            self._told.drew(step, rows, tokens)

    def _tell_first_stage(self, tokens: Tokens) -> None:
        ranks = [rank.number for rank in self._processes if self._layout.stage(rank.number).is_first]
        self._others.send(tokens, ranks)

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        """Raises `LostRankError` if a rank is gone, and what stopped rank 0 if that was something else: no step can be
        computed any more."""
        output = self._local.end(ticket, meanwhile)
        self._others.wait_for_step(ticket.number, meanwhile)
        return output

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        self._local.copy(copies)
        self._copy_joined(copies)

    def _copy_joined(self, copies: Sequence[BlockCopy]) -> None:
        for plane, host_cache in zip(self._joined, self._host_caches, strict=True):
            copy_blocks(copies, torch.as_tensor(plane.cache), host_cache)

    def planes(self) -> list[KVPlane]:
        return [*self._local.planes(), *self._joined]

    def warm_up(self) -> None:
        """As `LocalDevice.warm_up` does."""
        for row in warm_up_rows(self.info):
            self.execute([row])

    def check_alive(self) -> None:
        """Any thread may call it."""
        now = time.monotonic()
        if now - self._looked_at < _IDLE_LOOK_S:
            return
        self._looked_at = now
        self._others.check()

    def close(self) -> None:
        """Ends the other ranks."""
        if self._place is not None:
            self._place.fail()
            self._place.close()
        for rank in self._processes:
            rank.channel.close()  # all of them first: a rank may wait for another one
        for rank in self._processes:
            rank.end()
        self._others.close()

    def _plane_of(self, rank: Rank, cache_file: int) -> KVPlane:
        """Waits until the rank has loaded its part. Raises `StartupError` if it cannot, or is not like this one."""
        message, files = self._others.answer(rank.number)
        try:
            said = checked(rank.number, message, ready(self._local))
            place = said.spec
            shape = (said.num_cache_blocks, *place.block_shape)
            cache = map_cache(cache_file, shape, getattr(torch, place.dtype))
        finally:
            for file in files:
                os.close(file)
        return KVPlane(spec=place, cache=cache[: said.num_blocks])

    def _problem_of_any(self, _waited_for: int) -> str:
        """Of any rank, whichever is waited for: that one may itself wait for another, which is lost."""
        return self._others.problem()
