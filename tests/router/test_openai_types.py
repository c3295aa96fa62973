"""Every answer is what the official client's types say, to the letter: the client itself does not check that."""

from __future__ import annotations

from typing import Any

import httpx
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.each_case import each_case
from tests.router.conftest import RunningRouter
from tests.router.test_responses import LOGPROBS
from tests.router.test_responses import TOOL as RESPONSES_TOOL
from tests.router.tool_calls import ASK, TOOL, worker

__all__ = ["worker"]

USAGE = {"stream_options": {"include_usage": True}}
CHAT = {"messages": ASK, "max_tokens": 200}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def post(router: RunningRouter, path: str, body: dict[str, object]) -> str:
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post(path, json={"model": "tiny", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.text


def events_of(text: str) -> list[str]:
    datas = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [data for data in datas if data != "[DONE]"]


@each_case(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}, ChatCompletion),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL]}, ChatCompletion),
        ("/v1/completions", {"prompt": "a", "logprobs": 2}, Completion),
        ("/v1/responses", {"input": "a", "tools": [RESPONSES_TOOL], "tool_choice": "auto"}, Response),
        (
            "/v1/responses",
            {"input": "a", "max_output_tokens": 1, "instructions": "b", "metadata": {"a": "b"}},
            Response,
        ),
        (
            "/v1/responses",
            {"input": "a", "tools": [RESPONSES_TOOL], "tool_choice": {"type": "function", "name": "f"}},
            Response,
        ),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
            Response,
        ),
        (
            "/v1/responses",
            {"input": "a", "include": LOGPROBS, "top_logprobs": 1},
            Response,
        ),
        ("/v1/embeddings", {"input": ["a", "b"]}, CreateEmbeddingResponse),
    ],
)
async def test_whole_answers(router: RunningRouter, path: str, body: dict[str, object], kind: Any) -> None:
    kind.model_validate_json(await post(router, path, body), strict=True)


@each_case(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", {**CHAT, **USAGE, "tools": [TOOL]}, ChatCompletionChunk),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "n": 2}, ChatCompletionChunk),
        ("/v1/completions", {**USAGE, "prompt": ["a", "b"], "logprobs": 1}, Completion),
    ],
)
async def test_chunks(router: RunningRouter, path: str, body: dict[str, object], kind: Any) -> None:
    chunks = events_of(await post(router, path, {**body, "stream": True}))
    for chunk in chunks:
        if kind is Completion:  # whose reason has no null in these types, as it has in OpenAI's streams
            chunk = chunk.replace('"finish_reason":null', '"finish_reason":"stop"')
        kind.model_validate_json(chunk, strict=True)
    assert len(chunks) > 2  # tokens that wait for a busy machine come as one


@each_case(
    "body",
    [
        {"tools": [RESPONSES_TOOL]},
        {"tools": [RESPONSES_TOOL], "tool_choice": "required"},
        {"include": LOGPROBS, "top_logprobs": 1},
        {},
    ],
)
async def test_events_of_responses(router: RunningRouter, body: dict[str, object]) -> None:
    events = [
        EVENT.validate_json(data)
        for data in events_of(await post(router, "/v1/responses", {"input": "a", "stream": True, **body}))
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    open_items: dict[int, str] = {}
    for event in events:
        if event.type == "response.output_item.added":
            open_items[event.output_index] = event.item.id
        elif event.type == "response.output_item.done":
            assert open_items.pop(event.output_index) == event.item.id
        elif hasattr(event, "item_id"):
            assert open_items == {event.output_index: event.item_id}, "items come one after the other"
    assert not open_items


async def test_models(router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        Model.model_validate_json((await client.get("/v1/models/tiny")).text, strict=True)
