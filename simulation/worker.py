"""A worker: its engine's loop on the virtual clock.

    exact   prepare ── begin ── (the predicted seconds; messages pass) ── end ── prepare ...
    leap    a batch that only decodes goes on for k steps at once, up to the step in which its first request ends

A leap is what k steps would do (`Scheduler.repeat`), in the sum of their times. Whatever reaches the worker meanwhile
ends the leap with the step that runs at that moment. What differs: blocks are taken and named at the end of a leap, so
their order of eviction may be another one, and routers hear of them a moment later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from common.batch_time import BatchTime, StepShape
from common.config import EngineSettings
from common.types import LOAD_INTERVAL_S, WorkerLoad, WorkerRole
from engine import messages as m
from engine.core import BegunStep, EngineCore
from engine.scheduling.schedule import LateRequest, SchedulerOutput
from simulation.clock import VirtualClock
from simulation.device import VirtualDevice
from simulation.link import Link

BLOCKS_INTERVAL_S = 0.02
LONGEST_LEAP = 256  # steps, whose times grow evenly enough


class _Leap:
    """Steps of one batch that are not computed one by one."""

    def __init__(self, time: BatchTime, shape: StepShape, num_steps: int, start: float, host_s: float) -> None:
        """Contexts grow by one token in each step, so times grow evenly: they are predicted for the first step and the
        one after the last."""
        after = StepShape(
            num_decodes=shape.num_decodes,
            decode_context=shape.decode_context + num_steps * shape.num_decodes,
            longest_context=shape.longest_context + num_steps,
            num_head_rows=shape.num_head_rows,
        )
        self.num_steps = num_steps
        self.start = start
        self._first_s = time.seconds(shape) + host_s
        self._growth_s = (time.seconds(after) + host_s - self._first_s) / num_steps  # from step to step
        self.end = start + self.seconds(num_steps)

    def seconds(self, num_steps: int) -> float:
        """Of the first steps together."""
        return num_steps * (self._first_s + self._growth_s * (num_steps - 1) / 2)

    def num_done(self, now: float) -> int:
        """Steps that have ended by then."""
        num = min(int((now - self.start) / self._first_s), self.num_steps)
        while num < self.num_steps and self.start + self.seconds(num + 1) <= now:
            num += 1
        while num and self.start + self.seconds(num) > now:
            num -= 1
        return num


class SimulatedWorker:
    def __init__(
        self,
        address: str,
        role: WorkerRole,
        settings: EngineSettings,
        device: VirtualDevice,
        link: Link,
        clock: VirtualClock,
        *,
        leaps: bool,
        host_s: float,
        emit: Callable[[SimulatedWorker, m.Event], None],
        report_load: Callable[[SimulatedWorker, WorkerLoad], None],
        report_blocks: Callable[[SimulatedWorker, bytes, bytes], None],
        report_late: Callable[[LateRequest], None],
    ) -> None:
        """`host_s`: seconds between two steps, in which the device waits for the engine."""
        self.address = address
        self.role = role
        self.busy_s = 0.0  # of the device
        self.num_steps = 0
        self._device = device
        self._link = link
        self._clock = clock
        self._leaps = leaps
        self._host_s = host_s
        self._emit = emit
        self._report_load = report_load
        self._report_blocks = report_blocks
        self._report_late_request = report_late
        self._begun: BegunStep | None = None
        self._leap: _Leap | None = None
        self._steps_begun = 0  # and leaps: tells the end of one that was cut short
        self._is_turn_due = False
        self._last_load: WorkerLoad | None = None
        self._has_changed = True  # since its load was reported
        self._load_due = self._blocks_due = 0.0  # when the next report may be made
        self._is_report_due = False  # a call that makes it is due
        self.core = EngineCore(settings, device, link, clock, self._wake, batch_time=lambda: device.time)

    @property
    def load(self) -> WorkerLoad:
        return self.core.load

    @property
    def is_idle(self) -> bool:
        """Nobody has anything of it, or waits for it."""
        return not self.core.scheduler.requests and not self.core.has_work

    def deliver(self, command: m.Command) -> None:
        """A command has come."""
        self._interrupt()
        self._has_changed = True
        self.core.handle(command)
        self._go_on()

    # ------------------------------------------------------------------------------------------ internals

    def _wake(self) -> None:
        """Blocks have arrived."""
        self._link.is_held = True  # what runs now began before they came
        self._interrupt()
        self._link.is_held = False
        self._has_changed = True
        self._go_on()

    def _go_on(self) -> None:
        """Does what a message asks for: in mid-step as far as that is possible, else with the next step."""
        if self._begun is None:
            self._turn_soon()
            return
        self.core.take_in_transfers()
        self.core.begin_remote()
        self._send()

    def _turn_soon(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._clock.at(self._clock.now, self._turn)

    def _turn(self) -> None:
        """One step, if there is something to compute."""
        self._is_turn_due = False
        if self._begun is not None or self._leap is not None:
            return
        output = self._prepare()
        num_steps = self._num_leapt(output)
        if num_steps > 1:
            self._begin_leap(num_steps)
        else:
            self._begin(output)
        self.report()

    def _prepare(self) -> SchedulerOutput:
        output = self.core.prepare()
        for late in output.late:
            self._report_late_request(late)
        self._send()
        return output

    def _begin(self, output: SchedulerOutput, ends_at: float | None = None) -> None:
        begun = self.core.begin(output)
        if begun.computed is None:
            if begun.is_busy:
                self._turn_soon()
            return
        self._begun = begun
        self._steps_begun += 1
        number, seconds = self._steps_begun, self._device.begun_s
        self.busy_s += seconds
        self.num_steps += 1
        at = self._clock.now + seconds + self._host_s if ends_at is None else ends_at
        self._clock.at(at, lambda: self._ended(number))

    def _ended(self, number: int) -> None:
        if self._begun is None or number != self._steps_begun:
            return
        begun, self._begun = self._begun, None
        self._has_changed = True
        self.core.end(begun)
        self._send()
        self._turn()

    # ------------------------------------------------------------------------------------------------ leaps

    def _num_leapt(self, output: SchedulerOutput) -> int:
        """How many steps may be made at once; 0 or 1: the next one is a step like any other."""
        core = self.core
        if not self._leaps or not output.num_tokens or core.scheduler.num_waiting or output.preempted:
            return 0
        if len(output.num_tokens) != len(core.scheduler.decodes):
            return 0  # a step has no room for all of them, so they take turns
        left = LONGEST_LEAP
        for request, num_new in output.num_tokens.items():
            if num_new != 1 or not request.num_output_tokens:
                return 0
            left = min(left, request.sampling_params.max_tokens - request.num_output_tokens - 1)
        # Each request takes a block for every `block_size` steps, and at most one more.
        most_each = core.blocks.num_available_blocks // len(output.num_tokens) - 1
        return min(left, most_each * core.blocks.block_size)

    def _begin_leap(self, num_steps: int) -> None:
        shape = self.core.scheduler.decode_shape
        self._steps_begun += 1
        number = self._steps_begun
        leap = self._leap = _Leap(self._device.time, shape, num_steps, self._clock.now, self._host_s)
        self._clock.at(leap.end, lambda: self._leapt(number))

    def _leapt(self, number: int) -> None:
        if self._leap is None or number != self._steps_begun:
            return
        self._end_leap(self._leap.num_steps)
        self._turn()

    def _end_leap(self, num_steps: int) -> None:
        leap, self._leap = self._leap, None
        if leap is not None and num_steps:
            self.busy_s += leap.seconds(num_steps) - num_steps * self._host_s
            self.num_steps += num_steps
            self._has_changed = True
            self.core.scheduler.repeat(num_steps)

    def _interrupt(self) -> None:
        """Ends a leap before something reaches the worker: what is left of the step that runs now is a step like any
        other."""
        if (leap := self._leap) is None:
            return
        num_done = leap.num_done(self._clock.now)
        self._end_leap(num_done)
        if num_done < leap.num_steps:
            output = self._prepare()
            self._begin(output, leap.start + leap.seconds(num_done + 1))

    # ---------------------------------------------------------------------------------------------- messages

    def _send(self) -> None:
        for event in self.core.take_events():
            self._emit(self, event)

    def report(self) -> None:
        """Reports load and blocks as far as they are due. What is not due yet is reported when it is, or with the end
        of the step under way."""
        now, core = self._clock.now, self.core
        if self._has_changed and now >= self._load_due:
            self._load_due = now + LOAD_INTERVAL_S
            self._has_changed = self._leap is not None  # it changes all the time
            load = core.load if self._leap is None else self._load_in(self._leap)
            if load != self._last_load:
                self._last_load = load
                self._report_load(self, load)
        if core.blocks.news and now >= self._blocks_due:
            self._blocks_due = now + BLOCKS_INTERVAL_S
            self._report_blocks(self, *core.blocks.news.take())
        if self._begun is None and not self._is_report_due and (self._has_changed or core.blocks.news):
            self._is_report_due = True
            due = [self._load_due] if self._has_changed else []
            self._clock.at(min([*due, *([self._blocks_due] if core.blocks.news else [])]), self._report_late)

    def _report_late(self) -> None:
        self._is_report_due = False
        self.report()

    def _load_in(self, leap: _Leap) -> WorkerLoad:
        """The load in the middle of a leap: its requests have taken further blocks."""
        core, load = self.core, self.core.load
        num_done, size = leap.num_done(self._clock.now), core.blocks.block_size
        num_new = sum(
            max(-(-(one.num_tokens + num_done) // size) - len(one.block_ids), 0) for one in core.scheduler.decodes
        )
        num_empty = min(num_new, load.num_free_blocks)
        return replace(
            load,
            num_free_blocks=load.num_free_blocks - num_empty,
            num_cached_blocks=max(load.num_cached_blocks - (num_new - num_empty), 0),
        )
