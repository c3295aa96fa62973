"""What `--dtype auto` means: the checkpoint's own dtype if this machine computes fast in it, else float32.

Workers exchange KV only if their dtypes are equal. So nothing here depends on a timing, or on how busy a machine is.
Imports no torch: `baton up` decides for its workers before any of them starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.cpu import Cpu, read_cpu
from common.model_files import checkpoint_dtype, open_model
from engine.kernels.choice import AUTO, TORCH, Choice, choose

_UNITS = {  # what a CPU that is slow in a dtype lacks
    "bfloat16": "avx512_bf16 or amx_bf16",
    "float16": "avx512_fp16",
}


@dataclass(slots=True, frozen=True)
class DtypeChoice:
    dtype: str  # "float32", "bfloat16", "float16"
    reason: str  # for people: log lines and `baton status`
    is_checkpoint_slow: bool = False  # this CPU is slow in the checkpoint's own dtype


def resolve_dtype(asked: str, model_dir: Path, device: str, kernels: str = AUTO) -> DtypeChoice:
    """`choose_dtype` for a model directory on this machine; `kernels` is --kernels. Raises `StartupError` if the
    directory cannot be read, or if such kernels cannot run here."""
    checkpoint = checkpoint_dtype(open_model(model_dir))
    used = choose(kernels) if device.startswith("cpu") else Choice(TORCH, "they are for CPUs")
    return choose_dtype(asked, checkpoint=checkpoint, device=device, cpu=read_cpu(), kernels=used)


def fast_dtypes(cpu: Cpu, kernels: Choice) -> frozenset[str]:
    """Dtypes that this CPU multiplies about as fast as float32, or faster. The kernels widen bfloat16 as they read it,
    which is as fast as float32 with many tokens and faster with few tokens, when reading the weights takes most of the
    time. They have no float16: float32 holds its values exactly, and is faster in the kernels than float16 in torch."""
    fast = {"float32"}
    if cpu.has_bf16 or kernels.instruction_set != TORCH:
        fast.add("bfloat16")
    if cpu.has_fp16 and kernels.instruction_set == TORCH:
        fast.add("float16")
    return frozenset(fast)


def choose_dtype(asked: str, *, checkpoint: str, device: str, cpu: Cpu, kernels: Choice) -> DtypeChoice:
    """`asked` is --dtype and `device` is --device. If a dtype was asked for, it is taken, and the reason names auto's
    choice if that differs. So a dtype that one process chose for all others keeps its reason."""
    auto = _auto(checkpoint, device, cpu, kernels)
    if asked in (AUTO, auto.dtype):
        return auto
    return DtypeChoice(asked, f"as set; auto would be {auto.dtype}: {auto.reason}", auto.is_checkpoint_slow)


def _auto(checkpoint: str, device: str, cpu: Cpu, kernels: Choice) -> DtypeChoice:
    if not device.startswith("cpu") or checkpoint in fast_dtypes(cpu, kernels):
        return DtypeChoice(checkpoint, "the checkpoint's own")
    if checkpoint == "float16" and kernels.instruction_set != TORCH:
        why = "the CPU kernels have nothing for it"
    elif cpu.limits:
        why = f"{' and '.join(cpu.limits)} take this CPU's {checkpoint} units away"
    else:
        why = f"this CPU has no {checkpoint} units ({_UNITS[checkpoint]})"
    if checkpoint == "bfloat16":
        why += f", and the CPU kernels are not used: {kernels.reason}"
    return DtypeChoice("float32", f"the checkpoint's {checkpoint} is slow here: {why}", is_checkpoint_slow=True)
