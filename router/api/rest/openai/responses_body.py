"""The body of `/v1/responses`. It brings its whole conversation, or continues one that the router has stored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from msgspec import UNSET

from common.choices import Choices
from common.errors import InvalidArgumentError
from common.guided import Guided
from common.validation import ModelLimits, check_messages
from router.api.rest.openai.body_types import (
    AnswerBody,
    Body,
    GivenRaw,
    is_given,
    parameters_in,
    refuse_if_asked,
    refuse_unless,
    with_sampling,
)
from router.api.rest.openai.guided import schema_text
from router.api.rest.openai.responses_input import InputItem, items_of, num_parts, turns_of
from router.api.rest.openai.tools import JsonObject, allowed_mode
from text.conversation import (
    CallIds,
    Conversation,
    Json,
    Tool,
    Tools,
    ValueCount,
    check_effort,
    check_num_parts,
    check_num_tools,
    check_options,
    make_message,
    make_tools,
    named_results,
)

LOGPROBS, KEPT_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
INCLUDED = (LOGPROBS, KEPT_REASONING)  # what `include` may ask for


class ResponseTool(Body, kw_only=True):
    kinds = ("function",)

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolName(Body, kw_only=True):
    kinds = ("function",)

    type: str
    name: str


class ResponseToolChoice(Body, kw_only=True):
    kinds = ("function", "allowed_tools")

    type: str
    name: str = ""
    mode: str | None = None  # this and `tools`: of type allowed_tools
    tools: list[ResponseToolName] | None = None

    def json(self) -> JsonObject:
        if self.type != "allowed_tools":
            return {"type": self.type, "name": self.name}
        names = [{"type": one.type, "name": one.name} for one in self.tools or ()]
        return {"type": self.type, "mode": self.mode, "tools": names}


class TextFormat(Body, kw_only=True):
    type: str
    name: str | None = None  # this and the description are notes
    description: str | None = None
    schema: GivenRaw = UNSET
    strict: bool | None = None  # every schema is kept to the letter


class TextOptions(Body, kw_only=True):
    format: TextFormat | None = None
    verbosity: GivenRaw = UNSET


class ResponseStreamOptions(Body, kw_only=True):
    include_obfuscation: GivenRaw = UNSET  # whether chunks are padded to hide their lengths; none are


class Reasoning(Body, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # an older name


@with_sampling
class ResponsesBody(AnswerBody, kw_only=True, dict=True):
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    truncation: str | None = None  # nothing is cut: input that does not fit is refused
    reasoning: Reasoning | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[str] | None = None
    include_metrics: bool | None = None  # see `GenerationBody`
    top_logprobs: int | None = None

    # Not OpenAI's.
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None

    # Of what is stored, as `store`.
    previous_response_id: str | None = None
    conversation: GivenRaw = UNSET
    prompt: GivenRaw = UNSET
    background: GivenRaw = UNSET

    context_management: GivenRaw = UNSET
    max_tool_calls: GivenRaw = UNSET
    moderation: GivenRaw = UNSET

    choices: ClassVar[Choices] = Choices()
    unsupported: ClassVar[tuple[str, ...]] = (
        "conversation",
        "prompt",
        "background",
        "context_management",
        "max_tool_calls",
        "moderation",
    )
    stored: ClassVar[tuple[str, ...]] = ("store", "previous_response_id")  # which need a store of responses

    def check(self) -> None:
        """Raises `InvalidArgumentError` for what is well formed and still cannot be done."""
        refuse_if_asked(self, self.unsupported)
        self.check_service_tier()
        for index, one in enumerate(self.include or ()):
            if one not in INCLUDED:
                raise InvalidArgumentError(f"include[{index}]", f"must be one of {', '.join(INCLUDED)}, not {one!r}")
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidArgumentError("top_logprobs", f'needs include to have "{LOGPROBS}"')
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options", "is only allowed with stream")
        if self.truncation not in (None, "auto", "disabled"):
            raise InvalidArgumentError("truncation", 'must be "auto" or "disabled"')
        if self.reasoning is not None:
            for name in ("summary", "generate_summary"):
                if getattr(self.reasoning, name) not in (None, "auto"):
                    reason = 'must be "auto": there are no summaries, and answers have the reasoning itself'
                    raise InvalidArgumentError(f"reasoning.{name}", reason)
        if self.text is not None:
            refuse_unless(self.text, "verbosity", "medium", where="text")
        self.guided_text  # noqa: B018 - raises if it is wrong
        for name in ("logprobs", "prompt_logprobs", "max_tokens", "max_completion_tokens", "guided"):
            if getattr(self, name, None) is not None:
                raise InvalidArgumentError(name, "is not a field of responses")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def wants_kept_reasoning(self) -> bool:
        return KEPT_REASONING in (self.include or ())

    @cached_property
    def guided_text(self) -> Guided | None:
        """The form that the answer has; None for any text. It is read once: a schema may be long."""
        wanted = self.text.format if self.text is not None else None
        if wanted is None:
            return None
        if wanted.type not in ("text", "json_object", "json_schema"):
            raise InvalidArgumentError("text.format.type", "must be one of text, json_object, json_schema")
        if wanted.type != "json_schema":
            for name in ("name", "description", "schema", "strict"):
                value = getattr(wanted, name)
                if is_given(value) if name == "schema" else value is not None:
                    raise InvalidArgumentError(f"text.format.{name}", 'is only for type "json_schema"')
            return Guided(json_object=True) if wanted.type == "json_object" else None
        schema = schema_text(wanted.schema, "text.format.schema")
        if not schema:
            raise InvalidArgumentError("text.format.schema", "is required")
        return Guided(json_schema=schema)

    def sampling(self) -> dict[str, object]:
        """The sampling parameters that the client set."""
        given = parameters_in(self)
        if self.max_output_tokens is not None:
            given["max_tokens"] = self.max_output_tokens
        if (guided := self.guided_text) is not None:
            given["guided"] = guided
        if self.wants_logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given

    def field_name(self, name: str) -> str:
        """The client's name for a sampling parameter."""
        names = {"max_tokens": "max_output_tokens", "guided": "text.format", "logprobs": "top_logprobs"}
        return names.get(name, name)

    def response_conversation(self, limits: ModelLimits, earlier: Sequence[InputItem] = ()) -> Conversation:
        """`earlier`: items of the conversation that this one continues."""
        options = self.chat_template_kwargs or {}
        check_options(options, "chat_template_kwargs")
        return Conversation(
            messages=named_results(self._messages(limits, earlier)),
            tools=self._tools(),
            template_options=options,
            effort=check_effort(self._effort, "reasoning.effort"),
            effort_field="reasoning.effort",
            chat_template=self.chat_template or "",
        )

    @property
    def _effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    def _messages(self, limits: ModelLimits, earlier: Sequence[InputItem]) -> list[Json]:
        messages = []
        if self.instructions:
            messages.append(make_message("instructions", role="system", content=self.instructions))
        given = items_of(self.input)
        items = [("previous_response_id", item) for item in earlier] + given
        check_messages(len(items) if given else 0, limits, "input")
        check_num_parts(num_parts([item for _, item in items]), "input")
        values, ids = ValueCount(), CallIds()
        return messages + [turn.message(values, ids) for turn in turns_of(items)]

    def _tools(self) -> Tools:
        check_num_tools(len(self.tools or ()), "tools")
        tools = []
        for index, one in enumerate(self.tools or ()):
            if one.type != "function":
                raise InvalidArgumentError(f"tools[{index}].type", f'must be "function", not {one.type!r}')
            given: dict[str, Any] = {} if one.parameters is None else {"parameters": one.parameters}
            tools.append(Tool(name=one.name, description=one.description, strict=bool(one.strict), **given))
        parallel = self.parallel_tool_calls is not False
        choice = self.tool_choice
        if isinstance(choice, ResponseToolChoice) and choice.type == "allowed_tools":
            for index, entry in enumerate(choice.tools or ()):
                if entry.type != "function":
                    raise InvalidArgumentError(f"tool_choice.tools[{index}].type", 'must be "function"')
            return make_tools(
                tools,
                "tools",
                choice=allowed_mode(choice.mode or "", "tool_choice.mode"),
                allowed=[entry.name for entry in choice.tools or ()],
                allowed_field="tool_choice.tools",
                parallel=parallel,
            )
        if isinstance(choice, ResponseToolChoice):
            for name in ("mode", "tools"):
                if getattr(choice, name) is not None:
                    raise InvalidArgumentError(f"tool_choice.{name}", 'is only for type "allowed_tools"')
            if choice.type != "function":
                raise InvalidArgumentError(
                    "tool_choice.type", f'must be "function" or "allowed_tools", not {choice.type!r}'
                )
            if not choice.name:
                raise InvalidArgumentError("tool_choice.name", "must not be empty")
            return make_tools(tools, "tools", choice="required", named=choice.name, parallel=parallel)
        return make_tools(tools, "tools", choice=choice or "auto", parallel=parallel)

    def _format(self) -> JsonObject:
        wanted = self.text.format if self.text is not None else None
        if wanted is None:
            return {"type": "text"}
        given = {name: getattr(wanted, name) for name in ("type", "name", "description", "schema", "strict")}
        return {name: value for name, value in given.items() if value is not UNSET and value is not None}

    def echoed(self, *, is_stored: bool = False) -> JsonObject:
        """What a response repeats of its request."""
        choice = self.tool_choice
        named = choice.json() if isinstance(choice, ResponseToolChoice) else None
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id or None,
            "reasoning": {"effort": self._effort, "summary": self.reasoning.summary if self.reasoning else None},
            "store": is_stored,
            "text": {"format": self._format()},
            "tool_choice": named or choice or "auto",
            "top_logprobs": self.top_logprobs or 0,
            "tools": [
                {
                    "type": "function",
                    "name": one.name,
                    "description": one.description,
                    "parameters": one.parameters,
                    "strict": bool(one.strict),
                }
                for one in self.tools or ()
            ],
            "truncation": self.truncation or "disabled",
        }
