"""A small synchronous client of a router's gRPC API.

    with Client("127.0.0.1:50051") as client:
        answer = client.chat("What is the capital of Japan?", temperature=0)
        for chunk in answer:
            print(chunk.text, end="", flush=True)
        print(answer.result().usage)

Errors are those of `common.errors`. Leaving a stream early (`cancel`, or the end of the client) ends the request on
every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message

from baton.client.admin import Admin
from baton.client.base_client import BaseClient, Metadata
from baton.client.call_errors import to_baton_error
from baton.client.fleet import fleet_worker
from baton.client.messages import Tool
from baton.client.profiles import profile_message, profile_of
from baton.client.received import Received
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

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class Answer:
    """An answer that is arriving, or several: iterate over the chunks, then ask for its `result()`, or the `results()`
    of all."""

    def __init__(
        self, call: Iterator[inference_pb2.GenerateResponse], router: str, choices: inference_pb2.Choices
    ) -> None:
        self._call = call
        self._cancel: Callable[[], object] = call.cancel  # type: ignore[attr-defined]  # a call is also an iterator
        self._router = router
        self._received = Received(num_answers(choices))

    def __iter__(self) -> Iterator[Chunk]:
        try:
            for message in self._call:
                yield self._received.add(message)
        except grpc.RpcError as error:
            raise to_baton_error(error, self._router) from error

    def result(self) -> Result:
        """The whole answer, the first one if there are several; reads what has not arrived yet."""
        return self.results()[0]

    def results(self) -> list[Result]:
        """All `n` of them, whole."""
        for _ in self:
            pass
        return self._received.results()

    @property
    def text(self) -> str:
        """What has arrived so far of the first answer."""
        return self._received.text

    def cancel(self) -> None:
        """Ends the request. Iterating on raises a BatonError."""
        self._cancel()


class Client(BaseClient[Answer]):
    __doc__ = BaseClient.__doc__

    def _connect(self, credentials: grpc.ChannelCredentials | None, options: list[tuple[str, Any]]) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(self._router, options=options)
        else:
            self._channel = grpc.secure_channel(self._router, credentials, options=options)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._fleet = router_pb2_grpc.RouterServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every request in flight."""
        self._channel.close()

    def _ask_generate(self, request: inference_pb2.GenerateRequest, hints: Metadata) -> Answer:
        call = self._inference.Generate(request, timeout=self._timeout, metadata=(*self._metadata, *hints))
        return Answer(call, self._router, request.choices)

    def _ask_chat(self, request: inference_pb2.ChatRequest, hints: Metadata) -> Answer:
        call = self._inference.Chat(request, timeout=self._timeout, metadata=(*self._metadata, *hints))
        return Answer(call, self._router, request.choices)

    def embed(
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
        """A vector for each text, or list of token ids, and their `usage`. `pooling`: last or mean; `dimensions` 0:
        all."""
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
        return embeddings_of(self._ask(self._inference.Embed, request))

    def retain_prefix(self, seconds: float, **prefix: Unpack[PrefixOptions]) -> Prefix:
        """Has all workers that have a prompt's KV evict it after others, for so long; 0: no longer. Which prompt:
        `prompt` or `messages`, and what else requests have beside them."""
        request = inference_pb2.RetainPrefixRequest(prefix=prefix_message(prefix), seconds=seconds)
        return prefix_of(self._ask(self._inference.RetainPrefix, request))

    def evict_prefix(self, **prefix: Unpack[PrefixOptions]) -> Prefix:
        """Has all workers forget a prompt's KV, in the store too."""
        request = inference_pb2.EvictPrefixRequest(prefix=prefix_message(prefix))
        return prefix_of(self._ask(self._inference.EvictPrefix, request))

    def prefetch_prefix(self, *, session: str = "", **prefix: Unpack[PrefixOptions]) -> Prefix:
        """Has a prompt's KV brought from host memory and the store onto the decode worker that a request of this
        session would go to now."""
        request = inference_pb2.PrefetchPrefixRequest(prefix=prefix_message(prefix))
        return prefix_of(self._ask(self._inference.PrefetchPrefix, request, call_hints(session, explain=False)))

    def tokenize(
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
        """Token ids of a text, or of the prompt that a conversation becomes."""
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
        return list(self._ask(self._inference.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str = "") -> str:
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return self._ask(self._inference.Detokenize, request).text

    def models(self) -> list[ModelCard]:
        response = self._ask(self._inference.ListModels, inference_pb2.ListModelsRequest())
        return [ModelCard(model.id, model.max_model_len) for model in response.models]

    def fleet(self) -> list[FleetWorker]:
        """Every worker that the router knows, asked now."""
        response = self._ask(self._fleet.GetFleet, router_pb2.GetFleetRequest())
        return [fleet_worker(worker) for worker in response.workers]

    def requests(self, limit: int = 50, request_id: str = "") -> list[FinishedRequest]:
        """The last requests that ended, the newest first; with `request_id` only those of that id. A key sees those of
        its tenant, an operator's all."""
        asked = router_pb2.GetRequestsRequest(limit=limit, request_id=request_id)
        return [value_of(one, FinishedRequest) for one in self._ask(self._fleet.GetRequests, asked).requests]

    def profile_worker(self, address: str = "", *, num_steps: int = 0, timeout_s: float = 0.0) -> Profile:
        """Where the time of a worker's next steps goes, while it serves. Asks for an operator's key, if the router asks
        for keys. `address` is as `fleet` has it; empty if this client is connected to the worker itself. `num_steps` 0:
        20, `timeout_s` 0: 30, and that is how long the worker waits for that many steps."""
        asked = profile_message(address, num_steps, timeout_s)
        try:
            if address:
                return profile_of(self._fleet.ProfileWorker(asked, timeout=self._timeout, metadata=self._metadata))
            worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
            return profile_of(worker.Profile(asked.profile, timeout=self._timeout))
        except grpc.RpcError as error:
            raise to_baton_error(error, self._router) from error

    @property
    def admin(self) -> Admin:
        """What operators order of the router and its workers."""
        return Admin(admin_pb2_grpc.AdminServiceStub(self._channel), self._ask, self._parts)

    def _parts(
        self, method: grpc.UnaryStreamMultiCallable[Request, worker_pb2.ProfilePart], request: Request
    ) -> Iterator[worker_pb2.ProfilePart]:
        try:
            yield from method(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise to_baton_error(error, self._router) from error

    def _ask(
        self,
        method: grpc.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        hints: Metadata = (),
    ) -> Response:
        try:
            return method(request, timeout=self._timeout, metadata=(*self._metadata, *hints))
        except grpc.RpcError as error:
            raise to_baton_error(error, self._router) from error
