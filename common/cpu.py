"""What this machine's CPU can do, read from its flags and never from a timing, so that two equal machines decide alike.

Variables that keep torch and oneDNN from using a part of the CPU count as flags that are missing, so that any machine
can be tested as an older one: `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

# Levels of x86, weakest first.
LEVELS = ("baseline", "avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx")

_ONEDNN_LEVELS = {
    "SSE41": "baseline",
    "AVX": "baseline",
    "AVX2": "avx2",
    "AVX2_VNNI": "avx2",
    "AVX2_VNNI_2": "avx2",
    "AVX512_CORE": "avx512",
    "AVX512_CORE_VNNI": "avx512",
    "AVX512_CORE_BF16": "avx512_bf16",
    "AVX512_CORE_FP16": "avx512_fp16",
}
# The highest level that a variable's value leaves. Other values leave all. They are read on x86 only.
_LIMITS = {
    "ONEDNN_MAX_CPU_ISA": _ONEDNN_LEVELS,
    "DNNL_MAX_CPU_ISA": _ONEDNN_LEVELS,
    "ATEN_CPU_CAPABILITY": {"DEFAULT": "baseline", "AVX2": "avx2"},
}

# Linux's names of the flags. Names with a level are x86's; the last name of each entry is Arm's.
_X86_FLAGS = {"avx512_bf16": "avx512_bf16", "avx512_fp16": "avx512_fp16", "amx_bf16": "amx", "amx_fp16": "amx"}
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
FP16_FLAGS = ("avx512_fp16", "amx_fp16", "asimdhp")


@dataclass(slots=True, frozen=True)
class Limit:
    """A variable that keeps oneDNN or torch from using all of an x86 CPU."""

    setting: str  # NAME=VALUE
    level: str  # the highest of LEVELS that is left

    def allows(self, level: str) -> bool:
        return LEVELS.index(level) <= LEVELS.index(self.level)


@dataclass(slots=True, frozen=True)
class Cpu:
    name: str  # as the system names it; empty if it does not
    flags: frozenset[str]  # that every core has, and that no variable takes away
    limits: tuple[str, ...] = ()  # variables that take some away, as NAME=VALUE
    vendor: str = ""  # such as GenuineIntel; Arm's: its implementer, such as 0x41; empty if the system does not say
    family: int = 0
    model: int = 0  # of the family; Arm's: its part

    @property
    def kind(self) -> str:
        """Names all CPUs of one design, such as GenuineIntel-6-207; empty if the system does not say."""
        return f"{self.vendor}-{self.family}-{self.model}" if self.vendor else ""

    @property
    def title(self) -> str:
        """For people, and for tables of measurements: hypervisors give one name to many kinds."""
        name = self.name or "unknown CPU"
        return f"{name} ({self.vendor} family {self.family} model {self.model})" if self.vendor else name

    @property
    def has_bf16(self) -> bool:
        return not self.flags.isdisjoint(BF16_FLAGS)

    @property
    def has_fp16(self) -> bool:
        return not self.flags.isdisjoint(FP16_FLAGS)


def read_limits(environ: Mapping[str, str] = os.environ) -> list[Limit]:
    """What the environment sets."""
    found = []
    for variable, levels in _LIMITS.items():
        value = environ.get(variable, "")
        if (level := levels.get(value.upper())) is not None:
            found.append(Limit(f"{variable}={value}", level))
    return found


def read_cpu(cpuinfo: Path = _CPUINFO, environ: Mapping[str, str] = os.environ) -> Cpu:
    """This machine's CPU. If there is no such file (not Linux), it has no flags."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except FileNotFoundError:
        text = ""
    name, vendor, cores, numbers = "", "", [], {"family": 0, "model": 0}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        match key.strip():
            case "flags" | "Features":  # x86, Arm
                cores.append(frozenset(value.split()))
            case "model name":
                name = value.strip()
            case "vendor_id" | "CPU implementer":
                vendor = value.strip()
            case "cpu family" | "CPU architecture":
                numbers["family"] = _number(value)
            case "model" | "CPU part":
                numbers["model"] = _number(value)
    whole = frozenset[str]().union(*cores[:1]).intersection(*cores)
    flags, limits = whole, []
    for limit in read_limits(environ):
        taken = {flag for flag, level in _X86_FLAGS.items() if not limit.allows(level)} & whole
        if taken:
            flags -= taken
            limits.append(limit.setting)
    return Cpu(name, flags, tuple(limits), vendor, **numbers)


def _number(text: str) -> int:
    """Decimal, or hexadecimal with 0x; 0 for what is neither."""
    try:
        return int(text.strip(), 0)
    except ValueError:
        return 0
