"""An endpoint that speaks `baton.v1`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable
from urllib.parse import urlsplit

import grpc

from bench.serving.endpoint import Answer, Question, RefusedError, Target
from common.errors import ConfigError, InternalError
from common.grpc.options import CLIENT_CHANNEL_OPTIONS
from common.grpc.status import DETAILS_KEY, error_of_call
from common.grpc.transport import channel_credentials
from common.tls import TlsFiles
from protos.baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2


class BatonEndpoint:
    """`target.url` is host:port, or grpc://host:port; grpcs://host:port speaks TLS. One channel for all requests."""

    def __init__(self, target: Target, *, is_chat: bool) -> None:
        scheme, address = _address(target.url)
        options = [*CLIENT_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)]
        if scheme == "grpcs" or target.tls_ca:
            credentials = channel_credentials(TlsFiles(None, None, target.tls_ca or None))
            self._channel = grpc.aio.secure_channel(address, credentials, options)
        else:
            self._channel = grpc.aio.insecure_channel(address, options)
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(
            self._channel
        )
        self._metadata = (("authorization", f"Bearer {target.api_key}"),) if target.api_key else ()
        self._is_chat = is_chat
        self._model = target.model
        try:
            self._params = types_pb2.SamplingParams(**target.options)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ConfigError("--extra-body", f"is not of sampling parameters: {error}") from error

    def use_model(self, name: str) -> None:
        self._model = name

    async def model(self) -> str:
        try:
            listed = await self._stub.ListModels(inference_pb2.ListModelsRequest(), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _refusal(error) from error
        if not listed.models:
            raise InternalError("the endpoint lists no model")
        return str(listed.models[0].id)

    async def ask(self, question: Question, answer: Answer) -> None:
        params = types_pb2.SamplingParams()
        params.CopyFrom(self._params)
        params.max_tokens = question.max_tokens
        call: AsyncIterable[inference_pb2.GenerateResponse]
        if self._is_chat:
            messages = [inference_pb2.ChatMessage(role=role, content=content) for role, content in question.messages]
            chat = inference_pb2.ChatRequest(model=self._model, messages=messages, sampling_params=params)
            call = self._stub.Chat(chat, metadata=self._metadata)
        else:
            generate = inference_pb2.GenerateRequest(model=self._model, prompt=question.prompt, sampling_params=params)
            call = self._stub.Generate(generate, metadata=self._metadata)
        try:
            async for message in call:
                if message.token_ids:
                    answer.token_times.append(time.perf_counter())
                    answer.text.append(message.text)
                if message.finish_reason:
                    usage = message.usage
                    answer.prompt_tokens, answer.output_tokens = usage.prompt_tokens, usage.completion_tokens
                    answer.cached_tokens = usage.cached_tokens
        except grpc.aio.AioRpcError as error:
            raise _refusal(error) from error

    async def close(self) -> None:
        await self._channel.close()


def _address(url: str) -> tuple[str, str]:
    scheme, rest = ("grpc", url) if "://" not in url else url.split("://", 1)
    address = urlsplit(f"//{rest}").netloc
    if scheme not in ("grpc", "grpcs") or ":" not in address:
        raise ConfigError("--base-url", f"{url!r} is no gRPC address: host:port is one")
    return scheme, address


def _refusal(error: grpc.aio.AioRpcError) -> RefusedError:
    code, details = error.code().name, error.details() or ""
    known = error_of_call(code, details, error.trailing_metadata())
    # A connection that failed has the same code as a router without room, but no details of a peer.
    has_details = any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    has_no_room = code == "RESOURCE_EXHAUSTED" or (code == "UNAVAILABLE" and has_details)
    return RefusedError(code, known.message, has_no_room=has_no_room)
