"""The client for asyncio: as `baton.client.sync_client.Client`, with `async` and `await`.

async with AsyncClient("127.0.0.1:50051") as client:
    answer = client.chat("What is the capital of Japan?", temperature=0)
    async for chunk in answer:
        print(chunk.text, end="", flush=True)
    print((await answer.result()).usage)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message

from baton.client.admin import AsyncAdmin
from baton.client.base_client import BaseClient, Metadata
from baton.client.call_errors import to_baton_error
from baton.client.fleet import fleet_worker
from baton.client.messages import Tool
from baton.client.profiles import profile_message, profile_of
from baton.client.received import Received, last_message
from baton.client.report import Chunk, Embeddings, FleetWorker, ModelCard, Prefix, Profile, Result
from baton.client.requests import (
    Messages,
    PrefixOptions,
    call_hints,
    embed_message,
    embeddings_of,
    num_answers,
    prefix_message,
    prefix_of,
    tokenize_message,
)
from common.finished_request import FinishedRequest
from common.grpc.streams import MessageStream
from protos.baton.v1 import (
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from protos.messages import value_of

Call = (
    grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
    | grpc.aio.UnaryStreamCall[inference_pb2.ChatRequest, inference_pb2.GenerateResponse]
)


Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class AsyncAnswer:
    """An answer that is arriving, or several: iterate over the chunks, then await its `result()`, or the `results()` of
    all."""

    def __init__(self, call: Call, router: str, choices: inference_pb2.Choices) -> None:
        self._call = call
        self._router = router
        self._num_answers = num_answers(choices)
        self._received = Received(self._num_answers)
        self._messages: MessageStream[inference_pb2.GenerateResponse] | None = None

    def _stream(self) -> MessageStream[inference_pb2.GenerateResponse]:
        """One for all who iterate: it may have read more than the first of them took."""
        if self._messages is None:
            is_last = last_message(self._num_answers)
            self._messages = MessageStream(self._call, inference_pb2.GenerateResponse, is_last)
        return self._messages

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            async with aclosing(self._stream()) as messages:
                async for message in messages:
                    yield self._received.add(message)
        except grpc.RpcError as error:
            raise to_baton_error(error, self._router) from error

    async def result(self) -> Result:
        """The whole answer, the first one if there are several; reads what has not arrived yet."""
        return (await self.results())[0]

    async def results(self) -> list[Result]:
        """All `n` of them, whole."""
        if not self._received.is_whole:
            async for _ in self:
                pass
        return self._received.results()

    @property
    def text(self) -> str:
        """What has arrived so far of the first answer."""
        return self._received.text

    def cancel(self) -> None:
        """Ends the request."""
        self._call.cancel()


class AsyncClient(BaseClient[AsyncAnswer]):
    __doc__ = BaseClient.__doc__

    def _connect(self, credentials: grpc.ChannelCredentials | None, options: list[tuple[str, Any]]) -> None:
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(self._router, options=options)
        else:
            self._channel = grpc.aio.secure_channel(self._router, credentials, options=options)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._fleet = router_pb2_grpc.RouterServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every request in flight."""
        await self._channel.close()

    def _ask_generate(self, request: inference_pb2.GenerateRequest, hints: Metadata) -> AsyncAnswer:
        call = self._inference.Generate(request, timeout=self._timeout, metadata=(*self._metadata, *hints))
        return AsyncAnswer(call, self._router, request.choices)

    def _ask_chat(self, request: inference_pb2.ChatRequest, hints: Metadata) -> AsyncAnswer:
        call = self._inference.Chat(request, timeout=self._timeout, metadata=(*self._metadata, *hints))
        return AsyncAnswer(call, self._router, request.choices)

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        pooling: str = "last",
        dimensions: int = 0,
        normalize: bool = True,
        add_special_tokens: bool = True,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
    ) -> Embeddings:
        """Does what `Client.embed` does."""
        request = embed_message(
            inputs,
            pooling=pooling,
            dimensions=dimensions,
            normalize=normalize,
            add_special_tokens=add_special_tokens,
            model=model,
            request_id=request_id,
            cache_salt=cache_salt,
        )
        return embeddings_of(await self._ask(self._inference.Embed, request))

    async def retain_prefix(self, seconds: float, **prefix: Unpack[PrefixOptions]) -> Prefix:
        """Does what `Client.retain_prefix` does."""
        request = inference_pb2.RetainPrefixRequest(prefix=prefix_message(prefix), seconds=seconds)
        return prefix_of(await self._ask(self._inference.RetainPrefix, request))

    async def evict_prefix(self, **prefix: Unpack[PrefixOptions]) -> Prefix:
        """Does what `Client.evict_prefix` does."""
        request = inference_pb2.EvictPrefixRequest(prefix=prefix_message(prefix))
        return prefix_of(await self._ask(self._inference.EvictPrefix, request))

    async def prefetch_prefix(self, *, session: str = "", **prefix: Unpack[PrefixOptions]) -> Prefix:
        """Does what `Client.prefetch_prefix` does."""
        request = inference_pb2.PrefetchPrefixRequest(prefix=prefix_message(prefix))
        hints = call_hints(session, explain=False)
        return prefix_of(await self._ask(self._inference.PrefetchPrefix, request, hints))

    async def tokenize(
        self,
        text: str = "",
        *,
        messages: Messages = (),
        tools: Sequence[Tool] = (),
        chat_template_kwargs: Mapping[str, object] | None = None,
        chat_template: str = "",
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        model: str = "",
    ) -> list[int]:
        """Does what `Client.tokenize` does."""
        request = tokenize_message(
            text,
            messages,
            tools,
            chat_template_kwargs,
            add_special_tokens=add_special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            model=model,
        )
        return list((await self._ask(self._inference.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str = "") -> str:
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return (await self._ask(self._inference.Detokenize, request)).text

    async def models(self) -> list[ModelCard]:
        response = await self._ask(self._inference.ListModels, inference_pb2.ListModelsRequest())
        return [ModelCard(model.id, model.max_model_len) for model in response.models]

    async def fleet(self) -> list[FleetWorker]:
        """Does what `Client.fleet` does."""
        response = await self._ask(self._fleet.GetFleet, router_pb2.GetFleetRequest())
        return [fleet_worker(worker) for worker in response.workers]

    async def requests(self, limit: int = 50, request_id: str = "") -> list[FinishedRequest]:
        """Does what `Client.requests` does."""
        asked = router_pb2.GetRequestsRequest(limit=limit, request_id=request_id)
        return [value_of(one, FinishedRequest) for one in (await self._ask(self._fleet.GetRequests, asked)).requests]

    async def profile_worker(self, address: str = "", *, num_steps: int = 0, timeout_s: float = 0.0) -> Profile:
        """Does what `Client.profile_worker` does."""
        asked = profile_message(address, num_steps, timeout_s)
        worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        if address:
            return profile_of([part async for part in self._parts(self._fleet.ProfileWorker, asked)])
        try:
            return profile_of([part async for part in worker.Profile(asked.profile, timeout=self._timeout)])
        except grpc.RpcError as error:
            raise to_baton_error(error, self._router) from error

    @property
    def admin(self) -> AsyncAdmin:
        """What operators order of the router and its workers."""
        return AsyncAdmin(admin_pb2_grpc.AdminServiceStub(self._channel), self._ask, self._parts)

    async def _parts(
        self, method: grpc.aio.UnaryStreamMultiCallable[Request, worker_pb2.ProfilePart], request: Request
    ) -> AsyncIterator[worker_pb2.ProfilePart]:
        try:
            async for part in method(request, timeout=self._timeout, metadata=self._metadata):
                yield part
        except grpc.RpcError as error:
            raise to_baton_error(error, self._router) from error

    async def _ask(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        hints: Metadata = (),
    ) -> Response:
        try:
            return await method(request, timeout=self._timeout, metadata=(*self._metadata, *hints))
        except grpc.RpcError as error:
            raise to_baton_error(error, self._router) from error
