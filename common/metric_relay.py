"""Carries metrics from a process that serves none to one that does: an engine's to its gRPC front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import Counter, Gauge

Change = tuple[str, tuple[str, ...], float]
"""Name of a metric, values of its labels, and a counter's increase or a gauge's value."""


class MetricRelay:
    """One end; both are made of the same metrics."""

    def __init__(self, metrics: Iterable[Counter | Gauge]) -> None:
        self._metrics = {next(iter(metric.describe())).name: metric for metric in metrics}
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def changes(self) -> list[Change]:
        """What changed since the last call."""
        changes: list[Change] = []
        for name, metric in self._metrics.items():
            for sample in next(iter(metric.collect())).samples:
                if sample.name.endswith("_created"):
                    continue
                key = (name, tuple(sample.labels.values()))
                before = self._last.get(key, 0.0)
                if sample.value != before:
                    self._last[key] = sample.value
                    changes.append((*key, sample.value - before if isinstance(metric, Counter) else sample.value))
        return changes

    def apply(self, changes: Sequence[Change]) -> None:
        """Makes the other end's changes here."""
        for name, labels, value in changes:
            metric = self._metrics[name]
            child = metric.labels(*labels) if labels else metric
            if isinstance(child, Counter):
                child.inc(value)
            else:
                child.set(value)
