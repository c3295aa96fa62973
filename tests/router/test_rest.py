"""The REST gateway, through the official client and through a bare one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import httpx
import openai
import pytest

from protos.baton.v1 import inference_pb2, types_pb2
from tests.each_case import each_case
from tests.router.conftest import RunningRouter, reaches, sample
from tests.router.tiny_tokenizer import byte_ids, eos_id, ids_of, tiny_tokenizer
from tests.support.fake_worker import ANSWER, FakeWorker

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello?"}]


async def test_chat(router: RunningRouter, worker: FakeWorker) -> None:
    answer = await router.openai.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    choice = answer.choices[0]
    assert choice.message.content == ANSWER
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    prompt = ids_of("<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n")
    assert list(worker.requests[0].prompt_token_ids) == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(worker.answer) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.model_extra is not None
    baton = answer.model_extra["baton"]
    assert baton["decode_worker"] == worker.address
    assert baton["prefill_worker"] == "p:1"
    assert (baton["num_blocks_moved"], baton["num_bytes_moved"]) == (2, 64)
    assert baton["timings"]["queue_ms"] == 1.5
    assert 0 < baton["timings"]["ttft_ms"] <= baton["timings"]["total_ms"]


async def test_chat_stream(router: RunningRouter) -> None:
    stream = await router.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices].count("stop") == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids_of(ANSWER)) + 1
    assert (chunks[-1].model_extra or {})["baton"]["num_blocks_moved"] == 2


async def test_stream_without_usage_has_the_report_in_its_last_chunk(router: RunningRouter) -> None:
    async with httpx.AsyncClient() as client:
        body = {"messages": MESSAGES, "stream": True}
        answer = await client.post(f"{router.url}/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["baton"]["request_id"] == answer.headers["x-request-id"]
    assert not any("baton" in json.loads(event) for event in events[:-2])


async def test_completions_of_several_prompts(router: RunningRouter, worker: FakeWorker) -> None:
    answer = await router.openai.completions.create(model="tiny", prompt=["one", "two"], n=2, max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids_of("one")) + len(ids_of("two"))
    assert answer.usage.completion_tokens == 12
    assert len({request.request_id for request in worker.requests}) == 4
    assert len((answer.model_extra or {})["baton"]["choices"]) == 4


@each_case("prompt", [[1, 2, 3], [[1, 2, 3]]])
async def test_completions_of_token_ids(router: RunningRouter, worker: FakeWorker, prompt: list[int]) -> None:
    answer = await router.openai.completions.create(model="tiny", prompt=prompt)
    assert list(worker.requests[0].prompt_token_ids) == [1, 2, 3]
    assert worker.requests[0].sampling_params.max_tokens == 16
    assert ANSWER.startswith(answer.choices[0].text)


async def test_choices_have_seeds_of_their_own(router: RunningRouter, worker: FakeWorker) -> None:
    answer = await router.openai.chat.completions.create(model="tiny", messages=MESSAGES, n=3, seed=7)
    assert sorted(request.sampling_params.seed for request in worker.requests) == [7, 8, 9]
    assert len(answer.choices) == 3


async def test_extensions_reach_the_worker(router: RunningRouter, worker: FakeWorker) -> None:
    extensions = {
        "top_k": 5,
        "min_p": 0.25,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "cache_salt": "tenant",
        "repetition_penalty": 1.5,
        "priority": 0,
        "request_id": "mine-1",
        "retain": {"seconds": 90.5, "num_tokens": 7},
    }
    answer = await router.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body=extensions, user="u", metadata={"a": "b"}, store=False
    )
    request = worker.requests[0]
    params = request.sampling_params
    assert (params.top_k, params.min_p, params.ignore_eos, params.min_tokens) == (5, 0.25, True, 2)
    assert (list(params.stop_token_ids), params.repetition_penalty) == ([9], 1.5)
    assert (request.cache_salt, request.priority, request.request_id) == ("tenant", 0, "mine-1")
    assert (request.retain.seconds, request.retain.num_tokens) == (90.5, 7)
    assert answer.id == "chatcmpl-mine-1"


async def test_a_chat_template_writes_special_tokens_itself(router: RunningRouter, worker: FakeWorker) -> None:
    for given in ({}, {"add_special_tokens": False}, {"add_special_tokens": None}):
        await router.openai.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=given)
    assert len({tuple(request.prompt_token_ids) for request in worker.requests}) == 1


async def test_request_id_header(router: RunningRouter, worker: FakeWorker) -> None:
    raw = await router.openai.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, extra_headers={"X-Request-Id": "from-header"}
    )
    assert raw.headers["x-request-id"] == "from-header"
    assert worker.requests[0].request_id == "from-header"


async def test_stop_string_cuts_and_cancels(router: RunningRouter, worker: FakeWorker) -> None:
    answer = await router.openai.chat.completions.create(model="tiny", messages=MESSAGES, stop=["Paris", "zzz"])
    assert answer.choices[0].message.content == "The capital of France is "
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.choices[0].model_extra or {})["stop_reason"] == "Paris"


@each_case("text", ["naïve 東京 😀 end", "👩‍👩‍👧 e\u0301 한국어"])
async def test_characters_split_across_tokens(router: RunningRouter, worker: FakeWorker, text: str) -> None:
    worker.answer = byte_ids(text)
    stream = await router.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    deltas = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


async def test_chat_logprobs(router: RunningRouter, worker: FakeWorker) -> None:
    answer = await router.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=4
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == answer.choices[0].message.content
    assert all(len(token.top_logprobs) == 2 and token.logprob == -0.5 for token in logprobs.content)
    assert bytes(logprobs.content[0].bytes or []).decode() == logprobs.content[0].token


async def test_completion_logprobs(router: RunningRouter) -> None:
    answer = await router.openai.completions.create(model="tiny", prompt="x", logprobs=1, max_tokens=4)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[2] == len("".join(logprobs.tokens[:2]))


async def test_models_and_tokenize(router: RunningRouter) -> None:
    models = await router.openai.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert (await router.openai.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await router.openai.models.retrieve("other")
    async with httpx.AsyncClient(base_url=router.url) as client:
        tokens = (await client.post("/tokenize", json={"text": "Hello, 東京"})).json()
        assert tokens["count"] == len(tokens["token_ids"])
        text = (await client.post("/detokenize", json={"token_ids": [*tokens["token_ids"], eos_id()]})).json()
        assert text == {"text": "Hello, 東京"}
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert "baton_router_endpoints" in (await client.get("/metrics")).text


async def test_texts_and_tokens_by_vllms_names(router: RunningRouter) -> None:
    """As harnesses ask for them that have no tokenizer of their own."""
    async with httpx.AsyncClient(base_url=router.url) as client:
        info = (await client.get("/tokenizer_info")).json()
        assert info["eos_token"] == "<|im_end|>"
        assert (info["bos_token"], info["pad_token"]) == ("<|im_start|>", None)
        assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert "<|im_start|>" in info["chat_template"]
        asked = {"prompt": "Hello, 東京", "add_special_tokens": False}
        tokens = (await client.post("/tokenize", json=asked)).json()
        assert tokens["tokens"] == tokens["token_ids"] == ids_of("Hello, 東京")
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        assert text["prompt"] == text["text"] == "Hello, 東京"
        for path, body, param in (
            ("/tokenize", {}, "text"),
            ("/tokenize", {"text": "a", "prompt": "a"}, "prompt"),
            ("/detokenize", {}, "token_ids"),
            ("/detokenize", {"tokens": [1], "token_ids": [1]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
        ):
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body


async def test_what_changes_nothing_is_taken(router: RunningRouter, worker: FakeWorker) -> None:
    """Notes for OpenAI's records, hints for its caches, and what asks for what is done anyway."""
    body = {
        "messages": [{**part(type="text", text="Hi", cache_control={"type": "ephemeral"}), "type": "text"}],
        "metadata": {"a": "b"},
        "safety_identifier": "u",
        "service_tier": "auto",
        "store": False,
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "prompt_cache_retention": "24h",
        "response_format": {"type": "text"},
    }
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert list(worker.requests[0].prompt_token_ids) == ids_of(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


VLLM_DEFAULTS: dict[str, object] = {
    "n": 1,
    "best_of": None,
    "seed": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "return_tokens_as_token_ids": None,
    "truncation_side": "left",
    "logits_processors": None,
    "guided_decoding_backend": "auto",
    "detokenize": True,
    "structured_outputs": {"json": None, "disable_fallback": False, "disable_any_whitespace": False},
    "guided_whitespace_pattern": None,
    "kv_transfer_params": None,
    "vllm_xargs": None,
    "priority": 0,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "stop": [],
    "stop_token_ids": [],
    "top_k": 0,
    "min_tokens": 0,
}
DEFAULTS = [
    (
        "/v1/chat/completions",
        {
            **{name: value for name, value in VLLM_DEFAULTS.items() if name != "best_of"},
            "messages": [{"role": "user", "content": "Hi"}],
            "verbosity": "medium",
            "logprobs": False,
            "top_logprobs": 0,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "echo": False,
            "include_reasoning": True,
            "chat_template": None,
            "documents": None,
            "mm_processor_kwargs": None,
            "function_call": "none",
            "functions": [],
            "audio": None,
            "prediction": None,
        },
    ),
    ("/v1/completions", {**VLLM_DEFAULTS, "prompt": "Hi", "suffix": None, "echo": False, "prompt_embeds": None}),
    (
        "/v1/responses",
        {
            "input": "Hi",
            "truncation": "auto",
            "text": {"verbosity": "medium", "format": {"type": "text"}},
            "top_logprobs": 0,
            "background": False,
            "previous_response_id": None,
        },
    ),
]


@each_case(("path", "body"), DEFAULTS)
async def test_defaults_that_are_written_out(router: RunningRouter, path: str, body: dict[str, object]) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text


async def test_no_probability_at_all_is_greedy(router: RunningRouter, worker: FakeWorker) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        for path, body in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "Hi"})):
            assert (await client.post(f"/v1/{path}", json={**body, "top_p": 0})).status_code == 200
        assert (await client.post("/v1/responses", json={"input": "Hi", "top_p": 0})).status_code == 200
    sampling = inference_pb2.GenerateRequest(prompt="Hi", sampling_params=types_pb2.SamplingParams(top_p=0))
    async for _ in router.inference.Generate(sampling):
        pass
    asked = [request.sampling_params for request in worker.requests]
    assert [(params.temperature, params.top_p or 1) for params in asked] == [(0, 1)] * 4


async def test_many_choices(router: RunningRouter) -> None:
    answer = await router.openai.chat.completions.create(model="tiny", messages=MESSAGES, n=128, max_tokens=1)
    assert sorted(choice.index for choice in answer.choices) == list(range(128))


@each_case(
    ("options", "in_chunks", "at_the_end"),
    [
        ({"continuous_usage_stats": True}, True, True),
        ({"continuous_usage_stats": True, "include_usage": True}, True, True),
        ({"continuous_usage_stats": True, "include_usage": False}, False, False),
        ({"include_usage": True}, False, True),
        ({}, False, False),
    ],
)
async def test_when_usage_is_told(
    router: RunningRouter, options: dict[str, bool], in_chunks: bool, at_the_end: bool
) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        for path, body in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "Hi"})):
            asked = {**body, "stream": True, "stream_options": options}
            text = (await client.post(f"/v1/{path}", json=asked)).text
            chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            assert all(bool(chunk.get("usage")) is in_chunks for chunk in chunks if chunk["choices"])
            assert any(not chunk["choices"] and chunk["usage"] for chunk in chunks) is at_the_end


async def test_refusals_in_a_history(router: RunningRouter, worker: FakeWorker) -> None:
    """They are what the model said."""
    for said in (
        {"content": None, "refusal": "No."},
        {"content": "", "refusal": "No."},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": [{"type": "refusal", "refusal": "No."}], "refusal": None},
    ):
        messages: Any = [*MESSAGES, {"role": "assistant", **said}, *MESSAGES]
        await router.openai.chat.completions.create(model="tiny", messages=messages)
    history: Any = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "type": "message", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "Hi"},
    ]
    await router.openai.responses.create(model="tiny", input=history)
    for request in worker.requests:
        assert "assistant\nNo.<|im_end|>" in tiny_tokenizer().decode(
            list(request.prompt_token_ids), skip_special_tokens=False
        )


async def test_content_parts_and_developer_role(router: RunningRouter, worker: FakeWorker) -> None:
    await router.openai.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
    )
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    assert list(worker.requests[0].prompt_token_ids) == ids_of(prompt)


def part(**fields: object) -> dict[str, object]:
    """A message of one part."""
    return {"role": "user", "content": [fields]}


BAD_CHAT = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"n": 129}, "n"),
    ({"n": 9, "use_beam_search": True}, "n"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"nonsense": 1}, "nonsense"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"logit_bias": {"5": 1, "abc": 1}}, "logit_bias.abc"),
    ({"logit_bias": {"5": "much"}}, "logit_bias.5"),
    ({"logit_bias": {"5": None}}, "logit_bias.5"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"logit_bias": {" 1": 1}}, "logit_bias. 1"),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias.01"),
    ({"logit_bias": {f"x{number}": 1 for number in range(1025)}}, "logit_bias.x0"),
    ({"logit_bias": {"5": 1, "": 1}}, 'logit_bias.""'),
    ({"logit_bias": {"5": 1, "9" * 5000: 1}}, f"logit_bias.{'9' * 100}"),
    ({"logit_bias": {"5": 1, "6": 10**400}}, "logit_bias.6"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 50_000}]}, "messages"),
    ({"messages": [1, 1]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"request_id": "a b"}, "request_id"),
    ({"cache_salt": "s" * 300}, "cache_salt"),
    ({"priority": -101}, "priority"),
    ({"retain": 60}, "retain"),
    ({"retain": {}}, "retain.seconds"),
    ({"retain": {"seconds": 0}}, "retain.seconds"),
    ({"retain": {"seconds": 3601}}, "retain.seconds"),
    ({"retain": {"seconds": 1, "num_tokens": -1}}, "retain.num_tokens"),
    ({"priority": 2**31}, "priority"),
    ({"seed": 2**63}, "seed"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"safety_identifier": 5}, "safety_identifier"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),  # of which its template knows nothing
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"verbosity": "low"}, "verbosity"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"detokenize": False}, "detokenize"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"include_reasoning": False}, "include_reasoning"),
    ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, "truncation_side"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages[0].refusal"),
    ({"messages": [part(type="refusal", refusal="no")]}, "messages[0].refusal"),
    ({"messages": [{**part(type="refusal"), "role": "assistant"}]}, "messages[0].content[0].refusal"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
    ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"messages": [{"role": "user", "content": "x", "type": "image"}]}, "messages[0].type"),
    ({"messages": [part(type="text", text="x", image_url={"url": "x"})]}, "messages[0].content[0].image_url"),
    ({"messages": [part(type="image_url", image_url={"url": "x"})]}, "messages[0].content[0].type"),
    ({"messages": [part(type="text", text="x", colour=1)]}, "messages[0].content[0].colour"),
]


@each_case(("body", "param"), BAD_CHAT)
async def test_bad_chat_requests(router: RunningRouter, body: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await router.openai.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=body)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    answer = await router.openai.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER


@each_case(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, 100_000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", 1.5]}, "prompt[1]"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 21}, "best_of"),
        ({"prompt": "x", "best_of": 2, "n": 3}, "best_of"),
        ({"prompt": "x", "best_of": 0}, "best_of"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["x"] * 7, "best_of": 20}, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0, "min_tokens": 1, "echo": True}, "min_tokens"),
        ({"prompt": "x", "echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "echo": True, "logprobs": 2, "prompt_logprobs": 3}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"prompt": "x", "top_k": -2}, "top_k"),
        ({}, "prompt"),
    ],
)
async def test_bad_completions(router: RunningRouter, body: dict[str, object], param: str) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@each_case(
    ("data", "param"),
    [
        (b'{"prompt": "a', None),
        (b"[]", None),
        (b'{"prompt": "caf\xe9"}', "prompt"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b"\xff\xfe", None),
        (b"[" * 10_000, None),
    ],
)
async def test_bad_bytes(router: RunningRouter, data: bytes, param: str | None) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/completions", content=data)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


UNREADABLE = [b'"\xff"', b'{"a": "\xff"}', b'{"\xff": 1}', b"1e999", b'{"a": 1e999}', b"9" * 5000, b'"\\ud800"']
READ_LATE = [
    ("chat/completions", b'"web_search_options": ', b"", "web_search_options"),
    ("chat/completions", b'"guided_json": ', b"", "guided_json"),
    ("completions", b'"guided": {"json_schema": ', b"}", "guided.json_schema"),
    ("completions", b'"structured_outputs": {"structural_tag": ', b"}", "structured_outputs.structural_tag"),
    ("completions", b'"response_format": {"type": "text", "format": ', b"}", "response_format.format"),
    (
        "completions",
        b'"response_format": {"type": "json_schema", "json_schema": {"schema": ',
        b"}}",
        "response_format.json_schema.schema",
    ),
    ("responses", b'"text": {"format": {"type": "json_schema", "schema": ', b"}}", "text.format.schema"),
    ("responses", b'"prompt_cache_key": ', b"", "prompt_cache_key"),
]


@each_case(("path", "begin", "end", "param", "value"), [(*place, value) for place in READ_LATE for value in UNREADABLE])
async def test_what_is_decoded_late_is_refused_too(
    router: RunningRouter, path: str, begin: bytes, end: bytes, param: str, value: bytes
) -> None:
    asked = {"completions": b'"prompt"', "responses": b'"input"'}.get(path)
    first = b'"messages": [{"role": "user", "content": "x"}]' if asked is None else asked + b': "x"'
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post(f"/v1/{path}", content=b"{%s, %s%s%s}" % (first, begin, value, end))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in (param, param.partition(".")[0])  # the latter, if it is no text at all


async def test_what_is_sent_back_as_it_came_is_text(router: RunningRouter) -> None:
    shape = b'{"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "object"}, "name": %s}}}'
    async with httpx.AsyncClient(base_url=router.url) as client:
        for value, param in ((b'"\xff"', "text"), (b"1", "text.format.name")):
            answer = await client.post("/v1/responses", content=shape % value)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param
        answer = await client.post("/v1/responses", content=shape % '"é"'.encode())
    assert answer.json()["text"]["format"]["name"] == "é"


async def test_errors_outside_of_requests_have_the_same_shape(router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        for answer, status in (
            (await client.get("/v1/nothing"), 404),
            (await client.get("/v1/chat/completions"), 405),
        ):
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_body_that_is_too_large_is_refused_by_its_head(router: RunningRouter) -> None:
    """None of it is sent here: a client that goes on sending may find the connection closed before it reads."""
    host, _, port = router.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (2**26 + 1))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    assert head.startswith(b"HTTP/1.1 413 ")
    (length,) = (int(line[15:]) for line in head.splitlines() if line.lower().startswith(b"content-length:"))
    body = await asyncio.wait_for(reader.readexactly(length), 60)
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    writer.close()


async def test_unknown_model(router: RunningRouter) -> None:
    client = router.openai
    for asking in (
        client.chat.completions.create(model="other", messages=MESSAGES),
        client.chat.completions.create(model="other", messages=MESSAGES, stream=True),
        client.completions.create(model="other", prompt="a"),
        client.responses.create(model="other", input="a"),
        client.embeddings.create(model="other", input="a"),
        client.models.retrieve("other"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await asking
        error = caught.value
        assert (error.type, error.param, error.code) == ("invalid_request_error", "model", "model_not_found")


async def test_full_worker_is_a_rate_limit(router: RunningRouter, worker: FakeWorker) -> None:
    worker.refuse = (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
    with pytest.raises(openai.RateLimitError) as caught:
        await router.openai.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(router: RunningRouter, worker: FakeWorker, stream: bool) -> None:
    worker.hang_after = 2
    body = {"messages": MESSAGES, "stream": stream}
    async with httpx.AsyncClient(base_url=router.url) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await worker.asked.wait()
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(worker.cancelled.wait(), 60)


async def test_an_error_after_the_first_token_is_an_event(router: RunningRouter, worker: FakeWorker) -> None:
    worker.hang_after = 3
    received: list[str] = []
    failed = {"interface": "rest", "outcome": "unavailable"}
    before = sample("baton_router_requests_total", **failed)

    async def read() -> None:
        stream = await router.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        async for chunk in stream:
            received.append(chunk.choices[0].delta.content or "")
            if received[-1]:
                await worker.stop()

    with pytest.raises(openai.APIError, match="no decode worker"):
        await read()
    assert "".join(received)
    assert ANSWER.startswith("".join(received))
    await reaches("baton_router_requests_total", before + 1, **failed)


@each_case("stream", [False, True])
async def test_how_requests_end_is_counted(router: RunningRouter, stream: bool) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        for body, outcome in (({}, "ok"), ({"top_p": 2}, "invalid_argument"), ({"model": "x"}, "not_found")):
            before = sample("baton_router_requests_total", interface="rest", outcome=outcome)
            await client.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": stream, **body})
            assert sample("baton_router_requests_total", interface="rest", outcome=outcome) == before + 1


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure(
    router: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    host, _, port = router.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)  # its handler waits for the rest
    writer.close()
    await writer.wait_closed()
    async with httpx.AsyncClient() as client:
        for _ in range(20):
            assert (await client.get(f"{router.url}/health")).status_code == 200
    assert "Traceback" not in caplog.text
    assert "a handler failed" not in caplog.text
