"""What a router's `/metrics` says after some requests, in each format and under each name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from common.batch_time_file import encode
from protos.baton.v1 import worker_pb2
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, sample
from tests.router.test_costs import model
from tests.support.fake_worker import FakeWorker

OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"}
TRACE = "0af7651916cd43dd8448eb211c80319c"


async def ask(router: RunningRouter, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=router.url, headers=body.pop("headers", {})) as client:
        return await client.post("/v1/completions", json={"model": "tiny", "prompt": "Hello?", **body})


async def page(router: RunningRouter, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=router.url, headers=headers) as client:
        return await client.get("/metrics")


def family(text: str, name: str) -> Metric:
    (found,) = [one for one in text_string_to_metric_families(text) if one.name == name]
    return found


async def test_values_under_vllm_s_names(worker: FakeWorker, start_router: StartRouter) -> None:
    worker.report(num_free_blocks=60, num_cached_blocks=15)
    router = await start_router(worker, metrics_aliases="vllm")
    before = sample("baton_router_output_tokens_sum")
    answer = (await ask(router)).json()
    text = (await page(router)).text
    (tokens,) = family(text, "vllm:generation_tokens").samples
    assert tokens.value - before == answer["usage"]["completion_tokens"] > 0
    assert tokens.labels == {"model_name": "tiny", "engine": "0"}
    (usage,) = family(text, "vllm:kv_cache_usage_perc").samples
    assert usage.value == pytest.approx(0.25)
    (info,) = family(text, "vllm:cache_config_info").samples
    assert info.labels["num_gpu_blocks"] == "100"
    assert f"\nbaton_router_output_tokens_sum {tokens.value}\n" in text, "Baton's own stay"
    assert "vllm:" not in (await page(await start_router(worker))).text


async def test_openmetrics_for_those_who_ask(router: RunningRouter) -> None:
    await ask(router)
    asked, plain = await page(router, **OPENMETRICS), await page(router)
    assert asked.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert plain.headers["content-type"].startswith("text/plain")
    assert {one.name for one in openmetrics_families(asked.text)} >= {"baton_router_requests", "baton_router_answers"}  # type: ignore[no-untyped-call]
    assert "baton_router_requests_total" in plain.text


# It comes before the router among a test's fixtures, so that it is there until the router has sent its last spans.
@pytest.fixture
def collector_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs opentelemetry's exporters")
    from tests.support.collector import collecting

    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    for name in [name for name in os.environ if name.startswith("OTEL_EXPORTER")]:
        monkeypatch.delenv(name)
    with collecting() as found:
        yield found.grpc_url


async def test_a_bucket_names_a_trace(collector_url: str, worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, trace_endpoint=collector_url, metrics_aliases="vllm")
    made, sent = (sample("baton_trace_spans_total", outcome=outcome) for outcome in ("made", "sent"))
    await ask(router, headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})
    text = (await page(router, **OPENMETRICS)).text
    for name in ("baton_router_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"):
        (found,) = [one for one in openmetrics_families(text) if one.name == name]  # type: ignore[no-untyped-call]
        named = [one.exemplar.labels for one in found.samples if one.exemplar]
        assert {"trace_id": TRACE} in named, name
    num_spans = sample("baton_trace_spans_total", outcome="made") - made
    assert num_spans > 2
    async with asyncio.timeout(20):
        while sample("baton_trace_spans_total", outcome="sent") - sent < num_spans:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_how_answers_end(worker: FakeWorker, router: RunningRouter) -> None:
    reasons = ("stop", "length", "cancelled", "unavailable")
    before = {reason: sample("baton_router_answers_total", reason=reason) for reason in reasons}
    stages = sample("baton_router_stage_seconds_total", stage="decode")
    assert (await ask(router, max_tokens=2, n=2)).status_code == 200
    assert (await ask(router)).status_code == 200
    worker.hang_after = 1
    worker.asked.clear()
    leaves = asyncio.create_task(ask(router))
    await worker.asked.wait()
    leaves.cancel()
    async with asyncio.timeout(20):
        while sample("baton_router_answers_total", reason="cancelled") == before["cancelled"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    after = {reason: sample("baton_router_answers_total", reason=reason) - before[reason] for reason in reasons}
    assert after == {"stop": 1, "length": 2, "cancelled": 1, "unavailable": 0}
    assert sample("baton_router_stage_seconds_total", stage="decode") > stages


async def test_measured_beside_predicted(start_worker: StartWorker, start_router: StartRouter) -> None:
    decode = await start_worker()
    said = worker_pb2.BatchTime(model=encode(model(floor_s=1e-6, token_s=1e-8)), source="file", version=1)
    decode.change(batch_time=said)
    router = await start_router(decode)
    name = "baton_router_measured_to_predicted_ratio"
    before = [sample(f"{name}_count", of=of) for of in ("first_token", "token")]
    async with asyncio.timeout(20):
        while sample(f"{name}_count", of="first_token") == before[0]:  # the router may not know the times at once
            await ask(router, max_tokens=16)
    assert sample(f"{name}_count", of="token") > before[1]
    far_off = sample(f"{name}_bucket", of="first_token", le="10.0")
    assert far_off < sample(f"{name}_count", of="first_token"), "a worker that says microseconds takes longer"


async def test_bodies_and_heads_that_are_refused_are_counted(router: RunningRouter) -> None:
    before = {limit: sample("baton_router_refused_total", limit=limit) for limit in ("body size", "head size")}
    assert (await ask(router, prompt="x" * 5_000_000)).status_code == 413
    async with httpx.AsyncClient(base_url=router.url) as client:
        assert (await client.get("/health", headers={"x-long": "y" * 70_000})).status_code == 431
    for limit, number in before.items():
        assert sample("baton_router_refused_total", limit=limit) == number + 1, limit
