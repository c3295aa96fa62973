"""The REST gateway: OpenAI's paths, and Baton's own few."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import ClientDisconnect

from common.errors import InvalidArgumentError, ModelNotFoundError
from common.validation import check_model, check_request_id
from router.api.api_keys import current_client
from router.api.rest import errors
from router.api.rest.answer import Answer
from router.api.rest.body import read_body
from router.api.rest.body_types import Body
from router.api.rest.disconnect import ClientGoneError, EventStream, unless_gone
from router.api.rest.errors import as_baton, error_response, json_response
from router.api.rest.formats import ChatFormat, CompletionFormat
from router.api.rest.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    parse,
    schemas,
)
from router.fleet.registry import ServedModel
from router.serving.clients import CallHints, call_hints
from router.serving.decisions import MAX_DECISIONS
from router.serving.front import Front
from router.serving.request import Prompt, new_request_id

DEFAULT_DECISIONS = 50  # at /decisions
DEFAULT_COMPLETION_TOKENS = 16  # what OpenAI's text completion gives if max_tokens is not set
CLIENT_GONE_STATUS = 499  # nobody reads it; access logs know it

BODIES: tuple[type[Body], ...] = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)

Endpoint = Callable[[Request], Awaitable[Response]]
Prompts = Callable[[ServedModel], Awaitable[list[Prompt]]]


def make_app(front: Front) -> FastAPI:
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None)
    errors.install(app)
    gateway = _Gateway(front)

    references, components = schemas(BODIES)

    def route(method: str, path: str, handler: Endpoint, body: type[Body] | None = None) -> None:
        extra: dict[str, object] | None = None
        if body is not None:
            schema = references[BODIES.index(body)]
            extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
        app.add_api_route(path, _guarded(handler), methods=[method], response_model=None, openapi_extra=extra)

    route("POST", "/v1/chat/completions", gateway.chat, ChatBody)
    route("POST", "/v1/completions", gateway.completions, CompletionBody)
    route("GET", "/v1/models", gateway.models)
    route("GET", "/v1/models/{model:path}", gateway.model)
    route("POST", "/tokenize", gateway.tokenize, TokenizeBody)
    route("POST", "/detokenize", gateway.detokenize, DetokenizeBody)
    route("GET", "/health", gateway.health)
    route("GET", "/metrics", gateway.metrics)
    route("GET", "/decisions", gateway.decisions)
    page = app.openapi()
    page.setdefault("components", {}).setdefault("schemas", {}).update(components)
    return app


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

        async def prompts(model: ServedModel) -> list[Prompt]:
            return [await self._front.preparation.chat_prompt(model, body.conversation())]

        return await self._generate(request, body, prompts, arrived_at)

    async def completions(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        body = parse(CompletionBody, await self._read(request))

        async def prompts(model: ServedModel) -> list[Prompt]:
            special = body.add_special_tokens is not False
            return await self._front.preparation.prompts(model, body.prompts(), "prompt", add_special_tokens=special)

        return await self._generate(request, body, prompts, arrived_at)

    async def _generate(
        self, request: Request, body: ChatBody | CompletionBody, prompts: Prompts, arrived_at: float
    ) -> Response:
        request_id = _request_id(request, body)
        hints = call_hints(request.headers, body.session())
        events = self._run(body, prompts, request_id, arrived_at, hints)
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
        self, body: ChatBody | CompletionBody, prompts: Prompts, request_id: str, arrived_at: float, hints: CallHints
    ) -> AsyncGenerator[bytes, None]:
        """The answer's bytes: one piece, or server-sent events."""
        client = current_client.get()
        with self._front.admission.running("rest") as ending, contextlib.ExitStack() as places:
            model = await self._front.admission.serving()
            check_model(body.model or "", model.limits)
            body.check()
            is_chat = isinstance(body, ChatBody)
            sampling = body.sampling()
            given = await prompts(model)
            requests = [
                self._front.preparation.request(
                    model,
                    prompt,
                    sampling,
                    request_id=request_id,
                    cache_salt=body.cache_salt or "",
                    priority=body.priority or 0,
                    arrived_at=arrived_at,
                    default_max_tokens=None if is_chat else DEFAULT_COMPLETION_TOKENS,
                    name=body.field_name,
                    client=client,
                    hints=hints,
                    num_answers=len(given) * body.num_choices,
                )
                for prompt in given
            ]
            await self._front.preparation.check_guided(requests[0].sampling_params, body.field_name)
            choices = [
                prepared.numbered(number * body.num_choices + index)
                for number, prepared in enumerate(requests)
                for index in range(body.num_choices)
            ]
            places.enter_context(self._front.admission.gate.requests(client.name if client else "", len(choices) - 1))
            answer = Answer(
                self._front.generation,
                choices,
                ChatFormat() if is_chat else CompletionFormat(),
                request_id=request_id,
                num_choices=body.num_choices,
                wants_logprobs="logprobs" in sampling,
                wants_usage_chunk=body.wants_usage_chunk,
                wants_usage_so_far=body.wants_usage_so_far,
            )
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
        model = self._front.admission.served()
        check_model(body.model or "", model.limits)
        name = "prompt" if body.text is None else "text"
        text = (body.prompt if body.text is None else body.text) or ""
        special = body.add_special_tokens is not False
        ids = await self._front.preparation.tokenize(model, text, name, add_special_tokens=special)
        return json_response({"token_ids": ids, "count": len(ids), "max_model_len": model.limits.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeBody, await self._read(request))
        model = self._front.admission.served()
        check_model(body.model or "", model.limits)
        skip = body.skip_special_tokens is not False
        text = await self._front.preparation.detokenize(model, body.token_ids, "token_ids", skip_special_tokens=skip)
        return json_response({"text": text})

    async def health(self, _request: Request) -> Response:
        if reason := self._front.admission.not_ready():
            return json_response({"status": "unavailable", "reason": reason}, status=503, headers={"Retry-After": "1"})
        return json_response({"status": "ok"})

    async def decisions(self, request: Request) -> Response:
        """A key of a tenant sees the decisions of that tenant's requests."""
        given = request.query_params.get("limit", str(DEFAULT_DECISIONS))
        if not (given.isascii() and given.isdecimal() and 1 <= int(given[:6]) <= MAX_DECISIONS):
            raise InvalidArgumentError("limit", f"must be a number from 1 to {MAX_DECISIONS}")
        client = current_client.get()
        tenant = client.tenant if client and client.tenant else None
        made = self._front.decisions.latest(int(given), tenant)
        return json_response({"decisions": [dataclasses.asdict(decision) for decision in made]})

    async def metrics(self, _request: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


def _request_id(request: Request, body: GenerationBody) -> str:
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
