"""`/v1/cache/retain`, `evict` and `prefetch`: a prompt whose KV is to be kept for a while, forgotten, or ready."""

from __future__ import annotations

import dataclasses
from typing import Any

from common.errors import InvalidArgumentError
from router.api.rest.body_types import Body
from router.api.rest.schema import ChatMessage, conversation_of
from router.api.rest.tools import FunctionTool, JsonObject, chat_tools
from router.serving.conversation import Conversation
from router.serving.prefix_hints import Hinted


class PrefixBody(Body, kw_only=True):
    """A prompt, as in a request for an answer."""

    model: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt: str | list[int] | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    num_tokens: int | None = None  # of so many of its first tokens

    def check(self) -> None:
        """Raises `InvalidArgumentError` for what is well formed and still cannot be done."""
        if (self.messages is None) is (self.prompt is None):
            raise InvalidArgumentError("messages", "set one of messages and prompt")
        mine, others = ("messages", ("add_special_tokens",)), ("prompt", ("tools", "chat_template_kwargs"))
        given, unfit = mine if self.prompt is None else others
        for name in unfit:
            if getattr(self, name) is not None:
                raise InvalidArgumentError(name, f"is not for {given}")

    def conversation(self) -> Conversation:
        tools = chat_tools(self.tools or (), None, parallel=True)
        return conversation_of(self.messages or [], tools, self.chat_template_kwargs)


class RetainPrefixBody(PrefixBody, kw_only=True):
    seconds: float


def prefix_json(hinted: Hinted) -> JsonObject:
    return {
        "num_tokens": hinted.num_tokens,
        "num_blocks": hinted.num_blocks,
        "workers": [dataclasses.asdict(one) for one in hinted.workers],
    }
