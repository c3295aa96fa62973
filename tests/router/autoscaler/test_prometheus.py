"""Scaling by way of Prometheus: what `/metrics` says, and the chart's rules for prometheus-adapter asked of a real
Prometheus that scrapes a running autoscaler.

The adapter itself does two things with a rule: it lists the series of `seriesQuery`, and for an HPA it fills the
metric's name and matchers of its labels into `metricsQuery`. Here that is done as its documentation says.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import yaml

from common.types import WorkerRole
from router.autoscaler.board import FRESH_S, METRIC_NAMES, Board
from router.autoscaler.http import StatusPage
from router.autoscaler.signals import FleetSignals, RoleSignals
from tests.helm.chart import HELM, Object, find, render
from tests.router.autoscaler.test_process import StartLoaded, autoscaler
from tests.router.autoscaler.test_process import start_loaded as start_loaded
from tests.support.prometheus import PROMETHEUS, prometheus

NAMESPACE = "prod"  # which the chart is rendered for


def is_near(wanted: float, seen: float | None) -> bool:
    return seen == pytest.approx(wanted)


# ------------------------------------------------------------------------------------------- what is not known


def shown(page: StatusPage) -> set[str]:
    """Names of the metrics for scalers that `/metrics` has values of."""
    code, _, body = page.answer("/metrics")
    assert code == 200
    lines = body.decode().splitlines()
    return {name for name in METRIC_NAMES if any(line.startswith((f"{name} ", f"{name}{{")) for line in lines)}


def test_a_value_that_is_not_known_is_missing() -> None:
    now = 100.0
    board = Board(lambda: now)
    page = StatusPage(board)
    assert shown(page) == set(), "nothing was read yet: no zero that somebody might scale by"
    signals = FleetSignals(prefill=RoleSignals(queued_tokens=7))
    board.put(signals, {})
    arrivals = {"baton_prefill_arrival_tokens_per_second"}
    assert shown(page) == set(METRIC_NAMES) - arrivals - {"baton_desired_replicas"}
    now += FRESH_S + 0.1
    assert shown(page) == set(), "an old value would be believed for ever"
    assert b"\nbaton_autoscaler_workers{" in page.answer("/metrics")[2], "everything else stays"


# --------------------------------------------------------------------------------------------- a real Prometheus


def query_of(rule: Object, selector: dict[str, str], namespace: str = NAMESPACE) -> str:
    """What prometheus-adapter asks when the HPA of `namespace` reads a metric."""
    (label,) = [name for name, into in rule["resources"]["overrides"].items() if into["resource"] == "namespace"]
    matchers = ",".join(f'{name}="{value}"' for name, value in {label: namespace, **selector}.items())
    query: str = rule["metricsQuery"]
    return query.replace("<<.Series>>", rule["name"]["as"]).replace("<<.LabelMatchers>>", matchers)


def metrics_of_hpas(objects: list[Object]) -> dict[tuple[str, str], dict[str, str]]:
    """Selectors of the metrics that the HPAs name, by metric and role that is selected."""
    found = {}
    for role in ("prefill", "decode"):
        for one in find(objects, "HorizontalPodAutoscaler", f"demo-baton-{role}")["spec"]["metrics"]:
            metric = one["external"]["metric"]
            selector = metric.get("selector", {}).get("matchLabels", {})
            found[metric["name"], selector.get("role", "")] = selector
    return found


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
@pytest.mark.skipif(HELM is None, reason="helm is not installed")
async def test_rules_of_the_chart_give_hpas_what_workers_report(tmp_path: Path, start_loaded: StartLoaded) -> None:
    objects = render(
        {
            "autoscaling": {"mode": "prometheus-adapter", "followPlanner": True},
            "prefill.autoscaling.arrivalTokensPerSecond": 500,
            "metrics.serviceMonitor": {"enabled": True, "interval": "1s"},
        }
    )
    rules = yaml.safe_load(find(objects, "ConfigMap", "demo-baton-autoscaler-rules")["data"]["rules.yaml"])
    by_name = {rule["name"]["as"]: rule for rule in rules["rules"]["external"]}
    (endpoint,) = find(objects, "ServiceMonitor", "demo-baton-autoscaler")["spec"]["endpoints"]
    prefill, decode = await start_loaded(WorkerRole.PREFILL), await start_loaded(WorkerRole.DECODE)
    prefill.report(num_queued_prompt_tokens=450, num_free_blocks=100)
    decode.report(num_requests_running=100, num_requests_waiting=30, num_free_blocks=30)
    expected = {
        ("baton_prefill_queued_tokens", ""): 450,
        ("baton_prefill_arrival_tokens_per_second", ""): None,  # no router is asked
        ("baton_decode_kv_used_pods", ""): 0.7,
        ("baton_decode_requests", ""): 130,
        ("baton_desired_replicas", "prefill"): 5,
        ("baton_desired_replicas", "decode"): 5,
    }
    selectors = metrics_of_hpas(objects)
    assert set(selectors) == set(expected)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            autoscaler(prefill=(prefill.address,), decode=(decode.address,), target_queued_tokens=100)
        )
        # The labels are those that the Prometheus operator gives to what a ServiceMonitor selects.
        target = {
            "targets": [running.addresses["http"].removeprefix("http://")],
            "labels": {"namespace": NAMESPACE, "service": "demo-baton-autoscaler", "endpoint": endpoint["port"]},
        }
        scrape = {
            "job_name": "demo-baton-autoscaler",
            "scrape_interval": endpoint["interval"],
            "scrape_timeout": endpoint["interval"],
            "metrics_path": endpoint["path"],
            "static_configs": [target],
        }
        async with prometheus(tmp_path, [scrape]) as server:
            for (name, role), value in expected.items():
                rule, selector = by_name[name], selectors[name, role]
                if value is not None:
                    await server.until(query_of(rule, selector), partial(is_near, value))
                assert await server.value(query_of(rule, selector, "elsewhere")) is None
                series = await server.get("/api/v1/series", **{"match[]": rule["seriesQuery"]})
                assert {one["__name__"] for one in series} == ({name} if value is not None else set())
            await stack.aclose()
            # Nobody serves it any more: an HPA is told nothing, instead of what once was.
            query = query_of(by_name["baton_decode_requests"], {})
            await server.until(query, lambda seen: seen is None)
