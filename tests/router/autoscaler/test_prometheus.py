"""Scaling by way of Prometheus: what `/metrics` says, and the chart's rules for prometheus-adapter asked of a real
Prometheus that scrapes a running autoscaler.

The adapter itself does two things with a rule: it lists the series of `seriesQuery`, and for an HPA it fills the
metric's name and matchers of its labels into `metricsQuery`. Here that is done as its documentation says.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.types import WorkerRole
from router.autoscaler.board import FRESH_S, METRIC_NAMES, Board
from router.autoscaler.http import StatusPage
from router.autoscaler.signals import FleetSignals, RoleSignals
from tests.helm.chart import HELM, Object, find, render
from tests.router.autoscaler.test_process import StartLoaded, autoscaler
from tests.router.autoscaler.test_process import start_loaded as start_loaded

PROMETHEUS = shutil.which("prometheus")
WAIT_S = 60.0
NAMESPACE = "prod"  # which the chart is rendered for


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


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    async def get(self, path: str, **parameters: str) -> Any:
        def ask() -> Any:
            with urllib.request.urlopen(
                f"{self._url}{path}?{urllib.parse.urlencode(parameters)}", timeout=10
            ) as answer:
                return json.load(answer)["data"]

        return await asyncio.to_thread(ask)

    async def value(self, query: str) -> float | None:
        """Of a query with one result at most; None if it has none."""
        found = (await self.get("/api/v1/query", query=query))["result"]
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    async def until(self, query: str, wanted: Callable[[float | None], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not wanted(await self.value(query)):  # noqa: ASYNC110 (there is nothing to wait for but the next scrape)
                await asyncio.sleep(0.2)


@asynccontextmanager
async def prometheus(folder: Path, scrape: dict[str, Any]) -> AsyncIterator[Prometheus]:
    assert PROMETHEUS is not None
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = {
        "config.file": config,
        "storage.tsdb.path": folder / "data",
        "web.listen-address": address,
        "log.level": "warn",
    }
    with (folder / "log").open("wb") as log:
        command = [PROMETHEUS, *(f"--{name}={value}" for name, value in flags.items())]
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection(*address.split(":"))
                    break
                except OSError:
                    assert process.returncode is None, (folder / "log").read_text()
                    await asyncio.sleep(0.1)
        writer.close()
        await writer.wait_closed()
        yield Prometheus(f"http://{address}")
    finally:
        process.kill()
        await process.wait()


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
        async with prometheus(tmp_path, scrape) as server:
            for (name, role), value in expected.items():
                rule, selector = by_name[name], selectors[name, role]
                if value is not None:
                    await server.until(query_of(rule, selector), lambda seen, value=value: seen == pytest.approx(value))
                assert await server.value(query_of(rule, selector, "elsewhere")) is None
                series = await server.get("/api/v1/series", **{"match[]": rule["seriesQuery"]})
                assert {one["__name__"] for one in series} == ({name} if value is not None else set())
            await stack.aclose()
            # Nobody serves it any more: an HPA is told nothing, instead of what once was.
            query = query_of(by_name["baton_decode_requests"], {})
            await server.until(query, lambda seen: seen is None)
