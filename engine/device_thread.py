"""A device's steps on a thread of their own, so that `begin` returns at once and the engine may run ahead of it.

The device behind sees one step after the other, as if there were no thread: it begins a step when it has ended the one
before. One that `overlaps_steps` begins each at once. Native kernels release the interpreter's lock, and the engine's
thread does its own work then.

The front kills an engine that is silent for too long (`engine_timeout`). So that it still notices a device that hangs,
messages pass only while the device shows that it goes on, as it does after each layer.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from engine.blocks.host_tier import BlockCopy
from engine.device import Device, KVPlane, Ticket, do_nothing
from engine.step import StepInput, StepOutput

_PIECE_S = 0.002  # `meanwhile` is called this often while a step is computed
_SIGN_OF_LIFE_S = 2.0  # and for this long after the device was last seen to go on


@dataclass(slots=True)
class _Step:
    step: StepInput
    is_inline: bool
    ticket: Ticket | None = None  # if the device has begun it already
    output: StepOutput | None = None
    error: BaseException | None = None
    has_ended: threading.Event = field(default_factory=threading.Event)


class DeviceThread(Device):
    def __init__(
        self,
        device: Device,
        is_inline: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_inline`: whether a step that begins now is computed in `end`, by the engine's own thread, since a
        profiler looks at that. No other step may be under way then."""
        self.info = replace(device.info, gives_up=False)  # the next step may have begun
        self._device = device
        self._is_inline = is_inline
        self._clock = clock
        self._lived_at = clock()  # the last sign of life
        self._begun: dict[int, _Step] = {}
        self._last: _Step | None = None  # of those that have begun
        self._queue: SimpleQueue[_Step | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def begin(self, step: StepInput) -> Ticket:
        for row in step.rows:
            self.check(row)
        # The engine goes on to change its block tables while this step is read.
        rows = [replace(row, block_ids=array("i", row.block_ids)) for row in step.rows]
        one = _Step(replace(step, rows=rows), self._is_inline())
        if self.info.overlaps_steps:
            one.ticket = self._device.begin(one.step)
        elif step.copies:
            self._copy_first(one)
        self._begun[step.number] = self._last = one
        if not one.is_inline:
            self._queue.put(one)
        return Ticket(step.number)

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        one = self._begun.pop(ticket.number)
        if one.is_inline:
            return self._device.end(one.ticket or self._device.begin(one.step), meanwhile)
        while not one.has_ended.wait(_PIECE_S):
            if self._clock() - self._lived_at < _SIGN_OF_LIFE_S:
                meanwhile()
        if one.error is not None:
            raise one.error
        if one.output is None:
            raise RuntimeError("the device's thread has ended")
        return one.output

    def _copy_first(self, one: _Step) -> None:
        """Nobody waits for the thread to come to the step: its copies are carried out now."""
        if self._last is None or self._last.is_inline or self._last.has_ended.is_set():
            one.ticket = self._device.begin(one.step)
        else:
            self.copy(one.step.copies)
            one.step = replace(one.step, copies=())

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """At once, beside a step under way: the engine copies no block that a step writes, nor into one that a request
        of that step reads."""
        self._device.copy(copies)

    def planes(self) -> list[KVPlane]:
        return self._device.planes()

    def close(self) -> None:
        """Ends the thread, after the steps that have begun."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            self._live()
            try:
                one.output = self._device.end(one.ticket or self._device.begin(one.step), self._live)
            except BaseException as error:  # the engine's thread raises it
                one.error = error
            one.has_ended.set()

    def _live(self) -> None:
        self._lived_at = self._clock()
