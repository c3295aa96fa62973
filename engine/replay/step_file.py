"""The file of recorded steps: one header, then one entry for each step, each in msgpack behind its length.

Everything that a step needs is in its entry: the copies, the rows, and the KV blocks that it reads and no earlier entry
wrote. So the file can be computed again by another device, of this machine or another. Copies between the device and
host memory that were not a step's are not in the file: what they brought to the device is, like other blocks.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from common.errors import StartupError
from common.types import KVCacheSpec, SampledToken
from engine.blocks.host_tier import BlockCopy
from engine.step import Draw, Drawn, LogitEdits, Scoring, StepInput, StepOutput, StepRow

SCHEMA = 2
_LENGTH = struct.Struct("<Q")
_MAGIC = b"baton steps\n"


@dataclass(slots=True, frozen=True, kw_only=True)
class StepFileHeader:
    spec: KVCacheSpec
    num_blocks: int
    max_model_len: int
    device: str
    model: str  # as --model named it
    quantization: str
    kernels: str  # as --kernels named them
    host_cache_gb: float  # for all blocks in host memory
    schema: int = SCHEMA


@dataclass(slots=True, frozen=True, kw_only=True)
class RecordedStep:
    step: StepInput
    output: StepOutput
    blocks: Mapping[int, bytes] = field(default_factory=dict)  # by id, to be written before the step's copies


class StepFileWriter:
    def __init__(self, path: Path, header: StepFileHeader) -> None:
        self._file = path.open("wb")
        self._file.write(_MAGIC)
        self._write(header)

    def add(self, recorded: RecordedStep) -> None:
        self._write(recorded)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, value: object) -> None:
        data = msgspec.msgpack.encode(value, enc_hook=_array_to_ext)
        self._file.write(_LENGTH.pack(len(data)))
        self._file.write(data)


def read_steps(path: Path) -> tuple[StepFileHeader, Iterator[RecordedStep]]:
    """The header, and the steps one by one. Raises `StartupError` if the file is none of recorded steps, or of another
    schema, or damaged. An entry that was cut off at the end of the file is left out."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise StartupError(f"{path} holds no recorded steps; --record-steps of a worker writes such a file")
            header, start = _next(file, path), file.tell()
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from error
    if header is None:
        raise StartupError(f"{path} ends before its first step")
    if header.get("schema") != SCHEMA:
        raise StartupError(f"{path} has schema {header.get('schema')} of recorded steps, this Baton reads {SCHEMA}")
    return msgspec.convert(header, StepFileHeader), _steps(path, start)


def _steps(path: Path, start: int) -> Iterator[RecordedStep]:
    with path.open("rb") as file:
        file.seek(start)
        while (entry := _next(file, path)) is not None:
            try:
                yield RecordedStep(
                    step=_step(entry["step"]), output=_output(entry["output"]), blocks=dict(entry["blocks"])
                )
            except (KeyError, TypeError, msgspec.ValidationError) as error:
                raise StartupError(f"{path} is damaged: {error}") from error


def _next(file: BinaryIO, path: Path) -> dict[str, Any] | None:
    length = file.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(length)
    data = file.read(size) if size <= path.stat().st_size else b""
    if len(data) < size:
        return None
    try:
        entry = msgspec.msgpack.decode(data, ext_hook=_array_of_ext, strict=False)
    except (msgspec.DecodeError, ValueError) as error:
        raise StartupError(f"{path} is damaged: {error}") from error
    if not isinstance(entry, dict):
        raise StartupError(f"{path} is damaged: an entry is no map")
    return entry


def _array_to_ext(value: object) -> object:
    if isinstance(value, array):
        return msgspec.msgpack.Ext(ord(value.typecode), value.tobytes())
    if isinstance(value, range):
        return list(value)
    raise TypeError(f"a step holds a {type(value).__name__}")


def _array_of_ext(code: int, data: memoryview) -> object:
    values: array[Any] = array(chr(code))
    values.frombytes(bytes(data))
    return values


def _step(entry: dict[str, Any]) -> StepInput:
    return StepInput(
        number=entry["number"],
        rows=[_row(row) for row in entry["rows"]],
        copies=msgspec.convert(entry["copies"], list[BlockCopy]),
    )


def _row(entry: dict[str, Any]) -> StepRow:
    draw, score, first = entry["draw"], entry["score"], entry["first"]
    if draw is not None and draw["edits"] is not None:
        draw = {**draw, "edits": LogitEdits(**draw["edits"])}
    return StepRow(
        token_ids=entry["token_ids"],
        num_computed_tokens=entry["num_computed_tokens"],
        block_ids=entry["block_ids"],
        draw=None if draw is None else Draw(**draw),
        score=None if score is None else Scoring(**score),
        num_pooled=entry["num_pooled"],
        first=None if first is None else Drawn(**first),
    )


def _output(entry: dict[str, Any]) -> StepOutput:
    return StepOutput(
        tokens=msgspec.convert(entry["tokens"], list[SampledToken | None]),
        scores={row: msgspec.convert(scores, list[SampledToken]) for row, scores in entry["scores"].items()},
        pooled=entry["pooled"],
        failures=entry["failures"],
        elapsed_s=entry["elapsed_s"],
    )
