"""Parameters and fields of answers that vLLM's clients know: the stop string kept, token ids, prompts that are cut."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx
import pytest

from protos.baton.v1 import inference_pb2, types_pb2
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.router.tiny_tokenizer import byte_ids, eos_id, ids_of, tiny_tokenizer, vocab_size
from tests.support.fake_worker import ANSWER, MAX_MODEL_LEN, FakeWorker

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello?"}]}
CHAT_IDS = ids_of("<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n")
PROMPT = "The quick brown fox jumps over the lazy dog."
Params = types_pb2.SamplingParams


async def post(router: RunningRouter, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=router.url) as client:
        return await client.post(f"/v1/{path}", json=body)


async def whole(router: RunningRouter, path: str, **body: Any) -> dict[str, Any]:
    answer = await post(router, path, body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def chunks(router: RunningRouter, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = await post(router, path, {**body, "stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]", answer.text
    return [json.loads(event) for event in events[:-1]]


async def refused(router: RunningRouter, path: str, **body: Any) -> dict[str, Any]:
    answer = await post(router, path, body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def generate(router: RunningRouter, prompt: str, **params: Any) -> list[inference_pb2.GenerateResponse]:
    asked = inference_pb2.GenerateRequest(prompt=prompt, sampling_params=Params(**params))
    return [response async for response in router.inference.Generate(asked)]


# ----------------------------------------------------------------------------------------- the stop string is kept


async def test_the_stop_string_ends_the_answer_or_comes_before_its_end(
    router: RunningRouter, worker: FakeWorker
) -> None:
    stop = ANSWER[5:9]  # within several tokens
    for is_kept in (True, False):
        wanted = ANSWER[: ANSWER.index(stop) + (len(stop) if is_kept else 0)]
        asked: dict[str, Any] = {"stop": [stop, "never"], "include_stop_str_in_output": is_kept}
        (choice,) = (await whole(router, "chat/completions", **CHAT, **asked))["choices"]
        assert (choice["message"]["content"], choice["stop_reason"]) == (wanted, stop)
        (choice,) = (await whole(router, "completions", prompt="x", max_tokens=50, **asked))["choices"]
        assert (choice["text"], choice["finish_reason"]) == (wanted, "stop")
        streamed = await chunks(router, "completions", prompt="x", max_tokens=50, **asked)
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == wanted
        responses = await generate(router, "x", stop=[stop], include_stop_str_in_output=is_kept)
        assert "".join(response.text for response in responses) == wanted
        assert responses[-1].stop_reason == stop


async def test_it_is_kept_at_the_very_end_too(router: RunningRouter, worker: FakeWorker) -> None:
    """Characters that are made of several tokens complete it as the answer ends."""
    worker.answer = byte_ids("ab😀")
    asked: dict[str, Any] = {"stop": "b😀", "include_stop_str_in_output": True}
    (choice,) = (await whole(router, "completions", prompt="x", max_tokens=len(worker.answer), **asked))["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("ab😀", "b😀")
    worker.answer = ids_of("a b b")
    asked["stop"], asked["min_tokens"] = " b", 2
    (choice,) = (await whole(router, "completions", prompt="x", **asked))["choices"]
    assert choice["text"] == "a b b"  # below min_tokens nothing ends it


# ------------------------------------------------------------------------------------------------------- token ids


async def test_token_ids_of_a_chat(router: RunningRouter, worker: FakeWorker) -> None:
    answer = await whole(router, "chat/completions", **CHAT, n=2, return_token_ids=True)
    assert answer["prompt_token_ids"] == CHAT_IDS
    for choice in answer["choices"]:
        assert choice["token_ids"] == [*worker.answer, eos_id()]
        assert "prompt_token_ids" not in choice
    plain = await whole(router, "chat/completions", **CHAT, return_token_ids=False)
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


async def test_token_ids_of_completions(router: RunningRouter, worker: FakeWorker) -> None:
    prompts = ["one", "two of them"]
    answer = await whole(router, "completions", prompt=prompts, n=2, max_tokens=3, return_token_ids=True)
    for index, choice in enumerate(answer["choices"]):
        assert choice["prompt_token_ids"] == (ids_of("one") if index < 2 else ids_of("two of them"))
        assert choice["token_ids"] == worker.answer[:3]
    assert "prompt_token_ids" not in answer
    echoed = await whole(router, "completions", prompt="one", echo=True, max_tokens=0, return_token_ids=True)
    assert (echoed["choices"][0]["prompt_token_ids"], echoed["choices"][0]["token_ids"]) == (ids_of("one"), [])


async def test_token_ids_of_streams(router: RunningRouter, worker: FakeWorker) -> None:
    """The prompt's come once, in the first chunk; those of half a character come although it has no text yet."""
    worker.answer = byte_ids("a😀b")
    streamed = await chunks(router, "chat/completions", **CHAT, n=2, return_token_ids=True)
    assert streamed[0]["prompt_token_ids"] == CHAT_IDS
    assert not any("prompt_token_ids" in chunk for chunk in streamed[1:])
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in streamed if chunk["choices"][0]["index"] == index]
        given = [choice.get("token_ids", []) for choice in own]
        assert [each for ids in given for each in ids] == [*worker.answer, eos_id()]
        assert any(ids and not choice["delta"].get("content") for ids, choice in zip(given, own, strict=True))
    streamed = await chunks(router, "completions", prompt=["one", "two"], max_tokens=50, return_token_ids=True)
    for index, prompt in enumerate(("one", "two")):
        own = [chunk["choices"][0] for chunk in streamed if chunk["choices"][0]["index"] == index]
        assert [choice.get("prompt_token_ids") for choice in own] == [ids_of(prompt)] + [None] * (len(own) - 1)
        assert [each for choice in own for each in choice["token_ids"]] == [*worker.answer, eos_id()]


async def test_logprobs_with_ids_in_place_of_texts(router: RunningRouter, worker: FakeWorker) -> None:
    worker.answer = byte_ids("a😀b")
    asked: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 50}
    named = [f"token_id:{one}" for one in [*worker.answer, eos_id()]]
    plain = (await whole(router, "completions", prompt="x", max_tokens=50, logprobs=2))["choices"][0]["logprobs"]
    (choice,) = (await whole(router, "completions", prompt="x", **asked, logprobs=2))["choices"]
    assert choice["logprobs"]["tokens"] == named[: len(plain["tokens"])]
    for field in ("token_logprobs", "text_offset"):
        assert choice["logprobs"][field] == plain[field]
    for name, tops in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        assert name in tops
        assert all(one.startswith("token_id:") for one in tops)
    logprobs = {"logprobs": True, "top_logprobs": 2}
    plain = (await whole(router, "chat/completions", **CHAT, **logprobs))["choices"][0]["logprobs"]["content"]
    (choice,) = (await whole(router, "chat/completions", **CHAT, **asked, **logprobs))["choices"]
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == named[: len(content)]
    assert [one["bytes"] for one in content] == [one["bytes"] for one in plain]
    assert all(top["token"].startswith("token_id:") for one in content for top in one["top_logprobs"])
    streamed = await chunks(router, "chat/completions", **CHAT, **asked, **logprobs)
    given = [one["choices"][0]["logprobs"] for one in streamed if one["choices"][0].get("logprobs")]
    assert [each["token"] for one in given for each in one["content"]] == [one["token"] for one in content]


async def test_token_ids_end_with_the_stop_string(router: RunningRouter, worker: FakeWorker) -> None:
    stop = tiny_tokenizer().decode(worker.answer[2:4])
    (choice,) = (await whole(router, "chat/completions", **CHAT, stop=stop, return_token_ids=True))["choices"]
    assert choice["token_ids"] == worker.answer[:4]
    streamed = await chunks(router, "completions", prompt="x", max_tokens=50, stop=stop, return_token_ids=True)
    assert [each for chunk in streamed for each in chunk["choices"][0]["token_ids"]] == worker.answer[:4]


# ------------------------------------------------------------------------------------------- prompts that are cut


async def test_the_last_tokens_of_a_prompt_are_kept(router: RunningRouter, worker: FakeWorker) -> None:
    ids = ids_of(PROMPT)
    for prompt in (PROMPT, ids):
        answer = await whole(router, "completions", prompt=prompt, truncate_prompt_tokens=5)
        assert answer["usage"]["prompt_tokens"] == 5
    await whole(router, "chat/completions", **CHAT, truncate_prompt_tokens=7)
    await whole(router, "responses", input="Hello?", truncate_prompt_tokens=7)
    await generate(router, PROMPT, truncate_prompt_tokens=5)
    chat = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role="user", content="Hello?")],
        sampling_params=Params(truncate_prompt_tokens=7),
    )
    assert [response async for response in router.inference.Chat(chat)]
    sent = [list(request.prompt_token_ids) for request in worker.requests]
    assert sent == [ids[-5:], ids[-5:], CHAT_IDS[-7:], CHAT_IDS[-7:], ids[-5:], CHAT_IDS[-7:]]
    worker.requests.clear()
    await whole(router, "completions", prompt=PROMPT, truncate_prompt_tokens=MAX_MODEL_LEN)  # longer than the prompt
    assert list(worker.requests[0].prompt_token_ids) == ids


async def test_a_prompt_that_is_too_long_is_cut_to_what_leaves_room(router: RunningRouter, worker: FakeWorker) -> None:
    ids = [number % 250 for number in range(2 * MAX_MODEL_LEN)]
    assert (await refused(router, "completions", prompt=ids))["param"] == "prompt"
    await whole(router, "completions", prompt=ids, truncate_prompt_tokens=-1)
    await whole(router, "completions", prompt=ids, truncate_prompt_tokens=-1, max_tokens=40)
    long = {"messages": [{"role": "user", "content": "a " * MAX_MODEL_LEN}]}
    assert (await refused(router, "chat/completions", **long))["param"] == "messages"
    await whole(router, "chat/completions", **long, truncate_prompt_tokens=-1, max_completion_tokens=9)
    sent = [list(request.prompt_token_ids) for request in worker.requests]
    assert sent[:2] == [ids[-MAX_MODEL_LEN + 16 :], ids[-MAX_MODEL_LEN + 40 :]]
    assert len(sent[2]) == MAX_MODEL_LEN - 9
    assert sent[2][-5:] == CHAT_IDS[-5:]


async def test_echo_has_what_was_kept(router: RunningRouter, worker: FakeWorker) -> None:
    answer = await whole(router, "completions", prompt=PROMPT, truncate_prompt_tokens=4, echo=True, max_tokens=1)
    kept = tiny_tokenizer().decode(ids_of(PROMPT)[-4:])
    assert answer["choices"][0]["text"] == kept + tiny_tokenizer().decode(worker.answer[:1])
    answer = await whole(router, "completions", prompt=PROMPT, truncate_prompt_tokens=200, echo=True, max_tokens=1)
    assert answer["choices"][0]["text"].startswith(PROMPT)


@pytest.mark.parametrize("value", [0, -2, MAX_MODEL_LEN + 1])
async def test_a_wrong_number_is_named(router: RunningRouter, worker: FakeWorker, value: int) -> None:
    for path, body in (("completions", {"prompt": PROMPT}), ("chat/completions", CHAT)):
        error = await refused(router, path, **body, truncate_prompt_tokens=value)
        assert error["param"] == "truncate_prompt_tokens"
        assert f"not {value}" in error["message"]
    with pytest.raises(grpc.aio.AioRpcError, match=r"sampling_params\.truncate_prompt_tokens"):
        await generate(router, PROMPT, truncate_prompt_tokens=value)
    assert not worker.requests


# ------------------------------------------------------------------------------- what is refused in clear words


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": "x", "logprobs": -1}, "logprobs"),
        ("completions", {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ],
)
async def test_all_of_the_vocabulary_is_too_much(
    router: RunningRouter, path: str, body: dict[str, Any], field: str
) -> None:
    error = await refused(router, path, **body)
    assert (error["param"], "must be at most 20: -1 asks for" in error["message"]) == (field, True)
    if field != "top_logprobs":
        with pytest.raises(grpc.aio.AioRpcError, match=rf"sampling_params\.{field}: must be at most 20"):
            await generate(router, "x", **{field: -1})


async def test_ids_that_pad_the_vocabulary_are_named(start_worker: StartWorker, start_router: StartRouter) -> None:
    worker = await start_worker()
    worker.false_info = {"vocab_size": vocab_size() + 8}
    router, padding = await start_router(worker), vocab_size() + 3
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", CHAT)):
        error = await refused(router, path, **body, logit_bias={"5": 1, str(padding): 100})
        assert error["param"] == f"logit_bias.{padding}"
        error = await refused(router, path, **body, allowed_token_ids=[5, padding])
        assert error["param"] == "allowed_token_ids[1]"
        await whole(router, path, **body, logit_bias={"5": 1}, stop_token_ids=[padding])
    with pytest.raises(grpc.aio.AioRpcError, match=rf"sampling_params\.logit_bias\.{padding}"):
        await generate(router, "x", logit_bias={padding: 1.0})
    assert len(worker.requests) == 2


# ------------------------------------------------------------------------------------------- metrics of one request

OF_VLLM = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
REPORT = types_pb2.RequestReport(
    timings=types_pb2.Timings(queue_ms=0.01, prefill_ms=3.0), num_drafted_tokens=8, num_accepted_tokens=6
)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_metrics_are_in_the_answer_if_asked_for(router: RunningRouter, worker: FakeWorker, path: str) -> None:
    asked = {"chat/completions": CHAT, "completions": {"prompt": "x", "max_tokens": 50}, "responses": {"input": "x"}}[
        path
    ]
    worker.first_report = REPORT
    assert "metrics" not in await whole(router, path, **asked)
    answer = await whole(router, path, **asked, include_metrics=True)
    found, timings = answer["metrics"], answer["baton"]["timings"]
    assert set(found) > OF_VLLM
    assert (found["ttft_ms"], found["total_ms"]) == (timings["ttft_ms"], timings["total_ms"])
    queue_ms = timings["router_queue_ms"] + timings["queue_ms"]
    assert found["queue_time_ms"] == pytest.approx(queue_ms, abs=0.01)
    assert found["time_to_first_token_ms"] == pytest.approx(max(found["ttft_ms"] - queue_ms, 0), abs=0.01)
    assert found["generation_time_ms"] == pytest.approx(found["total_ms"] - found["ttft_ms"], abs=0.01)
    num_tokens = len(worker.answer) + 1
    assert found["mean_itl_ms"] == pytest.approx(found["generation_time_ms"] / (num_tokens - 1), abs=0.01)
    assert found["tokens_per_second"] == pytest.approx(1000 * num_tokens / (found["total_ms"] - queue_ms), rel=0.02)
    assert found["decode_worker"] == worker.address


async def test_metrics_are_in_the_last_chunk(router: RunningRouter, worker: FakeWorker) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        streamed = await chunks(router, "chat/completions", **CHAT, include_metrics=True, **options)
        assert ["metrics" in chunk for chunk in streamed] == [*[False] * (len(streamed) - 1), True]
        assert set(streamed[-1]["metrics"]) > OF_VLLM
    several = await whole(router, "chat/completions", **CHAT, n=2, include_metrics=True)
    assert several["metrics"] is None
    one = await whole(router, "completions", prompt="x", max_tokens=1, include_metrics=True)
    assert one["metrics"]["mean_itl_ms"] is None


async def test_a_router_may_tell_metrics_in_every_answer(worker: FakeWorker, start_router: StartRouter) -> None:
    router = await start_router(worker, per_request_metrics=True)
    assert set((await whole(router, "chat/completions", **CHAT))["metrics"]) > OF_VLLM
    assert "metrics" not in await whole(router, "chat/completions", **CHAT, include_metrics=False)
