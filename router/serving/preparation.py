"""From what a client wrote to a request that workers take: validated, rendered, tokenized."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from common.validation import (
    FieldName,
    SamplingFields,
    check_cache_salt,
    check_model,
    check_priority,
    check_prompt,
    check_request_id,
    check_text,
    validate_sampling,
)
from router.fleet.registry import ServedModel
from router.serving.chat_template import Message
from router.serving.clients import ApiClient
from router.serving.request import GenerationRequest, Prompt, new_request_id


class Preparation:
    """Shared by both interfaces of a router."""

    def __init__(self, *, request_timeout_s: float) -> None:
        self._request_timeout_s = request_timeout_s

    async def text_prompt(
        self, model: ServedModel, text: str, field: str, *, add_special_tokens: bool = True
    ) -> Prompt:
        check_text(text, model.limits, field)
        ids = await model.tokenizer.encode(text, field=field, add_special_tokens=add_special_tokens)
        return Prompt(ids, field)

    async def chat_prompt(self, model: ServedModel, messages: Sequence[Message]) -> Prompt:
        """The template writes special tokens out itself, so none are added."""
        total = "".join(message["content"] for message in messages)
        if total:
            check_text(total, model.limits, "messages")
        text = model.tokenizer.render_chat(messages)
        return await self.text_prompt(model, text, "messages", add_special_tokens=False)

    def request(
        self,
        model: ServedModel,
        prompt: Prompt,
        fields: SamplingFields,
        *,
        model_name: str = "",
        request_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        arrived_at: float,
        timeout_s: float | None = None,
        default_max_tokens: int | None = None,
        name: FieldName = str,
        client: ApiClient | None = None,
    ) -> GenerationRequest:
        """Validates all of it. `timeout_s` is the client's own deadline, counted from `arrived_at`; `client`
        is whose key came with the request."""
        check_model(model_name, model.limits)
        if request_id:
            check_request_id(request_id)
        check_cache_salt(cache_salt)
        check_priority(priority)
        check_prompt(prompt.token_ids, model.limits, prompt.field)
        params = validate_sampling(
            fields,
            model.limits,
            num_prompt_tokens=len(prompt.token_ids),
            draw_seed=lambda: secrets.randbits(63),
            default_max_tokens=default_max_tokens,
            name=name,
        )
        return GenerationRequest(
            request_id=request_id or new_request_id(),
            model=model,
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            cache_salt=client.cache_salt(cache_salt) if client else cache_salt,
            priority=priority,
            arrived_at=arrived_at,
            deadline=arrived_at + (self._request_timeout_s if timeout_s is None else timeout_s),
            client=client.name if client else "",
        )
