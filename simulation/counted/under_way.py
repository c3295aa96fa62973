"""What a worker computes now: a run of steps of its decodes alone, or one step that has chunks of prompts, too."""

from __future__ import annotations

from common.batch_time import StepShape
from common.types import LOAD_INTERVAL_S
from simulation.counted.decodes import Decodes
from simulation.counted.job import Job
from simulation.step_times import Run, StepTimes


class UnderWay:
    """Of a step, nothing is known but its end. Of a run, each step."""

    def __init__(self, decodes: Decodes, times: StepTimes) -> None:
        self.run: Run | None = None
        self.chunks: list[tuple[Job, int]] = []  # of the step, or of the next one while it is put together: new tokens
        self.busy_s = 0.0  # of the device, until now
        self.num_steps = 0  # likewise
        self._decodes = decodes
        self._times = times
        self._step_start = self._step_end = 0.0
        self._step_device_s = 0.0

    def begin_step(self, now: float) -> float:
        """One step of all decodes and `chunks`. Returns its end."""
        num_chunks = new = past = pairs = squares = num_done = 0
        num_decodes, context = len(self._decodes.ending), self._decodes.context
        for job, num in self.chunks:
            before = job.num_computed
            is_done = before + num == job.num_tokens and not job.is_part
            num_done += is_done
            if num == 1:  # a row like a decode's
                num_decodes += 1
                context += before + 1
                continue
            num_chunks += 1
            new += num
            past += before
            pairs += num * before + num * (num + 1) // 2
            squares += num * num
        device_s, host_s = self._times.step(
            StepShape(
                num_decodes=num_decodes,
                decode_context=context,
                longest_context=self._longest_context(),
                num_chunks=num_chunks,
                chunk_tokens=new,
                chunk_past=past,
                chunk_pairs=pairs,
                chunk_squares=squares,
                num_head_rows=len(self._decodes.ending) + num_done,
            )
        )
        self._step_device_s = device_s
        self._step_start = now
        self._step_end = now + device_s + host_s
        return self._step_end

    def begin_run(self, now: float) -> float:
        """Steps of all decodes until the first one ends, or blocks may run out. Returns the end of the last one."""
        decodes = self._decodes
        num_steps = min(decodes.num_steps_to_end, self._times.longest_run)
        if not decodes.has_blocks_for(num_steps):  # the first one has its blocks
            num_steps = min(num_steps, 1 + decodes.steps_with_blocks(decodes.step + 1))
        self.run = self._times.run(now, num_steps, len(decodes.ending), decodes.context, self._longest_context())
        return self.run.end

    def end(self) -> list[tuple[Job, int]]:
        """All of it is computed. Returns the chunks."""
        chunks, run = self.chunks, self.run
        if run is not None:
            self.run = None
            self.busy_s += run.end - run.start - run.num_steps * run.host_s
            self.num_steps += run.num_steps
            self._decodes.step += run.num_steps
            return chunks
        self.chunks = []
        self.busy_s += self._step_device_s
        self.num_steps += 1
        self._decodes.step += 1
        return chunks

    def _longest_context(self) -> int:
        return self._decodes.longest_context if self._times.needs_longest else 0

    # -------------------------------------------------------------------------------- when loads are reported

    def boundary(self, time: float) -> float:
        """The first moment from `time` on that is between two steps, as far as steps are known: loads are reported
        then."""
        if self.run is not None:
            return time if time > self.run.end else self.run.step_end(time)
        return max(time, self._step_end) if self.chunks and time > self._step_start else time

    def last_quiet_turn(self, told_at: float, until: float) -> float:
        """When the worker had its last turn to report before `until`, if only decodes went on, and nothing was to be
        told."""
        if self.run is None:
            return told_at
        next_s = self.next_block_s
        return self.run.last_turn(told_at, LOAD_INTERVAL_S, until if next_s is None else min(until, next_s))

    def goes_on_after(self, time: float) -> bool:
        """Whether further decodes without a prompt follow then, as far as is known."""
        return self.run is not None and time < self.run.end

    @property
    def next_block_s(self) -> float | None:
        """When the load will change by itself, as a decode of the run takes a further block; None if none does before
        its end."""
        if (run := self.run) is None:
            return None
        num_steps = self._decodes.next_block_at - self._decodes.step
        if num_steps >= run.num_steps:
            return None
        return run.start + run.seconds(max(num_steps, 0))
