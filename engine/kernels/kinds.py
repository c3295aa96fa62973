"""Which variant of the kernels is the fastest on which kind of CPU, if that is not the order of instruction sets.

A newer unit may be slower than an older one: some CPUs multiply pairs of bfloat16 at half the rate of float32. A kind
is a vendor, a family and models. Here stand the kinds that were measured; docs/kernels.md has the figures. On any other
kind that could go either way, `engine/kernels/trial.py` measures once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from common.cpu import Cpu

# Weakest first, in the order of `baton_cpu_has`. Each is a variant of the kernels.
INSTRUCTION_SETS = ("avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16")

# Of these, CPUs differ in which is the fastest; each has more than the one before.
_CONTESTED = (("avx512", "avx512_bf16", "amx"), ("neon", "neon_bf16"))


@dataclass(slots=True, frozen=True)
class Kind:
    vendor: str
    family: int
    models: frozenset[int]  # empty: all of the family
    order: tuple[str, ...]  # slowest first

    def fits(self, cpu: Cpu) -> bool:
        is_family = (self.vendor, self.family) == (cpu.vendor, cpu.family)
        return is_family and (not self.models or cpu.model in self.models)


_MEASURED = (
    Kind("AuthenticAMD", 25, frozenset(), INSTRUCTION_SETS),  # Zen 4; Zen 3 has AVX2 only
    Kind("AuthenticAMD", 26, frozenset(), INSTRUCTION_SETS),  # Zen 5
    # Sapphire and Emerald Rapids: bfloat16 at half the rate of float32. It decides if a hypervisor hides AMX.
    Kind("GenuineIntel", 6, frozenset({143, 207}), ("avx2", "avx512_bf16", "avx512", "amx")),
)


def ranked(names: Collection[str], cpu: Cpu) -> list[str]:
    """The instruction sets `names`, slowest first as far as this kind of CPU was measured."""
    order = next((kind.order for kind in _MEASURED if kind.fits(cpu)), INSTRUCTION_SETS)
    return sorted(names, key=order.index)


def rivals(names: Sequence[str], cpu: Cpu) -> tuple[str, ...]:
    """Those of `names` of which any could be the fastest on this CPU, weakest first; none if its kind was measured."""
    if any(kind.fits(cpu) for kind in _MEASURED):
        return ()
    found = (tuple(name for name in group if name in names) for group in _CONTESTED)
    return next((group for group in found if len(group) > 1), ())
