"""The OpenAPI page: it is valid, and real answers are as it says."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

from common.version import VERSION
from tests.each_case import each_case
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.tool_calls import ASK, TOOL, worker
from tests.support.fake_worker import FakeWorker

__all__ = ["worker"]

PROMPT = {"prompt": "Hi", "max_tokens": 3}
CHAT = {"messages": ASK, "tools": [TOOL], "max_tokens": 200}
MESSAGES = {"messages": ASK, "tools": [{"name": "f", "input_schema": {"type": "object"}}], "max_tokens": 200}


async def page_of(router: RunningRouter) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=router.url) as client:
        page: dict[str, Any] = (await client.get("/openapi.json")).json()
    return page


@pytest.mark.slow
async def test_a_validator_takes_the_page(router: RunningRouter) -> None:
    page = await page_of(router)
    schema = schema_of(page)
    schema.validate()
    operations = {(result.ok().method, result.ok().path) for result in schema.get_all_operations()}
    assert operations == {(method, path) for path, item in page["paths"].items() for method in item}
    with pytest.raises(Exception, match=r"is not valid under|required"):
        schema_of({**page, "paths": {"/x": {"get": {"parameters": [{}]}}}}).validate()


def schema_of(page: dict[str, Any]) -> Any:
    import schemathesis  # takes a while

    return schemathesis.openapi.from_dict(page)


async def test_operations_and_schemas_are_as_they_should_be(router: RunningRouter) -> None:
    page = await page_of(router)
    assert page["info"]["version"] == VERSION
    for path, item in page["paths"].items():
        for operation in item.values():
            declared = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"]
            assert declared == re.findall(r"\{(\w+)\}", path)
            assert set(operation["responses"]) >= {"200", "default"}
            error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
            assert operation["responses"]["default"]["content"]["application/json"]["schema"] == {
                "$ref": f"#/components/schemas/{error}"
            }
    for component in page["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(component)


async def checked(router: RunningRouter, method: str, path: str, **asked: Any) -> httpx.Response:
    """The answer, whose kind and JSON are as the page says."""
    page = await page_of(router)
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.request(method, path, timeout=60, **asked)
    path = path.partition("?")[0]
    known = path if path in page["paths"] else described(path)
    responses = page["paths"][known][method.lower()]["responses"]
    content = responses.get(str(answer.status_code), responses["default"])["content"]
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in content, answer.headers
    if kind == "application/json":
        valid(page, content[kind]["schema"], answer.json())
    return answer


def described(path: str) -> str:
    """The page's name of a path that ends with a parameter."""
    head, _, _ = path.rpartition("/")
    return "/requests/{request_id}" if head == "/requests" else "/v1/models/{model}"


def valid(page: dict[str, Any], schema: dict[str, Any], value: object) -> None:
    """`value` has what the page says, and nothing that the page leaves out."""
    jsonschema.Draft202012Validator(closed({**schema, "components": page["components"]})).validate(value)


def closed(schema: Any) -> Any:
    """`schema` without room for fields that it does not name, unless it says itself that there are more."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(value) for name, value in schema.items()}
    return (
        {"additionalProperties": False, **inner} if schema.get("type") == "object" and "properties" in inner else inner
    )


async def test_an_answer_with_a_field_that_the_page_leaves_out_is_found(router: RunningRouter) -> None:
    page, answer = await page_of(router), {"version": "1"}
    valid(page, {"$ref": "#/components/schemas/Version"}, answer)
    with pytest.raises(jsonschema.ValidationError, match="extra"):
        valid(page, {"$ref": "#/components/schemas/Version"}, {**answer, "extra": 1})


async def test_which_operations_need_a_key(worker: FakeWorker, start_router: StartRouter, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k" * 32)
    router = await start_router(worker, api_keys_file=str(tmp_path / "keys"))
    headers = {"Authorization": "Bearer " + "k" * 32}
    async with httpx.AsyncClient(base_url=router.url) as client:
        page = (await client.get("/openapi.json", headers=headers)).json()
        name, other = page["components"]["securitySchemes"]
        assert {"type": "http", "scheme": "bearer"}.items() <= page["components"]["securitySchemes"][name].items()
        in_header = {"type": "apiKey", "in": "header", "name": "X-Api-Key"}
        assert in_header.items() <= page["components"]["securitySchemes"][other].items()
        for path, item in page["paths"].items():
            for method, operation in item.items():
                needs_key = (await client.request(method, path)).status_code == 401
                for one in (name, other):
                    assert ({one: []} in operation.get("security", page["security"])) is needs_key, path


CASES: list[tuple[str, str, dict[str, object] | None, int]] = [
    ("POST", "/v1/chat/completions", CHAT, 200),
    ("POST", "/v1/chat/completions", {**CHAT, "logprobs": True, "n": 2}, 200),
    ("POST", "/v1/chat/completions", {**CHAT, "prompt_logprobs": 1, "stop": ["Y"]}, 200),
    ("POST", "/v1/chat/completions", {"messages": []}, 400),
    ("POST", "/v1/completions", {**PROMPT, "logprobs": 1, "request_id": "mine"}, 200),
    ("POST", "/v1/completions", {**PROMPT, "prompt_logprobs": 1, "n": 2}, 200),
    ("POST", "/v1/completions", {**PROMPT, "model": "other"}, 404),
    ("POST", "/v1/responses", {"input": "Hi", "max_output_tokens": 3}, 200),
    ("POST", "/v1/messages", MESSAGES, 200),
    ("POST", "/v1/messages", {**MESSAGES, "include_metrics": True, "stop_sequences": ["Y"]}, 200),
    ("POST", "/v1/messages", {"messages": []}, 400),
    ("POST", "/v1/messages/count_tokens", {"messages": ASK}, 200),
    ("POST", "/v1/messages/count_tokens", {"messages": []}, 400),
    ("POST", "/v1/embeddings", {"input": ["Hi", "Ho"]}, 200),
    ("POST", "/v1/embeddings", {"input": "Hi", "encoding_format": "base64"}, 200),
    ("POST", "/v1/cache/retain", {"prompt": "Hi", "seconds": 1}, 200),
    ("POST", "/v1/cache/evict", {"prompt": "Hi"}, 200),
    ("POST", "/v1/cache/prefetch", {"prompt": "Hi"}, 200),
    ("GET", "/v1/models", None, 200),
    ("GET", "/v1/models/tiny", None, 200),
    ("GET", "/v1/models/other/one", None, 404),
    ("POST", "/tokenize", {"prompt": "Hi"}, 200),
    ("POST", "/detokenize", {"tokens": [5]}, 200),
    ("GET", "/tokenizer_info", None, 200),
    ("GET", "/version", None, 200),
    ("GET", "/health", None, 200),
    ("GET", "/ping", None, 200),
    ("GET", "/metrics", None, 200),
    ("GET", "/docs", None, 200),
    ("GET", "/decisions?limit=1", None, 200),
    ("GET", "/decisions?limit=0", None, 400),
    ("GET", "/requests?limit=1", None, 200),
    ("GET", "/requests?limit=0", None, 400),
    ("GET", "/requests/mine", None, 200),
    ("GET", "/requests/other", None, 404),
]


@each_case(("method", "path", "body", "status"), CASES)
async def test_answers_are_as_the_page_says(
    router: RunningRouter, method: str, path: str, body: dict[str, object] | None, status: int
) -> None:
    answer = await checked(router, method, path, json=body)
    assert answer.status_code == status, answer.text


async def test_each_operation_is_asked(router: RunningRouter) -> None:
    page = await page_of(router)
    asked = {(method, path.partition("?")[0]) for method, path, _, status in CASES if status == 200}
    known = {(method.upper(), path) for path, item in page["paths"].items() for method in item}
    assert {(method, path if (method, path) in known else described(path)) for method, path in asked} == known


@each_case(
    ("path", "body", "event"),
    [
        ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, "ChatCompletionChunk"),
        ("/v1/completions", PROMPT, "Completion"),
        ("/v1/responses", {"input": "Hi"}, "ResponseEvent"),
        ("/v1/messages", MESSAGES, "MessageEvent"),
    ],
)
async def test_events_are_as_the_page_says(
    router: RunningRouter, path: str, body: dict[str, object], event: str
) -> None:
    page = await page_of(router)
    answer = await checked(router, "POST", path, json={**body, "stream": True})
    said = page["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]["description"]
    assert f"a {event}, or an {'AnthropicError' if event == 'MessageEvent' else 'Error'}" in said
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert (lines[-1] == "[DONE]") is ("[DONE]" in said)
    assert events
    for one in events:
        valid(page, {"$ref": f"#/components/schemas/{event}"}, one)


async def test_no_worker_is_told_as_the_page_says(router: RunningRouter, worker: FakeWorker) -> None:
    await worker.stop()
    async with asyncio.timeout(60):
        while (answer := await checked(router, "GET", "/health")).status_code != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert answer.json()["status"] == "unavailable"
