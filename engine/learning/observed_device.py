"""A device whose steps are learned from."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.batch_time import StepShape
from engine.blocks.host_tier import BlockCopy
from engine.device import Device, KVPlane, Ticket, do_nothing
from engine.learning.learner import Learner
from engine.learning.step_trace import StepTrace
from engine.step import StepInput, StepOutput

IDLE_S = 0.05  # after so long without a step caches and clocks of the processor are cold
MIN_CPU_SHARE = 0.9  # of a step's time that this thread computed; less: it waited for a core
MAX_SWITCHES_PER_S = 100.0  # of this process's threads off a core against their will


@dataclass(slots=True)
class _Begun:
    shape: StepShape
    host_s: float | None  # since the step before
    is_clean: bool  # so far


class ObservedDevice(Device):
    """Does what `device` does. A step is not learned from if it is the first after a pause, comes with copies to or
    from host memory (preemption by swapping, evicted blocks), or if other work had this process's cores meanwhile."""

    def __init__(
        self,
        device: Device,
        learner: Learner,
        trace: StepTrace | None = None,
        clock: Callable[[], float] = time.monotonic,
        cores: Callable[[], tuple[float, int]] | None = None,
    ) -> None:
        """`is_profiled` may be set: steps that a profiler looks at take longer, and nothing is learned from them.

        `cores`: this thread's seconds on a core, and how often the process's threads were taken off one. Another
        device than a CPU computes without them."""
        self.info = device.info
        self._device = device
        self._learner = learner
        self._trace = trace
        self._clock = clock
        self._cores = (cores or _cores) if device.info.device == "cpu" else None
        self._begun: dict[int, _Begun] = {}
        self._ended_at: float | None = None  # the last step
        self._has_copied = False  # since the last step began
        self.is_profiled: Callable[[], bool] = lambda: False

    def begin(self, step: StepInput) -> Ticket:
        host_s = None if self._ended_at is None else self._clock() - self._ended_at
        if self._begun:  # a step is under way: the device goes on with this one at once
            host_s = 0.0
        is_clean = host_s is not None and host_s <= IDLE_S and not (self._has_copied or step.copies)
        self._has_copied = False
        ticket = self._device.begin(step)
        self._begun[step.number] = _Begun(step.shape, host_s if host_s is None or host_s <= IDLE_S else None, is_clean)
        return ticket

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        start = self._clock()
        before = self._cores() if self._cores is not None else (0.0, 0)
        output = self._device.end(ticket, meanwhile)
        self._ended_at = now = self._clock()
        begun = self._begun.pop(ticket.number)
        if output.failures or output.elapsed_s <= 0:
            return output
        is_clean = begun.is_clean and not self.is_profiled()
        if self._cores is not None:
            computed_s, num_switches = self._cores()
            wall_s = now - start
            is_clean &= computed_s - before[0] >= MIN_CPU_SHARE * wall_s
            is_clean &= num_switches - before[1] <= 1 + MAX_SWITCHES_PER_S * wall_s
        predicted = self._learner.observe(begun.shape, output.elapsed_s, now, is_clean=is_clean)
        if self._trace is not None:
            self._trace.add(
                begun.shape, predicted=predicted, measured=output.elapsed_s, host=begun.host_s, is_clean=is_clean
            )
        return output

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        self._has_copied |= bool(copies)
        self._device.copy(copies)

    def planes(self) -> list[KVPlane]:
        return self._device.planes()

    def close(self) -> None:
        """Closes the trace. The device goes on."""
        if self._trace is not None:
            self._trace.close()


def _cores() -> tuple[float, int]:
    return time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
