"""The REST gateway: OpenAI's paths, Anthropic's, Baton's own few, and who answers each."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from common.version import VERSION
from router.api.rest import oip, openapi
from router.api.rest.anthropic.count_tokens import CountTokensHandler
from router.api.rest.anthropic.messages_body import CountTokensBody, MessagesBody
from router.api.rest.entrance import DirectApp, Endpoint, guarded
from router.api.rest.generate import GenerationHandlers
from router.api.rest.http import errors
from router.api.rest.http.auth import OPEN_PATHS
from router.api.rest.http.error_body import has_anthropic_errors
from router.api.rest.information import DEFAULT_LATEST, InformationHandlers
from router.api.rest.openai.batches import BatchHandlers
from router.api.rest.openai.body_types import Body
from router.api.rest.openai.embeddings import EmbeddingHandlers, EmbeddingsBody
from router.api.rest.openai.files import FileHandlers
from router.api.rest.openai.generation_bodies import ChatBody, CompletionBody
from router.api.rest.openai.prefix import PrefixBody, PrefixHandlers, RetainPrefixBody
from router.api.rest.openai.responses_body import ResponsesBody
from router.api.rest.openai.stored_responses import StoredResponses
from router.api.rest.openai.tokenization import DetokenizeBody, TokenizeBody, TokenizerHandlers
from router.api.ui.live import Live
from router.running.decisions import MAX_DECISIONS
from router.running.known_requests import MAX_FINISHED
from router.serving.gateway import Gateway

BODIES: tuple[type[Body], ...] = (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    MessagesBody,
    CountTokensBody,
    EmbeddingsBody,
    RetainPrefixBody,
    PrefixBody,
    TokenizeBody,
    DetokenizeBody,
)


def make_app(
    gateway: Gateway,
    root_path: str = "",
    live: Live | None = None,
    batches: tuple[FileHandlers, BatchHandlers] | None = None,
    stored: StoredResponses | None = None,
) -> ASGIApp:
    """`live`: what the live page shows; None if there is no page. `batches`: None if there are none. `stored`: None if
    responses are not stored."""
    servers = [{"url": root_path}] if root_path else None
    app = FastAPI(title="Baton", version=VERSION, docs_url=None, redoc_url=None, servers=servers)
    described = FastAPI(title="Baton", version=VERSION, servers=servers)  # has the same routes, for the page alone
    errors.install(app)
    generation, embedding = GenerationHandlers(gateway, stored), EmbeddingHandlers(gateway)
    prefixes = PrefixHandlers(gateway, stored)
    tokenizer, information = TokenizerHandlers(gateway), InformationHandlers(gateway)
    count_tokens = CountTokensHandler(gateway).count_tokens

    references, components = openapi.schemas(BODIES)
    direct: dict[str, Endpoint] = {}

    describing: list[Callable[[], None]] = []

    def route(method: str, path: str, handler: Endpoint) -> None:
        """FastAPI looks into each handler for what it may take, for a millisecond, and these take requests."""
        app.router.routes.append(PlainRoute(path, handler, method))

    def add(method: str, path: str, handler: Endpoint, summary: str, operation: openapi.Json) -> None:
        def describe() -> None:
            described.add_api_route(
                path,
                handler,
                methods=[method],
                response_model=None,
                response_class=Response,  # the page says of answers what `operation` says, and nothing else
                summary=summary,
                openapi_extra=operation | ({"security": []} if path in OPEN_PATHS else {}),
            )

        describing.append(describe)
        route(method, path, handler)

    def post(path: str, handler: Endpoint, summary: str, body: type[Body], answer: openapi.Json) -> None:
        direct[path] = handler = guarded(handler)
        error = openapi.ANTHROPIC_ERROR if has_anthropic_errors(path) else openapi.ERROR
        add("POST", path, handler, summary, openapi.operation(answer, body=references[BODIES.index(body)], error=error))

    def get(
        path: str,
        handler: Endpoint,
        summary: str,
        answer: openapi.Json,
        *parameters: openapi.Json,
        unavailable: openapi.Json | None = None,
    ) -> None:
        operation = openapi.operation(answer, parameters=parameters, unavailable=unavailable)
        add("GET", path, guarded(handler), summary, operation)

    embeddings, hinted = openapi.json_answer("Embeddings"), openapi.json_answer("PrefixHinted")
    post("/v1/chat/completions", generation.chat, "Answer a conversation", ChatBody, openapi.CHAT_ANSWER)
    post("/v1/completions", generation.completions, "Continue prompts", CompletionBody, openapi.COMPLETION_ANSWER)
    items = "Answer a conversation, item by item"
    post("/v1/responses", generation.responses, items, ResponsesBody, openapi.RESPONSE_ANSWER)
    post(
        "/v1/messages",
        generation.messages,
        "Answer a conversation, block by block",
        MessagesBody,
        openapi.MESSAGE_ANSWER,
    )
    counted = openapi.json_answer("MessageTokens")
    post("/v1/messages/count_tokens", count_tokens, "How long a prompt is", CountTokensBody, counted)
    post("/v1/embeddings", embedding.embeddings, "Vectors of texts or of a chat", EmbeddingsBody, embeddings)
    post("/v1/cache/retain", prefixes.retain, "Keep a prompt's KV for a while", RetainPrefixBody, hinted)
    post("/v1/cache/evict", prefixes.evict, "Forget a prompt's KV", PrefixBody, hinted)
    post("/v1/cache/prefetch", prefixes.prefetch, "Have a prompt's KV ready", PrefixBody, hinted)
    get("/v1/models", information.models, "The model that is served", openapi.json_answer("ModelList"))
    model = openapi.json_answer("Model")
    get("/v1/models/{model:path}", information.model, "One model", model, openapi.MODEL_PARAMETER)
    tokens, text = openapi.json_answer("Tokens"), openapi.json_answer("Text")
    post("/tokenize", tokenizer.tokenize, "Token ids of a text or a chat", TokenizeBody, tokens)
    post("/detokenize", tokenizer.detokenize, "The text of token ids", DetokenizeBody, text)
    special = "Special tokens and the chat template, for harnesses"
    get("/tokenizer_info", tokenizer.tokenizer_info, special, openapi.json_answer("TokenizerInfo"))
    get("/version", information.version, "This router's version", openapi.json_answer("Version"))
    healthy, unavailable = openapi.json_answer("Health"), openapi.json_answer("Health", "No requests are taken now")
    get("/health", information.health, "Whether requests are taken", healthy, unavailable=unavailable)
    get("/ping", information.health, "The same as /health", healthy, unavailable=unavailable)
    get("/metrics", information.metrics, "Metrics for Prometheus", openapi.METRICS_ANSWER)
    get("/docs", information.docs, "This API, for people", openapi.PAGE_ANSWER)
    decisions = openapi.json_answer("Decisions")
    limit = openapi.query_number("limit", DEFAULT_LATEST, MAX_DECISIONS, "how many of the latest decisions to return")
    get("/decisions", information.decisions, "Where the last requests went, and why", decisions, limit)
    limit = openapi.query_number("limit", DEFAULT_LATEST, MAX_FINISHED, "how many of the latest requests to return")
    get("/requests", information.requests, "The last requests that ended", openapi.json_answer("Requests"), limit)
    ended = openapi.json_answer("FinishedRequest")
    get("/requests/{request_id:path}", information.request, "One of them", ended, openapi.REQUEST_ID_PARAMETER)
    for method, path, handler in oip.routes(gateway):  # described by their own protocol
        route(method, path, handler)
    if stored is not None:
        for method, path, handler in _stored_routes(stored):
            route(method, path, guarded(handler))
    if batches is not None:
        for method, path, handler in _batch_routes(*batches):
            route(method, path, guarded(handler))
    if live is not None:
        route("GET", "/ui/events", guarded(live.events))

    def page() -> openapi.Json:
        """Made when it is first asked for: it takes as long as all else that a router does before it serves."""
        while describing:
            describing.pop(0)()
        made = described.openapi()
        parts = made.setdefault("components", {})
        parts.setdefault("schemas", {}).update({**components, **openapi.COMPONENTS})
        parts["securitySchemes"], made["security"] = openapi.SECURITY_SCHEMES, openapi.SECURITY
        return made

    app.openapi = page  # type: ignore[method-assign]
    return DirectApp(app, direct, root_path)


class PlainRoute(Route):
    """Has its one method, and no HEAD that it was not given."""

    def __init__(self, path: str, handler: Endpoint, method: str) -> None:
        super().__init__(path, handler, methods=[method])
        self.methods = {method}


def _stored_routes(stored: StoredResponses) -> list[tuple[str, str, Endpoint]]:
    """(method, path, handler)"""
    return [
        ("GET", "/v1/responses/{response_id}", stored.told),
        ("DELETE", "/v1/responses/{response_id}", stored.delete),
        ("GET", "/v1/responses/{response_id}/input_items", stored.input_items),
        ("POST", "/v1/responses/{response_id}/cancel", stored.cancel),
    ]


def _batch_routes(files: FileHandlers, batches: BatchHandlers) -> list[tuple[str, str, Endpoint]]:
    """(method, path, handler)"""
    return [
        ("POST", "/v1/files", files.upload),
        ("GET", "/v1/files", files.listed),
        ("GET", "/v1/files/{file_id}", files.told),
        ("GET", "/v1/files/{file_id}/content", files.content),
        ("DELETE", "/v1/files/{file_id}", files.delete),
        ("POST", "/v1/batches", batches.create),
        ("GET", "/v1/batches", batches.listed),
        ("GET", "/v1/batches/{batch_id}", batches.told),
        ("POST", "/v1/batches/{batch_id}/cancel", batches.cancel),
    ]
