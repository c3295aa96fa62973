"""A trace of the engine's next steps, which `baton profile --steps` asks for: torch's profiler, with a range around
each step and each call of a kernel.

The engine's thread begins and ends the trace between two steps. A thread of its own writes the file, so that requests
wait for neither JSON nor compression. Until a trace is asked for, nothing of torch's profiler is imported.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from engine import messages as m
from engine.local.device_choice import SIMULATED
from engine.scheduling.schedule import SchedulerOutput

if TYPE_CHECKING:
    from torch.autograd.profiler import profile

log = logging.getLogger(__name__)

_NOTHING = nullcontext()


@dataclass(slots=True)
class _Trace:
    command: m.ProfileSteps
    give_up_at: float  # by the profiler's clock
    num_steps: int = 0
    started_at: float | None = None  # with the first step
    ended_at: float = 0.0  # of the latest step
    is_wanted: bool = True
    failure: str = ""  # why it does not begin
    profile: profile | None = None
    ranges: ExitStack = field(default_factory=ExitStack)


class StepProfiler:
    """One trace at a time: another command takes the place of the one before it."""

    def __init__(self, device: str, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`device` as torch names it. `wake` ends the engine's wait; another thread calls it when `due` has news."""
        self._device = device
        self._wake = wake
        self._clock = clock
        self._wanted: m.ProfileSteps | None = None
        self._trace: _Trace | None = None
        self._news: SimpleQueue[m.StepsProfiled] = SimpleQueue()
        self._num_writing = 0

    @property
    def has_trace(self) -> bool:
        """Whether the next step is traced."""
        return self._trace is not None

    def is_on(self) -> bool:
        """Whether a step that runs now is traced."""
        return self._trace is not None and self._trace.profile is not None

    def begin(self, command: m.ProfileSteps) -> None:
        """Traces the steps that begin from now on. May be called in mid-step."""
        self.end()
        self._wanted = command

    def end(self) -> None:
        """Nobody waits for the trace any more. May be called in mid-step: the trace itself ends with `due`."""
        self._wanted = None
        if self._trace is not None:
            self._trace.is_wanted = False

    def step(self, output: SchedulerOutput) -> AbstractContextManager[object]:
        """Use it around a step."""
        if self._trace is None or not output.num_tokens:
            return _NOTHING
        return self._named_step(self._trace, output)

    def due(self) -> list[m.StepsProfiled]:
        """Call it between two steps: begins and ends what is due. Returns what has become of traces."""
        trace = self._trace
        if trace is not None and self._is_over(trace):
            self._trace = None
            self._finish(trace)
        if self._wanted is not None and self._trace is None:
            command, self._wanted = self._wanted, None
            trace = _Trace(command, self._clock() + command.timeout_s)
            if self._device == SIMULATED:
                trace.failure = "no trace: a simulated device has no torch"
                self._finish(trace)
            else:
                self._trace = trace
        news = []
        while self._num_writing:
            try:
                news.append(self._news.get_nowait())
            except Empty:
                break
            self._num_writing -= 1
        return news

    def _is_over(self, trace: _Trace) -> bool:
        is_whole = trace.num_steps >= trace.command.num_steps or bool(trace.failure)
        return is_whole or not trace.is_wanted or self._clock() >= trace.give_up_at

    def _named_step(self, trace: _Trace, output: SchedulerOutput) -> AbstractContextManager[object]:
        if trace.started_at is None:
            try:
                self._start(trace)
            except Exception as error:  # a trace that cannot begin must not end the engine
                log.warning("steps cannot be traced", exc_info=error)
                trace.failure = f"torch's profiler does not start: {type(error).__name__}: {error}"
                return _NOTHING
            trace.started_at = self._clock()
        from torch.autograd.profiler import record_function  # the trace has begun, so torch is there

        trace.num_steps += 1
        num_tokens = sum(output.num_tokens.values()) + sum(map(len, output.drafts.values()))
        stack = ExitStack()
        stack.callback(self._ended, trace)
        stack.enter_context(
            record_function(f"step {trace.num_steps}: {len(output.num_tokens)} requests, {num_tokens} tokens")
        )
        return stack

    def _ended(self, trace: _Trace) -> None:
        trace.ended_at = self._clock()

    def _start(self, trace: _Trace) -> None:
        from torch.autograd.profiler import profile, record_function

        from engine.kernels.library import named_calls

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write lines of its own into the log
        trace.profile = trace.ranges.enter_context(profile(use_device="cuda" if "cuda" in self._device else None))
        trace.ranges.enter_context(named_calls(record_function))

    def _finish(self, trace: _Trace) -> None:
        trace.ranges.close()
        if not trace.is_wanted:
            return
        self._num_writing += 1
        if trace.profile is None or trace.started_at is None:
            failure = trace.failure or f"the engine computed nothing in {trace.command.timeout_s:g} s"
            self._news.put(m.StepsProfiled(call_id=trace.command.call_id, failure=failure))
            return
        seconds = trace.ended_at - trace.started_at
        writing = (trace.profile, trace.command, trace.num_steps, seconds)
        threading.Thread(target=self._write, args=writing, name="writing a trace", daemon=True).start()

    def _write(self, profile: profile, command: m.ProfileSteps, num_steps: int, seconds: float) -> None:
        path, failure = Path(command.path), ""
        plain = path.with_suffix(".plain")
        try:
            profile.export_chrome_trace(str(plain))  # type: ignore[no-untyped-call]
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target, 2**20)
            plain.unlink()
        except (OSError, RuntimeError) as error:  # its folder may be gone with whoever asked
            failure = f"the trace cannot be written: {error}"
            log.warning("a trace cannot be written", extra={"reason": str(error)})
        self._news.put(m.StepsProfiled(call_id=command.call_id, num_steps=num_steps, seconds=seconds, failure=failure))
        self._wake()
