"""Every query of the dashboard and of the alerts, asked of a real Prometheus that scraped a stack under traffic."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml

from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.helm.test_alerts import FILE as ALERTS
from tests.helm.test_alerts import RULES
from tests.helm.test_dashboard import selectors
from tests.integration.stack import Fleet, running
from tests.router.autoscaler.test_process import autoscaler
from tests.support.prometheus import PROMETHEUS, PROMTOOL, Prometheus, prometheus
from tools import dashboard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROMETHEUS is None or PROMTOOL is None, reason="prometheus is not installed"),
]

NAMESPACE = "prod"
SCRAPE_S = 1
RATE = "2m"  # for $__rate_interval
DID_NOT_HAPPEN = {  # here, or not for sure; nor do workers know their times well enough for a router to predict with
    "baton_advised_replicas",
    "baton_autoscaler_role_shifts_total",
    "baton_autoscaler_scalings_total",
    "baton_router_measured_to_predicted_ratio_bucket",
    "baton_router_pick_seconds_bucket",
    "baton_router_migrations_total",
    "baton_router_refused_total",
    "baton_router_retries_total",
    "baton_router_unauthenticated_total",
    "baton_worker_prefill_failures_total",
    "baton_worker_streams_cut_total",
}
MAY_FIRE = {  # what the traffic is made for, or a busy machine; and here no autoscaler is elected
    "BatonAutoscalerWithoutLeader",
    "BatonModelOfTimeDrifts",
    "BatonNeedsMoreWorkers",
    "BatonRequestsRefused",
    "BatonTargetsMissed",
}
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs opentelemetry's exporters")
    from tests.support.collector import collecting

    folder = tmp_path_factory.mktemp("fleet")
    write_tiny_model(folder / "model")
    (folder / "limits.yaml").write_text("default: {streams: 64}\n")
    flags = (f"--model={folder / 'model'}", "--speculation=ngram", "--kv-dir-size-gb=1", "--metrics-aliases=vllm")
    limited = ("--max-running=4", "--max-queued=4", "--policy=prefix_aware", "--metrics-aliases=vllm")
    with collecting() as collector:
        traced = f"--trace-endpoint={collector.grpc_url}"
        router = (*limited, f"--limits-file={folder / 'limits.yaml'}", "--trace-sample=0", traced)
        one = Fleet(folder, *flags, traced, prefill=1, decode=1, router_flags=router)
        with running(one):
            yield one


def traffic(fleet: Fleet, seed: int) -> None:
    """Long prompts and short ones, again and anew, too many at a time, and wrong ones."""
    draw = random.Random(seed)

    def ask(prompt: list[int], **more: object) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        return httpx.post(f"{fleet.http}/v1/completions", json=body, headers=headers, timeout=120, trust_env=False)

    long = random_prompt(draw, 300)
    for prompt in (long, long, random_prompt(draw, 6), [*random_prompt(draw, 8)] * 12):
        assert ask(prompt).status_code == 200
    for targets in ({"ttft_ms": 60_000, "tpot_ms": 0.001}, {"ttft_ms": 60_000}):  # missed, and met
        assert ask(long, slo=targets).status_code == 200
    assert ask(long, temperature=-1).status_code == 400
    with ThreadPoolExecutor(16) as pool:
        statuses = set(pool.map(lambda _: ask(random_prompt(draw, 40)).status_code, range(16)))
    assert statuses <= {200, 429}


def targets(fleet: Fleet, autoscaler_url: str) -> dict[str, str]:
    """Addresses by the container's name, as the chart's pods have them."""
    return {
        "router": fleet.http.removeprefix("http://"),
        "autoscaler": autoscaler_url.removeprefix("http://"),
        **{member.role: f"127.0.0.1:{member.metrics_port}" for member in fleet.members},
    }


def job(container: str, address: str) -> dict[str, Any]:
    """With the labels that the Prometheus operator gives to what the chart's monitors select."""
    labels = {"namespace": NAMESPACE, "pod": f"{container}-0", "container": container}
    return {
        "job_name": container,
        "scrape_interval": f"{SCRAPE_S}s",
        "scrape_timeout": f"{SCRAPE_S}s",
        "static_configs": [{"targets": [address], "labels": labels}],
    }


async def gives_data(server: Prometheus, query: str) -> bool:
    """Whether there is a number among the answers. Raises if the query cannot be run."""
    found = (await server.get("/api/v1/query", query=query))["result"]
    return any(one["value"][1] != "NaN" for one in found)


def base(name: str) -> str:
    """The name of a series' family, as a page's `# TYPE` has it."""
    return re.sub("_(bucket|sum|count)$", "", name)


async def test_every_query_gives_data(fleet: Fleet, tmp_path: Path) -> None:
    prefill, decode = ([one.address for one in fleet.members if one.role == role] for role in ("prefill", "decode"))
    advice = {"planner": "advisory", "target_ttft_ms": 10_000, "target_tpot_ms": 1000}
    async with autoscaler(
        prefill=tuple(prefill), decode=tuple(decode), routers=(fleet.grpc,), **advice
    ) as running_autoscaler:
        addresses = targets(fleet, running_autoscaler.addresses["http"])
        jobs = [job(container, address) for container, address in addresses.items()]
        async with prometheus(tmp_path, jobs, "exemplar-storage") as server:
            await server.until('count(up{namespace="prod"} == 1)', lambda seen: seen == len(jobs))
            for seed in range(3):
                await asyncio.to_thread(traffic, fleet, seed)
                await asyncio.sleep(2 * SCRAPE_S)
            answered = 'sum(increase(baton_router_answers_total{reason="length"}[2m]))'
            await server.until(answered, lambda seen: (seen or 0) > 0)
            pages = "".join(
                [(await asyncio.to_thread(httpx.get, f"http://{one}/metrics")).text for one in addresses.values()]
            )
            families = set(re.findall("^# TYPE (\\S+) ", pages, re.MULTILINE))
            await check_panels(server, families)
            await check_alerts(server, families)
            await check_exemplars(server)
            await check_aliases(server)
            for address in addresses.values():
                await asyncio.to_thread(check_page, f"http://{address}/metrics")


async def check_panels(server: Prometheus, families: set[str]) -> None:
    silent = set()
    for panel in dashboard.dashboard()["panels"]:
        for query in panel.get("targets", []):
            expression = query["expr"].replace("$__rate_interval", RATE).replace("$namespace", NAMESPACE)
            if not await gives_data(server, expression):
                names = {selector.name for selector, _ in selectors(promql_parser.parse(expression))}
                assert {base(name) for name in names} <= families, expression
                silent |= names
    assert silent <= DID_NOT_HAPPEN


async def check_alerts(server: Prometheus, families: set[str]) -> None:
    """Each can be run, and what it is about is there, but for outcomes of requests that did not occur."""
    for rule in RULES:
        assert rule["alert"] in MAY_FIRE or not await gives_data(server, rule["expr"]), rule["alert"]
        for selector, _ in selectors(promql_parser.parse(rule["expr"])):
            assert base(selector.name) in families, selector.name
            if all(matcher.name not in ("outcome", "ttft") for matcher in selector.matchers.matchers):
                assert await gives_data(server, selector.prettify()), selector.prettify()


async def check_exemplars(server: Prometheus) -> None:
    async with asyncio.timeout(30):
        while True:
            seen = await server.get(
                "/api/v1/query_exemplars",
                query="baton_router_time_to_first_token_seconds_bucket",
                start="0",
                end="99999999999",
            )
            labels = [one["labels"] for series in seen for one in series["exemplars"]]
            if {"trace_id": TRACE} in labels:
                return
            await asyncio.sleep(SCRAPE_S)


async def check_aliases(server: Prometheus) -> None:
    """What autoscalers, the endpoint picker and vLLM's dashboards ask."""
    for query in (
        'sum(vllm:num_requests_running{container="router"})',
        'avg(vllm:num_requests_waiting{container="router"})',
        'max(vllm:kv_cache_usage_perc{container="decode"})',
        'vllm:cache_config_info{container="router",block_size="16"}',
        f'rate(vllm:prompt_tokens_total{{container="router"}}[{RATE}])',
        f'rate(vllm:generation_tokens_total{{container="decode"}}[{RATE}])',
        f"sum by (finished_reason) (rate(vllm:request_success_total[{RATE}])) > 0",
        f"histogram_quantile(0.99, sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket[{RATE}])))",
        f"histogram_quantile(0.99, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[{RATE}])))",
        f"histogram_quantile(0.99, sum by (le) (rate(vllm:inter_token_latency_seconds_bucket[{RATE}])))",
        f"rate(vllm:request_queue_time_seconds_sum[{RATE}]) / rate(vllm:request_queue_time_seconds_count[{RATE}])",
        f"rate(vllm:prefix_cache_hits_total[{RATE}]) / rate(vllm:prefix_cache_queries_total[{RATE}])",
    ):
        assert await gives_data(server, query), query


def check_page(url: str) -> None:
    assert PROMTOOL is not None
    page = httpx.get(url, trust_env=False).content
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=page, capture_output=True, check=False, timeout=60)
    complaints = done.stderr.decode().splitlines()
    of_vllm = [one for one in complaints if re.fullmatch("vllm:[a-z0-9_]+ metric names should not contain ':'", one)]
    assert complaints == of_vllm
    assert bool(of_vllm) == (b"vllm:" in page)


def test_the_rules_are_what_prometheus_takes() -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "rules", str(ALERTS)], capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    num = sum(len(group["rules"]) for group in yaml.safe_load(ALERTS.read_text())["groups"])
    assert f"{num} rules found" in done.stdout.decode()
