"""Schemas as people write them, over gRPC: kept ones reach the worker as they are, others are refused by keyword."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from protos.baton.v1 import inference_pb2, types_pb2
from tests.each_case import each_case
from tests.router.conftest import RunningRouter
from tests.router.test_grpc import violated_field
from tests.support.fake_worker import FakeWorker


def request(schema: dict[str, Any]) -> inference_pb2.GenerateRequest:
    guided = types_pb2.Guided(json_schema=json.dumps(schema, ensure_ascii=False))
    return inference_pb2.GenerateRequest(prompt="Hi", sampling_params=types_pb2.SamplingParams(guided=guided))


@each_case(
    "schema",
    [
        {"type": "string", "not": {"pattern": "[a-z]"}},
        {"oneOf": [{"type": "string", "pattern": "^[0-9a-f]{24}$"}, {"type": "string"}]},
        {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "null"}}]},
        {"type": "string", "pattern": "^(?=.*[0-9])(?!x)[a-z0-9]+$"},
        {"type": "object", "patternProperties": {"a": {"type": "integer"}, "b": {"minimum": 3}}},
        {"type": "string", "format": "regex"},
        {"type": "string", "format": "iri"},
        {"type": "array", "contains": {"const": "漢"}},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    ],
)
async def test_kept(router: RunningRouter, worker: FakeWorker, schema: dict[str, Any]) -> None:
    assert [one async for one in router.inference.Generate(request(schema))]
    assert json.loads(worker.requests[-1].sampling_params.guided.json_schema) == schema


@each_case(
    ("schema", "words"),
    [
        ({"type": "string", "not": {"pattern": r"(a)\1"}}, "not at #/not: of pattern it is not supported"),
        ({"not": {"multipleOf": 3}}, "not at #/not: of multipleOf it is not supported"),
        ({"type": "string", "format": "idn-hostname"}, "format at #: 'idn-hostname' is not supported"),
        ({"allOf": [{"multipleOf": one} for one in (7, 11, 13, 17, 19)]}, "are too large together"),
        ({"properties": {"a": {"const": -(2**63)}}}, "const at #/properties/a: -9223372036854775808"),
    ],
)
async def test_refused(router: RunningRouter, worker: FakeWorker, schema: dict[str, Any], words: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(router.inference.Generate(request(schema))))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(caught.value) == "sampling_params.guided"
    assert words in (caught.value.details() or "")
    assert not worker.requests
