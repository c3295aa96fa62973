"""EmbedService: a prompt's embedding. Every worker has it, whatever its role: it takes no more than a prefill does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import grpc

from common.errors import InvalidArgumentError
from common.tracing import RequestSpans, Span, Value
from engine import messages as m
from protos.baton.v1 import embed_pb2, embed_pb2_grpc
from worker.request_spans import add_step, exported
from worker.shell import Work, Worker, check_names, ends_counted, error_from

Context = grpc.aio.ServicerContext[Any, Any]

_POOLINGS = {
    embed_pb2.POOLING_UNSPECIFIED: m.Pooling.LAST,
    embed_pb2.POOLING_LAST: m.Pooling.LAST,
    embed_pb2.POOLING_MEAN: m.Pooling.MEAN,
}


class EmbedServicer(embed_pb2_grpc.EmbedServiceServicer):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def EmbedTokens(  # noqa: N802
        self,
        request: embed_pb2.EmbedTokensRequest,
        context: Context,  # noqa: ARG002
    ) -> embed_pb2.EmbedTokensResponse:
        worker, begin = self._worker, time.monotonic()
        spans = worker.traced(request.traceparent, request.tracestate)
        if spans is None or worker.spans is None:
            return await self._embed(request, begin, None)

        def whole(error: str) -> Sequence[Span]:
            attributes: dict[str, Value] = {
                "baton.worker": worker.address,
                "baton.request_id": request.request_id,
                "baton.prompt_tokens": len(request.prompt_token_ids),
            }
            return spans.whole("baton.v1.EmbedService/EmbedTokens", begin, time.monotonic(), attributes, error=error)

        with exported(worker.spans, whole):
            return await self._embed(request, begin, spans)

    async def _embed(
        self, request: embed_pb2.EmbedTokensRequest, begin: float, spans: RequestSpans | None
    ) -> embed_pb2.EmbedTokensResponse:
        worker = self._worker
        with ends_counted("embed"):
            work = Work("embed", request.request_id)
            async with worker.admit(work):
                self._check(request)
                with worker.engine.open(request.request_id, len(request.prompt_token_ids)) as stream:
                    work.stream = stream
                    stream.send(
                        m.Embed(
                            request_id=stream.engine_id,
                            prompt_token_ids=list(request.prompt_token_ids),
                            pooling=_POOLINGS[request.pooling],
                            dimensions=request.dimensions,
                            normalize=request.normalize if request.HasField("normalize") else True,
                            cache_salt=request.cache_salt,
                            traceparent="" if spans is None else spans.own.traceparent,
                        )
                    )
                    event = await stream.next()
                    while isinstance(event, m.StepTraced):
                        if spans is not None:
                            add_step(spans, event)
                        event = await stream.next()
        match event:
            case m.Embedded():
                if spans is not None:
                    spans.add("queue", begin, begin + event.queue_s)
                return embed_pb2.EmbedTokensResponse(
                    values=event.values, cached_tokens=event.num_cached_tokens, queue_ms=event.queue_s * 1000
                )
            case m.RequestFailed():
                raise error_from(event)
            case _:
                raise TypeError(f"an embedding has no event {type(event).__name__}")

    def _check(self, request: embed_pb2.EmbedTokensRequest) -> None:
        self._worker.check_fingerprint(request.fingerprint)
        check_names(request.request_id, request.cache_salt)
        self._worker.check_tokens("prompt_token_ids", request.prompt_token_ids, has_answer=False)
        if request.pooling not in _POOLINGS:
            raise InvalidArgumentError("pooling", f"{request.pooling} is not known")


def add_service(worker: Worker, server: grpc.aio.Server) -> str:
    embed_pb2_grpc.add_EmbedServiceServicer_to_server(EmbedServicer(worker), server)
    return embed_pb2.DESCRIPTOR.services_by_name["EmbedService"].full_name
