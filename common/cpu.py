"""What this machine's CPU computes fast, by its flags and never by a timing: two machines of a kind decide alike.

Variables that keep torch and oneDNN from using a part of the CPU count as flags that are missing, so that any machine
can be tested as an older one: `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

# As Linux names them; the last of each is Arm's.
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
FP16_FLAGS = ("avx512_fp16", "amx_fp16", "asimdhp")

_X86_BF16, _X86_FP16 = frozenset(BF16_FLAGS[:-1]), frozenset(FP16_FLAGS[:-1])
_BELOW_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
_ONEDNN_VALUES = {**dict.fromkeys(_BELOW_BF16, _X86_BF16 | _X86_FP16), "AVX512_CORE_BF16": _X86_FP16}

# Which value of which variable takes which flags away. They are read on x86 only.
_LIMITS = {
    "ONEDNN_MAX_CPU_ISA": _ONEDNN_VALUES,
    "DNNL_MAX_CPU_ISA": _ONEDNN_VALUES,
    "ATEN_CPU_CAPABILITY": dict.fromkeys(("DEFAULT", "AVX2"), _X86_BF16 | _X86_FP16),
}


@dataclass(slots=True, frozen=True)
class Cpu:
    name: str  # as the system names it; empty where it does not
    flags: frozenset[str]  # that every core has, and that no variable takes away
    limits: tuple[str, ...] = ()  # variables that take some away, as NAME=VALUE

    @property
    def has_bf16(self) -> bool:
        return not self.flags.isdisjoint(BF16_FLAGS)

    @property
    def has_fp16(self) -> bool:
        return not self.flags.isdisjoint(FP16_FLAGS)


def read_cpu(cpuinfo: Path = _CPUINFO, environ: Mapping[str, str] = os.environ) -> Cpu:
    """This machine's CPU. Where there is no such file (not Linux), it has no flags."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except FileNotFoundError:
        text = ""
    name, cores = "", []
    for line in text.splitlines():
        key, _, value = line.partition(":")
        match key.strip():
            case "flags" | "Features":  # x86, Arm
                cores.append(frozenset(value.split()))
            case "model name":
                name = value.strip()
    whole = frozenset[str]().union(*cores[:1]).intersection(*cores)
    flags, limits = whole, []
    for variable, values in _LIMITS.items():
        value = environ.get(variable, "")
        taken = values.get(value.upper(), frozenset()) & whole
        if taken:
            flags -= taken
            limits.append(f"{variable}={value}")
    return Cpu(name, flags, tuple(limits))


def fast_dtypes(cpu: Cpu) -> frozenset[str]:
    """Those that `cpu` multiplies at least as fast as float32."""
    fast = {"float32"}
    if cpu.has_bf16:
        fast.add("bfloat16")
    if cpu.has_fp16:
        fast.add("float16")
    return frozenset(fast)
