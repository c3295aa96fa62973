"""Grammars that break the native parser, through every field that takes one: 400 by that field's name, and the router
serves the next request."""

from __future__ import annotations

import json

import grpc
import httpx
import pytest

from common.guided import Guided
from protos.baton.v1 import inference_pb2, types_pb2
from tests.common.test_grammar_process import HOSTILE
from tests.each_case import each_case
from tests.router.conftest import RunningRouter
from tests.router.test_grpc import violated_field

MESSAGES = [{"role": "user", "content": "Hi"}]
LEAST = {"const": -(2**63)}
TAG = {"type": "json_schema", "json_schema": LEAST}


@each_case(
    ("fields", "param"),
    [
        ({"guided_json": LEAST}, "guided_json"),
        ({"structured_outputs": {"json": LEAST}}, "structured_outputs"),
        ({"guided": {"json_schema": LEAST}}, "guided"),
        ({"guided_regex": HOSTILE["repetitions"][0].regex}, "guided_regex"),
        ({"guided_grammar": HOSTILE["lark-json"][0].grammar}, "guided_grammar"),
        ({"guided_grammar": HOSTILE["rules"][0].grammar}, "guided_grammar"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": LEAST}}},
            "response_format",
        ),
        ({"response_format": {"type": "structural_tag", "format": TAG}}, "response_format"),
        ({"guided_json": json.loads(HOSTILE["object-of-itself"][0].json_schema), "stream": True}, "guided_json"),
    ],
)
async def test_refused_by_name_and_the_next_request_is_served(
    router: RunningRouter, fields: dict[str, object], param: str
) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        for _ in range(2):  # the second one finds the reason kept
            refused = await client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == param, refused.text
            assert "cannot be used: " in refused.json()["error"]["message"]
        served = await client.post("/v1/chat/completions", json={"messages": MESSAGES, "guided_regex": "a+"})
        assert served.status_code == 200, served.text


ONE_OF_EACH_KIND = ("const", "tag", "many-rules", "rule-of-itself", "repetitions")


@each_case("guided", [HOSTILE[name][0] for name in ONE_OF_EACH_KIND])
async def test_refused_over_grpc(router: RunningRouter, guided: Guided) -> None:
    await refused_over_grpc(router, guided)


@pytest.mark.slow
@each_case("guided", [guided for name, (guided, _) in HOSTILE.items() if name not in (*ONE_OF_EACH_KIND, "ebnf")])
async def test_all_are_refused_over_grpc(router: RunningRouter, guided: Guided) -> None:
    await refused_over_grpc(router, guided)


async def refused_over_grpc(router: RunningRouter, guided: Guided) -> None:
    (kind,) = guided.kinds
    given = types_pb2.Guided(**{kind: getattr(guided, kind)})
    request = inference_pb2.GenerateRequest(prompt="Hi", sampling_params=types_pb2.SamplingParams(guided=given))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(router.inference.Generate(request)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(caught.value) == "sampling_params.guided"
    plain = inference_pb2.GenerateRequest(prompt="Hi")
    assert [one async for one in router.inference.Generate(plain)]
