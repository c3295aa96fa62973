"""Guided text in REST: each client's own words for it, and what is wrong named by the field that the client used."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from common.guided import Guided
from router.preparing import guided
from tests.each_case import each_case
from tests.router.conftest import RunningRouter
from tests.router.test_every_parameter import in_the_engine
from tests.support.fake_worker import FakeWorker

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
FORMAT = {"type": "const_string", "value": "x"}


def response_format(kind: str, **fields: object) -> dict[str, object]:
    return {"response_format": {"type": kind, **fields}}


async def post(router: RunningRouter, path: str = "/v1/completions", **fields: object) -> httpx.Response:
    prompt = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    async with httpx.AsyncClient(base_url=router.url) as client:
        return await client.post(path, json={**prompt, **fields})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@each_case(
    ("fields", "guided"),
    [
        (response_format("text"), None),
        (response_format("json_object"), Guided(json_object=True)),
        (
            response_format("json_schema", json_schema={"name": "x", "schema": SCHEMA, "strict": True}),
            Guided(json_schema=TEXT),
        ),
        (
            response_format("structural_tag", format=FORMAT),
            Guided(structural_tag='{"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}'),
        ),
        ({"guided_json": SCHEMA}, Guided(json_schema=TEXT)),
        ({"guided_json": TEXT}, Guided(json_schema=TEXT)),
        ({"guided_regex": "a+"}, Guided(regex="a+")),
        ({"guided_choice": ["a", "b"]}, Guided(choice=("a", "b"))),
        ({"guided_grammar": 'root ::= "a"'}, Guided(grammar='root ::= "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, Guided(json_schema=TEXT)),
        ({"structured_outputs": {"choice": ["a"]}}, Guided(choice=("a",))),
        ({"guided": {"json_schema": SCHEMA}}, Guided(json_schema=TEXT)),
        ({"guided": {"regex": "a"}, "response_format": None}, Guided(regex="a")),
    ],
)
async def test_asked_for(
    router: RunningRouter, worker: FakeWorker, path: str, fields: dict[str, object], guided: Guided | None
) -> None:
    response = await post(router, path, **fields)
    assert response.status_code == 200, response.text
    assert in_the_engine(worker.requests[0]).guided == guided


@each_case(
    ("fields", "param", "words"),
    [
        (response_format("yaml"), "response_format.type", "must be one of text, json_object"),
        (response_format("json_schema"), "response_format.json_schema.schema", "is required"),
        (response_format("text", json_schema={}), "response_format.json_schema", "only for type"),
        (response_format("json_object", triggers=["x"]), "response_format.triggers", "only for type"),
        (response_format("json_schema", json_schema={"schema": {}, "x": 1}), "response_format.json_schema.x", "known"),
        (response_format("json_schema", json_schema={"schema": {"not": {}}}), "response_format", "not"),
        (response_format("structural_tag", format={"type": "x"}), "response_format", "format.type must be one of"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": ""}, "guided_regex", "must not be empty"),
        ({"guided_choice": []}, "guided_choice", "must not be empty"),
        ({"guided_grammar": ""}, "guided_grammar", "must not be empty"),
        ({"guided_json": ""}, "guided_json", "must not be empty"),
        ({"guided_choice": [""]}, "guided_choice", "must not be empty"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "cannot be parsed"),
        ({"guided_regex": "a", **response_format("json_object")}, "guided_regex", "cannot be together"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"lark": "a"}}, "structured_outputs.lark", "not a known field"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs", "exactly one"),
        ({"guided": {}}, "guided", "exactly one"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "is not for guided text"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "is not for guided text"),
    ],
)  # fmt: skip
async def test_refused(router: RunningRouter, fields: dict[str, Any], param: str, words: str) -> None:
    response = await post(router, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


async def test_a_workers_refusal_has_the_clients_field(router: RunningRouter, worker: FakeWorker) -> None:
    from common.errors import InvalidArgumentError

    worker.refuse = InvalidArgumentError("sampling_params.guided", "unknown special token")
    response = await post(router, guided_regex="a")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_regex")


@pytest.mark.parametrize("step", [14, pytest.param(2, marks=pytest.mark.slow)])
async def test_schemas_of_any_depth_are_refused(router: RunningRouter, step: int) -> None:
    """Some are not too deep for who looks over them, and too deep for who decodes them, in a few frames more."""
    async with httpx.AsyncClient(base_url=router.url) as client:
        for depth in range(800, 1010, step):
            schema = '{"items":' * depth + "1" + "}" * depth
            response = await client.post("/v1/completions", content=f'{{"prompt": "Hi", "guided_json": {schema}}}')
            assert response.status_code == 400, (depth, response.text)


LONG = {"const": "漢" * 11_000}  # six times as many characters if each is written as an escape


@each_case(
    "fields",
    [
        {"guided_json": LONG},
        {"guided": {"json_schema": json.dumps(LONG, ensure_ascii=False)}},
        {"structured_outputs": {"json": LONG}},
        response_format("json_schema", json_schema={"schema": LONG}),
        response_format("structural_tag", format={"type": "json_schema", "json_schema": LONG}),
    ],
)
async def test_a_long_schema_is_counted_in_characters_of_its_text(router: RunningRouter, fields: Any) -> None:
    response = await post(router, **fields)
    assert response.status_code == 200, response.text


@each_case(
    ("schema", "words"),
    [
        ({"properties": {"a": {"enum": [1234567890123456789]}}}, "enum at #/properties/a: 1234567890123456789"),
        (
            {"oneOf": [{"type": "number"}, {"type": "integer"}]},
            "oneOf at #/oneOf: two of its branches may hold at once",
        ),
        ({"multipleOf": -3}, "multipleOf at #: must be above 0, not -3"),
    ],
)
async def test_what_a_schema_cannot_keep_is_named(router: RunningRouter, schema: object, words: str) -> None:
    given = (
        {"guided_json": schema},
        {"guided_grammar": f"start: %json {json.dumps(schema)}"},
        response_format("json_schema", json_schema={"schema": schema}),
        response_format("structural_tag", format={"type": "json_schema", "json_schema": schema}),
    )
    for fields in given:
        response = await post(router, **fields)
        assert (response.status_code, words in response.text) == (400, True), response.text


async def test_others_grammars_take_too_long(router: RunningRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided, "MAX_WAIT_S", -1.0)
    response = await post(router, guided_regex="one that nobody else asks for")
    assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
    assert "others' grammars" in response.json()["error"]["message"]


async def test_half_a_surrogate_pair_is_refused(router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        response = await client.post("/v1/completions", content='{"prompt": "Hi", "guided_json": {"const": "\\ud800"}}')
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_json")
