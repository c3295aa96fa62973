"""Which variant of the kernels runs here: the fastest on this kind of CPU, unless a setting or a variable says less."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from common.cpu import Cpu, read_cpu, read_limits
from common.errors import StartupError
from engine.kernels.build import FEATURES, VARIANTS, library_file
from engine.kernels.kinds import INSTRUCTION_SETS, ranked, rivals

TORCH = "torch"
AUTO = "auto"
_UNKNOWN = Cpu("", frozenset())


@dataclass(slots=True, frozen=True)
class Choice:
    instruction_set: str  # one of INSTRUCTION_SETS, or TORCH
    reason: str
    rivals: tuple[str, ...] = ()  # any of which could be the fastest here: nobody has measured this kind of CPU
    slower: tuple[str, ...] = ()  # others that `auto` may take


def cpu_instruction_sets() -> list[str]:
    """The `INSTRUCTION_SETS` that this CPU and its system have; none if the kernels were not built."""
    file = library_file(FEATURES)
    if not file.exists():
        return []
    library = ctypes.CDLL(str(file))
    return [name for number, name in enumerate(INSTRUCTION_SETS) if library.baton_cpu_has(number)]


def refused_by_system() -> dict[str, str]:
    """Instruction sets that the CPU has, and that its system does not let this process use, each with the reason."""
    file = library_file(FEATURES)
    reason = ctypes.CDLL(str(file)).baton_tiles_refused() if file.exists() else 0
    return {"amx": os.strerror(reason)} if reason else {}


def built_variants() -> list[str]:
    return [name for name in VARIANTS if library_file(name).exists()]


def choose(wanted: str = AUTO) -> Choice:
    """`wanted` is the setting `kernels`. Raises `StartupError` if it names one that cannot run here."""
    return choose_among(wanted, cpu_instruction_sets(), built_variants(), os.environ, read_cpu(), refused_by_system())


def choose_among(
    wanted: str,
    has: Collection[str],
    built: Collection[str],
    environ: Mapping[str, str],
    cpu: Cpu = _UNKNOWN,
    refused: Mapping[str, str] | None = None,
) -> Choice:
    """`cpu` says the order of speed. `refused`: see `refused_by_system`."""
    refused = refused or {}
    if wanted == TORCH:
        return Choice(TORCH, "--kernels torch")
    possible = [name for name in has if name in built]
    if wanted != AUTO:
        if wanted not in possible:
            why = "was not built (make install builds what the compiler can)" if wanted in has or not has else ""
            if wanted in refused:
                why = f"is refused by the system ({refused[wanted]})"
            raise StartupError(f"--kernels {wanted} {why or 'is not what this CPU has'}; here work {_list(possible)}")
        return Choice(wanted, f"--kernels {wanted}")
    if not built:
        return Choice(TORCH, "no kernels were built (make install does, with a C++ compiler)")
    if not possible:
        return Choice(TORCH, "this CPU has no instruction set that there are kernels for")
    possible = ranked(possible, cpu)
    best, reason = possible[-1], "the best that this CPU has"
    if best != max(possible, key=INSTRUCTION_SETS.index):
        reason = f"the fastest on this kind of CPU ({cpu.kind})"
    if refused:
        reason += "".join(f", as the system refuses {name} ({why})" for name, why in refused.items())
    if not best.startswith("neon"):
        for limit in read_limits(environ):  # what users forbid oneDNN and torch is forbidden to the kernels too
            allowed = [name for name in possible if limit.allows(name)]
            if best not in allowed:
                best, reason = allowed[-1] if allowed else TORCH, limit.setting
            possible = allowed
    return Choice(best, reason, rivals(possible, cpu), tuple(possible[:-1]))


def _list(names: Collection[str]) -> str:
    return ", ".join([AUTO, *names, TORCH])
