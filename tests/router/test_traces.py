"""The router's spans, as a collector gets them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from common.config import TraceSettings
from common.errors import ConfigError
from common.trace_settings import make_trace_export
from common.tracing import TraceContext, Traced, context_of, sampled_context
from protos.baton.v1 import inference_pb2
from tests.router.conftest import StartRouter, StartWorker
from tests.support.fake_worker import ANSWER

if TYPE_CHECKING:
    from tests.support.collector import Collector, SeenSpan

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello?"}]}
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, CLIENT = 2, 3  # kinds of spans


def parent(trace_id: str = TRACE, flags: str = "01") -> str:
    return f"00-{trace_id}-{CALLER}-{flags}"


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "x",
        f"00-{TRACE}-{CALLER}",
        f"ff-{TRACE}-{CALLER}-01",
        f"00-{TRACE}-{CALLER}-01-more",
        f"00-{TRACE.upper()}-{CALLER}-01",
        f"00-{'0' * 32}-{CALLER}-01",
        f"00-{TRACE}-{'0' * 16}-01",
    ],
)
def test_a_traceparent_that_says_nothing(wrong: str) -> None:
    assert context_of(wrong) is None


def test_a_traceparent() -> None:
    context = context_of(parent(flags="03"), "a=1")
    assert context == TraceContext(TRACE, CALLER, is_sampled=True, state="a=1")
    assert context_of(context.traceparent) == TraceContext(TRACE, CALLER)
    assert context_of(f"01-{TRACE}-{CALLER}-01-of a later version") == TraceContext(TRACE, CALLER)
    assert context_of(parent(), "x" * 600) == TraceContext(TRACE, CALLER)
    assert sampled_context(parent(flags="00")) is None
    child = context.child()
    assert (child.trace_id, child.state, child.is_sampled) == (TRACE, "a=1", True)
    assert child.span_id != CALLER
    first = Traced(child)
    assert first.sibling().parent == child
    assert Traced(child, context).sibling().parent == context


@pytest.mark.parametrize(
    ("settings", "environ"),
    [
        ({}, {}),
        ({"trace_endpoint": "http://c:4317"}, {"OTEL_SDK_DISABLED": "true"}),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_TRACES_EXPORTER": "none"}),
    ],
)
def test_nothing_is_traced(settings: dict[str, str], environ: dict[str, str]) -> None:
    assert make_trace_export(TraceSettings.model_validate(settings), "s", environ=environ) is None


def test_without_opentelemetry_a_collector_that_is_asked_for_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "common.trace_export", None)
    with pytest.raises(ConfigError, match=r"baton-serve\[otel\]"):
        make_trace_export(TraceSettings(trace_endpoint="http://c:4317"), "s")
    assert make_trace_export(TraceSettings(), "s", environ={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}) is None
    assert "baton-serve[otel]" in caplog.text or "baton-serve[otel]" in str(vars(caplog.records[0]))


# It comes before the router among a test's fixtures, so that it is there until the router has sent its last spans.
@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs opentelemetry's exporters")
    from tests.support.collector import collecting

    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    for name in [name for name in os.environ if name.startswith("OTEL_EXPORTER")]:
        monkeypatch.delenv(name)
    with collecting() as found:
        yield found


async def trace(collector: Collector, trace_id: str = TRACE, num_answers: int = 1) -> list[SeenSpan]:
    return await asyncio.to_thread(collector.of, trace_id, {"baton-router"}, num_answers)


def named(spans: list[SeenSpan], name: str) -> SeenSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


async def test_a_request_over_grpc_that_migrates(
    collector: Collector, start_worker: StartWorker, start_router: StartRouter
) -> None:
    workers = [await start_worker(), await start_worker()]
    workers[0].die_after, workers[1].num_requests_waiting = 3, 9  # so that the first one is asked first
    router = await start_router(*workers, trace_endpoint=collector.grpc_url)
    asked = inference_pb2.GenerateRequest(prompt="Hello?", request_id="mine")
    metadata = (("traceparent", parent()), ("tracestate", "vendor=7"))
    assert [one async for one in router.inference.Generate(asked, metadata=metadata)]
    spans = await trace(collector)
    root = named(spans, "text_completion tiny")
    assert (root.service, root.protocol, root.parent_id, root.kind) == ("baton-router", "grpc", CALLER, SERVER)
    first, second = named(spans, "decode"), named(spans, "decode (migration)")
    assert {first.parent_id, second.parent_id} == {root.span_id}
    assert (first.kind, second.links) == (CLIENT, (first.span_id,))
    assert first.error
    assert not second.error
    told = {one.traceparent: one.tracestate for worker in workers for one in worker.requests}
    assert told == {f"00-{TRACE}-{span.span_id}-01": "vendor=7" for span in (first, second)}
    assert root.start_ns <= first.start_ns <= first.end_ns <= second.start_ns <= second.end_ns <= root.end_ns
    assert {span.name for span in spans} >= {"prepare", "queue", "stream"}
    assert root.events == ("first token",)
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["gen_ai.provider.name"] == "baton"
    assert root.attributes["gen_ai.request.model"] == "tiny"
    assert root.attributes["gen_ai.response.id"] == "mine"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert root.attributes["gen_ai.usage.output_tokens"] == len(workers[0].answer) + 1
    assert root.attributes["baton.num_migrations"] == 1
    first_token_s = root.attributes["gen_ai.latency.time_to_first_token"]
    assert 0 < first_token_s <= root.attributes["gen_ai.latency.e2e"]
    assert not [name for name in root.attributes if "messages" in name or "prompt" in name]


async def test_requests_over_rest_by_http(
    collector: Collector, start_worker: StartWorker, start_router: StartRouter
) -> None:
    """Several answers are one trace; a request that fails says why; content is told if it is asked for."""
    worker = await start_worker()
    router = await start_router(
        worker,
        trace_endpoint=collector.http_url,
        trace_protocol="http/protobuf",
        trace_sample=1.0,
        trace_content=True,
    )
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "n": 2, "request_id": "mine"})
        assert answer.status_code == 200
        trace_id = (await client.get("/requests/mine")).json()["trace_id"]
        spans = await trace(collector, trace_id, num_answers=2)
        roots = [span for span in spans if span.name == "chat tiny"]
        first = next(span for span in roots if not span.parent_id)
        assert [span.parent_id for span in roots if span is not first] == [first.span_id]
        assert first.protocol == "http"
        (said,) = json.loads(first.attributes["gen_ai.output.messages"])
        assert (said["role"], said["parts"][0]["content"], said["finish_reason"]) == ("assistant", ANSWER, "stop")
        assert "Hello?" in first.attributes["baton.prompt"]
        worker.refuse = (grpc.StatusCode.INVALID_ARGUMENT, "no")
        failed_trace = "1" * 32
        headers = {"traceparent": parent(failed_trace)}
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 400
        failed = named(await trace(collector, failed_trace), "chat tiny")
        assert (failed.attributes["error.type"], "no" in failed.error) == ("invalid_argument", True)


async def test_embeddings(collector: Collector, start_worker: StartWorker, start_router: StartRouter) -> None:
    worker = await start_worker()
    router = await start_router(worker, trace_endpoint=collector.grpc_url)
    async with httpx.AsyncClient(base_url=router.url) as client:
        body = {"input": [[1, 2], [3]], "request_id": "mine"}
        answer = await client.post("/v1/embeddings", json=body, headers={"traceparent": parent()})
        assert answer.status_code == 200, answer.text
    spans = await trace(collector)
    root = named(spans, "embeddings tiny")
    assert (root.parent_id, root.kind, root.attributes["gen_ai.operation.name"]) == (CALLER, SERVER, "embeddings")
    assert (root.attributes["gen_ai.usage.input_tokens"], root.attributes["baton.num_inputs"]) == (3, 2)
    calls = [span for span in spans if span.name == "embed"]
    assert {(span.parent_id, span.kind) for span in calls} == {(root.span_id, CLIENT)}
    told = {one.traceparent for one in worker.embedded}
    assert told == {f"00-{TRACE}-{span.span_id}-01" for span in calls}
    asked = inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(token_ids=[5])])
    await router.inference.Embed(asked, metadata=(("traceparent", parent("3" * 32)),))
    assert named(await trace(collector, "3" * 32), "embed").attributes["rpc.service"] == "baton.v1.EmbedService"


async def test_what_is_not_sampled_is_told_to_nobody(
    collector: Collector, start_worker: StartWorker, start_router: StartRouter
) -> None:
    worker = await start_worker()
    router = await start_router(worker, trace_endpoint=collector.grpc_url, trace_sample=0.0)
    async with httpx.AsyncClient(base_url=router.url) as client:
        for headers in ({}, {"traceparent": parent("2" * 32, "00")}, {"traceparent": "nonsense"}):
            assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
        assert {one.traceparent for one in worker.requests} == {""}
        headers = {"traceparent": parent()}  # whose caller's trace is kept, so this is, too
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
    assert {span.trace_id for span in await trace(collector)} == {TRACE}
    assert {span.trace_id for span in collector.spans} == {TRACE}
