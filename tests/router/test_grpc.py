"""The gRPC gateway, with stock clients."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from msgspec.structs import replace

from common.config import RouterSettings
from common.errors import StartupError
from common.grpc.status import DETAILS_KEY
from common.types import WorkerRole, WorkerState
from protos.baton.v1 import inference_pb2, router_pb2, types_pb2, worker_pb2
from router.api.fleet_service import ask_worker
from router.api.grpc_parser import invalid_utf8_field
from router.fleet.endpoint import Endpoint
from router.server import serve
from tests.each_case import each_case
from tests.router.conftest import SETTINGS, RunningRouter, StartRouter, StartWorker
from tests.router.tiny_tokenizer import eos_id, ids_of
from tests.support.fake_worker import ANSWER, FakeWorker

GENERATE = "/baton.v1.InferenceService/Generate"


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    metadata = dict(error.trailing_metadata() or ())
    return status_pb2.Status.FromString(bytes(metadata[DETAILS_KEY]))


def violated_field(error: grpc.aio.AioRpcError) -> str:
    detail = error_details_pb2.BadRequest()
    assert status_of(error).details[0].Unpack(detail)
    return str(detail.field_violations[0].field)


async def collect(
    router: RunningRouter, request: inference_pb2.GenerateRequest, timeout: float | None = None
) -> list[inference_pb2.GenerateResponse]:
    return [response async for response in router.inference.Generate(request, timeout=timeout)]


async def test_generate(router: RunningRouter, worker: FakeWorker) -> None:
    request = inference_pb2.GenerateRequest(
        request_id="r1", prompt="Hello", sampling_params=types_pb2.SamplingParams(logprobs=1)
    )
    responses = await collect(router, request)
    assert "".join(response.text for response in responses) == ANSWER
    assert [t for response in responses for t in response.token_ids] == [*worker.answer, eos_id()]
    assert all(len(response.logprobs) == len(response.token_ids) for response in responses)
    assert {response.request_id for response in responses} == {"r1"}
    last = responses[-1]
    assert last.finish_reason == types_pb2.FINISH_REASON_STOP
    assert last.usage.prompt_tokens == len(ids_of("Hello"))
    assert last.usage.cached_tokens == 3
    assert last.report.decode_worker == worker.address
    assert 0 < last.report.timings.ttft_ms <= last.report.timings.total_ms
    assert all(not response.HasField("report") for response in responses[:-1])


async def test_chat_and_tokenize(router: RunningRouter, worker: FakeWorker) -> None:
    chat = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="Hi")])
    responses = [response async for response in router.inference.Chat(chat)]
    assert "".join(response.text for response in responses) == ANSWER
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert list(worker.requests[0].prompt_token_ids) == ids_of(prompt)
    tokens = await router.inference.Tokenize(inference_pb2.TokenizeRequest(text="東京"))
    text = await router.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
    assert text.text == "東京"
    models = await router.inference.ListModels(inference_pb2.ListModelsRequest())
    assert [(model.id, model.max_model_len) for model in models.models] == [("tiny", 256)]


HI = inference_pb2.ChatMessage(role="user", content="Hi")
BEGUN = inference_pb2.ChatMessage(role="assistant", content="I say")
ASKED = "<|im_start|>user\nHi<|im_end|>\n"


async def test_chats_that_go_on_and_their_tokens(router: RunningRouter, worker: FakeWorker) -> None:
    cases: tuple[tuple[list[inference_pb2.ChatMessage], dict[str, Any], str], ...] = (
        ([HI, BEGUN], {"continue_final_message": True}, ASKED + "<|im_start|>assistant\nI say"),
        ([HI, BEGUN], {"add_generation_prompt": False}, ASKED + "<|im_start|>assistant\nI say<|im_end|>\n"),
        ([HI], {"add_generation_prompt": True}, ASKED + "<|im_start|>assistant\n"),
        ([HI], {}, ASKED + "<|im_start|>assistant\n"),
    )
    for given, options, prompt in cases:
        chat = inference_pb2.ChatRequest(messages=given, **options)
        assert [response async for response in router.inference.Chat(chat)]
        assert list(worker.requests[-1].prompt_token_ids) == ids_of(prompt)
        tokens = await router.inference.Tokenize(inference_pb2.TokenizeRequest(messages=given, **options))
        assert list(tokens.token_ids) == ids_of(prompt)


@each_case(
    ("fields", "field"),
    [
        ({"messages": [HI], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [HI, BEGUN], "continue_final_message": True, "add_generation_prompt": True}, "continue_final_"),
        ({"messages": [HI], "text": "x"}, "text"),
        ({"messages": [HI], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [HI], "chat_template_kwargs": '{"nothing": 1}'}, "chat_template_kwargs.nothing"),
        ({"text": "x", "continue_final_message": True}, "continue_final_message"),
        ({"text": "x", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"text": "x", "tools": [inference_pb2.Tool(name="a")]}, "tools"),
    ],
)
async def test_tokens_of_what_is_no_chat(router: RunningRouter, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.inference.Tokenize(inference_pb2.TokenizeRequest(**fields))
    assert violated_field(caught.value).startswith(field)


async def test_a_seed_is_drawn_only_if_it_matters(router: RunningRouter, worker: FakeWorker) -> None:
    for params in (
        types_pb2.SamplingParams(),
        types_pb2.SamplingParams(),
        types_pb2.SamplingParams(seed=-5),
        types_pb2.SamplingParams(temperature=0),
    ):
        await collect(router, inference_pb2.GenerateRequest(prompt="x", sampling_params=params))
    seeds = [request.sampling_params.seed for request in worker.requests]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [-5, 0]


async def test_what_is_to_be_retained_reaches_the_worker(router: RunningRouter, worker: FakeWorker) -> None:
    retain = types_pb2.Retain(seconds=60, num_tokens=5)
    await collect(router, inference_pb2.GenerateRequest(prompt="x", retain=retain))
    chat = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="Hi")], retain=retain)
    assert [response async for response in router.inference.Chat(chat)]
    await collect(router, inference_pb2.GenerateRequest(prompt="x"))
    assert [request.retain for request in worker.requests[:2]] == [retain, retain]
    assert not worker.requests[2].HasField("retain")
    assert {request.tenant for request in worker.requests} == {"key "}


P = types_pb2.SamplingParams
BAD = [
    (inference_pb2.GenerateRequest(), "prompt"),
    (inference_pb2.GenerateRequest(prompt="a", prompt_token_ids=[1]), "prompt_token_ids"),
    (inference_pb2.GenerateRequest(prompt_token_ids=[-1]), "prompt_token_ids"),
    (inference_pb2.GenerateRequest(prompt_token_ids=[1] * 256), "prompt_token_ids"),
    (inference_pb2.GenerateRequest(prompt="x" * 50_000), "prompt"),
    (inference_pb2.GenerateRequest(prompt="a", request_id="ü"), "request_id"),
    (inference_pb2.GenerateRequest(prompt="a", cache_salt="s" * 300), "cache_salt"),
    (inference_pb2.GenerateRequest(prompt="a", priority=-101), "priority"),
    (inference_pb2.GenerateRequest(prompt="a", retain=types_pb2.Retain()), "retain.seconds"),
    (inference_pb2.GenerateRequest(prompt="a", retain=types_pb2.Retain(seconds=float("nan"))), "retain.seconds"),
    (inference_pb2.GenerateRequest(prompt="a", retain=types_pb2.Retain(seconds=3601)), "retain.seconds"),
    (inference_pb2.GenerateRequest(prompt="a", retain=types_pb2.Retain(seconds=1, num_tokens=-1)), "retain.num_tokens"),
    (inference_pb2.GenerateRequest(prompt="a", sampling_params=P(temperature=-1)), "sampling_params.temperature"),
    (
        inference_pb2.GenerateRequest(prompt="a", sampling_params=P(temperature=float("nan"))),
        "sampling_params.temperature",
    ),
    (inference_pb2.GenerateRequest(prompt="a", sampling_params=P(max_tokens=300)), "sampling_params.max_tokens"),
    (inference_pb2.GenerateRequest(prompt="a", sampling_params=P(stop=[""])), "sampling_params.stop"),
]


@each_case(("request_", "field"), BAD)
async def test_bad_requests(router: RunningRouter, request_: inference_pb2.GenerateRequest, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(router, request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(caught.value) == field
    assert field in (caught.value.details() or "")
    assert await collect(router, inference_pb2.GenerateRequest(prompt="a"))


@each_case(
    ("data", "field"),
    [
        (b"\x1a\x02\xff\xfe", "prompt"),
        (b"\x2a\x04\x42\x02\xff\xfe", "sampling_params.stop"),
        (b"\x1a\xff", "request"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "request"),
    ],
)
async def test_bytes_that_are_no_message(router: RunningRouter, data: bytes, field: str) -> None:
    method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = router.channel.unary_stream(GENERATE)
    call = method(data)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(caught.value) == field


def test_valid_messages_have_no_invalid_field() -> None:
    request = inference_pb2.GenerateRequest(
        prompt="é", prompt_token_ids=[1, 300], sampling_params=P(seed=1, stop=["ü"], logit_bias={1: 2.0})
    )
    assert invalid_utf8_field(inference_pb2.GenerateRequest.DESCRIPTOR, request.SerializeToString()) == ""


async def test_unknown_model(router: RunningRouter) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(router, inference_pb2.GenerateRequest(model="other", prompt="a"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert violated_field(caught.value) == "model"


async def test_a_full_worker_says_when_to_retry(router: RunningRouter, worker: FakeWorker) -> None:
    worker.refuse = (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(router, inference_pb2.GenerateRequest(prompt="a"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    info = error_details_pb2.RetryInfo()
    assert status_of(caught.value).details[0].Unpack(info)
    assert info.retry_delay.seconds == 1


async def test_deadline_reaches_the_worker(router: RunningRouter, worker: FakeWorker) -> None:
    worker.hang_after = 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(router, inference_pb2.GenerateRequest(prompt="a"), timeout=1.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert worker.deadlines[0] is not None
    assert 0 < worker.deadlines[0] < 1.6  # gRPC rounds what is left up
    await asyncio.wait_for(worker.cancelled.wait(), 60)


async def test_cancelling_reaches_the_worker(router: RunningRouter, worker: FakeWorker) -> None:
    worker.hang_after = 1
    call = router.inference.Generate(inference_pb2.GenerateRequest(prompt="a"))
    await call.read()
    call.cancel()
    await asyncio.wait_for(worker.cancelled.wait(), 60)


async def test_a_stop_string_cancels_the_worker(router: RunningRouter, worker: FakeWorker) -> None:
    worker.hang_after = len(ids_of("The capital of France is Paris.")) + 1
    params = types_pb2.SamplingParams(stop=["Paris"])
    responses = await collect(router, inference_pb2.GenerateRequest(prompt="a", sampling_params=params))
    assert "".join(response.text for response in responses) == "The capital of France is "
    assert (responses[-1].finish_reason, responses[-1].stop_reason) == (types_pb2.FINISH_REASON_STOP, "Paris")
    assert responses[-1].usage.completion_tokens == sum(len(response.token_ids) for response in responses)
    await asyncio.wait_for(worker.cancelled.wait(), 60)


async def test_health_follows_the_fleet_and_names_services(router: RunningRouter, worker: FakeWorker) -> None:
    health = health_pb2_grpc.HealthStub(router.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service="baton.v1.InferenceService"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    worker.change(state=worker_pb2.WORKER_STATE_DRAINING)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(router, inference_pb2.GenerateRequest(prompt="a"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in (caught.value.details() or "")
    operators = await health.Check(health_pb2.HealthCheckRequest(service="baton.v1.RouterService"))
    assert operators.status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


@each_case("version", ["v1", "v1alpha"])
async def test_reflection(router: RunningRouter, version: str) -> None:
    method = router.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.InferenceService"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.InferenceService.Generate"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.InferenceService.Nothing"),
    ]
    answers = [answer async for answer in method(iter(requests))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"baton.v1.InferenceService", "baton.v1.RouterService", "grpc.health.v1.Health"} <= names
    assert answers[1].file_descriptor_response.file_descriptor_proto
    assert answers[2].file_descriptor_response == answers[1].file_descriptor_response
    assert answers[3].error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_calls_of_get_fleet_share_one_look(router: RunningRouter, worker: FakeWorker) -> None:
    """Workers are asked once for all who ask at a time, and one who gives up takes nothing from the others."""
    go, num_asked = asyncio.Event(), 0

    async def look(*_: object) -> worker_pb2.WorkerStatus:
        nonlocal num_asked
        num_asked += 1
        await go.wait()
        return worker_pb2.WorkerStatus(integrity="ok")

    worker.look = look
    calls = [router.fleet.GetFleet(router_pb2.GetFleetRequest()) for _ in range(20)]
    async with asyncio.timeout(20):
        while not num_asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for call in calls[:10]:
        call.cancel()
    await asyncio.sleep(0.2)
    go.set()
    answers = [await call for call in calls[10:]]
    assert {answer.workers[0].integrity for answer in answers} == {"ok"}
    assert num_asked == 1
    await router.fleet.GetFleet(router_pb2.GetFleetRequest())
    assert num_asked == 2


async def test_fleet(start_worker: StartWorker, start_router: StartRouter) -> None:
    decode = await start_worker()
    prefill = await start_worker(WorkerRole.PREFILL)
    wrong = await start_worker(WorkerRole.PREFILL, fingerprint="other")
    router = await start_router(decode, prefill=(prefill, wrong))
    await prefill.stop()
    fleet = await router.fleet.GetFleet(router_pb2.GetFleetRequest())
    by_address = {worker.address: worker for worker in fleet.workers}
    ready = by_address[decode.address]
    assert (ready.state, ready.integrity) == (worker_pb2.WORKER_STATE_READY, "ok")
    assert (ready.role, ready.info.model) == (worker_pb2.WORKER_ROLE_DECODE, "tiny")
    assert by_address[prefill.address].state == worker_pb2.WORKER_STATE_UNREACHABLE
    assert "KV of another kind" in by_address[wrong.address].integrity


async def test_fleet_says_if_workers_differ_in_dtype_alone(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    decode = await start_worker(fingerprint="bf16", fingerprint_but_dtype="all", dtype="bfloat16")
    slow = await start_worker(WorkerRole.PREFILL, fingerprint="fp32", fingerprint_but_dtype="all", dtype="float32")
    other = await start_worker(WorkerRole.PREFILL, fingerprint="large", fingerprint_but_dtype="blocks of 32")
    router = await start_router(decode, prefill=(slow, other))
    fleet = await router.fleet.GetFleet(router_pb2.GetFleetRequest())
    by_address = {worker.address: worker for worker in fleet.workers}
    assert (by_address[decode.address].integrity, by_address[decode.address].info.dtype) == ("ok", "bfloat16")
    assert by_address[slow.address].integrity == (
        "ok; not used: holds KV of another kind: it computes in float32 (why float32), others in bfloat16. "
        "Nothing else differs: give all workers one --dtype"
    )
    assert by_address[other.address].integrity == "ok; not used: holds KV of another kind (large, not bf16)"


async def test_fleet_before_a_worker_has_reported(start_worker: StartWorker) -> None:
    """It answers when it is asked, but no request would be sent to it."""
    worker = await start_worker()
    async with grpc.aio.insecure_channel(worker.address) as channel:
        unseen = Endpoint(worker_id="w", role=WorkerRole.DECODE, address=worker.address)
        listed = await ask_worker(unseen, None, channel)
        seen = await ask_worker(replace(unseen, state=WorkerState.READY), None, channel)
    assert listed.state == worker_pb2.WORKER_STATE_UNREACHABLE
    assert listed.integrity == "ok; not used: it has not reported to this router yet"
    assert (seen.state, seen.integrity) == (worker_pb2.WORKER_STATE_READY, "ok")


async def test_not_ready_says_why(unused_port: int) -> None:
    stop = asyncio.Event()
    ready: list[str] = []
    settings = {**SETTINGS, "decode": "127.0.0.1:1", "grpc_listen": f"127.0.0.1:{unused_port}"}
    task = asyncio.create_task(serve(RouterSettings.model_validate(settings), lambda url, _: ready.append(url), stop))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unused_port}") as channel:
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(GENERATE)
        call = method(b"", wait_for_ready=True, timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "no decode worker is ready (127.0.0.1:1: unreachable" in (caught.value.details() or "")
    stop.set()
    await task
    assert ready == []


async def test_a_taken_port_is_one_line(router: RunningRouter) -> None:
    for name, taken in (("http_listen", router.url.removeprefix("http://")), ("grpc_listen", router.grpc_address)):
        settings = RouterSettings.model_validate({**SETTINGS, "decode": "127.0.0.1:1", name: taken})
        with pytest.raises(StartupError, match=f"cannot listen on {taken}") as caught:
            await serve(settings)
        assert "\n" not in str(caught.value)


async def test_drain_finishes_what_runs_and_takes_nothing_new(router: RunningRouter, worker: FakeWorker) -> None:
    worker.delay_s = 0.05
    call = router.inference.Generate(inference_pb2.GenerateRequest(prompt="a"))
    responses = aiter(call)
    first = await anext(responses)
    health = health_pb2_grpc.HealthStub(router.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    router.stop.set()
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    # A request that is on its way when the connection is called back is cancelled by gRPC itself.
    await asyncio.wait_for(router.channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 20)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(router, inference_pb2.GenerateRequest(prompt="b"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    text = first.text + "".join([response.text async for response in responses])
    assert text == ANSWER
    watch.cancel()
    await router.task
