"""A router that answers from a script: what the client and the command are tested against."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from threading import Event
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from protos.baton.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    types_pb2,
    worker_pb2,
)

Context = grpc.ServicerContext


class FakeRouter(inference_pb2_grpc.InferenceServiceServicer, router_pb2_grpc.RouterServiceServicer):
    """Answers each prompt with its own words, one a message. Prompts that begin with ! ask for a failure."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.tokenizing: list[Any] = []
        self.metadata: list[dict[str, Any]] = []  # of calls for answers
        self.ended = Event()  # set when the last request has, however it did
        self.knows_beams = True  # else it answers a beam search as any request, as older ones do

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        for index in range(max(request.choices.n, 1)):
            for response in self._answer(request.prompt or " ".join(map(str, request.prompt_token_ids)), context):
                response.index = index
                if request.choices.use_beam_search and self.knows_beams:
                    response.cumulative_logprob = -1.5 - index
                yield response

    def Embed(  # noqa: N802
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        self.requests.append(request)
        if request.dimensions > 2:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "dimensions: must be at most 2")
        return inference_pb2.EmbedResponse(
            embeddings=[inference_pb2.Embedding(values=[1, 0.5])] * len(request.inputs),
            usage=types_pb2.Usage(prompt_tokens=3 * len(request.inputs), cached_tokens=1),
        )

    def Chat(  # noqa: N802
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if request.tools:
            yield inference_pb2.GenerateResponse(
                reasoning="hm", tool_calls=[inference_pb2.ToolCallDelta(index=0, id="c1", name=request.tools[0].name)]
            )
            yield inference_pb2.GenerateResponse(
                tool_calls=[inference_pb2.ToolCallDelta(index=0, arguments='{"x": 1}')],
                finish_reason=types_pb2.FINISH_REASON_TOOL_CALLS,
            )
            return
        yield from self._answer(request.messages[-1].content, context)

    def _answer(self, text: str, context: Context) -> Iterator[inference_pb2.GenerateResponse]:
        self.ended.clear()
        if not context.add_callback(self.ended.set):  # it has ended before
            self.ended.set()
        if text.startswith("!"):
            self._fail(text[1:], context)
        words = [word + " " for word in text.split()]
        for number, word in enumerate(words):
            yield inference_pb2.GenerateResponse(
                request_id="r1",
                model="m",
                text=word,
                token_ids=[number],
                logprobs=[
                    types_pb2.SampledToken(
                        token_id=number, logprob=-0.5, top_logprobs=[types_pb2.TokenLogprob(token_id=1, logprob=-0.25)]
                    )
                ],
            )
        if "forever" in text:
            self.ended.wait()
        yield inference_pb2.GenerateResponse(
            request_id="r1",
            model="m",
            finish_reason=types_pb2.FINISH_REASON_STOP,
            stop_reason="2",
            usage=types_pb2.Usage(prompt_tokens=5, completion_tokens=len(words), cached_tokens=3, reasoning_tokens=1),
            report=types_pb2.RequestReport(
                timings=types_pb2.Timings(prefill_ms=10, total_ms=20, tokens_per_second=50),
                prefill_worker="p:1",
                decode_worker="d:1",
                num_blocks_moved=2,
            ),
        )

    def _fail(self, code: str, context: Context) -> None:
        details: dict[str, Any] = {
            "INVALID_ARGUMENT": error_details_pb2.BadRequest(
                field_violations=[error_details_pb2.BadRequest.FieldViolation(field="top_p", description="too big")]
            ),
            "RESOURCE_EXHAUSTED": error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=7)),
        }
        packed = any_pb2.Any()
        if code == "LATE":  # a client that had given up gets the server's details and its own words
            late = status_pb2.Status(code=grpc.StatusCode.DEADLINE_EXCEEDED.value[0], message="the server's words")
            context.set_trailing_metadata(rpc_status.to_status(late).trailing_metadata)
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "why")
        if code not in details:
            context.abort(grpc.StatusCode[code], "top_p: as the message says" if code == "INVALID_ARGUMENT" else "why")
        packed.Pack(details[code])
        status = status_pb2.Status(code=grpc.StatusCode[code].value[0], message="why", details=[packed])
        context.abort_with_status(rpc_status.to_status(status))

    def RetainPrefix(  # noqa: N802
        self, request: inference_pb2.RetainPrefixRequest, context: Context
    ) -> inference_pb2.PrefixResponse:
        return self._prefix(request)

    def EvictPrefix(  # noqa: N802
        self, request: inference_pb2.EvictPrefixRequest, context: Context
    ) -> inference_pb2.PrefixResponse:
        return self._prefix(request)

    def PrefetchPrefix(  # noqa: N802
        self, request: inference_pb2.PrefetchPrefixRequest, context: Context
    ) -> inference_pb2.PrefixResponse:
        self.metadata.append(dict(context.invocation_metadata()))
        return self._prefix(request)

    def _prefix(self, request: Any) -> inference_pb2.PrefixResponse:
        self.requests.append(request)
        worker = inference_pb2.PrefixOnWorker(
            address="d:1", num_device_blocks=1, num_host_blocks=2, num_stored_blocks=3, error="why"
        )
        return inference_pb2.PrefixResponse(num_tokens=64, num_blocks=4, workers=[worker])

    def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        self.tokenizing.append(request)
        return inference_pb2.TokenizeResponse(token_ids=list(request.text.encode()))

    def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        self.tokenizing.append(request)
        return inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="m", max_model_len=100)])

    def GetFleet(  # noqa: N802
        self, request: router_pb2.GetFleetRequest, context: Context
    ) -> router_pb2.GetFleetResponse:
        return router_pb2.GetFleetResponse(
            workers=[
                router_pb2.FleetWorker(
                    address="p:1",
                    info=worker_pb2.WorkerInfo(
                        role=worker_pb2.WORKER_ROLE_PREFILL,
                        epoch="e1",
                        dtype="float32",
                        dtype_reason="the checkpoint's bfloat16 is slow here: this CPU has no [bf16]",
                        device="cpu",
                        device_reason="there is no CUDA device",
                        kernels="avx512",
                        kernels_reason="the fastest on this kind of CPU (GenuineIntel-6-207)",
                    ),
                    load=worker_pb2.WorkerLoad(
                        num_blocks=10, num_free_blocks=7, num_cached_blocks=2, num_leases=1, num_queued_prompt_tokens=77
                    ),
                    state=worker_pb2.WORKER_STATE_READY,
                    integrity="ok",
                    role=worker_pb2.WORKER_ROLE_PREFILL,
                    breaker="half open",
                    num_known_blocks=5,
                    hit_rate=0.25,
                    tokens_per_second=12.5,
                    batch_time=worker_pb2.BatchTime(
                        source="learned", age_s=185.0, num_steps=999, error_median=0.018, error_p90=0.07, drifts=True
                    ),
                ),
                router_pb2.FleetWorker(
                    address="d:1",
                    state=worker_pb2.WORKER_STATE_UNREACHABLE,
                    integrity="does not answer",
                    role=worker_pb2.WORKER_ROLE_DECODE,
                ),
            ]
        )

    def GetRequests(  # noqa: N802
        self, request: router_pb2.GetRequestsRequest, context: Context
    ) -> router_pb2.GetRequestsResponse:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not implemented!")

    def ProfileWorker(  # noqa: N802
        self, request: router_pb2.ProfileWorkerRequest, context: Context
    ) -> Iterator[worker_pb2.ProfilePart]:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not implemented!")


@contextmanager
def fake_router() -> Iterator[tuple[FakeRouter, str]]:
    """The servicer and its address."""
    servicer = FakeRouter()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        servicer.ended.set()
        server.stop(None).wait()
