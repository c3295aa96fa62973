from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from common.metric_relay import MetricRelay


def make() -> tuple[Counter, Counter, Gauge, CollectorRegistry]:
    registry = CollectorRegistry()
    return (
        Counter("evicted", "", registry=registry),
        Counter("failed", "", ["action", "why"], registry=registry),
        Gauge("size_bytes", "", registry=registry),
        registry,
    )


def test_what_one_process_counts_another_shows() -> None:
    (evicted, failed, size, _), (one, two, three, registry) = make(), make()
    here, there = MetricRelay([evicted, failed, size]), MetricRelay([one, two, three])
    assert here.changes() == []
    evicted.inc(3)
    failed.labels("read", "full").inc()
    size.set(7)
    there.apply(here.changes())
    failed.labels("read", "full").inc()
    failed.labels("write", "full").inc(2)
    size.set(0)
    there.apply(here.changes())
    assert here.changes() == []
    assert registry.get_sample_value("evicted_total") == 3
    assert registry.get_sample_value("failed_total", {"action": "read", "why": "full"}) == 2
    assert registry.get_sample_value("failed_total", {"action": "write", "why": "full"}) == 2
    assert registry.get_sample_value("size_bytes") == 0
