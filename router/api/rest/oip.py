"""The Open Inference Protocol v2 over REST, as KServe and Triton speak it: `/v2/...`, with Triton's binary tensors, its
`generate` and its `generate_stream`.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, cast

import msgspec
from fastapi import Request
from fastapi.responses import Response

from common.errors import BatonError, InvalidArgumentError
from common.version import VERSION as BATON_VERSION
from router.api.asking import Call
from router.api.oip.inference import (
    EXTENSIONS,
    INPUT_TYPES,
    OUTPUT_TYPES,
    PLATFORM,
    VERSION,
    Inference,
    InferRequest,
    check_numbers,
    check_version,
    infer,
    request_id_of,
)
from router.api.oip.tensors import Tensor, Value, check_one_value, value_of_raw
from router.api.rest.entrance import Endpoint, guarded
from router.api.rest.http.body import JSON_TYPE, read_body
from router.api.rest.http.errors import as_baton, error_headers
from router.api.rest.openai.body_types import Body
from router.api.rest.openai.disconnect import EventStream, unless_gone
from router.api.rest.openai.parsing import parse
from router.limits.clients import call_hints
from router.serving.gateway import Gateway

JSON_SIZE = "Inference-Header-Content-Length"  # of a body whose JSON is followed by binary tensors
BINARY_TYPE = "application/octet-stream"
ALL_BINARY = "binary_data_output"  # a request's parameter
BINARY, BINARY_SIZE = "binary_data", "binary_data_size"  # a tensor's parameters


class InputTensor(Body, kw_only=True):
    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None  # in row-major order, nested or not
    parameters: dict[str, Any] | None = None


class RequestedOutput(Body, kw_only=True):
    name: str
    parameters: dict[str, Any] | None = None


class InferBody(Body, kw_only=True):
    id: str | None = None
    model_name: str | None = None  # KServe's client repeats what the path says
    model_version: str | None = None
    inputs: list[InputTensor]
    outputs: list[RequestedOutput] | None = None
    parameters: dict[str, Any] | None = None


class GenerateBody(Body, kw_only=True):
    """Inputs by their names, beside or inside `parameters`; what else is in there is a sampling parameter."""

    id: str | None = None
    text_input: str
    stream: bool | None = None
    sampling_parameters: str | dict[str, Any] | None = None
    exclude_input_in_output: bool | None = None
    return_finish_reason: bool | None = None
    return_cumulative_logprob: bool | None = None
    return_logprobs: bool | None = None
    return_num_input_tokens: bool | None = None
    return_num_output_tokens: bool | None = None
    parameters: dict[str, Any] | None = None


class OpenInferenceHandlers:
    """Each failure becomes `{"error": "..."}`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def live(self, _request: Request) -> Response:
        return _json({"live": True})

    async def ready(self, _request: Request) -> Response:
        return self._readiness({})

    async def model_ready(self, request: Request) -> Response:
        return self._readiness({"name": self._model(request)})

    def _readiness(self, told: dict[str, object]) -> Response:
        is_ready = not self._gateway.not_ready()
        return _json({**told, "ready": is_ready}, 200 if is_ready else 503)

    async def server(self, _request: Request) -> Response:
        return _json({"name": PLATFORM, "version": BATON_VERSION, "extensions": [*EXTENSIONS, "generate"]})

    async def model(self, request: Request) -> Response:
        inputs = [{"name": name, "datatype": datatype, "shape": [1]} for name, datatype in INPUT_TYPES.items()]
        outputs = [{"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in OUTPUT_TYPES.items()]
        name = self._model(request)
        return _json({"name": name, "versions": [VERSION], "platform": PLATFORM, "inputs": inputs, "outputs": outputs})

    def _model(self, request: Request) -> str:
        """The name of the request's model. Raises `NotFoundError` if it is not served."""
        check_version(request.path_params.get("version", ""))
        return self._gateway.admission.served(request.path_params["model"]).limits.model

    async def infer(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        data = await self._read(request, (JSON_TYPE, BINARY_TYPE))
        size = _json_size(request.headers.get(JSON_SIZE), len(data))
        body = parse(InferBody, data[:size])
        check_numbers(len(body.inputs), len(body.outputs or ()), len(body.parameters or ()))
        for name, given, said in (
            ("model_name", body.model_name, request.path_params["model"]),
            ("model_version", body.model_version, request.path_params.get("version", VERSION)),
        ):
            if given is not None and given != said:
                raise InvalidArgumentError(name, f"is {given[:100]!r}, but the path says {said[:100]!r}")
        parameters = dict(body.parameters or {})
        all_binary = _is_true(parameters.pop(ALL_BINARY, False), f"parameters.{ALL_BINARY}")
        binary = {one.name: _asks_binary(one, all_binary) for one in body.outputs or ()}
        asked = InferRequest(
            model=request.path_params["model"],
            version=request.path_params.get("version", ""),
            inputs=_tensors(body.inputs, data[size:]),
            outputs=list(binary),
            parameters=parameters,
        )
        inference = Inference(asked, may_stream=False)
        answers = self._answers(request, inference, body.id, arrived_at)
        [tensors] = await unless_gone(request, _all(answers))
        return _infer_response(
            self._head(request, body.id), tensors, lambda name: binary.get(name, all_binary), _headers(request)
        )

    async def generate(self, request: Request) -> Response:
        return await self._generate(request, streams=False)

    async def generate_stream(self, request: Request) -> Response:
        return await self._generate(request, streams=True)

    async def _generate(self, request: Request, *, streams: bool) -> Response:
        arrived_at = time.monotonic()
        body = parse(GenerateBody, await self._read(request, (JSON_TYPE,)))
        given, sampling = _generate_inputs(body)
        given["stream"] = streams if streams else given.get("stream", False)
        if given["stream"] is not streams:
            raise InvalidArgumentError("stream", "is for generate_stream: generate has one response")
        inputs = [_tensor_of_json(name, INPUT_TYPES[name], (1,), [value]) for name, value in given.items()]
        asked = InferRequest(
            model=request.path_params["model"],
            version=request.path_params.get("version", ""),
            inputs=inputs,
            parameters=sampling,
        )
        inference = Inference(asked, may_stream=True)
        answers = self._answers(request, inference, body.id, arrived_at)
        head = self._head(request, body.id)
        if not streams:
            [tensors] = await unless_gone(request, _all(answers))
            return _json({**head, **_named(tensors)}, headers=_headers(request))
        first = await unless_gone(request, anext(answers))
        return EventStream(_event({**head, **_named(first)}), _events(head, answers), _headers(request))

    def _answers(
        self, request: Request, inference: Inference, given_id: str | None, arrived_at: float
    ) -> AsyncGenerator[list[Tensor], None]:
        request_id = request.state.request_id = request_id_of(given_id or "", request.headers)
        hints = call_hints(request.headers, inference.session)
        call = Call(interface="rest", request_id=request_id, arrived_at=arrived_at, hints=hints)
        return infer(self._gateway, inference, call, request.state.held_bytes)

    def _head(self, request: Request, given_id: str | None) -> dict[str, object]:
        head: dict[str, object] = {} if given_id is None else {"id": given_id}
        return {**head, "model_name": request.path_params["model"], "model_version": VERSION}

    async def _read(self, request: Request, types: tuple[str, ...]) -> bytes:
        admission = self._gateway.admission
        limit, timeout_s = admission.max_request_bytes(), admission.gate.limits.receive_timeout_s
        return await read_body(request, limit, timeout_s, types)


def routes(gateway: Gateway) -> list[tuple[str, str, Endpoint]]:
    """(method, path, handler)"""
    handlers = OpenInferenceHandlers(gateway)
    named: list[tuple[str, str, Endpoint]] = [
        ("GET", "/v2", handlers.server),
        ("GET", "/v2/health/live", handlers.live),
        ("GET", "/v2/health/ready", handlers.ready),
    ]
    for model in ("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}"):
        named += [
            ("POST", f"{model}/infer", handlers.infer),
            ("POST", f"{model}/generate", handlers.generate),
            ("POST", f"{model}/generate_stream", handlers.generate_stream),
            ("GET", f"{model}/ready", handlers.model_ready),
            ("GET", model, handlers.model),
        ]
    return [(method, path, guarded(handler, _failed)) for method, path, handler in named]


def _failed(request: Request, error: BatonError) -> Response:
    return _json({"error": error.message}, error.http_status, {**_headers(request), **error_headers(error)})


def _headers(request: Request) -> dict[str, str]:
    request_id = getattr(request.state, "request_id", "")
    return {"X-Request-Id": request_id} if request_id else {}


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, JSON_TYPE)


def _json_size(given: str | None, num_bytes: int) -> int:
    """Of the JSON at the beginning of a body."""
    if given is None:
        return num_bytes
    if not (given.isascii() and given.isdecimal() and len(given) < 12 and int(given) <= num_bytes):
        raise InvalidArgumentError(JSON_SIZE, f"must be a number up to {num_bytes}, the body's size")
    return int(given)


def _is_true(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgumentError(name, "must be true or false")
    return value


def _asks_binary(output: RequestedOutput, default: bool) -> bool:
    given = dict(output.parameters or {})
    is_binary = _is_true(given.pop(BINARY, default), f"outputs.{output.name[:100]}.{BINARY}")
    if given:
        raise InvalidArgumentError(f"outputs.{output.name[:100]}.{min(given)[:40]}", "is not known")
    return is_binary


def _tensors(inputs: list[InputTensor], data: bytes) -> list[Tensor]:
    """`data`: the binary tensors, one after the other."""
    tensors = []
    position = 0
    for index, one in enumerate(inputs):
        name = one.name[:100] or f"inputs[{index}]"
        given = dict(one.parameters or {})
        size = given.pop(BINARY_SIZE, None)
        if given:
            raise InvalidArgumentError(f"{name}.{min(given)[:40]}", "is not known")
        if size is None:
            tensors.append(_tensor_of_json(one.name, one.datatype, tuple(one.shape), one.data or []))
            continue
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(data) - position:
            raise InvalidArgumentError(f"{name}.{BINARY_SIZE}", f"must be a number up to {len(data) - position}")
        if one.data is not None:
            raise InvalidArgumentError(f"{name}.data", f"is given, and {BINARY_SIZE}, too")
        raw = data[position : position + size]
        tensors.append(Tensor(one.name, one.datatype, tuple(one.shape), (value_of_raw(name, one.datatype, raw),)))
        position += size
    if position != len(data):
        raise InvalidArgumentError("inputs", f"{len(data) - position} bytes after the JSON belong to none of them")
    return tensors


def _tensor_of_json(name: str, datatype: str, shape: tuple[int, ...], data: list[Any]) -> Tensor:
    while len(data) == 1 and isinstance(data[0], list):
        data = data[0]
    check_one_value(name[:100], len(data))
    [given] = data
    value: Value
    if datatype == "BYTES" and isinstance(given, str):
        value = given.encode()
    elif datatype == "BOOL" and isinstance(given, bool):
        value = given
    else:
        raise InvalidArgumentError(name[:100], f"holds what is no value of {datatype[:20]}")
    return Tensor(name, datatype, shape, (value,))


def _generate_inputs(body: GenerateBody) -> tuple[dict[str, Any], dict[str, Any]]:
    """(values of inputs by name, sampling parameters)."""
    given: dict[str, Any] = {}
    for name in INPUT_TYPES:
        if (value := getattr(body, name)) is not None:
            given[name] = value
    sampling: dict[str, Any] = {}
    for name, value in (body.parameters or {}).items():
        if name not in INPUT_TYPES:
            sampling[name] = value
        elif name in given:
            raise InvalidArgumentError(f"parameters.{name}", f"is given as {name}, too")
        else:
            given[name] = value
    if isinstance(given.get("sampling_parameters"), dict):
        given["sampling_parameters"] = json.dumps(given["sampling_parameters"])
    return given, sampling


def _infer_response(
    head: dict[str, object], tensors: list[Tensor], is_binary: Callable[[str], bool], headers: dict[str, str]
) -> Response:
    outputs: list[dict[str, object]] = []
    parts: list[bytes] = []
    for tensor in tensors:
        output: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if is_binary(tensor.name):
            parts.append(tensor.raw())
            output["parameters"] = {BINARY_SIZE: len(parts[-1])}
        else:
            output["data"] = _json_values(tensor)
        outputs.append(output)
    content = msgspec.json.encode({**head, "outputs": outputs})
    if not parts:
        return Response(content, 200, headers, JSON_TYPE)
    return Response(b"".join((content, *parts)), 200, {**headers, JSON_SIZE: str(len(content))}, BINARY_TYPE)


def _json_values(tensor: Tensor) -> list[object]:
    if tensor.datatype == "BYTES":
        return [cast("bytes", value).decode() for value in tensor.values]
    return list(tensor.values)


def _named(tensors: list[Tensor]) -> dict[str, object]:
    """By name; what has one value stands without its list."""
    named: dict[str, object] = {}
    for tensor in tensors:
        values = _json_values(tensor)
        named[tensor.name] = values[0] if len(values) == 1 else values
    return named


async def _all(answers: AsyncGenerator[list[Tensor], None]) -> list[list[Tensor]]:
    async with aclosing(answers):
        return [tensors async for tensors in answers]


def _event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _events(head: dict[str, object], answers: AsyncGenerator[list[Tensor], None]) -> AsyncGenerator[bytes, None]:
    """A failure is an event: the status has been sent."""
    try:
        async with aclosing(answers):
            async for tensors in answers:
                yield _event({**head, **_named(tensors)})
    except Exception as error:
        yield _event({"error": as_baton(error).message})
