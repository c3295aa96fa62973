"""EmbedService of a worker: what reaches the engine, what comes back, and what is refused."""

from __future__ import annotations

import grpc
import pytest

from protos.baton.v1 import embed_pb2, embed_pb2_grpc
from tests.support.fake_engine import MAX_MODEL_LEN
from tests.worker.conftest import StartWorker
from tests.worker.words import VOCAB_SIZE


async def test_an_embedding(start_worker: StartWorker) -> None:
    worker = await start_worker()
    stub = embed_pb2_grpc.EmbedServiceStub(worker.channel)
    request = embed_pb2.EmbedTokensRequest(request_id="e", prompt_token_ids=[1, 2, 3], pooling=embed_pb2.POOLING_MEAN)
    answer = await stub.EmbedTokens(request, timeout=20)
    assert (list(answer.values), answer.cached_tokens, answer.queue_ms) == ([3.0, 1.0], 3, 500.0)
    request.pooling = embed_pb2.POOLING_UNSPECIFIED
    assert list((await stub.EmbedTokens(request, timeout=20)).values) == [3.0, 0.0]


async def test_a_prompt_may_fill_the_context(start_worker: StartWorker) -> None:
    worker = await start_worker()
    stub = embed_pb2_grpc.EmbedServiceStub(worker.channel)
    request = embed_pb2.EmbedTokensRequest(request_id="e", prompt_token_ids=[1] * MAX_MODEL_LEN)
    await stub.EmbedTokens(request, timeout=20)
    request.prompt_token_ids.append(1)
    with pytest.raises(grpc.aio.AioRpcError, match=f"at most {MAX_MODEL_LEN} tokens"):
        await stub.EmbedTokens(request, timeout=20)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt_token_ids", {"prompt_token_ids": []}),
        ("prompt_token_ids", {"prompt_token_ids": [VOCAB_SIZE]}),
        ("pooling", {"pooling": 9}),
        ("request_id", {"request_id": "a\nforged log line"}),
        ("cache_salt", {"cache_salt": "x" * 5000}),
        ("dimensions", {"dimensions": 3}),
    ],
)
async def test_what_is_refused(start_worker: StartWorker, field: str, changes: dict[str, object]) -> None:
    worker = await start_worker()
    stub = embed_pb2_grpc.EmbedServiceStub(worker.channel)
    request = embed_pb2.EmbedTokensRequest(**{"prompt_token_ids": [1], **changes})  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.EmbedTokens(request, timeout=20)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (failed.value.details() or "").startswith(f"{field}: ")
