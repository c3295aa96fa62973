"""The REST gateway: OpenAI's paths, and Baton's own few."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from common.errors import InvalidArgumentError, ModelNotFoundError
from common.validation import check_model, check_request_id
from common.version import VERSION
from protos.baton.v1 import worker_pb2
from router.api.api_keys import current_client
from router.api.rest import errors
from router.api.rest.answer import Answer
from router.api.rest.body import read_body
from router.api.rest.body_types import Body
from router.api.rest.direct import DirectApp, Endpoint
from router.api.rest.disconnect import ClientGoneError, EventStream, unless_gone
from router.api.rest.docs_page import docs_page
from router.api.rest.echo import Echo
from router.api.rest.embeddings import EmbeddingsBody, embeddings_json
from router.api.rest.errors import as_baton, error_response, json_response
from router.api.rest.formats import AnswerFormat, ChatFormat, CompletionFormat
from router.api.rest.prefix import PrefixBody, RetainPrefixBody, prefix_json
from router.api.rest.responses import ResponseAnswer
from router.api.rest.responses_body import ResponsesBody
from router.api.rest.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
    schemas,
)
from router.api.rest.tools import NamedTool
from router.fleet.served_model import ServedModel
from router.serving.choices import candidates
from router.serving.clients import CallHints, call_hints
from router.serving.decisions import MAX_DECISIONS
from router.serving.embedding import MAX_AT_ONCE
from router.serving.front import Front
from router.serving.request import GenerationRequest, Prompt, new_request_id

DEFAULT_DECISIONS = 50  # at /decisions
DEFAULT_COMPLETION_TOKENS = 16  # what OpenAI's text completion gives if max_tokens is not set
CLIENT_GONE_STATUS = 499  # nobody reads it; access logs know it

BODIES: tuple[type[Body], ...] = (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    EmbeddingsBody,
    RetainPrefixBody,
    PrefixBody,
    TokenizeBody,
    DetokenizeBody,
)
TextBody = ChatBody | CompletionBody | ResponsesBody

Prompts = Callable[[ServedModel], Awaitable[list[Prompt]]]
AnswerMaker = Callable[[Sequence[GenerationRequest], str], Answer | ResponseAnswer]


def make_app(front: Front) -> ASGIApp:
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None)
    errors.install(app)
    gateway = _Gateway(front)

    references, components = schemas(BODIES)
    direct: dict[str, Endpoint] = {}

    def route(method: str, path: str, handler: Endpoint, summary: str, body: type[Body] | None = None) -> None:
        extra: dict[str, object] | None = None
        handler = _guarded(handler)
        if body is not None:
            direct[path] = handler
            schema = references[BODIES.index(body)]
            extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
        app.add_api_route(path, handler, methods=[method], response_model=None, summary=summary, openapi_extra=extra)

    route("POST", "/v1/chat/completions", gateway.chat, "Answer a conversation", ChatBody)
    route("POST", "/v1/completions", gateway.completions, "Continue prompts", CompletionBody)
    route("POST", "/v1/responses", gateway.responses, "Answer a conversation, item by item", ResponsesBody)
    route("POST", "/v1/embeddings", gateway.embeddings, "Vectors of texts", EmbeddingsBody)
    route("POST", "/v1/cache/retain", gateway.retain, "Keep a prompt's KV for a while", RetainPrefixBody)
    route("POST", "/v1/cache/evict", gateway.evict, "Forget a prompt's KV", PrefixBody)
    route("POST", "/v1/cache/prefetch", gateway.prefetch, "Have a prompt's KV ready", PrefixBody)
    route("GET", "/v1/models", gateway.models, "The model that is served")
    route("GET", "/v1/models/{model:path}", gateway.model, "One model")
    route("POST", "/tokenize", gateway.tokenize, "Token ids of a text", TokenizeBody)
    route("POST", "/detokenize", gateway.detokenize, "The text of token ids", DetokenizeBody)
    route("GET", "/tokenizer_info", gateway.tokenizer_info, "Special tokens and the chat template, for harnesses")
    route("GET", "/version", gateway.version, "This router's version")
    route("GET", "/health", gateway.health, "Whether requests are taken")
    route("GET", "/ping", gateway.health, "The same as /health")
    route("GET", "/metrics", gateway.metrics, "Metrics for Prometheus")
    route("GET", "/docs", gateway.docs, "This API, for people")
    route("GET", "/decisions", gateway.decisions, "Where the last requests went, and why")
    page = app.openapi()
    page.setdefault("components", {}).setdefault("schemas", {}).update(components)
    return DirectApp(app, direct)


def _guarded(handler: Endpoint) -> Endpoint:
    """Every failure of `handler` becomes an answer in OpenAI's shape."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except (ClientGoneError, ClientDisconnect):  # while its answer was made, or in the middle of its body
            return Response(status_code=CLIENT_GONE_STATUS)
        except Exception as error:
            return error_response(as_baton(error), getattr(request.state, "request_id", ""))

    return guarded


class _Gateway:
    """Handlers. They raise `BatonError`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._started = int(time.time())

    async def _read(self, request: Request) -> bytes:
        admission = self._front.admission
        return await read_body(request, admission.max_request_bytes(), admission.gate.limits.receive_timeout_s)

    async def chat(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        body = parse(ChatBody, await self._read(request))
        chat_format = ChatFormat(is_named_call=isinstance(body.tool_choice, NamedTool))

        async def prompts(model: ServedModel) -> list[Prompt]:
            return [await self._front.preparation.chat_prompt(model, body.conversation())]

        return await self._generate(request, body, prompts, self._answer_maker(body, chat_format), arrived_at)

    async def responses(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        body = parse(ResponsesBody, await self._read(request))

        async def prompts(model: ServedModel) -> list[Prompt]:
            return [await self._front.preparation.chat_prompt(model, body.response_conversation(), "input")]

        def answer(requests: Sequence[GenerationRequest], request_id: str) -> ResponseAnswer:
            echoed, wants_logprobs = body.echoed(), body.wants_logprobs
            return ResponseAnswer(
                self._front.generation, requests[0], request_id, echoed, wants_logprobs=wants_logprobs
            )

        return await self._generate(request, body, prompts, answer, arrived_at)

    async def completions(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        body = parse(CompletionBody, await self._read(request))

        async def prompts(model: ServedModel) -> list[Prompt]:
            special = body.add_special_tokens is not False
            given = body.prompts()
            made = await self._front.preparation.prompts(model, given, "prompt", add_special_tokens=special)
            for prompt in given if body.echo else ():
                echoed.append(prompt if isinstance(prompt, str) else await self._text(model, prompt))
            return made

        echoed: list[str] = []
        echo = Echo(echoed, generates=not body.is_only_echo) if body.echo else None
        make_answer = self._answer_maker(body, CompletionFormat(), echo)
        return await self._generate(request, body, prompts, make_answer, arrived_at)

    async def _text(self, model: ServedModel, token_ids: list[int]) -> str:
        """Of a prompt, control tokens and all."""
        return await self._front.preparation.detokenize(model, token_ids, "prompt", skip_special_tokens=False)

    def _answer_maker(
        self, body: ChatBody | CompletionBody, answer_format: AnswerFormat, echo: Echo | None = None
    ) -> AnswerMaker:
        return lambda requests, request_id: Answer(
            self._front.generation,
            requests,
            answer_format,
            request_id=request_id,
            choices=body.choices,
            echo=echo,
            wants_logprobs=body.wants_logprobs,
            wants_prompt_logprobs=body.prompt_logprobs is not None,
            wants_usage_chunk=body.wants_usage_chunk,
            wants_usage_so_far=body.wants_usage_so_far,
        )

    async def embeddings(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        body = parse(EmbeddingsBody, await self._read(request))
        request_id = _request_id(request, body)
        content = await unless_gone(request, self._embed(body, request_id, arrived_at))
        return Response(content, headers={"X-Request-Id": request_id}, media_type="application/json")

    async def _embed(self, body: EmbeddingsBody, request_id: str, arrived_at: float) -> bytes:
        client = current_client.get()
        front = self._front
        with front.admission.running("rest", client=client):
            model = await front.admission.serving()
            check_model(body.model or "", model.limits)
            body.check()
            special = body.add_special_tokens is not False
            inputs = body.inputs()
            prompts = await front.preparation.prompts(model, inputs, "input", add_special_tokens=special)
            wanted = front.preparation.embed_request(
                model,
                prompts,
                request_id=request_id,
                pooling=body.pooling_value,
                dimensions=body.dimensions or 0,
                normalize=body.normalize is not False,
                cache_salt=body.cache_salt or "",
                arrived_at=arrived_at,
                client=client,
            )
            with front.admission.gate.requests(client.name if client else "", min(len(inputs), MAX_AT_ONCE) - 1):
                embedded = await front.embedder.embed(wanted)
            return msgspec.json.encode(embeddings_json(body, wanted, embedded))

    async def retain(self, request: Request) -> Response:
        body = parse(RetainPrefixBody, await self._read(request))
        return await self._hint(request, body, worker_pb2.CACHE_ACTION_RETAIN, body.seconds)

    async def evict(self, request: Request) -> Response:
        body = parse(PrefixBody, await self._read(request))
        return await self._hint(request, body, worker_pb2.CACHE_ACTION_EVICT)

    async def prefetch(self, request: Request) -> Response:
        body = parse(PrefixBody, await self._read(request))
        return await self._hint(request, body, worker_pb2.CACHE_ACTION_PREFETCH)

    async def _hint(
        self,
        request: Request,
        body: PrefixBody,
        action: worker_pb2.CacheAction.ValueType,
        seconds: float | None = None,
    ) -> Response:
        client, front = current_client.get(), self._front
        with front.admission.running("rest", client=client):
            model = await front.admission.serving()
            check_model(body.model or "", model.limits)
            body.check()
            if body.prompt is None:
                prompt = await front.preparation.chat_prompt(model, body.conversation())
            else:
                special = body.add_special_tokens is not False
                (prompt,) = await front.preparation.prompts(model, [body.prompt], "prompt", add_special_tokens=special)
            hint = front.preparation.prefix_hint(
                model,
                prompt,
                num_tokens=body.num_tokens or 0,
                cache_salt=body.cache_salt or "",
                seconds=seconds,
                client=client,
                hints=call_hints(request.headers),
            )
            return json_response(prefix_json(await unless_gone(request, front.prefix_hints.give(hint, action))))

    async def _generate(
        self, request: Request, body: TextBody, prompts: Prompts, make_answer: AnswerMaker, arrived_at: float
    ) -> Response:
        request_id = _request_id(request, body)
        hints = call_hints(request.headers, body.session())
        events = self._run(body, prompts, make_answer, request_id, arrived_at, hints)
        if not body.stream:
            async with aclosing(events):
                whole = await unless_gone(request, anext(events))
                await anext(events, None)  # to its end: closed before, it would count as cancelled
            return Response(whole, headers={"X-Request-Id": request_id}, media_type="application/json")
        try:
            first = await unless_gone(request, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(first, events, {"X-Request-Id": request_id})

    async def _run(
        self,
        body: TextBody,
        prompts: Prompts,
        make_answer: AnswerMaker,
        request_id: str,
        arrived_at: float,
        hints: CallHints,
    ) -> AsyncGenerator[bytes, None]:
        """The answer's bytes: one piece, or server-sent events."""
        client = current_client.get()
        with self._front.admission.running("rest", client=client) as ending, contextlib.ExitStack() as places:
            model = await self._front.admission.serving()
            check_model(body.model or "", model.limits)
            body.check()
            sampling = body.sampling()
            given = await prompts(model)
            requests = [
                self._front.preparation.request(
                    model,
                    prompt,
                    sampling,
                    request_id=request_id,
                    cache_salt=body.cache_salt or "",
                    retain=None if body.retain is None else body.retain.value(),
                    priority=body.priority or 0,
                    arrived_at=arrived_at,
                    default_max_tokens=DEFAULT_COMPLETION_TOKENS if isinstance(body, CompletionBody) else None,
                    name=body.field_name,
                    client=client,
                    hints=hints,
                    choices=body.choices,
                    num_prompts=len(given),
                )
                for prompt in given
            ]
            await self._front.preparation.check_guided(requests[0].sampling_params, requests[0].sampling_field)
            choices = candidates(requests, body.choices)
            places.enter_context(self._front.admission.gate.requests(client.name if client else "", len(choices) - 1))
            field = "prompt" if len(given) > 1 else body.choices.field()
            places.enter_context(self._front.generation.allowed(choices, field))
            answer = make_answer(choices, request_id)
            if not body.stream:
                yield msgspec.json.encode(await answer.whole())
                return
            async with aclosing(answer.events()) as events:
                async for event in events:
                    yield event
            if answer.failure is not None:
                ending.failed(answer.failure)

    async def models(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        served = self._model()
        if name != served["id"]:
            raise ModelNotFoundError(f"{name!r} is not served here; this is {served['id']!r}", field="model")
        return json_response(served)

    def _model(self) -> dict[str, object]:
        limits = self._front.admission.served().limits
        return {
            "id": limits.model,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "max_model_len": limits.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        body = parse(TokenizeBody, await self._read(request))
        self._front.admission.charge(current_client.get())
        model = self._front.admission.served()
        check_model(body.model or "", model.limits)
        body.check()
        name, text = ("prompt", body.prompt) if body.text is None else ("text", body.text)
        special = body.add_special_tokens is not False
        ids = await self._front.preparation.tokenize(model, text or "", name, add_special_tokens=special)
        of_vllm = {"tokens": ids} if name == "prompt" else {}
        known = {"count": len(ids), "max_model_len": model.limits.max_model_len}
        return json_response({"token_ids": ids, **of_vllm, **known})

    async def detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeBody, await self._read(request))
        self._front.admission.charge(current_client.get())
        model = self._front.admission.served()
        check_model(body.model or "", model.limits)
        body.check()
        skip = body.skip_special_tokens is not False
        name, ids = ("tokens", body.tokens) if body.token_ids is None else ("token_ids", body.token_ids)
        text = await self._front.preparation.detokenize(model, ids or [], name, skip_special_tokens=skip)
        return json_response({"text": text, **({"prompt": text} if name == "tokens" else {})})

    async def tokenizer_info(self, _request: Request) -> Response:
        return json_response(self._front.admission.served().tokenizer.described())

    async def health(self, _request: Request) -> Response:
        if reason := self._front.not_ready():
            return json_response({"status": "unavailable", "reason": reason}, status=503, headers={"Retry-After": "1"})
        return json_response({"status": "ok"})

    async def decisions(self, request: Request) -> Response:
        """A key sees the decisions of its tenant's requests, an operator's those of all."""
        given = request.query_params.get("limit", str(DEFAULT_DECISIONS))
        if not (given.isascii() and given.isdecimal() and 1 <= int(given[:6]) <= MAX_DECISIONS):
            raise InvalidArgumentError("limit", f"must be a number from 1 to {MAX_DECISIONS}")
        client = current_client.get()
        tenant = None if client is None or client.is_operator else client.tenant
        made = await self._front.latest_decisions(int(given), tenant)
        return json_response({"decisions": [dataclasses.asdict(decision) for decision in made]})

    async def version(self, _request: Request) -> Response:
        return json_response({"version": VERSION})

    async def docs(self, request: Request) -> Response:
        return Response(docs_page(request.app.openapi()), media_type="text/html")

    async def metrics(self, _request: Request) -> Response:
        return Response(self._front.part.metrics_page(), media_type=CONTENT_TYPE_LATEST)


def _request_id(request: Request, body: TextBody | EmbeddingsBody) -> str:
    """The client's, from the body or the header, or a new one; from here on each answer carries it."""
    name, given = "request_id", body.request_id
    if given is None:
        name, given = "X-Request-Id", request.headers.get("x-request-id")
    if given is None:
        given = new_request_id()
    else:
        check_request_id(given, name)
    request.state.request_id = given
    return given
