"""The REST gateway: OpenAI's paths, Baton's own few, and who answers each."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from router.api.rest import errors
from router.api.rest.body_types import Body
from router.api.rest.direct import DirectApp, Endpoint
from router.api.rest.disconnect import ClientGoneError
from router.api.rest.embeddings import EmbeddingHandlers, EmbeddingsBody
from router.api.rest.errors import as_baton, error_response
from router.api.rest.generate import GenerationHandlers
from router.api.rest.generation_bodies import ChatBody, CompletionBody
from router.api.rest.information import InformationHandlers
from router.api.rest.prefix import PrefixBody, PrefixHandlers, RetainPrefixBody
from router.api.rest.responses_body import ResponsesBody
from router.api.rest.sampling_fields import schemas
from router.api.rest.tokenization import DetokenizeBody, TokenizeBody, TokenizerHandlers
from router.serving.front import Front

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


def make_app(front: Front) -> ASGIApp:
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None)
    errors.install(app)
    generation, embedding, prefixes = GenerationHandlers(front), EmbeddingHandlers(front), PrefixHandlers(front)
    tokenizer, information = TokenizerHandlers(front), InformationHandlers(front)

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

    route("POST", "/v1/chat/completions", generation.chat, "Answer a conversation", ChatBody)
    route("POST", "/v1/completions", generation.completions, "Continue prompts", CompletionBody)
    route("POST", "/v1/responses", generation.responses, "Answer a conversation, item by item", ResponsesBody)
    route("POST", "/v1/embeddings", embedding.embeddings, "Vectors of texts", EmbeddingsBody)
    route("POST", "/v1/cache/retain", prefixes.retain, "Keep a prompt's KV for a while", RetainPrefixBody)
    route("POST", "/v1/cache/evict", prefixes.evict, "Forget a prompt's KV", PrefixBody)
    route("POST", "/v1/cache/prefetch", prefixes.prefetch, "Have a prompt's KV ready", PrefixBody)
    route("GET", "/v1/models", information.models, "The model that is served")
    route("GET", "/v1/models/{model:path}", information.model, "One model")
    route("POST", "/tokenize", tokenizer.tokenize, "Token ids of a text", TokenizeBody)
    route("POST", "/detokenize", tokenizer.detokenize, "The text of token ids", DetokenizeBody)
    route("GET", "/tokenizer_info", tokenizer.tokenizer_info, "Special tokens and the chat template, for harnesses")
    route("GET", "/version", information.version, "This router's version")
    route("GET", "/health", information.health, "Whether requests are taken")
    route("GET", "/ping", information.health, "The same as /health")
    route("GET", "/metrics", information.metrics, "Metrics for Prometheus")
    route("GET", "/docs", information.docs, "This API, for people")
    route("GET", "/decisions", information.decisions, "Where the last requests went, and why")
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
