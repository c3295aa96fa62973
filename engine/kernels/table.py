"""Which library multiplies by a weight that is not quantised: Baton's kernels, or torch's (oneDNN for bfloat16, MKL for
float32).

The shipped table leaves all to the kernels, so equal workers compute equal bits. What `baton doctor --tune` found for a
model on this kind of CPU takes its place, and the variant that it found takes that of the choice.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from common.errors import StartupError

FILE_NAME = "tuned-kernels.json"  # in the folder of --cache-dir


class BrokenTableError(StartupError):
    """The file of what was tuned holds something else."""


@dataclass(slots=True, frozen=True)
class Rule:
    """What computes products with matrices of `dtype` that have `min_weights` or more. If several rules fit, the one
    with the most weights counts."""

    dtype: str  # float32 or bfloat16
    min_weights: int
    torch_from: int | None  # from so many rows of x on torch's library is faster; None: never


@dataclass(slots=True, frozen=True)
class Table:
    rules: tuple[Rule, ...]
    file: str = ""  # empty: shipped

    def torch_from(self, dtype: str, num_weights: int) -> int | None:
        fitting = [rule for rule in self.rules if rule.dtype == dtype and rule.min_weights <= num_weights]
        return max(fitting, key=lambda rule: rule.min_weights).torch_from if fitting else None


@dataclass(slots=True, frozen=True)
class TunedFor:
    """What tuning was about, and what it applies to."""

    cpu: str  # its kind, as `Cpu.kind`, or its name if the system does not say that
    model: str  # as `model_identity` names the weights
    dtype: str
    quantization: str


@dataclass(slots=True, frozen=True)
class Tuned:
    """One result of `baton doctor --tune`."""

    of: TunedFor
    instruction_set: str
    rules: tuple[Rule, ...]


@dataclass(slots=True, frozen=True)
class _TunedFile:
    tuned: tuple[Tuned, ...]


SHIPPED = Table(())
"""The kernels compute all."""


def tuned_file(cache_dir: str) -> Path:
    return Path(cache_dir).expanduser() / FILE_NAME


def keep_tuned(cache_dir: str, of: TunedFor, tuned: Tuned | None) -> Path:
    """Puts `tuned` in the place of what the file has for the same, or takes that away if it is None.

    Raises `OSError`."""
    file = tuned_file(cache_dir)
    try:
        before = _read(file)
    except BrokenTableError:
        before = ()  # of no use to anybody
    after = (*(one for one in before if one.of != of), *(() if tuned is None else (tuned,)))
    if not after:
        file.unlink(missing_ok=True)
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".{uuid4().hex}.tmp")
    scratch.write_text(json.dumps(asdict(_TunedFile(after)), indent=1) + "\n")
    scratch.replace(file)
    return file


def load_tuned(cache_dir: str, of: TunedFor) -> Tuned | None:
    """What was found for this model on this kind of CPU; None if nothing was.

    Raises `BrokenTableError` for a file that holds something else."""
    return next((one for one in _read(tuned_file(cache_dir)) if one.of == of), None)


def _read(file: Path) -> tuple[Tuned, ...]:
    try:
        return TypeAdapter(_TunedFile).validate_json(file.read_bytes()).tuned
    except FileNotFoundError:
        return ()
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error.errors()[0]['loc']} is wrong"
        raise BrokenTableError(f"{file}: {reason}; delete it, or run baton doctor --tune again") from error
