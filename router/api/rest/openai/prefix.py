"""`/v1/cache/retain`, `evict` and `prefetch`: a prompt whose KV is to be kept for a while, forgotten, or ready."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from msgspec import UNSET

from common.errors import InvalidArgumentError
from common.validation import ModelLimits
from protos.baton.v1 import worker_pb2
from router.api.api_keys import current_client
from router.api.rest.http.errors import json_response
from router.api.rest.openai.body_types import Body, GivenRaw, session_of
from router.api.rest.openai.chat_messages import ChatMessage, conversation_of
from router.api.rest.openai.disconnect import unless_gone
from router.api.rest.openai.parsing import read
from router.api.rest.openai.stored_responses import StoredResponses
from router.api.rest.openai.tools import FunctionTool, JsonObject, chat_tools
from router.limits.clients import call_hints
from router.running.prefix_hints import Hinted
from router.serving.gateway import Gateway
from text.conversation import Conversation


class PrefixBody(Body, kw_only=True):
    """A prompt, as in a request for an answer."""

    model: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    prompt: str | list[int] | None = None
    previous_response_id: str | None = None  # the prompt of a stored response, with its answer
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    num_tokens: int | None = None  # of so many of its first tokens
    prompt_cache_key: GivenRaw = UNSET  # this and `user` name the session whose worker is meant
    user: GivenRaw = UNSET

    def check(self) -> None:
        """Raises `InvalidArgumentError` for what is well formed and still cannot be done."""
        unfit = {
            "messages": ("add_special_tokens",),
            "prompt": ("tools", "chat_template_kwargs", "chat_template"),
            "previous_response_id": ("add_special_tokens", "tools"),
        }
        given = [name for name in unfit if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidArgumentError("messages", "set one of messages, prompt and previous_response_id")
        for name in unfit[given[0]]:
            if getattr(self, name) is not None:
                raise InvalidArgumentError(name, f"is not for {given[0]}")

    def conversation(self, limits: ModelLimits) -> Conversation:
        tools = chat_tools(self.tools or (), None, parallel=True)
        options, template = self.chat_template_kwargs, self.chat_template
        return conversation_of(self.messages or [], tools, options, limits, chat_template=template)


class RetainPrefixBody(PrefixBody, kw_only=True):
    seconds: float


def prefix_json(hinted: Hinted) -> JsonObject:
    return {
        "num_tokens": hinted.num_tokens,
        "num_blocks": hinted.num_blocks,
        "workers": [dataclasses.asdict(one) for one in hinted.workers],
    }


class PrefixHandlers:
    def __init__(self, gateway: Gateway, stored: StoredResponses | None = None) -> None:
        self._gateway = gateway
        self._stored = stored

    async def retain(self, request: Request) -> Response:
        body = await read(RetainPrefixBody, request, self._gateway.admission)
        return await self._hint(request, body, worker_pb2.CACHE_ACTION_RETAIN, body.seconds)

    async def evict(self, request: Request) -> Response:
        body = await read(PrefixBody, request, self._gateway.admission)
        return await self._hint(request, body, worker_pb2.CACHE_ACTION_EVICT)

    async def prefetch(self, request: Request) -> Response:
        body = await read(PrefixBody, request, self._gateway.admission)
        return await self._hint(request, body, worker_pb2.CACHE_ACTION_PREFETCH)

    async def _hint(
        self,
        request: Request,
        body: PrefixBody,
        action: worker_pb2.CacheAction.ValueType,
        seconds: float | None = None,
    ) -> Response:
        client, gateway = current_client.get(), self._gateway
        with gateway.admission.running("rest", client=client):
            model = await gateway.admission.serving(body.model or "")
            body.check()
            session = session_of(body)
            if body.previous_response_id is not None:
                if self._stored is None:
                    raise InvalidArgumentError("previous_response_id", "this router stores no responses")
                continued = await self._stored.continued(body.previous_response_id, request.state.held_bytes)
                conversation = continued.conversation(body.chat_template_kwargs, body.chat_template, model.limits)
                prompt = await gateway.preparation.chat_prompt(model, conversation, client=client)
                session = session or continued.session
            elif body.prompt is None:
                prompt = await gateway.preparation.chat_prompt(model, body.conversation(model.limits), client=client)
            else:
                special = body.add_special_tokens is not False
                (prompt,) = await gateway.preparation.prompts(
                    model, [body.prompt], "prompt", add_special_tokens=special, client=client
                )
            hint = gateway.preparation.prefix_hint(
                model,
                prompt,
                num_tokens=body.num_tokens or 0,
                cache_salt=body.cache_salt or "",
                seconds=seconds,
                client=client,
                hints=call_hints(request.headers, session),
            )
            return json_response(prefix_json(await unless_gone(request, gateway.prefix_hints.give(hint, action))))
