"""Computes recorded steps again, and says where the results differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from common.errors import StartupError
from common.types import SampledToken
from engine.device import Device
from engine.replay.step_file import RecordedStep, StepFileHeader
from engine.step import StepOutput


@dataclass(slots=True, frozen=True)
class ComparedStep:
    number: int
    num_rows: int
    differences: list[str]  # one line each: a row that drew another token, failed, or gave what the other did not
    largest: float  # difference of two logprobs, of all rows whose tokens are equal
    recorded_s: float
    elapsed_s: float


def _check_header(header: StepFileHeader, device: Device) -> None:
    """Raises `StartupError` if the file's KV is not the device's: of another model, another dtype or block size."""
    ours, theirs = device.info.spec, header.spec
    for name in ("model_id", "dtype", "block_size", "num_layers", "num_kv_heads", "head_dim", "num_planes"):
        if getattr(ours, name) != getattr(theirs, name):
            raise StartupError(
                f"the steps were recorded with {name} {getattr(theirs, name)}, here it is {getattr(ours, name)}"
            )
    if device.info.num_blocks < header.num_blocks:
        raise StartupError(f"the steps name {header.num_blocks} blocks, here are {device.info.num_blocks}")


def _check_copies(recorded: RecordedStep, device: Device) -> None:
    """Raises `StartupError` if host memory has no such blocks here."""
    last = max((copy.host_block for copy in recorded.step.copies), default=-1)
    if last >= (num_blocks := device.info.num_host_blocks):
        raise StartupError(
            f"step {recorded.step.number} copies block {last} of host memory, here are {num_blocks}: "
            "set --host-cache-gb as the worker had it, with --swap-space-gb added"
        )


def replay(header: StepFileHeader, steps: Iterable[RecordedStep], device: Device) -> Iterator[ComparedStep]:
    """Checks at once that the device can compute the steps of a file with this header; raises `StartupError` if not.
    Then the steps are computed one by one, in their order, as the caller iterates."""
    _check_header(header, device)
    return _compared(steps, device)


def _compared(steps: Iterable[RecordedStep], device: Device) -> Iterator[ComparedStep]:
    (plane,) = device.planes()
    cache = torch.as_tensor(plane.cache)  # the same memory
    for recorded in steps:
        _check_copies(recorded, device)
        for block_id, data in recorded.blocks.items():
            whole = torch.frombuffer(bytearray(data), dtype=cache.dtype).view(plane.spec.block_shape)
            cache[block_id].copy_(whole)
        yield _compare(recorded, device.end(device.begin(recorded.step)))


def _compare(recorded: RecordedStep, output: StepOutput) -> ComparedStep:
    differences: list[str] = []
    largest = 0.0
    before = recorded.output
    for row in range(len(recorded.step.rows)):
        pairs = [("token", before.tokens[row], output.tokens[row])]
        scores = before.scores.get(row, []), output.scores.get(row, [])
        pairs += [(f"score {index}", *pair) for index, pair in enumerate(zip(*scores, strict=True))]
        for what, then, now in pairs:
            if _id(then) != _id(now):
                differences.append(f"row {row}, {what}: recorded {_said(then)}, here {_said(now)}")
            elif then is not None and now is not None and then.logprob is not None and now.logprob is not None:
                largest = max(largest, abs(then.logprob - now.logprob))
        for then_sum, now_sum in zip(before.pooled.get(row, []), output.pooled.get(row, []), strict=True):
            largest = max(largest, abs(then_sum - now_sum) / max(1.0, abs(then_sum)))
        if before.failures.get(row, "") != output.failures.get(row, ""):
            differences.append(
                f"row {row}: recorded {before.failures.get(row) or 'no failure'}, "
                f"here {output.failures.get(row) or 'no failure'}"
            )
    return ComparedStep(
        number=recorded.step.number,
        num_rows=len(recorded.step.rows),
        differences=differences,
        largest=largest,
        recorded_s=before.elapsed_s,
        elapsed_s=output.elapsed_s,
    )


def _id(token: SampledToken | None) -> int | None:
    return None if token is None else token.token_id


def _said(token: SampledToken | None) -> str:
    return "none" if token is None else str(token.token_id)
