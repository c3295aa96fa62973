"""Embeddings through the router: shapes, limits, and workers that fail."""

from __future__ import annotations

import grpc
import httpx
import openai
import pytest

from common.errors import InvalidArgumentError
from common.types import WorkerRole
from protos.baton.v1 import embed_pb2, inference_pb2
from router.running.embedding import MAX_TOLD_CALLS
from tests.each_case import each_case
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, sample
from tests.router.tiny_tokenizer import ids_of
from tests.support.fake_worker import MAX_MODEL_LEN, FakeWorker


@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
async def test_each_input_has_its_vector(
    router: RunningRouter, worker: FakeWorker, encoding_format: str | None
) -> None:
    texts = ["hello world", "Paris", "How are you?"]
    given = {} if encoding_format is None else {"encoding_format": encoding_format}
    answer = await router.openai.embeddings.create(model="tiny", input=texts, **given)  # type: ignore[arg-type]
    assert [one.index for one in answer.data] == [0, 1, 2]
    if encoding_format == "base64":
        assert isinstance(answer.data[0].embedding, str)
    else:
        assert [one.embedding for one in answer.data] == [[len(ids_of(t)), ids_of(t)[0], 0.5] for t in texts]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(ids_of(text)) for text in texts)
    assert {"1", "2"} < {request.request_id.rpartition("-")[2] for request in worker.embedded}


@pytest.mark.parametrize("given", [[1, 2, 3], [[1, 2, 3]]])
async def test_token_ids(router: RunningRouter, worker: FakeWorker, given: list[int]) -> None:
    extra = {"pooling": "mean", "normalize": False, "cache_salt": "s", "request_id": "r"}
    answer = await router.openai.embeddings.create(
        model="tiny", input=given, dimensions=2, extra_body=extra, user="u", encoding_format="float"
    )
    assert len(answer.data) == 1
    (request,) = worker.embedded
    assert list(request.prompt_token_ids) == [1, 2, 3]
    assert (request.pooling, request.normalize, request.dimensions) == (embed_pb2.POOLING_MEAN, False, 2)
    assert (request.cache_salt != "", request.request_id, request.fingerprint) == (True, "r", "f1")


@each_case(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "word " * 300}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 2**21}, "dimensions"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "colour": 1}, "colour"),
    ],
)
async def test_what_is_refused(router: RunningRouter, body: dict[str, object], param: str) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/embeddings", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_an_input_may_fill_the_context(router: RunningRouter) -> None:
    """Nothing comes after it."""
    await router.openai.embeddings.create(model="tiny", input=[5] * MAX_MODEL_LEN)
    with pytest.raises(openai.BadRequestError, match=f"at most {MAX_MODEL_LEN} tokens") as caught:
        await router.openai.embeddings.create(model="tiny", input=[5] * (MAX_MODEL_LEN + 1))
    assert caught.value.param == "input"
    await router.inference.Embed(
        inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(token_ids=[5] * MAX_MODEL_LEN)])
    )


async def test_many_inputs_take_their_turns(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, max_requests=16)
    answer = await router.openai.embeddings.create(model="tiny", input=["a"] * 200)
    assert len(answer.data) == 200


async def test_prefill_workers_come_first_and_failures_go_elsewhere(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    prefill, decode = await start_worker(WorkerRole.PREFILL), await start_worker()
    router = await start_router(decode, prefill=(prefill,))
    await router.openai.embeddings.create(model="tiny", input="a")
    assert (len(prefill.embedded), len(decode.embedded)) == (1, 0)
    prefill.refuse = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    await router.openai.embeddings.create(model="tiny", input="a")
    assert len(decode.embedded) == 1
    decode.refuse = prefill.refuse
    with pytest.raises(openai.RateLimitError):
        await router.openai.embeddings.create(model="tiny", input="a")
    prefill.refuse = InvalidArgumentError("dimensions", "must be at most 3")
    with pytest.raises(openai.BadRequestError) as caught:
        await router.openai.embeddings.create(model="tiny", input="a")
    assert caught.value.param == "dimensions"


async def test_requests_that_ended_have_embeddings(
    start_worker: StartWorker, start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = await start_worker(WorkerRole.PREFILL), await start_worker()
    router = await start_router(whole, prefill=(broken,))
    broken.refuse = (grpc.StatusCode.INTERNAL, "it is on fire")
    with caplog.at_level("INFO"):
        await router.openai.embeddings.create(model="tiny", input=[[1, 2, 3]], extra_body={"request_id": "mine"})
    (line,) = [record for record in caplog.records if record.message == "answered"]
    assert (vars(line)["request_id"], vars(line)["num_inputs"]) == ("mine", 1)
    await router.openai.embeddings.create(model="tiny", input=["a"] * 40, extra_body={"request_id": "many"})
    whole.refuse = (grpc.StatusCode.INVALID_ARGUMENT, "no")
    with pytest.raises(openai.BadRequestError):
        await router.openai.embeddings.create(model="tiny", input="a", extra_body={"request_id": "bad"})
    async with httpx.AsyncClient(base_url=router.url) as client:
        told = {one["request_id"]: one for one in (await client.get("/requests")).json()["requests"]}
    mine = told["mine"]
    assert (mine["operation"], mine["status"], mine["prompt_tokens"], mine["cached_tokens"]) == (
        "embeddings",
        "ok",
        3,
        1,
    )
    assert (mine["decode_worker"], mine["ttft_ms"], mine["num_retries"]) == (whole.address, None, 1)
    assert [(one["name"], one["where"]) for one in mine["stages"]][-2:] == [
        ("failed attempt", broken.address),
        ("embed", whole.address),
    ]
    assert [one["cause"] for one in mine["attempts"]] == ["new", "retry"]
    assert (told["many"]["cached_tokens"], len(told["many"]["attempts"])) == (40, MAX_TOLD_CALLS)
    assert (told["bad"]["status"], "no" in told["bad"]["reason"]) == ("invalid_argument", True)


async def test_what_a_worker_fails_at_is_retried_as_answers_are(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    broken, whole = await start_worker(WorkerRole.PREFILL), await start_worker()
    router = await start_router(whole, prefill=(broken,))
    before = sample("baton_router_retries_total", reason="INTERNAL")
    broken.refuse = (grpc.StatusCode.INTERNAL, "it is on fire")
    answer = await router.openai.embeddings.create(model="tiny", input="a")
    assert len(answer.data) == len(whole.embedded) == 1
    assert sample("baton_router_retries_total", reason="INTERNAL") == before + 1


async def test_over_grpc(router: RunningRouter, worker: FakeWorker) -> None:
    request = inference_pb2.EmbedRequest(
        inputs=[inference_pb2.EmbedInput(text="Paris"), inference_pb2.EmbedInput(token_ids=[5, 6])],
        pooling=embed_pb2.POOLING_MEAN,
    )
    answer = await router.inference.Embed(request)
    assert [list(one.values) for one in answer.embeddings] == [
        [len(ids_of("Paris")), ids_of("Paris")[0], 0.5],
        [2, 5, 0.5],
    ]
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (len(ids_of("Paris")) + 2, 2)
    assert {one.normalize for one in worker.embedded} == {True}
    for wrong, field in (
        (inference_pb2.EmbedRequest(), "inputs"),
        (inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput()]), "inputs[0]"),
        (inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="a")], pooling=9), "pooling"),  # type: ignore[arg-type]
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.inference.Embed(wrong)
        assert (caught.value.details() or "").startswith(field)
