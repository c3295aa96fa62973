"""What `--dtype auto` means: the checkpoint's own dtype if this machine computes fast in it, else float32.

Workers exchange KV only if their dtypes are equal. So nothing here depends on a timing, or on how busy a machine is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.cpu import Cpu, fast_dtypes, read_cpu
from common.model_files import checkpoint_dtype, open_model

AUTO = "auto"

_MISSING = {  # what a CPU that is slow in a dtype lacks
    "bfloat16": "avx512_bf16 or amx_bf16",
    "float16": "avx512_fp16",
}


@dataclass(slots=True, frozen=True)
class DtypeChoice:
    dtype: str  # "float32", "bfloat16", "float16"
    reason: str  # for people: log lines and `baton status`


def resolve_dtype(asked: str, model_dir: Path, device: str) -> DtypeChoice:
    """`choose_dtype` for a model directory on this machine. Raises `StartupError` if the directory cannot be read."""
    return choose_dtype(asked, checkpoint=checkpoint_dtype(open_model(model_dir)), device=device, cpu=read_cpu())


def choose_dtype(asked: str, *, checkpoint: str, device: str, cpu: Cpu) -> DtypeChoice:
    """`asked` is --dtype and `device` is --device. A dtype that was asked for is taken, and the reason says what auto
    would take instead, if that differs: so a dtype that one process chose for all others keeps its reason."""
    auto = _auto(checkpoint, device, cpu)
    if asked in (AUTO, auto.dtype):
        return auto
    return DtypeChoice(asked, f"as set; auto would be {auto.dtype}: {auto.reason}")


def _auto(checkpoint: str, device: str, cpu: Cpu) -> DtypeChoice:
    if not device.startswith("cpu") or checkpoint in fast_dtypes(cpu):
        return DtypeChoice(checkpoint, "the checkpoint's own")
    if cpu.limits:
        why = f"{' and '.join(cpu.limits)} take this CPU's {checkpoint} units away"
    else:
        why = f"this CPU has no {checkpoint} units ({_MISSING[checkpoint]})"
    return DtypeChoice("float32", f"the checkpoint's {checkpoint} is slow here: {why}")
