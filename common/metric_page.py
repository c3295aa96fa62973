"""A page of metrics, in the format that its reader asks for: Prometheus' own text, or OpenMetrics, which alone has
exemplars (the `trace_id` of a request that is in a bucket)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector, RestrictedRegistry

OPENMETRICS = "application/openmetrics-text"

Change = Callable[[Iterable[Metric]], Iterable[Metric]]


def wants_openmetrics(accept: str) -> bool:
    """`accept`: the header of the request. A Prometheus that knows the format names it before all others."""
    return any(one.partition(";")[0].strip().lower() == OPENMETRICS for one in accept.split(","))


def content_type(*, is_openmetrics: bool) -> str:
    return openmetrics.CONTENT_TYPE_LATEST if is_openmetrics else CONTENT_TYPE_LATEST


def render(families: Iterable[Metric], *, is_openmetrics: bool = False) -> bytes:
    page = _Families(families)
    if is_openmetrics:
        made: bytes = openmetrics.generate_latest(page, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return made
    return generate_latest(page)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class ChangedRegistry(CollectorRegistry):
    """The process's metrics as `change` makes them, for what asks for a registry."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self._change = change

    def collect(self) -> Iterator[Metric]:
        yield from self._change(REGISTRY.collect())

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        """What `/metrics?name[]=...` asks for."""
        return _Restricted(names, self)


class _Restricted(RestrictedRegistry):
    def __init__(self, names: Iterable[str], registry: ChangedRegistry) -> None:
        super().__init__(names, registry)
        self._wanted = set(names)
        self._changed = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._changed.collect():
            if kept := [one for one in family.samples if one.name in self._wanted]:
                whole = Metric(family.name, family.documentation, family.type)
                whole.samples = kept
                yield whole
