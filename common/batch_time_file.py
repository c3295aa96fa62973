"""A model of time as a file, and as a message to others: JSON with a schema version."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import msgspec

from common.batch_time import FEATURES, MAX_RESIDUAL, BatchTime, BatchTimeKey, Regime, RegimeTime, Table
from common.errors import StartupError

SCHEMA = 1
# Beyond these a number is no time of a step, and whoever adds or multiplies such numbers would leave what floats hold.
MAX_SECONDS = 3600.0  # of a step
MAX_COEFFICIENT = 1.0  # seconds for one of whatever is counted
MAX_KNOT = 2.0**24  # tokens
MAX_QUANTILE = math.log(100.0)


class _Regime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layers: Table
    head: Table
    coefficients: dict[str, float]
    residuals: list[tuple[int, int, float]]
    p90: float
    p99: float
    num_steps: int


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    key: BatchTimeKey
    regimes: dict[Regime, _Regime]


def encode(model: BatchTime) -> bytes:
    regimes = {
        name: _Regime(
            layers=regime.layers,
            head=regime.head,
            coefficients=dict(zip(FEATURES, regime.coefficients, strict=True)),
            residuals=[(*cell, value) for cell, value in sorted(regime.residuals.items())],
            p90=regime.p90,
            p99=regime.p99,
            num_steps=regime.num_steps,
        )
        for name, regime in model.regimes.items()
    }
    return msgspec.json.format(msgspec.json.encode(_File(schema=SCHEMA, key=model.key, regimes=regimes)), indent=1)


def decode(data: bytes) -> BatchTime:
    """Raises `ValueError` with a reason if the data is damaged or of another schema."""
    head = msgspec.json.decode(data)
    if not isinstance(head, dict) or head.get("schema") != SCHEMA:
        found = head.get("schema") if isinstance(head, dict) else None
        raise ValueError(f"it has schema {found}, this Baton reads {SCHEMA}")
    file = msgspec.json.decode(data, type=_File)
    if missing := [name for name in Regime if name not in file.regimes]:
        raise ValueError(f"it lacks the regimes {', '.join(missing)}")
    return BatchTime(key=file.key, regimes={name: _checked(name, one) for name, one in file.regimes.items()})


def _checked(name: Regime, regime: _Regime) -> RegimeTime:
    if set(regime.coefficients) != set(FEATURES):
        raise ValueError(f"{name} has other coefficients than {', '.join(FEATURES)}")
    for table in (regime.layers, regime.head):
        numbers = (*table.knots, *table.seconds, table.last_slope)
        if (
            not all(math.isfinite(one) and one >= 0 for one in numbers)
            or not table.knots
            or len(table.knots) != len(table.seconds)
        ):
            raise ValueError(f"{name} has a table that is none")
        if table.knots[-1] > MAX_KNOT or table.seconds[-1] > MAX_SECONDS or table.last_slope > MAX_COEFFICIENT:
            raise ValueError(f"{name} has a table beyond {MAX_SECONDS:.0f} s for {MAX_KNOT:.0f} tokens")
        if list(table.knots) != sorted(set(table.knots)) or list(table.seconds) != sorted(table.seconds):
            raise ValueError(f"{name} has a table that falls")
    if not all(math.isfinite(one) and one >= 0 for one in (*regime.coefficients.values(), regime.p90, regime.p99)):
        raise ValueError(f"{name} has a number below 0, or none")
    if max(regime.coefficients.values()) > MAX_COEFFICIENT or max(regime.p90, regime.p99) > MAX_QUANTILE:
        raise ValueError(f"{name} has a coefficient beyond {MAX_COEFFICIENT} s, or a quantile beyond 100 times")
    if not regime.layers.seconds[-1] + regime.layers.last_slope:
        raise ValueError(f"{name} has steps that take no time")
    if not all(abs(value) <= MAX_RESIDUAL for _, _, value in regime.residuals):
        raise ValueError(f"{name} has a residual beyond {MAX_RESIDUAL:.2f}")
    return RegimeTime(
        layers=regime.layers,
        head=regime.head,
        coefficients=tuple(regime.coefficients[feature] for feature in FEATURES),
        residuals={(x, y): value for x, y, value in regime.residuals},
        p90=regime.p90,
        p99=regime.p99,
        num_steps=regime.num_steps,
    )


def load(path: Path, key: BatchTimeKey) -> BatchTime:
    """The model in a file. Raises `StartupError` with one line if it cannot be read, is damaged, or was fitted to
    something else, which the line names."""
    try:
        model = decode(path.read_bytes())
    except OSError as error:
        raise StartupError(f"the model of time {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # of JSON, too
        raise StartupError(
            f"the model of time {path} is of no use: {error}; make it again by `baton profile`"
        ) from error
    ours, theirs = asdict(key), asdict(model.key)
    for name, value in ours.items():
        if theirs[name] != value:
            raise StartupError(f"the model of time {path} is for {name} {theirs[name]}, here it is {value}")
    return model
