"""What a step costs by its number of rows: whether further rows pay.

Nothing is measured at start, so workers of a kind draft alike. The figures are of `python -m bench.step` with 1 to 32
rows, in docs/speculation.md.
"""

from __future__ import annotations

import math

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


def step_cost(num_rows: float, free_rows: float) -> float:
    """The cost of a step, in units of what it takes to multiply one row. Reading and multiplying overlap in part."""
    return math.hypot(free_rows, num_rows)
