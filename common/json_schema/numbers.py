"""Numbers that llguidance keeps exactly. It reads each as a double, and writes ranges as digits.

What a double cannot hold is refused, and so is what it reads inexactly: decimals of more than 15 or 16 digits. It takes
`5` for above 5 if the other bound is below 6, so in schemas that have such a bound above 5 is from 5.00000000000001.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from common.json_schema.plain import UnkeptError

# The grammar's escapes lack \uXXXX, so llguidance leaves these control characters out. It reads no halves of surrogate
# pairs.
_DROPPED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
_TINY = 1e-18
_DIGITS = 15
_MAX_POWER = 22  # of ten, that is a double
_LIMIT = 2**63  # bounds and constants are below it in size
_MAX_INT64 = _LIMIT - 1  # llguidance reads it as 2**63, and caps that to this again
_LEAST = 1024 - _LIMIT  # -2**63 as a lower bound is this one instead: llguidance knows none below it
_MAX_MULTIPLE = 100_000  # of multipleOf: about 7 microseconds each to compile
_MAX_MULTIPLES = 10_000  # the least common multiple of several
_MAX_COEFFICIENT = 2**32  # of multipleOf: what llguidance computes them with


def number(value: Any, keyword: str, place: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnkeptError(keyword, place, f"must be a number, not {value!r}")
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def check_constant(value: Any, keyword: str, place: str) -> Any:
    """`value`, a JSON value, as llguidance writes it without change. Raises `UnkeptError`."""
    if isinstance(value, list):
        return [check_constant(one, keyword, place) for one in value]
    if isinstance(value, dict):
        return {check_constant(key, keyword, place): check_constant(one, keyword, place) for key, one in value.items()}
    if isinstance(value, str) and (found := _DROPPED.search(value)) is not None:
        raise UnkeptError(keyword, place, f"a text with U+{ord(found[0]):04X} is not supported")
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = number(value, keyword, place)
        if not _is_kept(value):
            raise UnkeptError(keyword, place, f"{value} is a number that cannot be kept exactly")
    return value


def _is_kept(value: int | float) -> bool:
    if isinstance(value, int):
        return abs(value) < _LIMIT and int(float(value)) == value
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    coefficient = int("".join(map(str, digits)))
    is_read = int(float(coefficient)) == coefficient and abs(int(exponent)) <= _MAX_POWER
    return is_read and (abs(value) < 2**53 or (abs(value) < _LIMIT and int(value) == Decimal(repr(value))))


def bounds(schema: Mapping[str, Any], others: Collection[float], *, is_integer: bool, place: str) -> dict[str, float]:
    """Bounds that mean the same as those of `schema`. `others`: all bounds that it may meet. Raises `UnkeptError`."""
    found: dict[str, float] = {}
    for name, sign in (("minimum", 1), ("maximum", -1)):
        exclusive = "exclusive" + name[0].upper() + name[1:]
        if name not in schema and exclusive not in schema:
            continue
        # Mirrored for the maximum: from here on it is a lower bound.
        given = [(sign * schema[key], key == exclusive, key) for key in (name, exclusive) if key in schema]
        value, is_open, keyword = max(given)
        if is_integer and isinstance(value, int):
            value, is_open = (value + 1 if is_open else value), False
        elif is_integer:
            value, is_open = (math.floor(value) + 1 if is_open else math.ceil(value)), False
        if sign * value == -_LIMIT and name == "minimum":
            value = _LEAST
        if not _is_kept(value) and not (is_integer and sign * value == _MAX_INT64):
            raise UnkeptError(keyword, place, f"{schema[keyword]} cannot be kept exactly")
        if is_open and value >= 0 and value == int(value) and any(value < sign * one < value + 1 for one in others):
            value, is_open = _above(int(value), keyword, place), False
        found[exclusive if is_open else name] = sign * value
    return found


def _above(value: int, keyword: str, place: str) -> float:
    """The least number above `value`, which is not negative, that llguidance reads exactly."""
    if value == 0:
        return _TINY
    if (num := len(str(value))) >= _DIGITS:
        raise UnkeptError(keyword, place, f"{value} has too many digits for another bound that is close to it")
    return float(value + Decimal(1).scaleb(num - _DIGITS))


def _num_decimals(value: float) -> int:
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    return max(0, -int(exponent))


def check_multiples(multiples: Iterable[int | float], num: int, place: str) -> None:
    """llguidance intersects schemas by least common multiples, in 32 bits without a check, and counts remainders one by
    one. `num`: how often `multipleOf` comes in all. Raises `UnkeptError` if that may overflow or takes too long."""
    distinct = [Fraction(repr(one)) for one in multiples]
    decimals = 10 ** max((_num_decimals(one) for one in multiples), default=0)
    scaled = [int(one * decimals) for one in distinct]
    if any(one >= _MAX_COEFFICIENT or (one > _MAX_MULTIPLE and not _ends_in_digits(one)) for one in scaled):
        raise UnkeptError("multipleOf", place, f"has too many digits: at most {_MAX_MULTIPLE} can be kept")
    together = math.lcm(*scaled)
    if num > 1 and (
        together**2 >= _MAX_COEFFICIENT
        or (together > _MAX_MULTIPLES and len(scaled) > 1 and not _ends_in_digits(together))
    ):
        raise UnkeptError("multipleOf", place, "the values of this schema are too large together")


def _ends_in_digits(multiple: int) -> bool:
    """Whether the last digits of a number say if it is a multiple of this one."""
    for factor in (2, 5):
        while multiple % factor == 0:
            multiple //= factor
    return multiple == 1
