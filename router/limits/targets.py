"""Which latency targets a request has: what it asks for itself, and what the limits file says of its client.

Places are asked in this order: the request's body, its headers, its key, the key's tenant, the file's default, the
router's settings. Each number is that of the first place which has it. A place that names a class ends the search, as
a class is meant as a whole: a class that lacks a number has no such target.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.errors import InvalidArgumentError
from common.targets import LatencyTargets, check_target_ms

TTFT_HEADER = "x-llm-d-slo-ttft-ms"  # these three as clients of llm-d send them
TPOT_HEADER = "x-llm-d-slo-tpot-ms"
CLASS_HEADER = "x-llm-d-inference-objective"
TARGET_HEADERS = (TTFT_HEADER, TPOT_HEADER, CLASS_HEADER)
NO_CLASS = "none"  # what metrics say of requests without a class


@dataclass(slots=True, frozen=True, kw_only=True)
class GivenTargets:
    """What one place says. Milliseconds are checked. `slo_class` is empty if the place names none."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    slo_class: str = ""
    class_field: str = "slo_class"  # these three: the client's names
    ttft_field: str = "slo.ttft_ms"
    tpot_field: str = "slo.tpot_ms"


NOTHING_GIVEN = GivenTargets()


@dataclass(slots=True, frozen=True)
class Slo:
    """The targets of a request."""

    targets: LatencyTargets | None = None
    slo_class: str = ""  # to which it belongs; empty: none


NO_SLO = Slo()


def given_in_body(targets: LatencyTargets | None, slo_class: str) -> GivenTargets:
    """`targets` are checked."""
    if targets is None and not slo_class:
        return NOTHING_GIVEN
    ttft_ms, tpot_ms = (None, None) if targets is None else (targets.ttft_ms, targets.tpot_ms)
    return GivenTargets(ttft_ms=ttft_ms, tpot_ms=tpot_ms, slo_class=slo_class)


def given_in_headers(headers: Mapping[str, str]) -> GivenTargets:
    """`headers` by their names in lower case; one that is empty is as good as none. Raises `InvalidArgumentError`."""
    ttft_ms, tpot_ms = _milliseconds(headers, TTFT_HEADER), _milliseconds(headers, TPOT_HEADER)
    slo_class = headers.get(CLASS_HEADER, "")
    if ttft_ms is None and tpot_ms is None and not slo_class:
        return NOTHING_GIVEN
    return GivenTargets(
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        slo_class=slo_class,
        class_field=CLASS_HEADER,
        ttft_field=TTFT_HEADER,
        tpot_field=TPOT_HEADER,
    )


def _milliseconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise InvalidArgumentError(name, f"must be a number of milliseconds, not {text[:40]!r}") from None
    check_target_ms(value, name)
    return value


def slo_of(places: Iterable[GivenTargets], classes: Mapping[str, GivenTargets]) -> Slo:
    """`places`: the first goes first; their classes are known."""
    ttft_ms, tpot_ms, slo_class = None, None, ""
    for place in places:
        for given in (place, classes[place.slo_class]) if place.slo_class else (place,):
            ttft_ms = given.ttft_ms if ttft_ms is None else ttft_ms
            tpot_ms = given.tpot_ms if tpot_ms is None else tpot_ms
        if place.slo_class:
            slo_class = place.slo_class
            break
    if ttft_ms is None and tpot_ms is None:
        return Slo(None, slo_class) if slo_class else NO_SLO
    return Slo(LatencyTargets(ttft_ms, tpot_ms), slo_class)


def check_class(given: GivenTargets, classes: Mapping[str, GivenTargets]) -> None:
    """Raises `InvalidArgumentError` for a class that there is not."""
    if given.slo_class and given.slo_class not in classes:
        known = f"the classes are {', '.join(sorted(classes))}" if classes else "there are none (slo_classes)"
        raise InvalidArgumentError(given.class_field, f"there is no class {given.slo_class[:64]!r}: {known}")


def check_least(asked: Sequence[GivenTargets], classes: Mapping[str, GivenTargets], least: LatencyTargets) -> None:
    """Raises `InvalidArgumentError` if one of the numbers that hold of `asked` is below its least."""
    for name, least_ms in (("ttft_ms", least.ttft_ms), ("tpot_ms", least.tpot_ms)):
        field, value = _number_asked(asked, classes, name)
        if value is not None and least_ms is not None and value < least_ms:
            raise InvalidArgumentError(field, f"{name} must be at least {least_ms:g} for this client, not {value:g}")


def _number_asked(
    asked: Sequence[GivenTargets], classes: Mapping[str, GivenTargets], name: str
) -> tuple[str, float | None]:
    """The number that holds, as in `slo_of`, and the client's name for what says it."""
    for place in asked:
        own: float | None = getattr(place, name)
        if own is not None:
            return place.ttft_field if name == "ttft_ms" else place.tpot_field, own
        if place.slo_class:
            return place.class_field, getattr(classes[place.slo_class], name)
    return "", None
