"""Messages as OpenAI's chat has them, and the conversation that they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec import UNSET

from common.errors import InvalidArgumentError
from common.validation import ModelLimits, check_messages
from router.api.rest.openai.body_types import Body, GivenRaw, refuse_if_asked
from router.api.rest.openai.tools import ToolCall, calls_of
from text.conversation import (
    CallIds,
    Conversation,
    Json,
    Tools,
    ValueCount,
    check_continued,
    check_num_parts,
    check_options,
    joined_parts,
    make_message,
    named_results,
)


class ContentPart(Body, kw_only=True):
    type: str = ""
    text: str | None = None

    # Fields of parts that are not text.
    refusal: str | None = None
    image_url: GivenRaw = UNSET
    input_audio: GivenRaw = UNSET
    file: GivenRaw = UNSET

    # They mark where a prompt's cached part may end. Here it may end anywhere, so they change nothing.
    prompt_cache_breakpoint: GivenRaw = UNSET
    cache_control: GivenRaw = UNSET

    media: ClassVar[tuple[str, ...]] = ("image_url", "input_audio", "file")
    not_text: ClassVar[tuple[str, ...]] = (*media, "refusal")


class ChatMessage(Body, kw_only=True):
    type: str | None = None  # "text" from lm-eval, "message" in responses
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of it: vLLM's and OpenRouter's

    refusal: str | None = None  # an assistant's words, in place of content or after it

    # What answers hold and clients send back; each must be empty.
    annotations: GivenRaw = UNSET
    audio: GivenRaw = UNSET
    function_call: GivenRaw = UNSET

    unsupported: ClassVar[tuple[str, ...]] = ("annotations", "audio", "function_call")


def conversation_of(
    given: Sequence[ChatMessage],
    tools: Tools,
    options: dict[str, Any] | None,
    limits: ModelLimits,
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    chat_template: str | None = None,
) -> Conversation:
    """Counts before it looks at anything. Raises `InvalidArgumentError`."""
    if add_generation_prompt and continue_final_message:
        raise InvalidArgumentError("continue_final_message", "cannot be together with add_generation_prompt")
    check_messages(len(given), limits, "messages")
    check_num_parts(sum(len(one.content) for one in given if isinstance(one.content, list)), "messages")
    values, ids = ValueCount(), CallIds()
    messages = [_message(message, f"messages[{index}]", values, ids) for index, message in enumerate(given)]
    check_options(options or {}, "chat_template_kwargs")
    if continue_final_message:
        check_continued(messages, "continue_final_message")
    return Conversation(
        messages=named_results(messages),
        tools=tools,
        template_options=options or {},
        asks_answer=add_generation_prompt is not False,
        continues_last=bool(continue_final_message),
        chat_template=chat_template or "",
    )


class ChatInPlace(Body, kw_only=True):
    """A body that may have a chat in the place of a text, as vLLM's clients send it."""

    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    add_special_tokens: bool | None = None  # of the text

    of_chat: ClassVar[tuple[str, ...]] = (
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "chat_template",
    )
    of_text: ClassVar[tuple[str, ...]] = ()

    def check_chat(self) -> None:
        """Raises `InvalidArgumentError` for what is of a text and of a chat at once."""
        for name in self.of_chat if self.messages is None else self.of_text:
            if getattr(self, name) is not None:
                reason = "is only for messages" if self.messages is None else "cannot be together with messages"
                raise InvalidArgumentError(name, reason)
        if self.messages is not None and self.add_special_tokens:
            raise InvalidArgumentError("add_special_tokens", "is not for messages: the chat template writes them")

    def conversation_with(self, tools: Tools, limits: ModelLimits, *, asks_answer: bool = True) -> Conversation:
        """`asks_answer`: what holds if the client says nothing of `add_generation_prompt`."""
        asks = asks_answer and not self.continue_final_message
        return conversation_of(
            self.messages or [],
            tools,
            self.chat_template_kwargs,
            limits,
            add_generation_prompt=asks if self.add_generation_prompt is None else self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
        )


def _message(message: ChatMessage, where: str, values: ValueCount, ids: CallIds) -> Json:
    refuse_if_asked(message, message.unsupported, where=where)
    if message.type not in (None, "text", "message"):
        raise InvalidArgumentError(f"{where}.type", f'must be "text" or "message", not {message.type!r}')
    if None not in (names := (message.reasoning, message.reasoning_content)) and names[0] != names[1]:
        raise InvalidArgumentError(f"{where}.reasoning", "differs from reasoning_content, another name of it")
    if message.reasoning and message.role != "assistant":
        raise InvalidArgumentError(f"{where}.reasoning", "only an assistant's message can have it")
    return make_message(
        where,
        role=message.role,
        content=_said(message, where),
        name=message.name,
        calls=calls_of(message.tool_calls, where) if message.tool_calls else (),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning_content or message.reasoning,
        values=values,
        ids=ids,
    )


def _said(message: ChatMessage, where: str) -> str | None:
    """The text of a message, a refusal as well, since the model said that, too; None if it has neither."""
    refuses = message.refusal or any(p.type == "refusal" for p in message.content or () if isinstance(p, ContentPart))
    if refuses and message.role != "assistant":
        raise InvalidArgumentError(f"{where}.refusal", "only an assistant's message can have it")
    content = None if message.content is None else _content(message.content, f"{where}.content")
    return joined_parts(text for text in (content, message.refusal) if text) if message.refusal else content


def _content(content: str | list[ContentPart], where: str) -> str:
    """The text of a message, which is given as a string, or as parts that are joined by line breaks."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type == "refusal":
            if part.refusal is None:
                raise InvalidArgumentError(f"{where}[{index}].refusal", "must be a string")
            refuse_if_asked(part, ("text", *part.media), 'is not a field of type "refusal"', where=f"{where}[{index}]")
            texts.append(part.refusal)
            continue
        if part.type != "text":
            raise InvalidArgumentError(f"{where}[{index}].type", 'only parts of type "text" are supported')
        if part.text is None:
            raise InvalidArgumentError(f"{where}[{index}].text", "must be a string")
        refuse_if_asked(part, part.not_text, 'is not a field of type "text"', where=f"{where}[{index}]")
        texts.append(part.text)
    return joined_parts(texts)
