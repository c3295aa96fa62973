"""A rough model of time, from some steps at start."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from common.batch_time import BatchTime, BatchTimeKey
from common.batch_time_fit import MeasuredStep, fit_roughly
from common.config import EngineSettings
from engine.device import Device
from engine.profile.design import Limits, Point, rows_of
from engine.step import StepInput

NUM_STEPS = 20
BUDGET_S = 1.5  # no further step begins after that
MIN_STEPS = 4


def limits_of(device: Device, settings: EngineSettings) -> Limits:
    info = device.info
    return Limits(
        num_blocks=info.num_blocks,
        block_size=info.spec.block_size,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_rows=settings.max_num_seqs,
        max_tokens=min(settings.max_num_batched_tokens, settings.chunk_size),
    )


def quick_model(
    device: Device, key: BatchTimeKey, settings: EngineSettings, *, budget_s: float = BUDGET_S
) -> BatchTime | None:
    """A model from at most `NUM_STEPS` steps, cheap ones first. Blocks are overwritten, so that no request may have
    begun. None if the device is so slow that hardly any step fits into `budget_s`."""
    limits, rng = limits_of(device, settings), random.Random(1)  # noqa: S311 (no secret)
    steps: list[MeasuredStep] = []
    end = time.monotonic() + budget_s
    for point in points(limits):
        if time.monotonic() >= end:
            break
        rows = rows_of(point, limits, rng)
        output = device.compute(rows)
        if not output.failures and output.elapsed_s > 0:
            steps.append(MeasuredStep(StepInput(number=0, rows=rows).shape, output.elapsed_s))
    return fit_roughly(key, steps) if len(steps) >= MIN_STEPS else None


def points(limits: Limits) -> Iterator[Point]:
    """At most `NUM_STEPS`, such as fit into the limits, those with few new tokens first."""
    context = min(64, limits.max_context)
    wanted = (
        *(Point(decodes=(context,) * num) for num in (1, 2, 4, 8)),
        *(Point(decodes=(limits.max_context // 2,) * num) for num in (1, 4)),
        *(Point(chunks=((num, 0),)) for num in (8, 16, 32)),
        Point(decodes=(context,) * 16),
        Point(decodes=(context,) * 2, chunks=((16, 0),)),
        Point(decodes=(context,) * 32),
        Point(chunks=((32, min(512, limits.max_context - 32)),)),
        Point(chunks=((64, 0),)),
        Point(decodes=(context,) * 8, chunks=((64, 0),)),
        Point(decodes=(context,) * 64),
        *(Point(chunks=((num, 0),)) for num in (128, 256, 512)),
        Point(decodes=(context,) * 8, chunks=((256, 0),)),
    )
    assert len(wanted) == NUM_STEPS  # noqa: S101
    for point in wanted:
        num_tokens = len(point.decodes) + sum(new for new, _ in point.chunks)
        lengths = (*point.decodes, *(new + past for new, past in point.chunks))
        if (
            len(point.decodes) <= limits.max_rows
            and num_tokens <= limits.max_tokens
            and min(lengths) >= 1
            and all(past >= 0 for _, past in point.chunks)
            and max(lengths) <= limits.max_context
            and point.num_blocks(limits.block_size) <= limits.num_blocks
        ):
            yield point
