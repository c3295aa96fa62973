"""Every variant of the kernels that this machine has built and its CPU can run."""

from __future__ import annotations

from functools import cache

import pytest

from engine.kernels.choice import Choice, built_variants, cpu_instruction_sets
from engine.kernels.library import Kernels

VARIANTS = [name for name in built_variants() if name in cpu_instruction_sets()]

_NONE = [pytest.param("none", marks=pytest.mark.skip(reason="no kernels were built"))]


def slow_but_the_best(names: list[str]) -> list[object]:
    return [name if name == names[-1] else pytest.param(name, marks=pytest.mark.slow) for name in names]


def _ends_and_slow_others(names: list[str]) -> list[object]:
    return [name if name in (names[0], names[-1]) else pytest.param(name, marks=pytest.mark.slow) for name in names]


each_variant = pytest.mark.parametrize("variant", _ends_and_slow_others(VARIANTS) or _NONE)
"""The quick tier runs the plainest and the best."""

best_and_slow_other_variants = pytest.mark.parametrize("variant", slow_but_the_best(VARIANTS) or _NONE)

ALL = ["torch", *VARIANTS]
"""What a whole model can be computed with."""

best_and_slow_others = slow_but_the_best(ALL)
"""For tests of whole models: the quick tier computes each with what this machine would choose."""

torch_best_and_slow_others = [
    name if name in (ALL[0], ALL[-1]) else pytest.param(name, marks=pytest.mark.slow) for name in ALL
]
"""For cheaper ones: the quick tier computes with torch too."""


@cache
def kernels(variant: str, num_threads: int = 2) -> Kernels:
    return Kernels(Choice(variant, "a test"), num_threads)
