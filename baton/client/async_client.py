"""The client for asyncio: as `baton.client.sync_client.Client`, with `async` and `await`.

async with AsyncClient("127.0.0.1:50051") as client:
    answer = client.chat("What is the capital of Japan?", temperature=0)
    async for chunk in answer:
        print(chunk.text, end="", flush=True)
    print((await answer.result()).usage)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from baton.client.call_errors import to_baton_error
from baton.client.fleet import fleet_worker
from baton.client.messages import Tool
from baton.client.received import Received, last_message
from baton.client.report import Chunk, Embeddings, FleetWorker, ModelCard, Prefix, Result
from baton.client.requests import (
    Messages,
    PrefixOptions,
    call_hints,
    chat_messages,
    choices_message,
    embed_message,
    embeddings_of,
    num_answers,
    prefix_message,
    prefix_of,
    retain_message,
    sampling_message,
    sampling_options,
    template_options,
    tool_choice_message,
    tool_messages,
)
from common.cache_hints import Retain
from common.choices import AnswerOptions
from common.errors import ConfigError
from common.grpc.options import CLIENT_CHANNEL_OPTIONS
from common.grpc.streams import MessageStream
from common.grpc.transport import channel_credentials, name_options
from common.tls import TlsFiles
from protos.baton.v1 import inference_pb2, inference_pb2_grpc, router_pb2, router_pb2_grpc

Call = (
    grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
    | grpc.aio.UnaryStreamCall[inference_pb2.ChatRequest, inference_pb2.GenerateResponse]
)


Response = TypeVar("Response")


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


class AsyncClient:
    """`router` is host:port. `timeout` is each request's deadline in seconds; the router's own limit if None. TLS as in
    `baton.client.sync_client.Client`."""

    def __init__(
        self,
        router: str = "127.0.0.1:50051",
        *,
        timeout: float | None = None,
        api_key: str | None = None,
        tls: bool = False,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_server_name: str | None = None,
    ) -> None:
        self._router = router
        self._timeout = timeout
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise ConfigError("api_key", "is of printable ASCII without spaces")
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        options = [*CLIENT_CHANNEL_OPTIONS, *name_options(tls_server_name)]
        if tls or tls_ca is not None or tls_cert is not None or tls_key is not None:
            credentials = channel_credentials(TlsFiles(tls_cert, tls_key, tls_ca))
            self._channel = grpc.aio.secure_channel(router, credentials, options=options)
        elif tls_server_name is not None:
            raise ConfigError("tls_server_name", "is for TLS: tls or tls_ca is missing")
        else:
            self._channel = grpc.aio.insecure_channel(router, options=options)
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

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        add_special_tokens: bool = True,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        retain: Retain | None = None,
        priority: int = 0,
        session: str = "",
        explain: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> AsyncAnswer:
        """Continues a prompt, as `Client.generate`."""
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            model=model,
            prompt=prompt if isinstance(prompt, str) else "",
            prompt_token_ids=() if isinstance(prompt, str) else prompt,
            add_special_tokens=add_special_tokens,
            sampling_params=sampling_message(sampling_options(options)),
            choices=choices_message(options),
            cache_salt=cache_salt,
            retain=retain_message(retain),
            priority=priority,
        )
        metadata = (*self._metadata, *call_hints(session, explain=explain))
        call = self._inference.Generate(request, timeout=self._timeout, metadata=metadata)
        return AsyncAnswer(call, self._router, request.choices)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        retain: Retain | None = None,
        priority: int = 0,
        session: str = "",
        explain: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> AsyncAnswer:
        """Answers a conversation, as `Client.chat`."""
        request = inference_pb2.ChatRequest(
            request_id=request_id,
            model=model,
            messages=chat_messages(messages),
            tools=tool_messages(tools),
            tool_choice=tool_choice_message(tool_choice),
            parallel_tool_calls=parallel_tool_calls,
            chat_template_kwargs=template_options(chat_template_kwargs),
            sampling_params=sampling_message(sampling_options(options)),
            choices=choices_message(options),
            cache_salt=cache_salt,
            retain=retain_message(retain),
            priority=priority,
        )
        metadata = (*self._metadata, *call_hints(session, explain=explain))
        call = self._inference.Chat(request, timeout=self._timeout, metadata=metadata)
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
        response: inference_pb2.EmbedResponse = await self._answered(
            self._inference.Embed(request, timeout=self._timeout, metadata=self._metadata)
        )
        return embeddings_of(response)

    async def retain_prefix(self, seconds: float, **prefix: Unpack[PrefixOptions]) -> Prefix:
        """Does what `Client.retain_prefix` does."""
        request = inference_pb2.RetainPrefixRequest(prefix=prefix_message(prefix), seconds=seconds)
        call = self._inference.RetainPrefix(request, timeout=self._timeout, metadata=self._metadata)
        response: inference_pb2.PrefixResponse = await self._answered(call)
        return prefix_of(response)

    async def evict_prefix(self, **prefix: Unpack[PrefixOptions]) -> Prefix:
        """Does what `Client.evict_prefix` does."""
        request = inference_pb2.EvictPrefixRequest(prefix=prefix_message(prefix))
        call = self._inference.EvictPrefix(request, timeout=self._timeout, metadata=self._metadata)
        response: inference_pb2.PrefixResponse = await self._answered(call)
        return prefix_of(response)

    async def prefetch_prefix(self, *, session: str = "", **prefix: Unpack[PrefixOptions]) -> Prefix:
        """Does what `Client.prefetch_prefix` does."""
        request = inference_pb2.PrefetchPrefixRequest(prefix=prefix_message(prefix))
        metadata = (*self._metadata, *call_hints(session, explain=False))
        call = self._inference.PrefetchPrefix(request, timeout=self._timeout, metadata=metadata)
        response: inference_pb2.PrefixResponse = await self._answered(call)
        return prefix_of(response)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, model: str = "") -> list[int]:
        request = inference_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        response: inference_pb2.TokenizeResponse = await self._answered(
            self._inference.Tokenize(request, timeout=self._timeout, metadata=self._metadata)
        )
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str = "") -> str:
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        response: inference_pb2.DetokenizeResponse = await self._answered(
            self._inference.Detokenize(request, timeout=self._timeout, metadata=self._metadata)
        )
        return response.text

    async def models(self) -> list[ModelCard]:
        request = inference_pb2.ListModelsRequest()
        response: inference_pb2.ListModelsResponse = await self._answered(
            self._inference.ListModels(request, timeout=self._timeout, metadata=self._metadata)
        )
        return [ModelCard(model.id, model.max_model_len) for model in response.models]

    async def fleet(self) -> list[FleetWorker]:
        """Does what `Client.fleet` does."""
        response: router_pb2.GetFleetResponse = await self._answered(
            self._fleet.GetFleet(router_pb2.GetFleetRequest(), timeout=self._timeout, metadata=self._metadata)
        )
        return [fleet_worker(worker) for worker in response.workers]

    async def _answered(self, call: Awaitable[Response]) -> Response:
        try:
            return await call
        except grpc.RpcError as error:
            raise to_baton_error(error, self._router) from error
