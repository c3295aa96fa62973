"""Headers by which a call is found again go back at every door, over REST and over gRPC; and they count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from protos.baton.v1 import admin_pb2, inference_pb2, router_pb2
from protos.inference import open_inference_pb2
from router.api.echo import ECHOED
from tests.each_case import each_case
from tests.router.conftest import RunningRouter, StartRouter
from tests.support.fake_worker import FakeWorker

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
GIVEN = {
    "x-request-id": "from-a-proxy",
    "traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01",
    "x-llm-d-slo-ttft-ms": "5000",
    "x-llm-d-slo-tpot-ms": "400",
    "x-llm-d-inference-objective": "",
}
SERVICES = [
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    router_pb2.DESCRIPTOR.services_by_name["RouterService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
]
MESSAGES = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "x"},
    "/v1/embeddings": {"input": "x"},
    "/v1/messages": {"model": "tiny", "max_tokens": 4, "messages": MESSAGES},
}


def test_all_of_them_are_tried() -> None:
    assert GIVEN.keys() == ECHOED


async def test_they_go_back_over_rest(router: RunningRouter) -> None:
    """Whatever becomes of the call."""
    async with httpx.AsyncClient(base_url=router.url, headers=GIVEN, timeout=30) as client:
        page = (await client.get("/openapi.json")).json()
        doors = [(method, path) for path, operations in page["paths"].items() for method in operations]
        assert len(doors) > 15
        for method, path in [*doors, ("get", "/nothing")]:
            answer = await client.request(
                method, path.replace("{request_id}", "x"), json={} if method == "post" else None
            )
            told = {name: answer.headers.get(name) for name in GIVEN}
            assert told == GIVEN, (method, path, answer.status_code)
            assert len(answer.headers.get_list("x-request-id")) == 1


async def test_they_go_back_to_who_has_no_key(worker: FakeWorker, start_router: StartRouter, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-a name=a\n")
    router = await start_router(worker, api_keys_file=str(tmp_path / "keys"))
    async with httpx.AsyncClient(base_url=router.url, headers=GIVEN) as client:
        answer = await client.get("/v1/models")
        assert (answer.status_code, answer.headers["x-request-id"]) == (401, "from-a-proxy")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=list(GIVEN.items()))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert GIVEN.items() <= dict(refused.value.trailing_metadata() or ()).items()


async def test_they_go_back_over_grpc(router: RunningRouter) -> None:
    for method in [method for service in SERVICES for method in service.methods]:
        path = f"/{method.containing_service.full_name}/{method.name}"
        call = router.channel.unary_stream(path, bytes, bytes)(b"", metadata=list(GIVEN.items()))
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            told = dict(error.trailing_metadata() or ())
        else:
            told = dict(await call.trailing_metadata())
        assert {name: told.get(name) for name in GIVEN} == GIVEN, path


@each_case("path", list(ASKED))
async def test_a_request_has_the_id_and_targets_that_came_beside_it(router: RunningRouter, path: str) -> None:
    given = {**GIVEN, "x-request-id": f"mine{path}"}
    async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
        answer = await client.post(path, json=ASKED[path], headers=given)
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, f"mine{path}")
        told = (await client.get(f"/requests/mine{path}")).json()
        assert told["request_id"] == f"mine{path}"
        if path != "/v1/embeddings":
            assert (told["ttft_target_ms"], told["tpot_target_ms"]) == (5000, 400)


async def test_the_same_over_grpc(worker: FakeWorker, start_router: StartRouter) -> None:
    """An id in the message goes before the one beside it. A wrong one is refused by its name."""
    router = await start_router(worker)
    inference = router.inference
    chat = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="x")])
    for stream in (
        inference.Generate(inference_pb2.GenerateRequest(prompt="x"), metadata=list(GIVEN.items())),
        inference.Chat(chat, metadata=list(GIVEN.items())),
    ):
        answers = [one async for one in stream]
        assert {one.request_id for one in answers} == {"from-a-proxy"}
        assert answers[-1].report.slo.targets.ttft_ms == 5000
    embed = inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="x")])
    assert (await inference.Embed(embed, metadata=list(GIVEN.items()))).request_id == "from-a-proxy"
    embed.request_id = "of-the-message"
    assert (await inference.Embed(embed, metadata=list(GIVEN.items()))).request_id == "of-the-message"
    embed.request_id = ""
    with pytest.raises(grpc.aio.AioRpcError, match="x-request-id: may only contain"):
        await inference.Embed(embed, metadata=[("x-request-id", "no spaces")])
