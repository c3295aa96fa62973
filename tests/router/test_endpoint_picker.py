"""The endpoint picker, asked by a client that sends what Envoy sends, in Envoy's order and in others."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from common.config import RouterSettings
from common.errors import ConfigError, OverloadedError, StartupError, UnavailableError
from common.types import WorkerRole
from protos.baton.v1 import worker_pb2
from protos.envoy import external_processor_pb2 as pb
from router.api.endpoint_picker.messages import CHUNK_BYTES, request_body, served_by, subset_of
from router.api.endpoint_picker.picker import Choice, EndpointPicker, HttpRequest
from router.api.endpoint_picker.replicas import MAX_NAMED, Replicas
from router.api.endpoint_picker.server import LIVENESS, READINESS
from router.api.endpoint_picker.service import SERVICE, ExternalProcessorService
from router.fleet.endpoint import Endpoint
from router.fleet.registry import Registry
from router.limits.admission import Admission
from router.limits.clients import PICK_HEADER, REQUEST_ID_HEADER
from router.limits.demand import Demand
from router.limits.gate import Gate, GateLimits
from router.policy.base import Reasons, RoutingDecision
from router.running.picks import Pick, PickKeys, Picks, UnusablePickError, pick_of
from router.server import serve
from tests.each_case import each_case
from tests.router.conftest import SETTINGS, RunningRouter, StartRouter, StartWorker, reaches, sample
from tests.router.envoy import Envoy, body_messages, request_headers, response_headers
from tests.router.test_first_token import SECONDS
from tests.support.fake_worker import ANSWER, FakeWorker

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "What is the capital of France? " * 3}]}).encode()


@dataclass(slots=True)
class Gateway:
    router: RunningRouter
    envoy: Envoy
    client: httpx.AsyncClient

    @property
    def own(self) -> str:
        return self.router.url.removeprefix("http://")

    async def http(self, path: str = CHAT, body: bytes = BODY, **options: Any) -> tuple[Any, httpx.Response | None]:
        return await self.envoy.http(path, body, client=self.client, **options)


StartGateway = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def start_gateway(start_router: StartRouter, unused_port: int) -> AsyncIterator[StartGateway]:
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=30, verify=False))

        async def start(*decode: FakeWorker, port: int = unused_port, **options: Any) -> Gateway:
            address = f"127.0.0.1:{port}"
            router = await start_router(*decode, endpoint_picker_listen=address, **options)
            envoy = Envoy(address)
            stack.push_async_callback(envoy.close)
            return Gateway(router, envoy, client)

        yield start


@pytest.fixture
async def gateway(worker: FakeWorker, start_gateway: StartGateway) -> Gateway:
    return await start_gateway(worker)


def pick_in(headers: dict[str, str]) -> Pick:
    return msgspec.msgpack.decode(base64.urlsafe_b64decode(headers[PICK_HEADER])[32:], type=Pick)


def picked(outcome: str) -> float:
    return sample("baton_router_picked_requests_total", outcome=outcome)


# ------------------------------------------------------------------------------------------------- a whole request


async def test_a_request_goes_where_the_picker_says(gateway: Gateway, worker: FakeWorker) -> None:
    before = picked("followed"), sample("baton_router_picks_served_total", by="first")
    told, response = await gateway.http(headers={"x-request-id": "mine"})
    assert response is not None
    assert response.json()["choices"][0]["message"]["content"] == ANSWER
    assert told.endpoints == [gateway.own]
    assert told.metadata == told.destination
    assert told.body == BODY
    assert (picked("followed"), sample("baton_router_picks_served_total", by="first")) == (before[0] + 1, before[1] + 1)
    pick = pick_in(told.headers)
    assert (pick.request_id, pick.decode) == ("mine", (worker.address, "e1"))
    assert [one.request_id for one in worker.requests] == ["mine"]
    [decision] = (await gateway.client.get(f"{gateway.router.url}/decisions")).json()["decisions"]
    assert decision["reasons"][0] == f"chosen by the endpoint picker of {gateway.own}"
    assert decision["decode_worker"] == worker.address


@each_case(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello there, how are you"}),
        ("/v1/completions", {"prompt": ["Hello", "you"], "n": 2}),
        ("/v1/responses", {"input": "Hello there"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}),
        ("/v1/chat/completions?x=1", {"messages": [{"role": "user", "content": "Hello"}], "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "request_id": "in-the-body"}),
    ],
)
async def test_each_interface_that_models_answer(gateway: Gateway, path: str, body: dict[str, Any]) -> None:
    before = picked("followed")
    told, response = await gateway.http(path, json.dumps(body).encode())
    assert response is not None
    assert response.status_code == 200, response.text
    assert PICK_HEADER in told.headers
    assert picked("followed") == before + 1
    assert told.headers[REQUEST_ID_HEADER] == body.get("request_id", pick_in(told.headers).request_id)


async def test_the_pair_is_one(start_worker: StartWorker, start_gateway: StartGateway) -> None:
    """Policies of the picker and of the router take turns: they would differ if each chose."""
    decode = [await start_worker() for _ in range(2)]
    prefill = tuple([await start_worker(WorkerRole.PREFILL) for _ in range(2)])
    gateway = await start_gateway(*decode, prefill=prefill, policy="round_robin", min_remote_tokens=1)
    chosen = set()
    for number in range(4):
        body = json.dumps({"prompt": f"{number} what is the capital of France", "max_tokens": 1}).encode()
        told, _ = await gateway.http("/v1/completions", body)
        pick = pick_in(told.headers)
        [sent] = [one for worker in decode for one in worker.requests if one.request_id == pick.request_id]
        [at] = [worker.address for worker in decode if sent in worker.requests]
        assert (at, list(sent.prefill_addresses)) == (pick.decode[0], [one[0] for one in pick.prefill])
        assert len(pick.prefill) == 2
        chosen.add((at, pick.prefill[0][0]))
    assert len(chosen) > 1


async def test_what_no_model_answers_goes_to_a_router_alone(gateway: Gateway) -> None:
    async with gateway.envoy.exchange() as exchange:
        told = await exchange.request("/v1/models", body=None, method="GET")
        assert told.endpoints == [gateway.own]
        assert told.removed == [PICK_HEADER]  # of a client that made one up
        assert await exchange.response(gateway.own, b"{}") == b"{}"
        await exchange.ends()


@each_case(
    ("body", "status", "field"),
    [
        (b"not JSON", 400, None),
        (b'{"messages": 3}', 400, "messages"),
        (b'{"messages": [], "model": "another"}', 404, "model"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', 400, "max_tokens"),
    ],
)
async def test_what_is_wrong_is_said_by_the_router(
    gateway: Gateway, body: bytes, status: int, field: str | None
) -> None:
    told, response = await gateway.http(body=body)
    assert PICK_HEADER not in told.headers
    assert response is not None
    assert (response.status_code, response.json()["error"]["param"]) == (status, field)


async def test_trailers_and_large_bodies(worker: FakeWorker, start_gateway: StartGateway) -> None:
    gateway = await start_gateway(worker, max_request_mb=1)
    body = json.dumps({"prompt": "Hello", "user": "x" * 3 * CHUNK_BYTES}).encode()
    async with gateway.envoy.exchange() as exchange:
        first = request_headers("/v1/completions", {})
        await exchange.send(first, pb.ProcessingRequest(request_body=pb.HttpBody(body=body)))
        await exchange.send(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
        answers = [await exchange.read() for _ in range(2 + -(-len(body) // CHUNK_BYTES))]
        kinds = [one.WhichOneof("response") for one in answers if one is not None]
        assert kinds == ["request_headers", *["request_body"] * (len(kinds) - 2), "request_trailers"]
        pieces = [one.request_body.response.body_mutation.streamed_response for one in answers[1:-1] if one is not None]
        assert b"".join(piece.body for piece in pieces) == body
        assert not any(piece.end_of_stream for piece in pieces)
        assert await exchange.response(None, b"answer", has_trailers=True) == b"answer"


@each_case("mode", [pb.NONE, pb.STREAMED, pb.BUFFERED])
async def test_a_gateway_that_keeps_bodies_to_itself(gateway: Gateway, mode: pb.BodySendMode.ValueType) -> None:
    async with gateway.envoy.exchange() as exchange:
        await exchange.send(request_headers(CHAT, {}, modes=(mode, mode)))
        answer = await exchange.read()
        assert answer is not None
        assert answer.HasField("request_headers")
        if mode != pb.NONE:
            await exchange.send(*body_messages(b"{}"))
            answer = await exchange.read()
            assert answer == pb.ProcessingResponse(request_body=pb.BodyResponse())
        await exchange.send(response_headers(gateway.own), *body_messages(b"{}", kind="response_body"))
        assert [await exchange.read(), await exchange.read()] == [
            pb.ProcessingResponse(response_headers=pb.HeadersResponse()),
            pb.ProcessingResponse(response_body=pb.BodyResponse()),
        ]
        await exchange.ends()


async def test_the_gateway_answers_itself(gateway: Gateway) -> None:
    before = sample("baton_router_picks_total", outcome="cut")
    async with gateway.envoy.exchange() as exchange:
        await exchange.send(request_headers(CHAT, {}), *body_messages(BODY)[:2], response_headers(None, 408))
        answer = await exchange.read()
        assert answer == pb.ProcessingResponse(response_headers=pb.HeadersResponse())
        await exchange.ends()
    assert sample("baton_router_picks_total", outcome="cut") == before + 1


# --------------------------------------------------------------------------------------- choices that do not hold


async def test_workers_that_are_gone(start_worker: StartWorker, start_gateway: StartGateway) -> None:
    workers = [await start_worker(), await start_worker()]
    gateway = await start_gateway(*workers)
    async with gateway.envoy.exchange() as exchange:
        told = await exchange.request(CHAT, {}, BODY)
    first = next(one for one in workers if one.address == pick_in(told.headers).decode[0])
    first.change(state=worker_pb2.WORKER_STATE_DRAINING)
    await reaches("baton_router_endpoints", 1, role="decode", state="draining")
    before = picked("gone")
    headers = {"content-type": "application/json", **told.headers}
    response = await gateway.client.post(f"{gateway.router.url}{CHAT}", content=BODY, headers=headers)
    assert response.status_code == 200
    assert picked("gone") == before + 1
    assert not first.requests


async def test_headers_that_no_picker_made(gateway: Gateway, worker: FakeWorker) -> None:
    told, _ = await gateway.http(headers={"x-request-id": "one"})
    value = told.headers[PICK_HEADER]
    for sent, request_id, outcome in (
        (value, "another", "other"),
        (value[:-6] + "AAAAAA", "one", "unknown"),
        ("made up", "one", "unknown"),
        ("A" * 9000, "one", "unknown"),
        ("\xe9".encode().decode("latin-1"), "one", "unknown"),
    ):
        before = picked(outcome)
        headers = {"content-type": "application/json", "x-request-id": request_id, PICK_HEADER: sent}
        encoded = {name.encode(): text.encode("latin-1") for name, text in headers.items()}
        response = await gateway.client.post(f"{gateway.router.url}{CHAT}", content=BODY, headers=encoded)
        assert response.status_code == 200, outcome
        assert picked(outcome) == before + 1


async def test_a_router_without_a_picker_ignores_the_header(router: RunningRouter) -> None:
    async with httpx.AsyncClient(verify=False) as client:
        response = await client.post(f"{router.url}{CHAT}", content=BODY, headers={PICK_HEADER: "made up"})
    assert response.status_code == 200


# ------------------------------------------------------------------------------------------------------ refusals


async def test_subsets_are_obeyed(gateway: Gateway) -> None:
    host = gateway.own.partition(":")[0]
    for subset, is_taken in (
        ([gateway.own, "10.0.0.9:80"], True),
        (f"10.0.0.9:80, {gateway.own}", True),
        ([host], True),
        (["10.0.0.9:80"], False),
        ([], False),
        ("", False),
    ):
        async with gateway.envoy.exchange() as exchange:
            told = await exchange.request(CHAT, {}, BODY, subset=subset)
            assert (told.endpoints == [gateway.own]) == is_taken, subset
            assert (told.refusal is None) == is_taken
            if told.refusal is not None:
                assert told.refusal.status.code == 503
                assert json.loads(told.refusal.body)["error"]["type"] == "service_unavailable_error"


async def test_a_router_that_is_full(worker: FakeWorker, start_gateway: StartGateway) -> None:
    gateway = await start_gateway(worker, max_requests=1)
    worker.hang_after = 0
    running = asyncio.create_task(gateway.client.post(f"{gateway.router.url}{CHAT}", content=BODY))
    await worker.asked.wait()
    told, response = await gateway.http(headers={"x-request-id": "mine"})
    assert response is None
    assert told.refusal is not None
    assert told.refusal.status.code == 429
    headers = {one.header.key: one.header.raw_value.decode() for one in told.refusal.headers.set_headers}
    assert int(headers["retry-after"]) >= 1
    assert headers["x-request-id"] == "mine"
    assert json.loads(told.refusal.body)["error"]["type"] == "rate_limit_error"
    async with gateway.envoy.exchange() as exchange:  # in other interfaces' words
        told = await exchange.request("/v1/messages", {}, b"{}")
        assert told.refusal is not None
        assert json.loads(told.refusal.body)["error"]["type"] == "rate_limit_error"
        assert json.loads(told.refusal.body)["type"] == "error"
    async with gateway.envoy.exchange() as exchange:
        told = await exchange.request("/baton.v1.InferenceService/Generate", {"content-type": "application/grpc"}, b"")
        assert told.refusal is not None
        assert told.refusal.grpc_status.status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    worker.hang_after = None
    await running


async def test_limits_of_keys(worker: FakeWorker, start_gateway: StartGateway, tmp_path: Path) -> None:
    keys, limits = tmp_path / "keys", tmp_path / "limits.yaml"
    keys.write_text("secret-of-alice name=alice\n")
    limits.write_text("keys: {alice: {requests_per_second: 0.5}}\n")
    gateway = await start_gateway(worker, api_keys_file=str(keys), limits_file=str(limits))
    alice = {"authorization": "Bearer secret-of-alice"}
    before = picked("followed")
    told, response = await gateway.http(headers=alice)
    assert response is not None
    assert response.status_code == 200
    assert picked("followed") == before + 1
    told, response = await gateway.http(headers=alice)
    assert response is None
    assert told.refusal.status.code == 429
    told, response = await gateway.http()
    assert response is not None  # the router says what is missing
    assert response.status_code == 401
    assert PICK_HEADER not in told.headers


async def test_first_tokens_that_would_come_too_late(start_worker: StartWorker, start_gateway: StartGateway) -> None:
    decode = await start_worker()
    decode.change(batch_time=SECONDS)
    gateway = await start_gateway(decode, slo_late="refuse")
    body = json.dumps({"prompt": "Hello?", "slo": {"ttft_ms": 100}}).encode()
    refusal = None
    async with asyncio.timeout(20):
        while refusal is None:  # until the router has asked the worker how long its steps take
            async with gateway.envoy.exchange() as exchange:
                refusal = (await exchange.request("/v1/completions", {}, body)).refusal
    assert refusal.status.code == 429
    assert b"its first token is wanted 100 ms after it came" in refusal.body
    assert not decode.requests


async def test_no_worker_is_there(gateway: Gateway, worker: FakeWorker) -> None:
    worker.change(state=worker_pb2.WORKER_STATE_DRAINING)
    await reaches("baton_router_endpoints", 1, role="decode", state="draining")
    before = sample("baton_router_picks_total", outcome="unavailable")
    told, response = await gateway.http()
    assert response is None
    assert told.refusal.status.code == 503
    assert sample("baton_router_picks_total", outcome="unavailable") == before + 1


async def test_bodies_that_are_too_large_or_too_late(worker: FakeWorker, start_gateway: StartGateway) -> None:
    gateway = await start_gateway(worker, max_request_mb=0.001, receive_timeout=1.5)
    async with gateway.envoy.exchange() as exchange:
        body = pb.ProcessingRequest(request_body=pb.HttpBody(body=b"x" * 2000))  # more of it would come too late
        await exchange.send(request_headers(CHAT, {}), body)
        answer = await exchange.read()
        assert answer is not None
        assert answer.immediate_response.status.code == 413
    async with gateway.envoy.exchange() as exchange:
        await exchange.send(request_headers(CHAT, {}), *body_messages(BODY)[:1])
        answer = await exchange.read()
        assert answer is not None
        assert answer.immediate_response.status.code == 408


# ---------------------------------------------------------------------------------------------- several routers


async def test_siblings(
    worker: FakeWorker, start_router: StartRouter, start_gateway: StartGateway, tmp_path: Path
) -> None:
    keys = tmp_path / "picker-keys"
    keys.write_text("# of all replicas\na-secret-of-all-replicas\n")
    sibling = await start_router(worker, endpoint_picker_key_file=str(keys))
    address = sibling.url.removeprefix("http://")
    gateway = await start_gateway(
        worker, endpoint_picker_key_file=str(keys), endpoint_picker_replicas=(address, "127.0.0.1:1")
    )
    before = picked("followed"), sample("baton_router_picks_served_total", by="fallback")
    async with gateway.envoy.exchange() as first, gateway.envoy.exchange() as second:
        both = await asyncio.gather(first.request(CHAT, {}, BODY), second.request(CHAT, {}, BODY))
        assert [one.endpoints[0] for one in both].count(gateway.own) == 1, "which has a request then"
        assert all(set(one.endpoints) == {gateway.own, address, "127.0.0.1:1"} for one in both)
        await first.response(both[0].endpoints[1])
    assert sample("baton_router_picks_served_total", by="fallback") == before[1] + 1
    async with gateway.envoy.exchange() as exchange:
        told = await exchange.request(CHAT, {"content-type": "application/json"}, BODY, subset=[address])
        assert told.endpoints == [address]
        headers = {"content-type": "application/json", **told.headers}
        response = await gateway.client.post(f"http://{address}{CHAT}", content=told.body, headers=headers)
    assert response.status_code == 200
    assert picked("followed") == before[0] + 1
    decisions = (await gateway.client.get(f"{sibling.url}/decisions")).json()["decisions"]
    assert decisions[0]["reasons"][0] == f"chosen by the endpoint picker of {gateway.own}"


async def test_a_full_router_names_its_siblings(
    worker: FakeWorker, start_gateway: StartGateway, tmp_path: Path
) -> None:
    keys = tmp_path / "picker-keys"
    keys.write_text("a-secret-of-all-replicas")
    sibling = "127.0.0.1:1"
    gateway = await start_gateway(
        worker, max_requests=1, endpoint_picker_key_file=str(keys), endpoint_picker_replicas=(sibling,)
    )
    worker.hang_after = 0
    running = asyncio.create_task(gateway.client.post(f"{gateway.router.url}{CHAT}", content=BODY))
    await worker.asked.wait()
    async with gateway.envoy.exchange() as exchange:
        told = await exchange.request(CHAT, {}, BODY)
        assert told.endpoints == [sibling]
        assert PICK_HEADER in told.headers
    worker.hang_after = None
    await running


def test_replicas_are_named_in_order() -> None:
    replicas = Replicas("10.0.0.1:80", ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"])
    first = replicas.named(None, with_own=True)
    assert first[0] == "10.0.0.1:80"
    assert set(first) == {"10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"}
    assert {replicas.named(None, with_own=False)[0] for _ in range(4)} == {"10.0.0.2:80", "10.0.0.3:80"}
    replicas.opened("10.0.0.1:80")
    replicas.opened("10.0.0.2:80")
    assert replicas.named(None, with_own=True) == ["10.0.0.3:80", "10.0.0.1:80", "10.0.0.2:80"]
    assert replicas.named({"10.0.0.2"}, with_own=True) == ["10.0.0.2:80"]
    assert replicas.named({"10.0.0.1:80"}, with_own=False) == []
    replicas.closed("10.0.0.1:80")
    replicas.closed("10.0.0.2:80")
    assert replicas.num_open == 0
    replicas.set(f"10.0.1.{number}:80" for number in range(20))
    assert len(replicas.named(None, with_own=True)) == MAX_NAMED
    assert Replicas("[::1]:80").named({"::1"}, with_own=True) == ["[::1]:80"]


# ------------------------------------------------------------------------------------------------- health, start


async def test_health(gateway: Gateway, worker: FakeWorker) -> None:
    stub = health_pb2_grpc.HealthStub(gateway.envoy.channel)

    async def status(service: str) -> int:
        answer: health_pb2.HealthCheckResponse = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert SERVICE.full_name == "envoy.service.ext_proc.v3.ExternalProcessor"
    names = (LIVENESS, READINESS, SERVICE.full_name, "")
    assert [await status(name) for name in names] == [serving] * 4
    worker.change(state=worker_pb2.WORKER_STATE_DRAINING)
    await reaches("baton_router_endpoints", 1, role="decode", state="draining")
    assert [await status(name) for name in names] == [serving, *[not_serving] * 3]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await status("other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_answer_ends_while_the_router_drains(gateway: Gateway, worker: FakeWorker) -> None:
    async with gateway.envoy.exchange() as exchange:
        told = await exchange.request(CHAT, {"content-type": "application/json"}, BODY)
        worker.hang_after = 1
        headers = {"content-type": "application/json", **told.headers}
        running = asyncio.create_task(gateway.client.post(f"http://{gateway.own}{CHAT}", content=BODY, headers=headers))
        await worker.asked.wait()
        gateway.router.stop.set()
        worker.hang_after = None
        assert (await running).status_code == 200
        assert await exchange.response(gateway.own, b"answer") == b"answer"
    await gateway.router.task


async def test_a_certificate_of_its_own(worker: FakeWorker, start_router: StartRouter, unused_port: int) -> None:
    x509 = pytest.importorskip("cryptography.x509", reason="the extra `kubernetes` is not installed")
    address = f"127.0.0.1:{unused_port}"
    await start_router(worker, endpoint_picker_listen=address, endpoint_picker_tls="self-signed")
    pem = (await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", unused_port))).encode()
    assert "baton-endpoint-picker" in x509.load_pem_x509_certificate(pem).subject.rfc4514_string()
    options = [("grpc.ssl_target_name_override", "baton-endpoint-picker")]
    channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(pem), options=options)
    envoy = Envoy(address, channel)
    async with envoy.exchange() as exchange:
        assert (await exchange.request(CHAT, {}, BODY)).endpoints
    await envoy.close()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"endpoint_picker_address": "10.0.0.1:80"}, "endpoint_picker_address"),
        ({"endpoint_picker_replicas": ("10.0.0.1:80",)}, "endpoint_picker_replicas"),
        ({"endpoint_picker_listen": "127.0.0.1:0", "http_listen": "0.0.0.0:0"}, "endpoint_picker_address"),
        (
            {"endpoint_picker_listen": "127.0.0.1:0", "endpoint_picker_replicas": ("10.0.0.1:80",)},
            "endpoint_picker_key_file",
        ),
        ({"endpoint_picker_listen": "127.0.0.1:0", "endpoint_picker_tls": "router"}, "endpoint_picker_tls"),
    ],
)
async def test_settings_that_do_not_go_together(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await serve(RouterSettings.model_validate({**SETTINGS, "decode": ("127.0.0.1:1",), **settings}))
    assert caught.value.field == field


def test_an_address_is_one() -> None:
    for address in ("router:8000", "10.0.0.1", "http://10.0.0.1:80", "fd00::1", "1:2:3:4:5:6:7:8", "fd00::1:http"):
        with pytest.raises(ValueError, match="should be ip:port"):
            RouterSettings.model_validate({"endpoint_picker_address": address})
    for address in ("[fd00::1]:80", "fd00::1:80"):  # the chart's $(POD_IP):80 has no brackets
        settings = RouterSettings.model_validate({"endpoint_picker_address": address})
        assert settings.endpoint_picker_address == "[fd00::1]:80"


# ------------------------------------------------------------------------------------------------ signed choices


def a_pick(**changes: Any) -> Pick:
    fields: dict[str, Any] = {
        "number": "n",
        "made_at": 1000.0,
        "picker": "10.0.0.1:80",
        "request_id": "r",
        "num_prompt_tokens": 7,
        "decode": ("d:1", "e"),
        "prefill": (("p:1", "e"),),
        "facts": {"min_remote_tokens": 16, "num_missing_tokens": 7, "prefill_cost": 7.0},
        "reasons": ("because",),
    }
    return Pick(**{**fields, **changes})


def test_a_choice_holds_for_a_short_time_and_by_each_key() -> None:
    now, keys = 1000.0, [b"first key"]
    picks = Picks(lambda: keys, lambda: now)
    header = picks.signed(a_pick())
    assert header.isascii()
    assert picks.read(header) == a_pick()
    keys.insert(0, b"second key")
    assert picks.read(header) == a_pick(), "it was the first when it was signed"
    keys.remove(b"first key")
    with pytest.raises(UnusablePickError, match="no key"):
        picks.read(header)
    header = picks.signed(a_pick())
    now = 1011.0
    with pytest.raises(UnusablePickError) as caught:
        picks.read(header)
    assert caught.value.outcome == "expired"
    now = 900.0
    with pytest.raises(UnusablePickError, match=r"-100\.0 s ago"):
        picks.read(header)


def test_a_choice_says_all_that_a_decision_does() -> None:
    """Whatever a decision may hold: each field of another value than its default comes through."""
    workers = [Endpoint(worker_id=name, role=WorkerRole.BOTH, address=name, epoch="e") for name in ("d", "p", "q")]
    plain = RoutingDecision(decode=workers[0], prefill=tuple(workers[1:]), reasons=Reasons(choices=[lambda: "why"]))
    others = {"decode", "prefill", "reasons", "late"}
    changed = {
        one.name: not one.default if isinstance(one.default, bool) else (one.default or 0) + number
        for number, one in enumerate(msgspec.structs.fields(plain), 1)
        if one.name not in others
    }
    decision = msgspec.structs.replace(plain, **changed)
    picks = Picks(lambda: [b"key"], lambda: 0.0)
    told: dict[str, Any] = {
        "number": "n",
        "made_at": 0.0,
        "picker": "10.0.0.1:80",
        "request_id": "r",
        "num_prompt_tokens": 1,
    }
    pick = picks.read(picks.signed(pick_of(decision, **told)))
    found = pick.decision(workers[0], workers[1:])
    assert found.reasons.lines() == ("chosen by the endpoint picker of 10.0.0.1:80", "why")
    assert msgspec.structs.replace(found, reasons=decision.reasons) == decision
    assert not pick.decision(workers[0], workers[1:2]).may_hedge, "nobody is there to be the second"
    assert pick_of(plain, **told).facts == {}
    with pytest.raises(UnusablePickError, match="another version"):
        a_pick(facts={"from_the_future": 1}).decision(workers[0], [])


@given(st.data())
def test_no_other_header_is_a_choice(data: st.DataObject) -> None:
    picks = Picks(lambda: [b"key"], lambda: 1000.0)
    header = picks.signed(a_pick())
    wrong = data.draw(
        st.one_of(
            st.text(),
            st.integers(0, len(header) - 1).map(lambda end: header[:end]),
            st.tuples(st.integers(0, len(header) - 1), st.characters()).map(
                lambda at: header[: at[0]] + at[1] + header[at[0] + 1 :]
            ),
        )
    )
    if base64_or_nothing(wrong) == base64_or_nothing(header):
        return
    with pytest.raises(UnusablePickError) as caught:
        picks.read(wrong)
    assert caught.value.outcome == "unknown"


def base64_or_nothing(text: str) -> bytes:
    with contextlib.suppress(ValueError):
        return base64.b64decode(text, altchars=b"-_", validate=True)
    return b""


def test_secrets_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# new\nsecret-of-sixteen-characters\n\nanother-of-sixteen  # old\n")
    keys = PickKeys(str(path))
    assert keys.current() == [b"secret-of-sixteen-characters", b"another-of-sixteen"]
    path.write_text("another-one-of-sixteen\n")
    assert keys.current() == [b"another-one-of-sixteen"]
    for text, words in (("short", "line 1"), ("# nothing", "holds no secret")):
        path.write_text(text)
        with pytest.raises(StartupError, match=words):
            PickKeys(str(path))


async def test_a_choice_counts_as_load_until_its_request_comes(
    start_worker: StartWorker, start_gateway: StartGateway
) -> None:
    workers = [await start_worker(), await start_worker()]
    gateway = await start_gateway(*workers)
    async with contextlib.AsyncExitStack() as stack:
        exchanges = [await stack.enter_async_context(gateway.envoy.exchange()) for _ in range(4)]
        told = [
            await one.request(CHAT, {}, json.dumps({"messages": [{"role": "user", "content": f"{n} x"}]}).encode())
            for n, one in enumerate(exchanges)
        ]
        chosen = sorted(pick_in(one.headers).decode[0] for one in told)
        assert chosen == sorted([workers[0].address, workers[1].address] * 2), "of equal ones each gets its share"
        assert sum(sample("baton_router_endpoint_requests", address=one.address) for one in workers) == 4
        await exchanges[0].response(gateway.own)
        assert sum(sample("baton_router_endpoint_requests", address=one.address) for one in workers) == 3
    async with asyncio.timeout(60):
        while sum(sample("baton_router_endpoint_requests", address=one.address) for one in workers):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# -------------------------------------------------------------------------- what a gateway may do in any order


class _Context:
    """gRPC's side of a call: messages to be read, and then its end or nothing; what was written."""

    def __init__(self, messages: list[bytes], *, ends: bool) -> None:
        self._messages = messages
        self._ends = ends
        self.written: list[pb.ProcessingResponse] = []
        self.status: grpc.StatusCode | None = None

    async def read(self) -> object:
        await asyncio.sleep(0)
        if self._messages:
            return self._messages.pop(0)
        if not self._ends:
            await asyncio.Event().wait()
        return grpc.aio.EOF

    async def write(self, message: pb.ProcessingResponse) -> None:
        await asyncio.sleep(0)
        self.written.append(message)

    def trailing_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: grpc.StatusCode, _details: str, trailing_metadata: object = ()) -> None:
        self.status = code
        raise grpc.aio.AbortError


class _Picker:
    """Chooses at once, or refuses, or takes a moment."""

    def __init__(self, refusal: Exception | None, *, waits: bool) -> None:
        self.replicas = Replicas("10.0.0.1:80")
        self._refusal = refusal
        self._waits = waits
        self.bodies: list[bytes | None] = []

    def client(self, _headers: object) -> tuple[None, bool]:
        return None, True

    async def choose(self, asked: HttpRequest) -> Choice:
        self.bodies.append(asked.body)
        if self._waits:
            await asyncio.sleep(0.001)
        if self._refusal is not None:
            raise self._refusal
        self.replicas.opened("10.0.0.1:80")
        return Choice(addresses=("10.0.0.1:80",))

    def answered(self, _choice: Choice, _served: str) -> None:
        pass

    def ended(self, _choice: Choice) -> None:
        self.replicas.closed("10.0.0.1:80")


RIGHT = [
    request_headers(CHAT, {"content-type": "application/json"}),
    *body_messages(b"x" * 40),
    response_headers("10.0.0.1:80"),
    *body_messages(b"y" * 40, kind="response_body"),
]
OTHERS = [
    pb.ProcessingRequest(),
    pb.ProcessingRequest(request_trailers=pb.HttpTrailers()),
    pb.ProcessingRequest(response_trailers=pb.HttpTrailers()),
    pb.ProcessingRequest(observability_mode=True),
    request_headers(CHAT, {}, is_end=True),
    request_headers(CHAT, {}, modes=(pb.BUFFERED, pb.NONE)),
    request_headers("", {}, subset=["10.0.0.9:1"]),
    *body_messages(b"z" * 2000),
]
MESSAGES = st.lists(st.sampled_from([*RIGHT, *OTHERS]), max_size=12)


@st.composite
def orders(draw: st.DrawFn) -> list[bytes]:
    """The right messages, with some swapped, left out, repeated or spoilt; or any."""
    messages = [one.SerializeToString() for one in draw(st.one_of(st.just(RIGHT), MESSAGES))]
    for _ in range(draw(st.integers(0, 4)) if messages else 0):
        at, to = draw(st.integers(0, len(messages) - 1)), draw(st.integers(0, len(messages) - 1))
        change = draw(st.sampled_from(("swap", "drop", "repeat", "spoil", "cut")))
        if change == "swap":
            messages[at], messages[to] = messages[to], messages[at]
        elif change == "drop":
            messages[at] = b""
        elif change == "repeat":
            messages.insert(to, messages[at])
        elif change == "spoil":
            messages[at] = messages[at][: len(messages[at]) // 2] + draw(st.binary(max_size=4))
        else:
            messages = messages[: at + 1]
    return messages


@given(
    orders(),
    st.sampled_from([None, OverloadedError("full"), UnavailableError("nobody")]),
    st.booleans(),
    st.booleans(),
    st.one_of(st.none(), st.floats(0, 0.002)),
)
def test_nothing_leaks_in_any_order(
    messages: list[bytes], refusal: Exception | None, waits: bool, ends: bool, cut_after_s: float | None
) -> None:
    """Whatever comes, in whichever order, and whenever the stream is cut: a call ends with a status of its gateway's
    making, what is written is what Envoy takes, and no place, byte or count is left taken."""

    async def run() -> None:
        limits = GateLimits(max_requests=2, receive_timeout_s=0.02, answer_timeout_s=0.02)
        door, gate = Gate(limits), Gate(limits)
        admission = Admission(Registry([], []), Demand(), door, max_request_bytes=1000)
        picker, context = _Picker(refusal, waits=waits), _Context(list(messages), ends=ends)
        service = ExternalProcessorService(cast("EndpointPicker", picker), admission, gate)
        call = asyncio.create_task(service.handle(None, cast("Any", context)))
        if cut_after_s is not None:
            await asyncio.sleep(cut_after_s)
            call.cancel()
        with contextlib.suppress(grpc.aio.AbortError, asyncio.CancelledError):
            await call
        in_time = (None, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert context.status in in_time
        assert picker.replicas.num_open == 0
        for name in ("requests", "bytes"):
            assert gate._ledger.total(name) == door._ledger.total(name) == 0
        kinds = [one.WhichOneof("response") for one in context.written]
        assert len(picker.bodies) <= 1
        assert kinds.count("request_headers") + kinds.count("immediate_response") <= 1
        if "immediate_response" in kinds:
            assert kinds[-1] == "immediate_response"
        if "response_body" in kinds:
            assert kinds.index("response_headers") < kinds.index("response_body")

    asyncio.run(run())


@pytest.mark.parametrize(
    "messages",
    [
        [pb.ProcessingRequest()],
        [*RIGHT[1:3]],
        [RIGHT[0], RIGHT[0]],
        [*RIGHT[:2], pb.ProcessingRequest()],
        [*RIGHT[:4], RIGHT[1]],
        [RIGHT[-1]],
        [*RIGHT[:4], RIGHT[-1]],
        [*RIGHT[:4], pb.ProcessingRequest(response_trailers=pb.HttpTrailers())],
        [*RIGHT, response_headers(None)],
        [pb.ProcessingRequest(observability_mode=True, request_headers=RIGHT[0].request_headers)],
        [request_headers("/", {f"x-{number}": "y" for number in range(2000)})],
    ],
    ids=lambda messages: "-".join(str(one.WhichOneof("request")) for one in messages),
)
async def test_what_comes_out_of_order_ends_the_stream(messages: list[pb.ProcessingRequest]) -> None:
    picker, context = _Picker(None, waits=False), _Context([one.SerializeToString() for one in messages], ends=True)
    admission = Admission(Registry([], []), Demand(), Gate(), max_request_bytes=1000)
    service = ExternalProcessorService(cast("EndpointPicker", picker), admission, Gate())
    with pytest.raises(grpc.aio.AbortError):
        await service.handle(None, cast("Any", context))
    assert context.status is grpc.StatusCode.INVALID_ARGUMENT
    assert picker.replicas.num_open == 0


def test_texts_of_messages() -> None:
    hint = request_headers("/", {}, subset=["a:1, b:2", "c:3"]).metadata_context
    assert subset_of(hint) == frozenset({"a:1", "b:2", "c:3"})
    assert subset_of(pb.Metadata()) is None
    hint.filter_metadata["envoy.lb.subset_hint"]["x-gateway-destination-endpoint-subset"] = 7
    assert subset_of(hint) == frozenset()
    assert served_by(pb.Metadata()) == ""
    assert [
        len(one.request_body.response.body_mutation.streamed_response.body) for one in request_body(b"", is_end=True)
    ] == [0]
    assert list(request_body(b"", is_end=False)) == []
