"""Which library multiplies by a weight that is not quantised: Baton's kernels, or torch's (oneDNN for bfloat16, MKL for
float32).

The shipped table has fixed rules for each instruction set. Nothing is measured at start, so equal workers compute equal
bits. What `baton doctor --tune` measured on this kind of CPU takes its place.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from common.errors import StartupError

log = logging.getLogger(__name__)

FILE_NAME = "kernels.json"  # in the folder of --cache-dir


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
class Tuned:
    """The file that `baton doctor --tune` writes."""

    cpu: str  # its name; on others the file says nothing
    instruction_set: str
    rules: tuple[Rule, ...]


# By instruction set; those that are missing compute all with the kernels.
_SHIPPED = {"amx": (Rule("bfloat16", 0, 32),)}


def shipped(instruction_set: str) -> Table:
    return Table(_SHIPPED.get(instruction_set, ()))


def tuned_file(cache_dir: str) -> Path:
    return Path(cache_dir).expanduser() / FILE_NAME


def write_tuned(file: Path, tuned: Tuned) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(".tmp")
    scratch.write_text(json.dumps(asdict(tuned), indent=1) + "\n")
    scratch.replace(file)


def load_table(cache_dir: str, cpu: str, instruction_set: str) -> Table:
    """What was tuned for this CPU and instruction set, else what is shipped.

    Raises `StartupError` for a file that holds something else."""
    file = tuned_file(cache_dir)
    try:
        tuned = TypeAdapter(Tuned).validate_json(file.read_bytes())
    except FileNotFoundError:
        return shipped(instruction_set)
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error.errors()[0]['loc']} is wrong"
        raise StartupError(f"{file}: {reason}; delete it, or run baton doctor --tune again") from error
    if (tuned.cpu, tuned.instruction_set) != (cpu, instruction_set):
        log.info("kernels were tuned for another CPU", extra={"file": str(file), "tuned_for": tuned.cpu})
        return shipped(instruction_set)
    return Table(tuned.rules, str(file))
