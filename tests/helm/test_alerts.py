"""The alerts: current with the metrics that there are, and brought by the chart if that is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.helm.chart import CHART, HELM, find, render
from tests.helm.test_dashboard import SERIES, TARGET_LABELS, selectors

FILE = CHART / "files" / "alerts.yaml"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_alerts_are_promql_over_what_there_is(rule: dict[str, Any]) -> None:
    found = list(selectors(promql_parser.parse(rule["expr"])))
    assert found
    named = {
        word.split("}}")[0].strip() for text in rule["annotations"].values() for word in text.split("$labels.")[1:]
    }
    for selector, grouped in found:
        known = SERIES[selector.name] | TARGET_LABELS
        assert {matcher.name for matcher in selector.matchers.matchers} <= known
        assert grouped <= known
        assert "namespace" in grouped, "one alert for each installation"
        assert {name.strip() for name in named} <= grouped, "an alert has the labels that are left"
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert {"summary", "description"} == rule["annotations"].keys()


def test_each_alert_has_its_own_name() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    docs = (Path(CHART).parent / "docs" / "metrics.md").read_text()
    assert f"{len(names)} alerts" in docs


@pytest.mark.skipif(HELM is None, reason="helm is not installed")
def test_the_chart_brings_them_if_that_is_asked() -> None:
    objects = render({"metrics.prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}})
    rule = find(objects, "PrometheusRule", "demo-baton")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"] == yaml.safe_load(FILE.read_text())
    assert not [one for one in render() if one["kind"] == "PrometheusRule"]
