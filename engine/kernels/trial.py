"""Measures which variant of the kernels is the fastest on a kind of CPU that nobody has measured yet.

Once, in well under a second, in CPU time of one thread, so that other work disturbs little. A weaker variant takes the
place of the strongest only if it is clearly faster: what this finds is a unit that runs at half rate, or at full, and
these lie far apart, so that machines of one kind find the same. The first worker's result is kept in --cache-dir, and
is every later one's that shares it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

import torch
from pydantic import TypeAdapter, ValidationError

from common.cpu import Cpu
from engine.kernels.build import source_hash
from engine.kernels.choice import Choice
from engine.kernels.library import Kernels, WeightKind

log = logging.getLogger(__name__)

CLEAR = 1.25  # times as fast, to be a difference
BUDGET_S = 0.6  # after which no further round begins
_ROUNDS = 5
_SHAPE = (1024, 1024)  # of the weight: in the second cache's size
_FEW, _MANY = 8, 256  # rows


@dataclass(slots=True, frozen=True)
class Seconds:
    """Of one product, in the best round."""

    few: float
    many: float


@dataclass(slots=True, frozen=True)
class Trial:
    """The file that keeps a result."""

    instruction_set: str
    seconds: dict[str, Seconds]  # by instruction set


def tried(choice: Choice, cpu: Cpu, weights: str, cache_dir: str) -> Choice:
    """The choice among `choice.rivals` for weights of this kind: a dtype, int8 or int4. In float32 all rivals multiply
    alike, so nothing is measured."""
    if not choice.rivals or weights == "float32":
        return choice
    name = f"kernels-{cpu.kind or 'unknown'}-{choice.rivals[-1]}-{weights}-{source_hash()}.json"
    file = Path(cache_dir).expanduser() / name
    trial = _read(file, choice.rivals)
    if trial is None:
        seconds = measure(choice.rivals, weights)
        trial = Trial(winner(choice.rivals, seconds), seconds)
        trial = _keep(file, trial, choice.rivals)
    return Choice(trial.instruction_set, f"{', '.join(choice.rivals)} were measured on this kind of CPU ({file})")


def measure(names: Sequence[str], weights: str, shape: tuple[int, int] = _SHAPE) -> dict[str, Seconds]:
    """Variants take turns. `weights` as `tried` has it; `shape` is the weight's."""
    works: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    kind = WeightKind[weights.upper()]
    dtype = torch.bfloat16 if kind is WeightKind.BFLOAT16 else torch.float32
    weight = torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape).to(dtype)
    few, many = (torch.ones(rows, shape[1]) for rows in (_FEW, _MANY))
    for name in names:
        packed = Kernels(Choice(name, "a trial"), 1).pack(weight, None, kind)
        works[name] = (lambda packed=packed: packed(few), lambda packed=packed: packed(many))  # type: ignore[misc]
    best = {name: Seconds(math.inf, math.inf) for name in names}
    begin = time.perf_counter()
    for number in range(_ROUNDS):
        if number and time.perf_counter() - begin > BUDGET_S:
            break
        for name, (short, long) in works.items():
            best[name] = Seconds(min(best[name].few, _cpu_s(short)), min(best[name].many, _cpu_s(long)))
    return best


def winner(names: Sequence[str], seconds: Mapping[str, Seconds]) -> str:
    """The last of `names`, unless one before it is clearly faster with many rows and not clearly slower with few."""
    strongest = seconds[names[-1]]
    better = [
        name
        for name in names[:-1]
        if seconds[name].many * CLEAR < strongest.many and seconds[name].few < strongest.few * CLEAR
    ]
    return min(better, key=lambda name: seconds[name].many) if better else names[-1]


def _cpu_s(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _read(file: Path, names: Sequence[str]) -> Trial | None:
    """What was kept; None for a file that is missing, or of no use."""
    try:
        trial = TypeAdapter(Trial).validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        log.warning("a measurement of the kernels cannot be read", extra={"file": str(file), "reason": str(error)})
        return None
    return trial if trial.instruction_set in names else None


def _keep(file: Path, trial: Trial, names: Sequence[str]) -> Trial:
    """Writes the result unless another worker was first, whose result counts then."""
    scratch = file.with_suffix(f".{uuid4().hex}.tmp")  # process ids are equal in containers that share the folder
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(asdict(trial), indent=1) + "\n")
        try:
            os.link(scratch, file)
        except FileExistsError:
            first = _read(file, names)
            if first is not None:
                return first
            scratch.replace(file)
            return trial
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        log.warning("a measurement of the kernels cannot be kept", extra={"file": str(file), "reason": error.strerror})
    return trial
