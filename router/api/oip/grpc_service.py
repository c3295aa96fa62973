"""`inference.GRPCInferenceService`: the Open Inference Protocol v2 over gRPC, with Triton's `ModelStreamInfer`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

import grpc

from common.errors import BatonError, InvalidArgumentError
from common.version import VERSION as BATON_VERSION
from protos.inference import open_inference_pb2 as pb
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
from router.limits.clients import call_hints
from router.serving.gateway import Gateway

Context = grpc.aio.ServicerContext[object, object]

EMPTY_FINAL = "triton_enable_empty_final_response"  # asks for a last response without outputs
IS_FINAL = "triton_final_response"
MAX_TOLD_SIZES = 8  # of a shape: inputs may have two, and a refusal tells of so many
CONTENTS = {"BYTES": "bytes_contents", "BOOL": "bool_contents", "UINT32": "uint_contents", "FP32": "fp32_contents"}


class OpenInferenceService:
    """Handlers raise `BatonError`; `grpc_handlers` makes a status of it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def ServerLive(self, _request: pb.ServerLiveRequest, _context: Context) -> pb.ServerLiveResponse:  # noqa: N802
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, _request: pb.ServerReadyRequest, _context: Context) -> pb.ServerReadyResponse:  # noqa: N802
        return pb.ServerReadyResponse(ready=not self._gateway.not_ready())

    async def ModelReady(self, request: pb.ModelReadyRequest, _context: Context) -> pb.ModelReadyResponse:  # noqa: N802
        try:
            check_version(request.version)
            self._gateway.admission.served(request.name)
        except BatonError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=not self._gateway.not_ready())

    async def ServerMetadata(  # noqa: N802
        self, _request: pb.ServerMetadataRequest, _context: Context
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name=PLATFORM, version=BATON_VERSION, extensions=EXTENSIONS)

    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, _context: Context
    ) -> pb.ModelMetadataResponse:
        check_version(request.version)
        model = self._gateway.admission.served(request.name).limits.model
        response = pb.ModelMetadataResponse(name=model, versions=[VERSION], platform=PLATFORM)
        for name, datatype in INPUT_TYPES.items():
            response.inputs.add(name=name, datatype=datatype, shape=[1])
        for name, datatype in OUTPUT_TYPES.items():
            response.outputs.add(name=name, datatype=datatype, shape=[-1])
        return response

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:  # noqa: N802
        async with aclosing(self._responses(request, context, may_stream=False)) as responses:
            # To the end: an answer that is left after its first response would count as cancelled.
            [response, *_] = [one async for one in responses]
        return response

    async def ModelStreamInfer(  # noqa: N802
        self, request: pb.ModelInferRequest, context: Context
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """Answers one request of a stream."""
        async with aclosing(self._responses(request, context, may_stream=True)) as responses:
            async for response in responses:
                yield pb.ModelStreamInferResponse(infer_response=response)

    def failed(self, request: pb.ModelInferRequest | None, error: BatonError) -> pb.ModelStreamInferResponse:
        """What a stream tells of a request that failed; the stream goes on."""
        response = pb.ModelStreamInferResponse(error_message=error.message)
        if request is not None:
            response.infer_response.MergeFrom(
                pb.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
            )
        return response

    async def _responses(
        self, request: pb.ModelInferRequest, context: Context, *, may_stream: bool
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        arrived_at, gateway = time.monotonic(), self._gateway
        check_numbers(len(request.inputs), len(request.outputs), len(request.parameters))
        given = {name: _value(name, parameter) for name, parameter in request.parameters.items()}
        ends_empty = given.pop(EMPTY_FINAL, False) is True
        for name, of_tensor in [
            *((one.name, one.parameters) for one in request.inputs),
            *((one.name, one.parameters) for one in request.outputs),
        ]:
            if of_tensor:
                raise InvalidArgumentError(name[:100], f"has parameters, and none is known: {min(of_tensor)[:40]!r}")
        asked = InferRequest(
            model=request.model_name,
            version=request.model_version,
            inputs=_inputs(request),
            outputs=[output.name for output in request.outputs],
            parameters=given,
        )
        inference = Inference(asked, may_stream=may_stream)
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        with gateway.admission.gate.bytes_held() as held:
            call = Call(
                interface="grpc",
                request_id=request_id_of(request.id, metadata),
                arrived_at=arrived_at,
                hints=call_hints(metadata, inference.session),
                timeout_s=context.time_remaining(),
            )
            answers = infer(gateway, inference, call, held)
            is_raw = bool(request.raw_input_contents)
            model = gateway.admission.served(request.model_name).limits.model
            async with aclosing(answers):
                async for tensors in answers:
                    yield _response(model, request.id, tensors, is_raw=is_raw)
        if ends_empty:
            last = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=request.id)
            last.parameters[IS_FINAL].bool_param = True
            yield last


def _value(name: str, parameter: pb.InferParameter) -> object:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidArgumentError(f"parameters.{name[:100]}", "has no value")
    return getattr(parameter, kind)


def _inputs(request: pb.ModelInferRequest) -> list[Tensor]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidArgumentError("raw_input_contents", f"has {len(raw)} entries for {len(request.inputs)} inputs")
    tensors = []
    for index, given in enumerate(request.inputs):
        name = given.name[:100] or f"inputs[{index}]"
        if raw:
            if given.HasField("contents"):
                raise InvalidArgumentError(name, "has contents, and raw_input_contents is set, too")
            values: tuple[Value, ...] = (value_of_raw(name, given.datatype, raw[index]),)
        else:
            values = _typed(name, given)
        shape = tuple(given.shape[:MAX_TOLD_SIZES])
        tensors.append(Tensor(given.name, given.datatype, shape, values))
    return tensors


def _typed(name: str, given: pb.ModelInferRequest.InferInputTensor) -> tuple[Value, ...]:
    """The values of a tensor's contents, which may be in the list of its datatype alone."""
    expected = CONTENTS.get(given.datatype)
    for one, _ in given.contents.ListFields():
        if expected is not None and one.name != expected:
            raise InvalidArgumentError(
                f"{name}.contents.{one.name}", f"is not for {given.datatype}: that is {expected}"
            )
    if expected is None:  # refused by its datatype
        return ()
    values = getattr(given.contents, expected)
    check_one_value(name, len(values))
    return tuple(values)


def _response(model: str, given_id: str, tensors: Iterable[Tensor], *, is_raw: bool) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=given_id)
    for tensor in tensors:
        output = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if is_raw:
            response.raw_output_contents.append(tensor.raw())
        else:
            getattr(output.contents, CONTENTS[tensor.datatype]).extend(tensor.values)
    return response
