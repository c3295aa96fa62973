"""The keys file, and what a router with one lets through: by both interfaces, with the clients people use."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterable, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from baton.client.sync_client import Client
from common.config import RouterSettings
from common.errors import ConfigError, StartupError, UnauthenticatedError
from common.validation import MAX_SALT_CHARS
from protos.baton.v1 import demand_pb2, demand_pb2_grpc, inference_pb2, inference_pb2_grpc, router_pb2
from router.api.api_keys import ApiKeys
from router.limits.clients import ApiClient
from router.server import serve
from tests.each_case import each_case
from tests.router.conftest import RunningRouter, StartRouter, sample
from tests.support.fake_worker import ANSWER, FakeWorker
from worker.shell import check_names

ALICE, BOB, CAROL, DAVE = "sk-alice", "sk-bob", "sk-carol", "sk-dave"
FILE = f"""
# who may ask
{ALICE}   name=alice tenant=research
{BOB}     name=bob   tenant=research   # the same tenant
sha256:{hashlib.sha256(CAROL.encode()).hexdigest().upper()} name=carol tenant=sales
{DAVE}
"""

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...] | None


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(FILE)
    return path


@pytest.fixture
async def guarded(worker: FakeWorker, start_router: StartRouter, path: Path) -> RunningRouter:
    return await start_router(worker, api_keys_file=str(path))


# ------------------------------------------------------------------------------------------------------ the file


def test_keys_and_hashes_are_known_by_name(path: Path) -> None:
    keys = ApiKeys(str(path))
    assert keys.client(f"Bearer {ALICE}", "rest") == ApiClient("alice", "research")
    assert keys.client(f"bearer  {CAROL} ", "rest") == ApiClient("carol", "sales")
    unnamed = keys.client(f"Bearer {DAVE}", "rest")
    assert unnamed == ApiClient(f"key-{hashlib.sha256(DAVE.encode()).hexdigest()[:8]}")


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", f"Basic {ALICE}", ALICE, "Bearer sk-alic", "Bearer #"]
)
def test_nothing_else_is_a_key(path: Path, given: str | None) -> None:
    before = sample("baton_router_unauthenticated_total", interface="rest")
    with pytest.raises(UnauthenticatedError):
        ApiKeys(str(path)).client(given, "rest")
    assert sample("baton_router_unauthenticated_total", interface="rest") == before + 1


def test_refusals_do_not_fill_the_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    keys, before = ApiKeys(str(path)), sample("baton_router_unauthenticated_total", interface="rest")
    for _ in range(1000):
        with pytest.raises(UnauthenticatedError):
            keys.client(None, "rest")
    assert sample("baton_router_unauthenticated_total", interface="rest") == before + 1000
    assert 1 <= sum("refused" in record.message for record in caplog.records) < 10  # one a second


def test_a_hash_is_not_itself_a_key(path: Path) -> None:
    with pytest.raises(UnauthenticatedError):
        ApiKeys(str(path)).client(f"Bearer sha256:{hashlib.sha256(CAROL.encode()).hexdigest()}", "rest")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no key"),
        ("# nobody\n", "holds no key"),
        ("a\nsecret alice\n", "line 2: after the key stand"),
        ("secret name=a name=b\n", "line 1: after the key stand"),
        ("secret role=admin\n", "line 1: after the key stand"),
        ("secret name=\n", "line 1: names are"),
        ("secret tenant=a/b\n", "line 1: names are"),
        ("sha256:12ab name=a\n", "line 1: sha256:"),
        ("secret\nsecret name=a\n", "line 2: this key was there before"),
        ("sëcret\n", "line 1: keys travel in headers"),
    ],
)
def test_a_bad_file_is_refused_without_showing_it(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(StartupError, match=r"^api_keys_file: ") as caught:
        ApiKeys(str(path))
    assert reason in caught.value.message
    assert "secret" not in caught.value.message


def test_the_file_is_read_again(path: Path) -> None:
    keys = ApiKeys(str(path))
    path.write_text("sk-new name=new\n")
    assert keys.client("Bearer sk-new", "rest").name == "new"
    with pytest.raises(UnauthenticatedError):
        keys.client(f"Bearer {ALICE}", "rest")
    path.write_text("sk-new what is this\n")
    assert keys.client("Bearer sk-new", "rest").name == "new", "a file that is wrong changes nothing"


def test_salts_of_different_tenants_are_never_equal() -> None:
    nobody, acme, evil = ApiClient("n"), ApiClient("a", "acme"), ApiClient("e", "a")
    salts = ["", "x", "acme", '["acme", ""]', json.dumps(["acme", ""]), "cme"]
    made = {(client.tenant, salt): client.cache_salt(salt) for client in (nobody, acme, evil) for salt in salts}
    assert len(set(made.values())) == len(made)
    assert made["", ""] == ""
    assert ApiClient("b", "acme").cache_salt("x") == made["acme", "x"]


def test_the_longest_salt_of_a_tenant_is_one_that_workers_take() -> None:
    check_names("id", ApiClient("n", "t" * 64).cache_salt("\N{GRINNING FACE}" * MAX_SALT_CHARS))


async def test_a_router_does_not_start_without_its_keys(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^api_keys_file: cannot read"):
        await serve(RouterSettings(api_keys_file=str(tmp_path / "missing")))


# ---------------------------------------------------------------------------------------------------------- REST


async def test_the_openai_client_needs_a_key(guarded: RunningRouter, worker: FakeWorker) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        await guarded.openai.models.list()
    assert caught.value.status_code == 401
    assert caught.value.code == "invalid_api_key"
    assert caught.value.body == {
        "message": "the API key is not known here",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
    async with openai.AsyncOpenAI(base_url=f"{guarded.url}/v1", api_key=ALICE, max_retries=0) as client:
        answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello?"}])
        assert answer.choices[0].message.content == ANSWER
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello?"}], stream=True, extra_body={"cache_salt": "s"}
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text == ANSWER
    assert [request.cache_salt for request in worker.requests] == ['["research", ""]', '["research", "s"]']


@each_case("url", ["/v1/models", "/tokenize", "/openapi.json", "/nowhere", "/health/"])
async def test_every_other_path_needs_a_key(guarded: RunningRouter, url: str) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.get(guarded.url + url)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        known = await client.get(guarded.url + url, headers={"Authorization": f"Bearer {BOB}"})
        assert known.status_code != 401


@each_case("url", ["/health", "/metrics"])
async def test_probes_and_prometheus_need_none(guarded: RunningRouter, url: str) -> None:
    async with httpx.AsyncClient() as client:
        assert (await client.get(guarded.url + url)).status_code == 200


# ---------------------------------------------------------------------------------------------------------- gRPC


async def test_grpc_calls_need_a_key(guarded: RunningRouter, worker: FakeWorker) -> None:
    request = inference_pb2.GenerateRequest(prompt_token_ids=[1, 2, 3])
    reflection = reflection_pb2_grpc.ServerReflectionStub(guarded.channel)
    calls: dict[str, Callable[[Metadata], Awaitable[object]]] = {
        "unary": lambda metadata: guarded.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata),
        "fleet": lambda metadata: guarded.fleet.GetFleet(router_pb2.GetFleetRequest(), metadata=metadata),
        "stream": lambda metadata: all_of(guarded.inference.Generate(request, metadata=metadata)),
        # It asks nothing: a question that is on its way when the call is refused can end it with INTERNAL.
        "reflection": lambda metadata: all_of(reflection.ServerReflectionInfo(iter(()), metadata=metadata)),
    }
    for name, call in calls.items():
        for metadata in (None, bearer("sk-nobody")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
        await call(bearer(CAROL))
    assert [one.cache_salt for one in worker.requests] == ['["sales", ""]']


async def all_of(call: AsyncIterable[T]) -> list[T]:
    return [message async for message in call]


async def test_health_and_demand_need_none(guarded: RunningRouter) -> None:
    health = health_pb2_grpc.HealthStub(guarded.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    watch = demand_pb2_grpc.DemandServiceStub(guarded.channel).WatchDemand(demand_pb2.WatchDemandRequest())
    assert isinstance(await watch.read(), demand_pb2.RouterDemand)
    watch.cancel()


async def test_logs_name_the_key_and_never_show_it(guarded: RunningRouter, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        stub = inference_pb2_grpc.InferenceServiceStub(guarded.channel)
        await all_of(stub.Generate(inference_pb2.GenerateRequest(prompt_token_ids=[1]), metadata=bearer(ALICE)))
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer("sk-wrong"))
    (answered,) = [record for record in caplog.records if record.message == "answered"]
    assert vars(answered)["client"] == "alice"
    everything = " ".join(str(vars(record)) for record in caplog.records)
    assert ALICE not in everything
    assert "sk-wrong" not in everything


async def test_without_a_file_nobody_is_asked_and_salts_stay(router: RunningRouter, worker: FakeWorker) -> None:
    request = inference_pb2.GenerateRequest(prompt_token_ids=[1], cache_salt="mine")
    await all_of(router.inference.Generate(request, metadata=bearer("whatever")))
    assert worker.requests[0].cache_salt == "mine"


# -------------------------------------------------------------------------------------------------- Baton's client


async def test_batons_own_client(guarded: RunningRouter) -> None:
    def ask(key: str | None) -> str:
        with Client(guarded.grpc_address, timeout=30, api_key=key) as client:
            return client.chat("Hello?").result().text

    assert await asyncio.to_thread(ask, BOB) == ANSWER
    with pytest.raises(UnauthenticatedError):
        await asyncio.to_thread(ask, None)
    with pytest.raises(ConfigError, match=r"^api_key"):
        Client(guarded.grpc_address, api_key="sk-bob\n")


def test_an_emptied_file_locks_nobody_out(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("secret name=a")
    keys = ApiKeys(str(path))
    path.write_text("# nothing\n")
    assert keys.client("Bearer secret", "rest").name == "a"
    path.write_text("another name=b")
    assert keys.client("Bearer another", "rest").name == "b"
