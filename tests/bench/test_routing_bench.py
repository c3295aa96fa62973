"""`bench.routing`: its requests, and what it counts."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from bench.routing import figures, replay
from bench.routing_requests import BLOCK_SIZE, Request, make_chats, num_distinct_blocks, read_trace
from common.errors import ConfigError
from protos.baton.v1 import inference_pb2, inference_pb2_grpc
from tests.support.fake_worker import Context

ENTRIES = [(1024, [1, 2]), (1500, [1, 2, 3]), (90_000, [4] * 176), (1024, [5, 2])]  # input_length, hash_ids


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = (json.dumps({"input_length": num, "output_length": 400, "hash_ids": ids}) for num, ids in ENTRIES)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def taken(trace: Path, skip: int = 0, num: int = 10, *, is_shared: bool = True) -> list[Request]:
    return read_trace(
        trace, skip=skip, num=num, rate=1.0, divide=16, max_prompt_tokens=4096, max_output_tokens=8, seed=0,
        is_shared=is_shared,
    )  # fmt: skip


def test_a_trace_s_equal_beginnings_are_equal_beginnings_of_prompts(trace: Path) -> None:
    one, longer, other = taken(trace)  # and not the one that is too long
    assert [len(request.prompt) for request in (one, longer, other)] == [64, 93, 64]
    assert longer.prompt[:64] == one.prompt
    assert other.prompt[:32] != one.prompt[:32]
    assert {request.num_output_tokens for request in (one, longer, other)} == {8}
    assert 0 < one.at < longer.at < other.at
    assert num_distinct_blocks([one, longer, other]) == 4 + 1 + 4
    assert [request.prompt for request in taken(trace, skip=1, num=1)] == [longer.prompt]
    new = taken(trace, is_shared=False)
    assert new[1].prompt[:32] != new[0].prompt[:32]
    assert taken(trace, skip=9) == []


def chats(seed: int = 0, num: int = 200, rate: float = 2.0) -> list[Request]:
    return make_chats(num=num, rate=rate, seed=seed, max_prompt_tokens=2000, max_output_tokens=8)


def test_users_come_back_with_the_whole_conversation() -> None:
    requests = chats()
    assert requests == chats()
    assert requests != chats(seed=1)
    assert len(requests) == 200
    assert all(before.at <= after.at for before, after in itertools.pairwise(requests))
    assert {tuple(request.prompt[:64]) for request in requests} == {tuple(requests[0].prompt[:64])}
    goes_on = [
        any(one.prompt == later.prompt[: len(one.prompt)] and one.at < later.at for later in requests[index + 1 :])
        for index, one in enumerate(requests)
    ]
    assert 0.4 < sum(goes_on) / len(requests) < 0.9, "four turns of five are not the last, but the end is cut off"
    assert max(len(request.prompt) for request in requests) <= 2000
    num_tokens = sum(len(request.prompt) for request in requests)
    assert num_distinct_blocks(requests) * BLOCK_SIZE < 0.6 * num_tokens
    with pytest.raises(ConfigError, match="max-prompt-tokens"):
        make_chats(num=1, rate=1.0, seed=0, max_prompt_tokens=64, max_output_tokens=8)


def test_the_rate_is_that_of_requests() -> None:
    requests = chats(num=4000)
    assert 1.6 < 4000 / requests[-1].at < 2.4


class _Service(inference_pb2_grpc.InferenceServiceServicer):
    """Fails prompts of one token, and cuts off those of two."""

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        num = request.sampling_params.max_tokens
        if len(request.prompt_token_ids) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        if len(request.prompt_token_ids) == 2:
            num -= 1
        response = inference_pb2.GenerateResponse(token_ids=[1] * num)
        response.usage.prompt_tokens, response.usage.cached_tokens = len(request.prompt_token_ids), 2
        response.report.decode_worker = "d"
        yield response


async def test_a_request_that_fails_is_counted_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Service(), server)  # type: ignore[abstract] # nobody calls the others
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        outcomes = await replay(address, [Request(0.0, [1] * num, 3) for num in (1, 2, 4, 4)], seed=0)
    finally:
        await server.stop(None)
    found = figures(outcomes)
    assert (found["failed"], found["cached"], found["in place"]) == (2, 0.5, 1)
    assert figures(outcomes[:2]) == {"failed": 2}
    told = capsys.readouterr().err
    assert "failed: UNAVAILABLE: gone" in told
    assert "failed: 2 tokens, not 3" in told
