"""The kinds of endpoints, by the name that `--backend` takes. `openai` and `openai-chat` are vLLM's names."""

from __future__ import annotations

from typing import Protocol

from bench.serving.endpoint import Endpoint, Target

BACKENDS = {
    "openai": "POST /v1/completions",
    "openai-chat": "POST /v1/chat/completions",
    "baton": "baton.v1 Generate, over gRPC",
    "baton-chat": "baton.v1 Chat, over gRPC",
}
DEFAULT_URLS = {"openai": "http://127.0.0.1:8000", "baton": "127.0.0.1:50051"}


def default_url(backend: str) -> str:
    return DEFAULT_URLS[backend.removesuffix("-chat")]


class Opened(Endpoint, Protocol):
    def use_model(self, name: str) -> None: ...


def open_endpoint(target: Target) -> Opened:
    """Call it within the event loop that will ask. Raises `ConfigError`."""
    is_chat = target.backend.endswith("-chat")
    if target.backend.startswith("openai"):
        from bench.serving.openai import OpenAiEndpoint

        return OpenAiEndpoint(target, is_chat=is_chat)
    from bench.serving.grpc_endpoint import BatonEndpoint

    return BatonEndpoint(target, is_chat=is_chat)
