"""Bad input over both interfaces, to a real stack: a named field, and the next request is served."""

from __future__ import annotations

import json
from collections.abc import Callable

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos.baton.v1 import inference_pb2, types_pb2
from tests.integration.stack import Stack

pytestmark = pytest.mark.timeout(600)

CONTEXT = 8192  # tokens
GENERATE = "/baton.v1.InferenceService/Generate"
Sampling = types_pb2.SamplingParams


def generate(**fields: object) -> bytes:
    return inference_pb2.GenerateRequest(**{"prompt": "Hello", **fields}).SerializeToString()  # type: ignore[arg-type]


GRPC_CASES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty prompt": (lambda: generate(prompt=""), "prompt"),
    "too long": (lambda: generate(prompt="", prompt_token_ids=[5] * CONTEXT), "prompt_token_ids"),
    "too long text": (lambda: generate(prompt="word " * CONTEXT), "prompt"),
    "half a megabyte": (lambda: generate(prompt="x" * 500_000), "prompt"),
    "half a megabyte of tokens": (lambda: generate(prompt="", prompt_token_ids=[40_000] * 160_000), "prompt_token_ids"),
    "a megabyte": (lambda: generate(prompt="x" * 1_000_000), "request"),
    "both prompts": (lambda: generate(prompt_token_ids=[5]), "prompt_token_ids"),
    "outside the vocabulary": (lambda: generate(prompt="", prompt_token_ids=[5, 49_152]), "prompt_token_ids"),
    "negative token": (lambda: generate(prompt="", prompt_token_ids=[-1]), "prompt_token_ids"),
    "temperature": (lambda: generate(sampling_params=Sampling(temperature=-1)), "sampling_params.temperature"),
    "NaN": (lambda: generate(sampling_params=Sampling(temperature=float("nan"))), "sampling_params.temperature"),
    "infinite bias": (
        lambda: generate(sampling_params=Sampling(logit_bias={1: float("inf")})),
        "sampling_params.logit_bias",
    ),
    "top_p": (lambda: generate(sampling_params=Sampling(top_p=1.5)), "sampling_params.top_p"),
    "no tokens": (lambda: generate(sampling_params=Sampling(max_tokens=0)), "sampling_params.max_tokens"),
    "too many tokens": (lambda: generate(sampling_params=Sampling(max_tokens=CONTEXT)), "sampling_params.max_tokens"),
    "stop token": (
        lambda: generate(sampling_params=Sampling(stop_token_ids=[10**6])),
        "sampling_params.stop_token_ids",
    ),
    "invalid UTF-8": (lambda: b"\x1a\x04caf\xe9", "prompt"),
    "wrong wire type": (lambda: b"\x1a\xff", "request"),
}

REST_CASES: dict[str, tuple[bytes, str | None]] = {
    "empty prompt": (b'{"prompt": ""}', "prompt"),
    "too long": (json.dumps({"prompt": [5] * CONTEXT}).encode(), "prompt"),
    "half a megabyte": (json.dumps({"prompt": "x" * 500_000}).encode(), "prompt"),
    "outside the vocabulary": (b'{"prompt": [49152]}', "prompt"),
    "temperature": (b'{"prompt": "x", "temperature": -0.1}', "temperature"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', "temperature"),
    "wrong type": (b'{"prompt": "x", "max_tokens": "many"}', "max_tokens"),
    "unknown field": (b'{"prompt": "x", "temprature": 1}', "temprature"),
    "invalid UTF-8": (b'{"prompt": "caf\xe9"}', "prompt"),
    "no JSON": (b"prompt=x", None),
}


@pytest.mark.parametrize("name", GRPC_CASES)
def test_grpc(two: Stack, name: str) -> None:
    make, field = GRPC_CASES[name]
    options = [("grpc.max_send_message_length", 64 << 20), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(two.grpc, options=options) as channel:
        method = channel.unary_stream(GENERATE, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as caught:
            list(method(make(), timeout=60))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        status = rpc_status.from_call(caught.value)
        bad = error_details_pb2.BadRequest()
        assert status is not None
        assert status.details[0].Unpack(bad)
        assert bad.field_violations[0].field == field
        assert field in str(caught.value.details())
        assert_serves(channel)


@pytest.mark.parametrize(
    "fields", [{"prompt": "x" * 10_000_000}, {"prompt": "", "prompt_token_ids": [40_000] * 3_500_000}]
)
def test_grpc_messages_that_no_context_needs(two: Stack, fields: dict[str, object]) -> None:
    """10 MB: refused by their length, before anybody parses them."""
    options = [("grpc.max_send_message_length", 64 << 20), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(two.grpc, options=options) as channel:
        method = channel.unary_stream(GENERATE, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as caught:
            list(method(generate(**fields), timeout=60))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert_serves(channel)


def assert_serves(channel: grpc.Channel) -> None:
    method = channel.unary_stream(
        GENERATE, request_serializer=bytes, response_deserializer=inference_pb2.GenerateResponse.FromString
    )
    last = list(method(generate(sampling_params=Sampling(max_tokens=2)), timeout=120))[-1]
    assert last.usage.completion_tokens == 2


@pytest.mark.parametrize("name", REST_CASES)
def test_rest(two: Stack, name: str) -> None:
    data, field = REST_CASES[name]
    with httpx.Client(base_url=two.http, timeout=120, trust_env=False) as client:
        answer = client.post("/v1/completions", content=data)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == (field, "invalid_request_error")
        assert error["message"]
        good = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
        assert good.json()["usage"]["completion_tokens"] == 2


def test_a_rest_body_that_no_context_needs(two: Stack) -> None:
    with httpx.Client(base_url=two.http, timeout=120, trust_env=False) as client:
        answer = client.post("/v1/completions", json={"prompt": "x" * 10_000_000})
        assert answer.status_code == 413, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == (None, "invalid_request_error")
        assert "context" in error["message"]
        good = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
        assert good.json()["usage"]["completion_tokens"] == 2


def test_unknown_model_names_the_field(two: Stack) -> None:
    with grpc.insecure_channel(two.grpc) as channel:
        method = channel.unary_stream(GENERATE, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as caught:
            list(method(generate(model="gpt-4"), timeout=60))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "model: 'gpt-4'" in str(caught.value.details())
    answer = httpx.post(f"{two.http}/v1/completions", json={"model": "gpt-4", "prompt": "x"}, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
