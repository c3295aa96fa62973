"""The formats of a page of metrics."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from common.metric_page import ChangedRegistry, content_type, render, wants_openmetrics

PROMETHEUS_ASKS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (PROMETHEUS_ASKS, True),
        ("Application/OpenMetrics-Text", True),
        ("", False),
        ("*/*", False),
        ("text/html", False),
    ],
)
def test_who_gets_openmetrics(accept: str, wanted: bool) -> None:
    assert wants_openmetrics(accept) == wanted


def test_exemplars_are_openmetrics_alone() -> None:
    registry = CollectorRegistry()
    Histogram("seconds", "about", registry=registry).observe(0.2, {"trace_id": "a1"})
    Counter("refused", "about", ["limit"], registry=registry).labels('a "b"\n').inc()
    plain = render(registry.collect()).decode()
    assert "trace_id" not in plain
    page = render(registry.collect(), is_openmetrics=True).decode()
    assert page.endswith("# EOF\n")
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]  # type: ignore[no-untyped-call]
    assert [one.exemplar.labels for one in samples if one.exemplar] == [{"trace_id": "a1"}]
    assert [one.labels["limit"] for one in samples if one.name == "refused_total"] == ['a "b"\n']
    assert content_type(is_openmetrics=True).startswith("application/openmetrics-text; version=1.0.0")
    assert content_type(is_openmetrics=False).startswith("text/plain")


def test_a_registry_that_shows_more_than_there_is() -> None:
    more = Metric("more", "about", "gauge")
    more.add_sample("more", {}, 3.0)
    registry = ChangedRegistry(lambda families: [*families, more])
    encode, _ = choose_encoder("")
    page = encode(registry).decode()
    assert "\nmore 3.0\n" in page
    assert "\nbaton_router_requests_running " in page
    assert encode(registry.restricted_registry(["more"])).decode().splitlines()[2:] == ["more 3.0"]
    assert encode(registry.restricted_registry(["less"])) == b""
