"""A trace of steps: JSON lines. The first one says what the steps are of, each other one is a step.

    {"schema":1,"key":{"spec":"…","quantization":"none",…}}
    {"shape":{"num_decodes":2,…},"predicted":0.0121,"measured":0.0119,"host":0.0004,"is_clean":true}

Seconds. A field of the shape that is 0 is left out. `predicted` is null while there is no model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec

from common.batch_time import BatchTimeKey, StepShape
from common.batch_time_fit import MeasuredStep
from common.errors import StartupError

log = logging.getLogger(__name__)

SCHEMA = 1
_FIELDS = StepShape.__struct_fields__


class TracedStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    shape: dict[str, int]
    predicted: float | None  # the median
    measured: float
    host: float | None  # from the end of the step before; None if the engine had nothing to do in between
    is_clean: bool  # nothing else kept the device from it, as far as the worker knows


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    key: BatchTimeKey


_step_decoder = msgspec.json.Decoder(TracedStep)


class StepTrace:
    def __init__(self, path: Path, key: BatchTimeKey) -> None:
        """Writes a new file. Raises `OSError`."""
        self._file = path.open("wb", buffering=0)
        self._encoder = msgspec.json.Encoder()
        self._write(_Head(schema=SCHEMA, key=key))

    def add(
        self, shape: StepShape, *, predicted: float | None, measured: float, host: float | None, is_clean: bool
    ) -> None:
        counts = {name: count for name in _FIELDS if (count := getattr(shape, name))}
        if self._file.closed:
            return
        try:
            self._write(TracedStep(shape=counts, predicted=predicted, measured=measured, host=host, is_clean=is_clean))
        except OSError as error:  # a full disk; requests go on
            log.error("the trace of steps ends", extra={"file": self._file.name, "reason": error.strerror})
            self._file.close()

    def close(self) -> None:
        self._file.close()

    def _write(self, line: msgspec.Struct) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")


def read_trace(path: Path) -> tuple[BatchTimeKey, list[MeasuredStep]]:
    """What the steps are of, and those that were clean. Raises `StartupError` with one line if the file cannot be read,
    is no trace, or has a damaged line; a last line that was cut off is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from error
    try:
        head = msgspec.json.decode(lines[0])
        schema = head.get("schema") if isinstance(head, dict) else None
        if schema != SCHEMA:
            raise StartupError(f"{path} has schema {schema} of a trace of steps, this Baton reads {SCHEMA}")
        key = msgspec.json.decode(lines[0], type=_Head).key
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is no trace of steps, which --step-trace of a worker writes: {error}") from error
    return key, list(_clean_steps(path, lines))


def _clean_steps(path: Path, lines: list[bytes]) -> Iterator[MeasuredStep]:
    for number, line in enumerate(lines[1:-1], 2):  # what follows the last line break is empty or cut off
        try:
            step = _step_decoder.decode(line)
            shape = StepShape(**step.shape)
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
            raise StartupError(f"line {number} of {path} is damaged: {error}") from error
        if step.is_clean and step.measured > 0:
            yield MeasuredStep(shape, step.measured)
