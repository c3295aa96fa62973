"""How long steps take, the host's part of each included, and runs of steps whose times grow evenly."""

from __future__ import annotations

from dataclasses import dataclass

from common.batch_time import BatchTime, Regime, StepShape

LONGEST_RUN = 256  # steps, whose times grow evenly enough where they are not linear


@dataclass(slots=True, frozen=True)
class HostTime:
    """What an engine's own process takes. Between two steps the device waits for the engine."""

    step_s: float = 0.0  # between two steps
    request_s: float = 0.0  # more for each request of the step
    poll_s: float = 0.0  # while a step is computed, messages and KV that arrived are looked for this often; 0: at once

    def seconds(self, num_requests: int) -> float:
        return self.step_s + self.request_s * num_requests


class Run:
    """Steps of one batch that are not computed one by one. Contexts grow by one token in each, so times grow evenly."""

    __slots__ = ("_first_s", "_growth_s", "end", "host_s", "num_steps", "start")

    def __init__(self, start: float, num_steps: int, first_s: float, growth_s: float, host_s: float) -> None:
        """`first_s` of the first step and `growth_s` more of each further one, `host_s` of each included."""
        self.start = start
        self.num_steps = num_steps
        self.host_s = host_s
        self._first_s = first_s
        self._growth_s = growth_s
        self.end = start + self.seconds(num_steps)

    def shorten(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.end = self.start + self.seconds(num_steps)

    def seconds(self, num_steps: int) -> float:
        """Of the first steps together."""
        return num_steps * (self._first_s + self._growth_s * (num_steps - 1) / 2)

    def step_end(self, time: float) -> float:
        """When the first step ends that does not end before `time`."""
        num = self.num_done(time)
        end = self.start + num * (self._first_s + self._growth_s * (num - 1) / 2)
        return end if end >= time or num == self.num_steps else self.start + self.seconds(num + 1)

    def last_turn(self, turn: float, interval_s: float, until: float) -> float:
        """If something is done when a step ends, at most once in each `interval_s`, and was at `turn`: when it is done
        the last time before `until`. `turn` itself if it is not done again before."""
        start, first_s, growth_s = self.start, self._first_s, self._growth_s
        num = self.num_done(turn)
        while True:
            due = turn + interval_s
            if due >= until:
                return turn
            num += int(interval_s / (first_s + growth_s * num))  # about
            while num and start + (num - 1) * (first_s + growth_s * (num - 2) / 2) >= due:
                num -= 1
            while (end := start + num * (first_s + growth_s * (num - 1) / 2)) < due:
                num += 1
            if end >= until or num > self.num_steps:
                return turn
            turn = end

    def num_done(self, now: float) -> int:
        """Steps that have ended by then."""
        start, first_s, growth_s, num_steps = self.start, self._first_s, self._growth_s, self.num_steps
        passed_s = now - start
        most = passed_s / first_s  # if steps took no longer with time
        num = int(passed_s / max(first_s + growth_s * most / 2, first_s / 2))
        if num < 0:
            num = 0
        elif num > num_steps:
            num = num_steps
        # As `seconds`, which is not called: nothing is asked as often.
        while num < num_steps and start + (num + 1) * (first_s + growth_s * num / 2) <= now:
            num += 1
        while num and start + num * (first_s + growth_s * (num - 1) / 2) > now:
            num -= 1
        return num


class StepTimes:
    """Of one kind of worker."""

    def __init__(self, time: BatchTime, host: HostTime) -> None:
        self._time = time
        self._host = host
        self._regime = regime = time.regimes[Regime.DECODE]
        self._context_s, self._longest_s = regime.coefficients[0], regime.coefficients[1]
        self._is_linear = not regime.residuals
        self.needs_longest = self._longest_s > 0
        self.longest_run = LONGEST_RUN if regime.residuals else 2**30  # steps

    def run(self, start: float, num_steps: int, num_decodes: int, context: int, longest: int) -> Run:
        """Steps of decodes alone. `context` of the first step, and `longest` of one decode, in tokens."""
        host_s = self._host.seconds(num_decodes)
        if self._is_linear:
            first_s = (
                self._regime.of_decodes(num_decodes) + self._context_s * context + self._longest_s * longest + host_s
            )
            return Run(start, num_steps, first_s, self._context_s * num_decodes + self._longest_s, host_s)
        first_s = self._time.decode_seconds(num_decodes, context, longest) + host_s
        last_s = self._time.decode_seconds(num_decodes, context + num_steps * num_decodes, longest + num_steps) + host_s
        return Run(start, num_steps, first_s, (last_s - first_s) / num_steps, host_s)

    def step(self, shape: StepShape) -> tuple[float, float]:
        """Seconds of one step: of the device, and of the host."""
        return self._time.seconds(shape), self._host.seconds(shape.num_decodes + shape.num_chunks)
