"""The dashboard: current, and every query of it PromQL over metrics and labels that there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
from prometheus_client import Counter, Gauge, Histogram

from common import metrics
from tests.helm.chart import HELM, find, render
from tools import dashboard

TARGET_LABELS = {"namespace", "pod", "container"}  # of what Prometheus scrapes
SUFFIXES: dict[type, tuple[str, ...]] = {Counter: ("_total",), Gauge: ("",), Histogram: ("_bucket", "_sum", "_count")}
EXPRESSIONS = [query["expr"] for panel in dashboard.dashboard()["panels"] for query in panel.get("targets", [])]


def known_series() -> dict[str, set[str]]:
    """Labels by name of each time series that Baton exports."""
    found: dict[str, set[str]] = {}
    for one in vars(metrics).values():
        if isinstance(one, Counter | Gauge | Histogram):
            for suffix in SUFFIXES[type(one)]:
                found[one._name + suffix] = {*one._labelnames, *({"le"} if suffix == "_bucket" else ())}
    return found


SERIES = known_series()


def selectors(node: Any) -> Iterator[tuple[Any, set[str]]]:
    """Every vector selector below `node`, with the labels that something around it groups by."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node, set()
    elif isinstance(node, promql_parser.MatrixSelector):
        yield from selectors(node.vector_selector)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from selectors(argument)
    elif isinstance(node, promql_parser.AggregateExpr):
        labels = set(node.modifier.labels) if node.modifier else set()
        for selector, around in selectors(node.expr):
            yield selector, around | labels
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from selectors(node.lhs)
        yield from selectors(node.rhs)
    elif isinstance(node, promql_parser.ParenExpr):
        yield from selectors(node.expr)
    else:
        assert isinstance(node, promql_parser.NumberLiteral), f"{type(node).__name__} is not looked into"


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_queries_are_promql_over_what_there_is(expression: str) -> None:
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    found = list(selectors(parsed))
    assert found
    for selector, grouped in found:
        assert selector.name in SERIES
        known = SERIES[selector.name] | TARGET_LABELS
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched <= known
        assert grouped <= known
        assert "namespace" in matched, "of this namespace alone"


def test_a_wrong_label_would_be_noticed() -> None:
    parsed = promql_parser.parse('sum by (lane) (rate(baton_router_requests_total{namespace="a"}[1m]))')
    ((selector, grouped),) = selectors(parsed)
    assert not grouped <= SERIES[selector.name] | TARGET_LABELS


@pytest.mark.parametrize("panel", [one for one in dashboard.dashboard()["panels"] if one["type"] != "row"])
def test_legends_name_labels_that_are_left(panel: dict[str, Any]) -> None:
    for query in panel["targets"]:
        wanted = {word.split("}}")[0] for word in query["legendFormat"].split("{{")[1:]}
        for _, grouped in selectors(promql_parser.parse(query["expr"].replace("$__rate_interval", "1m"))):
            assert wanted <= grouped, panel["title"]


def test_every_metric_of_router_and_autoscaler_is_somewhere() -> None:
    """What somebody thought worth exporting is worth a look; what needs none is named here."""
    parsed = [promql_parser.parse(text.replace("$__rate_interval", "1m")) for text in EXPRESSIONS]
    shown = {selector.name for one in parsed for selector, _ in selectors(one)}
    means = {
        f"baton_{name}" for name in ("prefill_queued_tokens_per_pod", "decode_requests_per_pod", "decode_kv_usage")
    }
    by_address = {"baton_router_decisions_total", "baton_router_endpoint_requests", "baton_router_known_blocks"}
    left_out = ("baton_worker_", "baton_kv_", "baton_engine_")  # of which a dashboard shows the most telling
    theirs = {name for name in SERIES if not name.startswith(left_out)}
    assert {name for name in theirs if not name.endswith(("_bucket", "_sum", "_count"))} - shown == means | by_address


def test_the_file_is_current() -> None:
    assert dashboard.PATH.read_text() == dashboard.text(), "python -m tools.dashboard --write"


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip # noqa: E501
        assert not cells & taken
        assert place["x"] + place["w"] <= dashboard.WIDTH
        taken |= cells


@pytest.mark.skipif(HELM is None, reason="helm is not installed")
def test_the_chart_brings_it_if_that_is_asked() -> None:
    objects = render({"grafana.dashboards": {"enabled": True, "labels": {"grafana_dashboard": "1", "team": "a"}}})
    document = find(objects, "ConfigMap", "demo-baton-dashboard")
    assert {"grafana_dashboard": "1", "team": "a"}.items() <= document["metadata"]["labels"].items()
    (content,) = document["data"].values()
    assert json.loads(content) == dashboard.dashboard()
    assert not [one for one in render() if one["metadata"]["name"] == "demo-baton-dashboard"]
