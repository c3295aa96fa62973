"""The Open Inference Protocol over gRPC and REST, as its clients put their tensors on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import struct
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import grpc
import httpx
import pytest

from common.errors import DeadlineError, InvalidArgumentError
from common.version import VERSION
from protos.inference import open_inference_pb2 as pb
from protos.inference import open_inference_pb2_grpc as pb_grpc
from router.api.grpc_handlers import add_service
from router.api.grpc_services import OPEN_INFERENCE
from router.api.oip.grpc_service import Context, OpenInferenceService
from router.limits.gate import Gate, GateLimits
from router.serving.gateway import Gateway
from tests.each_case import each_case
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, reaches, sample
from tests.router.test_grpc import violated_field
from tests.router.tiny_tokenizer import ids_of
from tests.support.fake_worker import ANSWER, FakeWorker

MODEL = "tiny"
LIST_OF = {"BYTES": "bytes_contents", "BOOL": "bool_contents"}


def asked(text: str = "Hello", **inputs: Any) -> pb.ModelInferRequest:
    """`inputs`: flags, or texts."""
    request = pb.ModelInferRequest(model_name=MODEL)
    for name, value in {"text_input": text, **inputs}.items():
        datatype = "BOOL" if isinstance(value, bool) else "BYTES"
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[1])
        getattr(tensor.contents, LIST_OF[datatype]).append(value if isinstance(value, bool) else value.encode())
    return request


def raw(request: pb.ModelInferRequest) -> pb.ModelInferRequest:
    """The same with raw contents, as Triton's client sends them."""
    for tensor in request.inputs:
        if tensor.datatype == "BOOL":
            request.raw_input_contents.append(struct.pack("<?", tensor.contents.bool_contents[0]))
        else:
            [text] = tensor.contents.bytes_contents
            request.raw_input_contents.append(struct.pack("<I", len(text)) + text)
        tensor.ClearField("contents")
    return request


def outputs_of(response: pb.ModelInferResponse) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for index, output in enumerate(response.outputs):
        if not response.raw_output_contents:
            [(_, given)] = output.contents.ListFields()
            values[output.name] = list(given)
            continue
        data = response.raw_output_contents[index]
        if output.datatype == "BYTES":
            (size,) = struct.unpack_from("<I", data)
            assert len(data) == 4 + size
            values[output.name] = [data[4:]]
        else:
            values[output.name] = list(struct.unpack("<f" if output.datatype == "FP32" else "<I", data))
    return values


def stub(router: RunningRouter) -> pb_grpc.GRPCInferenceServiceAsyncStub:
    return pb_grpc.GRPCInferenceServiceStub(router.channel)


@pytest.fixture
async def http(router: RunningRouter) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{router.url}/v2", verify=False) as client:
        yield client


async def test_what_there_is(router: RunningRouter, http: httpx.AsyncClient) -> None:
    calls = stub(router)
    assert (await calls.ServerLive(pb.ServerLiveRequest())).live
    assert (await calls.ServerReady(pb.ServerReadyRequest())).ready
    ready = [
        (await calls.ModelReady(pb.ModelReadyRequest(name=name, version=version))).ready
        for name, version in ((MODEL, ""), (MODEL, "1"), (MODEL, "2"), ("other", ""))
    ]
    assert ready == [True, True, False, False]
    server = await calls.ServerMetadata(pb.ServerMetadataRequest())
    assert (server.name, server.version) == ("baton", VERSION)
    model = await calls.ModelMetadata(pb.ModelMetadataRequest(name=MODEL))
    assert {one.name: one.datatype for one in model.inputs}["text_input"] == "BYTES"
    assert next(one.name for one in model.outputs) == "text_output"

    assert (await http.get("/health/live")).json() == {"live": True}
    assert (await http.get("/health/ready")).json() == {"ready": True}
    assert (await http.get(str(http.base_url).rstrip("/"))).json()["name"] == "baton"
    described = (await http.get(f"/models/{MODEL}/versions/1")).json()
    assert [one["name"] for one in described["inputs"]] == [one.name for one in model.inputs]
    assert (await http.get(f"/models/{MODEL}/ready")).json() == {"name": MODEL, "ready": True}
    missing = await http.get("/models/other/ready")
    assert missing.status_code == 404
    assert "other" in missing.json()["error"]


@pytest.mark.parametrize("form", [lambda request: request, raw], ids=["typed", "raw"])
async def test_one_response(router: RunningRouter, worker: FakeWorker, form: Any) -> None:
    flags: dict[str, Any] = dict.fromkeys(
        ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), True
    )
    sampling = json.dumps({"temperature": "0.5", "max_tokens": 100, "seed": 7})
    request = form(asked(sampling_parameters=sampling, exclude_input_in_output=True, **flags))
    request.id = "call 1"
    response = await stub(router).ModelInfer(request, metadata=(("x-request-id", "mine"),))
    assert (response.model_name, response.model_version, response.id) == (MODEL, "1", "call 1")
    assert outputs_of(response) == {
        "text_output": [ANSWER.encode()],
        "finish_reason": [b"stop"],
        "num_input_tokens": [len(ids_of("Hello"))],
        "num_output_tokens": [len(worker.answer) + 1],
    }
    [sent] = worker.requests
    assert (sent.request_id, sent.sampling_params.temperature, sent.sampling_params.seed) == ("mine", 0.5, 7)


async def test_the_input_comes_back_and_chosen_outputs_alone(router: RunningRouter) -> None:
    assert outputs_of(await stub(router).ModelInfer(asked())) == {"text_output": [f"Hello{ANSWER}".encode()]}
    request = asked(sampling_parameters='{"logprobs": 1}')
    for name in ("logprobs", "cumulative_logprob"):
        request.outputs.add(name=name)
    outputs = outputs_of(await stub(router).ModelInfer(request))
    assert set(outputs) == {"logprobs", "cumulative_logprob"}
    tokens = json.loads(outputs["logprobs"][0])
    assert all({"logprob", "rank", "decoded_token"} == set(one) for token in tokens for one in token.values())
    chosen = sum(next(iter(token.values()))["logprob"] for token in tokens)
    assert outputs["cumulative_logprob"] == [pytest.approx(chosen, rel=1e-5)]


async def test_a_good_answer_counts_as_one(router: RunningRouter) -> None:
    name, labels = "baton_router_requests_total", {"interface": "grpc", "outcome": "ok"}
    good, cancelled = sample(name, **labels), sample(name, interface="grpc", outcome="cancelled")
    request = asked()
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    assert outputs_of(await stub(router).ModelInfer(request))["text_output"] == [f"Hello{ANSWER}".encode()]
    await reaches(name, good + 1, **labels)
    assert sample(name, interface="grpc", outcome="cancelled") == cancelled


async def test_a_user_is_a_session(start_worker: StartWorker, start_router: StartRouter) -> None:
    workers = [await start_worker() for _ in range(3)]
    router = await start_router(*workers, policy="session")
    request = asked()
    request.parameters["user"].string_param = "s1"
    async with httpx.AsyncClient(base_url=f"{router.url}/v2", verify=False) as http:
        for _ in range(3):
            await stub(router).ModelInfer(request)
            body = {"text_input": "Hello", "parameters": {"prompt_cache_key": "s1"}}
            assert (await http.post(f"/models/{MODEL}/generate", json=body)).status_code == 200
    assert sorted(len(worker.requests) for worker in workers) == [0, 0, 6]


async def test_several_answers(router: RunningRouter) -> None:
    request = asked(exclude_input_in_output=True)
    request.parameters["n"].int64_param = 3
    response = await stub(router).ModelInfer(request)
    assert outputs_of(response) == {"text_output": 3 * [ANSWER.encode()]}
    assert list(response.outputs[0].shape) == [3]


async def test_a_stream_answers_requests_side_by_side_and_goes_on_after_a_failure(router: RunningRouter) -> None:
    requests = []
    for name, inputs in (("a", {}), ("wrong", {"sampling_parameters": '{"top_p": 2}'}), ("b", {})):
        request = asked(stream=True, **inputs)
        request.id = name
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        requests.append(request)
    texts: dict[str, str] = {}
    ended, failed = [], {}
    async for response in stub(router).ModelStreamInfer(iter(requests)):
        infer = response.infer_response
        if response.error_message:
            failed[infer.id] = response.error_message
        elif infer.parameters["triton_final_response"].bool_param:
            ended.append(infer.id)
        else:
            texts[infer.id] = texts.get(infer.id, "") + outputs_of(infer)["text_output"][0].decode()
    assert texts == {"a": ANSWER, "b": ANSWER}
    assert sorted(ended) == ["a", "b"]
    assert "sampling_parameters.top_p" in failed["wrong"]
    assert list(failed) == ["wrong"]


async def test_a_stream_that_its_client_leaves_ends_its_requests(router: RunningRouter, worker: FakeWorker) -> None:
    worker.delay_s = 0.05
    call = stub(router).ModelStreamInfer()
    await call.write(asked(stream=True))
    await call.read()
    call.cancel()
    await worker.cancelled.wait()


class Ends:
    def __init__(self) -> None:
        self.of_answer = asyncio.Event()  # it was given up
        self.of_call: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why


@contextlib.asynccontextmanager
async def endless_answers(limits: GateLimits) -> AsyncIterator[tuple[pb_grpc.GRPCInferenceServiceAsyncStub, Ends]]:
    """Calls of a server whose streamed answers never end; and `Ends`."""
    ends = Ends()

    @contextlib.asynccontextmanager
    async def watched(_name: str, _context: Context) -> AsyncIterator[None]:
        try:
            yield
        except DeadlineError as error:
            ends.of_call.set_result(error.message)
            raise

    class Endless(OpenInferenceService):
        async def ModelStreamInfer(  # noqa: N802
            self, request: pb.ModelInferRequest, context: Context
        ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
            response = pb.ModelStreamInferResponse()
            response.infer_response.raw_output_contents.append(bytes(2**18))
            try:
                while True:
                    yield response
            finally:
                ends.of_answer.set()

    server = grpc.aio.server()
    add_service(server, OPEN_INFERENCE, Endless(cast("Gateway", None)), Gate(limits), guard=watched)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(20), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield pb_grpc.GRPCInferenceServiceStub(channel), ends
    finally:
        await server.stop(None)


async def test_an_answer_that_takes_too_long_says_so_to_a_client_that_did_not_read() -> None:
    async with endless_answers(GateLimits(answer_timeout_s=0.05)) as (calls, ends):
        call = calls.ModelStreamInfer()
        request = asked()
        request.id = "slow"
        await call.write(request)
        await ends.of_answer.wait()
        responses: list[Any] = [await call.read()]
        while not responses[-1].error_message:
            responses.append(await call.read())
        assert responses[-1].error_message == "the answer took too long"
        assert responses[-1].infer_response.id == "slow"
        assert all(response.infer_response.raw_output_contents for response in responses[:-1])
        call.cancel()


async def test_a_stream_whose_client_never_reads_ends() -> None:
    async with endless_answers(GateLimits(answer_timeout_s=1.0, receive_timeout_s=1.0)) as (calls, ends):
        call = calls.ModelStreamInfer()
        await call.write(asked())
        assert await ends.of_call == "the client does not read the answers"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await anext(one async for one in call if not one.infer_response.raw_output_contents)
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_one_key_gets_half_of_the_streams(start_router: StartRouter, worker: FakeWorker, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    names = ("a", "b")
    keys.write_text("".join(f"secret-of-the-team-{name}-0123456789 name={name}\n" for name in names))
    router = await start_router(worker, api_keys_file=str(keys), max_buffered_mb=16)  # four messages of 4 MiB

    async def outcome(name: str) -> str:
        """Of the first answer on a new stream, which stays open."""
        call = stub(router).ModelStreamInfer(
            metadata=(("authorization", f"Bearer secret-of-the-team-{name}-0123456789"),)
        )
        calls.append(call)
        try:
            await call.write(asked(stream=True))
            await call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return str(await call.details())
        return "open"

    calls: list[Any] = []
    assert [await outcome("a") for _ in range(2)] == ["open", "open"]
    assert "this key has 2 open streams" in await outcome("a")
    assert [await outcome("b") for _ in range(2)] == ["open", "open"]
    assert "this process has 4 open streams" in await outcome("b")
    await calls[0].done_writing()
    while await calls[0].read() is not grpc.aio.EOF:
        pass
    assert await calls[0].code() == grpc.StatusCode.OK
    assert await outcome("a") == "open"
    for call in calls:
        call.cancel()


async def test_json_and_binary_tensors_over_rest(http: httpx.AsyncClient) -> None:
    plain = {
        "id": "7",
        "inputs": [
            {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Hello"]},
            {"name": "exclude_input_in_output", "shape": [1, 1], "datatype": "BOOL", "data": [[True]]},
        ],
    }
    answer = await http.post(f"/models/{MODEL}/infer", json=plain, headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json() == {
        "id": "7",
        "model_name": MODEL,
        "model_version": "1",
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [ANSWER]}],
    }
    text = struct.pack("<I", 5) + b"Hello"
    head = json.dumps(
        {
            "inputs": [
                {"name": "text_input", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(text)}}
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    answer = await http.post(f"/models/{MODEL}/versions/1/infer", content=head + text, headers=headers)
    size = int(answer.headers["inference-header-content-length"])
    [output] = json.loads(answer.content[:size])["outputs"]
    assert output["parameters"]["binary_data_size"] == len(answer.content) - size
    assert answer.content[size + 4 :].decode() == f"Hello{ANSWER}"


async def test_generate_and_its_stream(http: httpx.AsyncClient) -> None:
    body = {"text_input": "Hello", "parameters": {"exclude_input_in_output": True, "max_tokens": 100}}
    answer = await http.post(f"/models/{MODEL}/generate", json={**body, "return_finish_reason": True})
    expected = {"model_name": MODEL, "model_version": "1", "text_output": ANSWER, "finish_reason": "stop"}
    assert answer.json() == expected
    streamed = await http.post(f"/models/{MODEL}/generate_stream", json=body)
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.split("\n\n") if line]
    assert "".join(event["text_output"] for event in events) == ANSWER
    assert len(events) > 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sampling_parameters": '{"temperature": -1}'}, "sampling_parameters.temperature"),
    ({"sampling_parameters": '{"temperature": "hot"}'}, "sampling_parameters.temperature"),
    ({"sampling_parameters": '{"nothing": 1}'}, "sampling_parameters.nothing"),
    ({"sampling_parameters": '{"prompt": "x"}'}, "sampling_parameters.prompt"),
    ({"sampling_parameters": '{"prompt_logprobs": 1}'}, "sampling_parameters.prompt_logprobs"),
    ({"sampling_parameters": '{"suffix": "x"}'}, "sampling_parameters.suffix"),
    ({"sampling_parameters": '{"request_id": "x"}'}, "sampling_parameters.request_id"),
    ({"sampling_parameters": '{"user": 5}'}, "sampling_parameters.user"),
    ({"sampling_parameters": "{"}, "sampling_parameters"),
    ({"sampling_parameters": "[]"}, "sampling_parameters"),
    ({"image": "x"}, "image"),
    ({"stream": True}, "stream"),
    ({"stream": "yes"}, "stream"),
    ({"text": 300 * "a"}, "text_input"),
]


@each_case(("inputs", "field"), REFUSED)
async def test_refusals_name_the_field(
    router: RunningRouter, http: httpx.AsyncClient, inputs: dict[str, Any], field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub(router).ModelInfer(asked(**inputs))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(error.value) == field
    body = {
        "inputs": [
            {
                "name": "text_input" if name == "text" else name,
                "shape": [1],
                "datatype": "BOOL" if isinstance(value, bool) else "BYTES",
                "data": [value],
            }
            for name, value in {"text": "Hello", **inputs}.items()
        ]
    }
    answer = await http.post(f"/models/{MODEL}/infer", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(field)


def broken(**changes: Any) -> pb.ModelInferRequest:
    request = asked()
    for name, value in changes.items():
        if name == "raw":
            request.inputs[0].ClearField("contents")
            request.raw_input_contents.extend(value)
        elif name == "shape":
            request.inputs[0].ClearField("shape")
            request.inputs[0].shape.extend(value)
        elif name == "twice":
            request.inputs.append(request.inputs[0])
        elif name == "output":
            request.outputs.add(name=value)
        elif name == "parameter":
            request.inputs[0].parameters[value].int64_param = 1
        elif name == "datatype":
            request.inputs[0].datatype = value
    return request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ModelInferRequest(model_name=MODEL), "text_input"),
        (broken(raw=[b"\x05\0\0\0Hell"]), "text_input"),
        (broken(raw=[b"\x05\0"]), "text_input"),
        (broken(raw=[b"\x01\0\0\0\xff"]), "text_input"),
        (broken(raw=[b"\x01\0\0\0a\x01\0\0\0b"]), "text_input"),
        (broken(raw=[b"", b""]), "raw_input_contents"),
        (broken(shape=[2]), "text_input"),
        (broken(twice=True), "text_input"),
        (broken(output="other"), "outputs"),
        (broken(parameter="shared_memory_region"), "text_input"),
        (broken(datatype="FP16"), "text_input"),
        (broken(datatype="BOOL"), "text_input.contents.bytes_contents"),
    ],
)
async def test_broken_tensors_are_refused(router: RunningRouter, request_: pb.ModelInferRequest, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub(router).ModelInfer(request_)
    assert (error.value.code(), violated_field(error.value)) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_numbers_are_finite(router: RunningRouter, value: float) -> None:
    request = asked()
    request.parameters["temperature"].double_param = value
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub(router).ModelInfer(request)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(error.value) == "sampling_parameters.temperature"


def large(kind: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=MODEL)
    if kind == "parameters":
        for number in range(2**15):
            request.parameters[str(number)].bool_param = True
    elif kind == "inputs":
        request.inputs.extend(2**15 * [pb.ModelInferRequest.InferInputTensor()])
    elif kind == "outputs":
        request.outputs.extend(2**15 * [pb.ModelInferRequest.InferRequestedOutputTensor()])
    elif kind == "sizes":
        request = asked()
        request.inputs[0].shape.extend(2**20 * [1])
    else:
        form, datatype = kind.split()
        tensor = request.inputs.add(name="stream", datatype=datatype, shape=[1])
        if form == "raw":
            request.raw_input_contents.append(bytes(2**20))
        else:
            getattr(tensor.contents, LIST_OF[datatype]).extend(2**19 * [True if datatype == "BOOL" else b""])
    return request


@pytest.mark.parametrize(
    "kind", ["raw BOOL", "raw BYTES", "typed BOOL", "typed BYTES", "sizes", "inputs", "outputs", "parameters"]
)
async def test_more_than_one_value_is_refused_before_it_is_unpacked(kind: str) -> None:
    """A message is refused as a whole, so what it holds takes neither time nor memory."""
    service, request = OpenInferenceService(cast("Gateway", None)), large(kind)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgumentError):
            await service.ModelInfer(request, cast("Context", None))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < (1.5 * 2**20 if kind.startswith("raw") else 2**18)  # raw: the bytes themselves are 1 MiB


async def test_the_second_value_over_rest_is_not_looked_at(http: httpx.AsyncClient) -> None:
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Hello", 5]}
    answer = await http.post(f"/models/{MODEL}/infer", json={"inputs": [tensor]})
    assert (answer.status_code, answer.json()) == (400, {"error": "text_input: must have one value, not 2"})
    answer = await http.post(f"/models/{MODEL}/infer", json={"inputs": 10 * [tensor]})
    assert (answer.status_code, answer.json()) == (400, {"error": "inputs: has 10 entries, and may have 9"})


async def test_a_version_or_model_that_is_not_served(router: RunningRouter, http: httpx.AsyncClient) -> None:
    for changes in ({"model_version": "2"}, {"model_name": "other"}):
        request = asked()
        for name, value in changes.items():
            setattr(request, name, value)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub(router).ModelInfer(request)
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
    for path in (f"{MODEL}/versions/2", "other"):
        answer = await http.post(f"/models/{path}/generate", json={"text_input": "Hello"})
        assert answer.status_code == 404
        assert isinstance(answer.json()["error"], str)


async def test_probes_need_no_key(start_router: StartRouter, worker: FakeWorker, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-of-the-team-0123456789 name=team\n")
    router = await start_router(worker, api_keys_file=str(keys))
    async with httpx.AsyncClient(base_url=f"{router.url}/v2", verify=False) as http:
        assert (await http.get("/health/ready")).status_code == 200
        assert (await http.get(f"/models/{MODEL}")).status_code == 401
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub(router).ModelInfer(asked())
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
