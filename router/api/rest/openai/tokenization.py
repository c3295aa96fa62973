"""`/tokenize`, `/detokenize` and `/tokenizer_info`: what a model's tokenizer makes of a text, and of token ids."""

from __future__ import annotations

from typing import ClassVar

from fastapi import Request
from fastapi.responses import Response

from common.errors import InvalidArgumentError
from common.validation import ModelLimits
from router.api.api_keys import current_client
from router.api.rest.http.errors import json_response
from router.api.rest.openai.body_types import Body
from router.api.rest.openai.chat_messages import ChatInPlace
from router.api.rest.openai.parsing import read
from router.api.rest.openai.tools import FunctionTool, JsonObject, chat_tools
from router.fleet.served_model import ServedModel
from router.serving.gateway import Gateway
from text.conversation import Conversation


class TokenizeBody(ChatInPlace, kw_only=True):
    model: str | None = None
    text: str | None = None
    prompt: str | None = None  # vLLM's name for `text`; the answer then has its name for `token_ids`, too
    tools: list[FunctionTool] | None = None  # of `messages`
    return_token_strs: bool | None = None

    of_chat: ClassVar[tuple[str, ...]] = (*ChatInPlace.of_chat, "tools")
    of_text: ClassVar[tuple[str, ...]] = ("text", "prompt")

    def check(self) -> None:
        self.check_chat()
        if self.messages is not None:
            return
        if self.text is None and self.prompt is None:
            raise InvalidArgumentError("text", "is required")
        if None not in (self.text, self.prompt):
            raise InvalidArgumentError("prompt", "cannot be together with text, another name of it")

    def conversation(self, limits: ModelLimits) -> Conversation:
        return self.conversation_with(chat_tools(self.tools or (), None, parallel=True), limits)


class DetokenizeBody(Body, kw_only=True):
    model: str | None = None
    token_ids: list[int] | None = None
    tokens: list[int] | None = None  # vLLM's name for `token_ids`; the answer then has its name for `text`, too
    skip_special_tokens: bool | None = None

    def check(self) -> None:
        if self.token_ids is None and self.tokens is None:
            raise InvalidArgumentError("token_ids", "is required")
        if None not in (self.token_ids, self.tokens):
            raise InvalidArgumentError("tokens", "cannot be together with token_ids, another name of it")


class TokenizerHandlers:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def tokenize(self, request: Request) -> Response:
        body = await read(TokenizeBody, request, self._gateway.admission)
        self._gateway.admission.charge(current_client.get())
        model = self._gateway.admission.served(body.model or "")
        body.check()
        ids = await self._token_ids(model, body)
        of_vllm: JsonObject = {"tokens": ids, "token_strs": None} if body.text is None else {}
        if body.return_token_strs:
            of_vllm["token_strs"] = model.tokenizer.token_strings(ids)
        known = {"count": len(ids), "max_model_len": model.limits.max_model_len}
        return json_response({"token_ids": ids, **of_vllm, **known})

    async def _token_ids(self, model: ServedModel, body: TokenizeBody) -> list[int]:
        preparation, client = self._gateway.preparation, current_client.get()
        if body.messages is not None:
            conversation = body.conversation(model.limits)
            return (await preparation.chat_prompt(model, conversation, has_answer=False, client=client)).token_ids
        name, text = ("prompt", body.prompt) if body.text is None else ("text", body.text)
        special = body.add_special_tokens is not False
        return await preparation.tokenize(model, text or "", name, add_special_tokens=special, client=client)

    async def detokenize(self, request: Request) -> Response:
        body = await read(DetokenizeBody, request, self._gateway.admission)
        self._gateway.admission.charge(current_client.get())
        model = self._gateway.admission.served(body.model or "")
        body.check()
        skip = body.skip_special_tokens is not False
        name, ids = ("tokens", body.tokens) if body.token_ids is None else ("token_ids", body.token_ids)
        text = await self._gateway.preparation.detokenize(
            model, ids or [], name, skip_special_tokens=skip, client=current_client.get()
        )
        return json_response({"text": text, **({"prompt": text} if name == "tokens" else {})})

    async def tokenizer_info(self, _request: Request) -> Response:
        return json_response(self._gateway.admission.served().tokenizer.described())
