"""A worker: its engine's loop on the virtual clock.

    exact   prepare ── begin ── (the predicted seconds; messages pass) ── end ── prepare ...
    leap    a batch that only decodes goes on for k steps at once, up to the step in which its first request ends

A leap is what k steps would do (`Scheduler.repeat`), in the sum of their times, and messages pass in it as they do in a
step. It ends with the step that runs if the next one will have another batch. Loads and names of blocks are reported
when they would be without leaps; between two reports the requests know of no step of the leap, so that blocks may be
evicted in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from common.batch_time import BatchTime, StepShape
from common.config import EngineSettings
from common.types import LOAD_INTERVAL_S, WorkerLoad, WorkerRole
from engine import messages as m
from engine.core import BegunStep, EngineCore
from engine.request import Request
from engine.scheduling.schedule import LateRequest, SchedulerOutput
from simulation.clock import VirtualClock
from simulation.device import VirtualDevice
from simulation.link import Link
from simulation.step_times import LONGEST_RUN, HostTime, Run

BLOCKS_INTERVAL_S = 0.02


class _Leap(Run):
    """Steps of one batch of requests that are not computed one by one."""

    def __init__(
        self,
        time: BatchTime,
        shape: StepShape,
        requests: Sequence[Request],
        num_steps: int,
        start: float,
        host_s: float,
        *,
        has_queue: bool,
    ) -> None:
        """Times are predicted for the first step and the one after the last. `has_queue`: requests wait for which there
        is no room."""
        after = StepShape(
            num_decodes=shape.num_decodes,
            decode_context=shape.decode_context + num_steps * shape.num_decodes,
            longest_context=shape.longest_context + num_steps,
            num_head_rows=shape.num_head_rows,
        )
        first_s = time.seconds(shape) + host_s
        super().__init__(start, num_steps, first_s, (time.seconds(after) + host_s - first_s) / num_steps, host_s)
        self.requests = requests
        self.num_taken_in = 0  # steps that its requests know of
        self.num_quiet = 0  # steps up to which nobody takes a further block, or fills one
        self.has_queue = has_queue


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
        host: HostTime,
        emit: Callable[[SimulatedWorker, m.Event], None],
        report_load: Callable[[SimulatedWorker, WorkerLoad, Sequence[int]], None],
        report_blocks: Callable[[SimulatedWorker, bytes, bytes], None],
        report_late: Callable[[LateRequest], None],
    ) -> None:
        self.address = address
        self.role = role
        self.busy_s = 0.0  # of the device
        self.num_steps = 0
        self._device = device
        self._link = link
        self._clock = clock
        self._leaps = leaps
        self._host = host
        self._max_batched_tokens = settings.max_num_batched_tokens
        self._emit = emit
        self._report_load = report_load
        self._report_blocks = report_blocks
        self._report_late_request = report_late
        self._begun: BegunStep | None = None
        self._leap: _Leap | None = None
        self._steps_begun = 0  # and leaps: tells the end of one that was cut short
        self._is_turn_due = False
        self._step_start = 0.0
        self._held: list[m.Command] = []  # that came in mid-step, until the engine looks for messages
        self._looks_in = 0  # the step in which it does that next
        self._last_load: WorkerLoad | None = None
        self._has_changed = True  # since its load was reported
        self._load_due = self._blocks_due = 0.0  # when the next report may be made
        self._is_report_due = False  # a call that makes it is due
        self._reports_in_leap = 0  # asked for: only the last one of them is made
        self._told_in: _Leap | None = None  # when the load was reported last, and nothing else has changed since
        self._passing: _Leap | None = None  # in which reports were passed over since `_load_due`
        self.core = EngineCore(settings, device, link, clock, self._wake, batch_time=lambda: device.time)

    @property
    def load(self) -> WorkerLoad:
        return self.core.load

    @property
    def is_idle(self) -> bool:
        """Nobody has anything of it, or waits for it."""
        return not self.core.scheduler.requests and not self.core.has_work

    def check_integrity(self) -> list[str]:
        """What is wrong with its blocks or queues; empty if nothing is."""
        return self.core.scheduler.check_integrity()

    def deliver(self, command: m.Command) -> None:
        """A command has come."""
        if self._looks_later():
            self._held.append(command)
            return
        if self._leap is not None and not self._has_room(self._leap, command):
            self._break_leap()
        elif self._leap is not None and isinstance(command, m.AddRequest):
            self._catch_up(self._leap)  # its prompt may find what was computed
        self._has_changed = True
        self.core.handle(command)
        self._go_on()

    # ------------------------------------------------------------------------------------------ internals

    def _wake(self) -> None:
        """Blocks have arrived."""
        if self._looks_later():
            return
        if self._leap is not None and self._leap.has_queue:  # which may now have room
            self._link.is_held = True  # what runs now began before they came
            self._break_leap()
            self._link.is_held = False
        self._has_changed = True
        self._go_on()

    def _looks_later(self) -> bool:
        """Whether the engine takes in what has come only when it looks for messages again. False: it does so now."""
        poll_s, now = self._host.poll_s, self._clock.now
        if not poll_s or self._begun is None:
            return False
        if self._looks_in != self._steps_begun:
            self._looks_in = self._steps_begun
            num_looks = int((now - self._step_start) / poll_s) + 1
            self._clock.at(self._step_start + num_looks * poll_s, partial(self._look, self._steps_begun))
        return True

    def _look(self, number: int) -> None:
        """Looks for messages in mid-step, unless that step has ended: then it has looked."""
        if self._begun is not None and number == self._steps_begun:
            self._looks_in = 0
            self._take_held()
            self._has_changed = True
            self._go_on()

    def _take_held(self) -> None:
        held, self._held = self._held, []
        for command in held:
            self.core.handle(command)

    def _go_on(self) -> None:
        """Does what a message asks for: in mid-step as far as that is possible, else with the next step."""
        core = self.core
        if self._begun is not None or self._leap is not None:
            core.take_in_transfers()
            core.begin_remote()
            self._send()
            if self._leap is not None:
                self._shorten(self._leap)
                self._told_in = None
                if not self._is_report_due:
                    self._pass_reports(self._clock.now)
                    self._report_in_leap(self._leap)
            return
        if not core.has_work:
            core.take_in_transfers()
        if core.has_work:
            self._turn_soon()
        else:
            self._send()
            self.report()

    def _turn_soon(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._clock.at(self._clock.now, self._turn)

    def _turn(self) -> None:
        """One step, if there is something to compute, or a leap."""
        self._is_turn_due = False
        if self._begun is not None or self._leap is not None:
            return
        if not self.core.has_work:
            self._send()
            self.report()
            return
        scheduler = self.core.scheduler
        # A batch that only goes on, and for whose place nobody waits, is what the scheduler would decide.
        decodes = scheduler.decodes if self._leaps and not (scheduler.goes_by_slack or scheduler.num_waiting) else []
        num_steps = self._num_leapt(decodes)
        if not num_steps:
            output = self._prepare()
            if self._leaps and not output.preempted and all(num == 1 for num in output.num_tokens.values()):
                decodes = scheduler.decodes
                if not (scheduler.goes_by_slack and scheduler.num_waiting) and len(decodes) == len(output.num_tokens):
                    num_steps = self._num_leapt(decodes)
        if num_steps:
            for request in decodes:
                self.core.blocks.append(request, request.num_tokens)  # as the scheduler does for the first step
            self._send()
            self._begin_leap(decodes, num_steps)
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
        self._step_start = self._clock.now
        self._steps_begun += 1
        number, seconds = self._steps_begun, self._device.begun_s
        self.busy_s += seconds
        self.num_steps += 1
        at = self._clock.now + seconds + self._host.seconds(len(output.num_tokens)) if ends_at is None else ends_at
        self._clock.at(at, lambda: self._ended(number))

    def _ended(self, number: int) -> None:
        if self._begun is None or number != self._steps_begun:
            return
        begun, self._begun = self._begun, None
        self._has_changed = True
        self.core.end(begun)
        self._take_held()
        self._send()
        self._turn()

    # ------------------------------------------------------------------------------------------------ leaps

    def _num_leapt(self, decodes: Sequence[Request]) -> int:
        """How many steps these requests may make at once; 0: the next one is a step like any other."""
        core = self.core
        if not decodes or len(decodes) != core.scheduler.num_computing or len(decodes) > self._max_batched_tokens:
            return 0  # a prompt is under way, or a step has no room for all of them, so they take turns
        left = LONGEST_RUN
        for request in decodes:
            num_tokens = len(request.token_ids)
            left = min(left, request.num_prompt_tokens + request.sampling_params.max_tokens - num_tokens)
        # Each request takes a block for every `block_size` steps, and at most one more.
        most_each = core.blocks.num_available_blocks // len(decodes) - 1
        return max(min(left, most_each * core.blocks.block_size), 0)

    def _begin_leap(self, decodes: Sequence[Request], num_steps: int) -> None:
        scheduler = self.core.scheduler
        leap = _Leap(
            self._device.time,
            scheduler.decode_shape,
            decodes,
            num_steps,
            self._clock.now,
            self._host.seconds(len(decodes)),
            has_queue=scheduler.num_waiting > 0,
        )
        self._leap = leap
        self._look_ahead(leap)
        self._await(leap)

    def _await(self, leap: _Leap) -> None:
        self._steps_begun += 1
        number = self._steps_begun
        self._clock.at(leap.end, lambda: self._leapt(number))

    def _leapt(self, number: int) -> None:
        if self._leap is None or number != self._steps_begun:
            return
        self._end_leap(self._leap, self._leap.num_steps)
        self._send()
        self._turn()

    def _end_leap(self, leap: _Leap, num_steps: int) -> None:
        self._leap = None
        self.busy_s += leap.seconds(num_steps) - num_steps * leap.host_s
        self.num_steps += num_steps
        self._take_in(leap, num_steps)

    def _take_in(self, leap: _Leap, num_steps: int) -> None:
        """Tells the requests of these steps of the leap, unless they know already."""
        if num_new := num_steps - leap.num_taken_in:
            leap.num_taken_in = num_steps
            self._has_changed = True
            self.core.repeat(leap.requests, num_new)

    def _catch_up(self, leap: _Leap) -> None:
        """Tells the requests of the steps that have ended, if blocks were taken or filled in them."""
        num_done = min(leap.num_done(self._clock.now), leap.num_steps - 1)  # the last one has an event of its own
        if num_done > leap.num_quiet:
            self._take_in(leap, num_done)
            self._look_ahead(leap)

    def _look_ahead(self, leap: _Leap) -> None:
        """Finds out up to which step the load stays as it is."""
        size = self.core.blocks.block_size
        num_left = min([len(one.block_ids) * size - len(one.token_ids) for one in leap.requests])
        leap.num_quiet = leap.num_taken_in + num_left

    def _shorten(self, leap: _Leap) -> None:
        """Ends the leap with the step that runs now, if the next one has further requests."""
        scheduler = self.core.scheduler
        if scheduler.num_computing == len(leap.requests) and (leap.has_queue or not scheduler.num_waiting):
            return
        num_steps = leap.num_done(self._clock.now) + 1
        if num_steps < leap.num_steps:
            leap.shorten(num_steps)
            self._await(leap)

    def _has_room(self, leap: _Leap, command: m.Command) -> bool:
        """Whether a leap may go on while the command is carried out: it has not taken its blocks yet."""
        if leap.has_queue:
            return False
        if not isinstance(command, m.AddRequest):
            return True
        blocks = self.core.blocks
        of_leap = len(leap.requests) * (leap.num_steps // blocks.block_size + 1)
        return blocks.num_available_blocks - of_leap >= blocks.blocks_for(len(command.prompt_token_ids) + 1)

    def _break_leap(self) -> None:
        """Ends the leap before something reaches the worker that may need its blocks: what is left of the step that
        runs now is a step like any other."""
        if (leap := self._leap) is None:
            return
        num_done = leap.num_done(self._clock.now)
        self._end_leap(leap, num_done)
        if num_done < leap.num_steps:
            output = self._prepare()
            self._begin(output, leap.start + leap.seconds(num_done + 1))
        else:
            self._send()

    # ---------------------------------------------------------------------------------------------- messages

    def _send(self) -> None:
        for event in self.core.take_events():
            self._emit(self, event)

    def report(self) -> None:
        """Reports load and blocks as far as they are due. What is not due yet is reported when it is, or with the end
        of the step under way."""
        now, core, leap = self._clock.now, self.core, self._leap
        self._pass_reports(now)
        if leap is not None and now >= self._load_due:
            self._catch_up(leap)
        if self._has_changed and now >= self._load_due:
            self._load_due = now + LOAD_INTERVAL_S
            self._has_changed = leap is not None  # it changes all the time
            self._told_in = leap
            load, counted = core.load, core.take_counted()
            if load != self._last_load or counted:
                self._last_load = load
                self._report_load(self, load, counted)
        if core.blocks.news and now >= self._blocks_due:
            self._blocks_due = now + BLOCKS_INTERVAL_S
            self._report_blocks(self, *core.blocks.news.take())
        if self._begun is not None or self._is_report_due or not (self._has_changed or core.blocks.news):
            return
        if leap is not None:
            self._report_in_leap(leap)
            return
        self._is_report_due = True
        due = [self._load_due] if self._has_changed else []
        self._clock.at(min([*due, *([self._blocks_due] if core.blocks.news else [])]), self._report_late)

    def _report_late(self) -> None:
        self._is_report_due = False
        self.report()

    def _report_in_leap(self, leap: _Leap) -> None:
        """Reports when a step of the leap ends, as it would without leaps, but for reports of which it is known that
        they would say what the last one said: until one of its requests takes a further block."""
        due = self._load_due
        if self.core.blocks.news:
            due = min(due, self._blocks_due)
        elif self._told_in is leap:
            self._passing = leap
            quiet_until = leap.start + leap.seconds(min(leap.num_quiet, leap.num_steps))
            while (end := leap.step_end(due)) <= quiet_until and end < leap.end:
                due = end + LOAD_INTERVAL_S
        end = leap.step_end(due)
        self._reports_in_leap += 1
        if end < leap.end:  # which brings a report by itself
            number = self._reports_in_leap
            self._clock.at(end, lambda: self._report_of_leap(leap, number))

    def _report_of_leap(self, leap: _Leap, number: int) -> None:
        if leap is self._leap and number == self._reports_in_leap and self._clock.now < leap.end:
            self.report()

    def _pass_reports(self, now: float) -> None:
        """Sets when the next load is due, after those that had nothing to say."""
        leap, self._passing = self._passing, None
        if leap is not None:
            while (end := leap.step_end(self._load_due)) < now and end >= self._load_due:
                self._load_due = end + LOAD_INTERVAL_S
