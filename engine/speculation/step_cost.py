"""What a step costs by its number of rows: whether further rows pay.

A model of time says it, once the engine is sure of one. Until then it is estimated from the figures below, of
`python -m bench.step` with 1 to 32 rows, in docs/speculation.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from common.batch_time import BatchTime, StepShape

# Rows that are multiplied in the time that a byte of each weight takes to come from memory.
_ROWS_PER_BYTE = {"avx2": 1.3, "avx512": 2.0, "avx512_bf16": 2.0, "amx": 2.0, "neon": 1.3, "neon_bf16": 1.3}
_MULTIPLY_PAIRS = ("avx512_bf16", "amx", "neon_bf16")  # of bfloat16: twice as fast
_WITH_TORCH = {"cpu": 4.0, "cuda": 64.0}


def free_rows(device_type: str, instruction_set: str | None, bytes_per_weight: float, *, is_bfloat16: bool) -> float:
    """The rows that a step multiplies in the time in which it reads the model's weights.

    `instruction_set`: of Baton's kernels, None if torch multiplies. `is_bfloat16`: the weights are, or are widened to
    it.
    """
    if instruction_set is None:
        return _WITH_TORCH[device_type]
    speed = 2.0 if is_bfloat16 and instruction_set in _MULTIPLY_PAIRS else 1.0
    return speed * _ROWS_PER_BYTE[instruction_set] * bytes_per_weight


def cost_by_rows(free_rows: float) -> Callable[[float], float]:
    """The cost of a step by its rows, in units of what it takes to multiply one. Reading and multiplying overlap in
    part."""
    return lambda num_rows: math.hypot(free_rows, num_rows)


def predicted_cost(time: BatchTime, shape: StepShape) -> Callable[[float], float]:
    """Seconds by the number of rows, if they are like those of `shape`, which has one at least."""
    num = shape.num_decodes

    def seconds(num_rows: float) -> float:
        times = num_rows / num
        return time.seconds(
            StepShape(
                num_decodes=round(num_rows),
                decode_context=round(times * shape.decode_context),
                longest_context=shape.longest_context,
                num_head_rows=round(times * shape.num_head_rows),
                num_drawn=round(times * shape.num_drawn),
                num_filtered=round(times * shape.num_filtered),
                num_edited=round(times * shape.num_edited),
                num_masked=round(times * shape.num_masked),
                num_logprobs=round(times * shape.num_logprobs),
            )
        )

    return seconds
