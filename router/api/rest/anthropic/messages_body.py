"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from msgspec import UNSET

from common.cache_hints import Retain
from common.choices import Choices
from common.errors import InvalidArgumentError
from common.guided import Guided
from common.validation import ModelLimits, check_messages
from router.api.rest.anthropic.messages_input import (
    CacheControl,
    Message,
    TextBlock,
    marks,
    num_blocks,
    text_of,
    turns_of,
)
from router.api.rest.http.error_body import ANTHROPIC_ID_HEADERS
from router.api.rest.openai.body_types import (
    Body,
    GivenRaw,
    RetainBody,
    SloBody,
    parameters_in,
    refuse_if_asked,
    refuse_unless,
    targets_of,
    with_sampling,
)
from router.api.rest.openai.guided import schema_text
from router.limits.targets import GivenTargets
from text.conversation import (
    DEFAULT_EFFORT,
    CallIds,
    Conversation,
    Json,
    Tool,
    Tools,
    ValueCount,
    check_num_parts,
    check_num_tools,
    check_options,
    make_message,
    make_tools,
    named_results,
)

EFFORTS = ("low", "medium", "high", "xhigh", "max")
CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}  # of tools, and Baton's words
MIN_BUDGET = 1024  # tokens
THINKING = ("enabled", "disabled", "adaptive")
DISPLAYS = ("summarized", "omitted")
OF_OTHERS = ("stop", "max_completion_tokens", "logprobs", "prompt_logprobs", "guided")
"""Sampling parameters that this interface has by another name, or not at all."""


class MessageTool(Body, kw_only=True):
    kinds = ("custom",)

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: GivenRaw = UNSET
    defer_loading: GivenRaw = UNSET
    input_examples: GivenRaw = UNSET

    unsupported: ClassVar[tuple[str, ...]] = ("defer_loading", "input_examples")


class MessageToolChoice(Body, kw_only=True):
    kinds = tuple(CHOICES)

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body, kw_only=True):
    kinds = THINKING

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Body, kw_only=True):
    kinds = ("json_schema",)

    type: str
    schema: GivenRaw = UNSET


class OutputConfig(Body, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(Body, kw_only=True):
    user_id: str | None = None


class PromptFields(Body, kw_only=True):
    """All that a prompt is made of."""

    model: str | None = None
    messages: list[Message]
    system: str | list[TextBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: GivenRaw = UNSET

    # Not Anthropic's.
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None

    def check_prompt(self) -> None:
        """Raises `InvalidArgumentError` for what is well formed and still cannot be done."""
        refuse_unless(self, "speed", "standard")
        if (thinking := self.thinking) is not None:
            _check_thinking(thinking)
        config = self.output_config
        if config is not None and config.effort is not None:
            if config.effort not in EFFORTS:
                raise InvalidArgumentError("output_config.effort", f"must be one of {', '.join(EFFORTS)}")
            if thinking is not None and thinking.type == "disabled":
                reason = 'cannot be together with thinking of type "disabled"'
                raise InvalidArgumentError("output_config.effort", reason)

    def conversation(self, limits: ModelLimits) -> Conversation:
        """Counts before it looks at anything. Raises `InvalidArgumentError`."""
        check_messages(len(self.messages), limits, "messages")
        check_num_parts(num_blocks(self.system, self.messages), "messages")
        options = self.chat_template_kwargs or {}
        check_options(options, "chat_template_kwargs")
        effort, effort_field = self._effort()
        messages, continues_last = self._messages()
        return Conversation(
            messages=messages,
            tools=self._tools(),
            template_options=options,
            effort=effort,
            effort_field=effort_field,
            chat_template=self.chat_template or "",
            continues_last=continues_last,
            continued_field="messages",
        )

    def _effort(self) -> tuple[str, str]:
        """(how much to reason, what of the body says so). Empty: as the model does by itself."""
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none", "thinking"
        if self.output_config is not None and self.output_config.effort is not None:
            return self.output_config.effort, "output_config.effort"
        return (DEFAULT_EFFORT if self.thinking is not None and self.thinking.type == "enabled" else ""), "thinking"

    def _messages(self) -> tuple[list[Json], bool]:
        """(the messages, whether the answer continues the last one)."""
        made = []
        if system := text_of(self.system, "system"):
            made.append(make_message("system", role="system", content=system))
        turns, values, ids = turns_of(self.messages), ValueCount(), CallIds()
        made += [turn.message(values, ids) for turn in turns]
        continues = turns[-1].role == "assistant"
        if continues and turns[-1].calls:
            raise InvalidArgumentError(
                turns[-1].where, "must not be the last one: the result of its tool_use has to follow"
            )
        return named_results(made), continues

    def _tools(self) -> Tools:
        check_num_tools(len(self.tools or ()), "tools")
        tools = [_tool(one, f"tools[{index}]") for index, one in enumerate(self.tools or ())]
        choice = self.tool_choice or MessageToolChoice(type="auto")
        if choice.type not in CHOICES:
            raise InvalidArgumentError("tool_choice.type", f"must be one of {', '.join(CHOICES)}, not {choice.type!r}")
        if choice.type == "tool" and not choice.name:
            raise InvalidArgumentError("tool_choice.name", "must not be empty")
        if choice.type != "tool" and choice.name is not None:
            raise InvalidArgumentError("tool_choice.name", 'is only for type "tool"')
        if choice.type == "none" and choice.disable_parallel_tool_use is not None:
            raise InvalidArgumentError("tool_choice.disable_parallel_tool_use", 'is not for type "none"')
        return make_tools(
            tools,
            "tools",
            choice=CHOICES[choice.type],
            named=choice.name or "",
            parallel=not choice.disable_parallel_tool_use,
            schema_name="input_schema",
        )

    def kept_s(self) -> float:
        """For how long the client wants the prompt's KV kept, in seconds. Raises `InvalidArgumentError`."""
        tools = [(f"tools[{index}].cache_control", one.cache_control) for index, one in enumerate(self.tools or ())]
        given = [("cache_control", self.cache_control), *tools, *marks(self.system, self.messages)]
        return max((mark.seconds(where) for where, mark in given if mark is not None), default=0.0)


class CountTokensBody(PromptFields, kw_only=True):
    def check(self) -> None:
        """Raises `InvalidArgumentError`."""
        self.check_prompt()
        self.kept_s()


@with_sampling
class MessagesBody(PromptFields, kw_only=True, dict=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    container: GivenRaw = UNSET
    context_management: GivenRaw = UNSET
    diagnostics: GivenRaw = UNSET
    inference_geo: GivenRaw = UNSET
    mcp_servers: GivenRaw = UNSET

    # Baton's own, as in `AnswerBody`.
    cache_salt: str | None = None
    retain: RetainBody | None = None
    priority: int | None = None
    slo: SloBody | None = None
    slo_class: str | None = None
    request_id: str | None = None
    include_metrics: bool | None = None  # see `GenerationBody`

    choices: ClassVar[Choices] = Choices()
    id_headers: ClassVar[tuple[str, ...]] = ANTHROPIC_ID_HEADERS
    unsupported: ClassVar[tuple[str, ...]] = (
        "container",
        "context_management",
        "diagnostics",
        "inference_geo",
        "mcp_servers",
    )

    def check(self) -> None:
        """Raises `InvalidArgumentError` for what is well formed and still cannot be done."""
        refuse_if_asked(self, self.unsupported)
        self.check_prompt()
        if self.service_tier not in (None, "auto", "standard_only"):
            reason = f'must be "auto" or "standard_only", not {self.service_tier!r}: there is one tier'
            raise InvalidArgumentError("service_tier", reason)
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise InvalidArgumentError("thinking.budget_tokens", f"must be less than max_tokens, {self.max_tokens}")
        for name in OF_OTHERS:
            if getattr(self, name, None) is not None:
                raise InvalidArgumentError(name, "is not a field of messages")
        self.guided_text  # noqa: B018 - raises if it is wrong

    @cached_property
    def guided_text(self) -> Guided | None:
        """The form that the answer has; None for any text. It is read once: a schema may be long."""
        wanted = None if self.output_config is None else self.output_config.format
        if wanted is None:
            return None
        if wanted.type != "json_schema":
            raise InvalidArgumentError("output_config.format.type", f'must be "json_schema", not {wanted.type!r}')
        schema = schema_text(wanted.schema, "output_config.format.schema")
        if not schema:
            raise InvalidArgumentError("output_config.format.schema", "is required")
        return Guided(json_schema=schema)

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def sampling(self) -> dict[str, object]:
        """The sampling parameters that the client set."""
        given = parameters_in(self)
        if self.stop_sequences is not None:
            given["stop"] = tuple(self.stop_sequences)
        if (guided := self.guided_text) is not None:
            given["guided"] = guided
        return given

    def field_name(self, name: str) -> str:
        """The client's name for a sampling parameter."""
        return {"stop": "stop_sequences", "guided": "output_config.format"}.get(name, name)

    def targets(self) -> GivenTargets:
        """Raises `InvalidArgumentError`."""
        return targets_of(self.slo, self.slo_class)

    def session(self) -> str:
        """The session that the body names; empty if it names none."""
        return (self.metadata.user_id or "") if self.metadata is not None else ""

    def retained(self, most_s: float) -> Retain | None:
        """As `AnswerBody.retained`. `cache_control` asks for a usual time, so it is shortened to what the router
        allows."""
        kept_s = min(self.kept_s(), most_s)
        if self.retain is not None:
            return self.retain.value()
        return Retain(kept_s) if kept_s else None


def _check_thinking(thinking: Thinking) -> None:
    if thinking.type not in THINKING:
        raise InvalidArgumentError("thinking.type", f"must be one of {', '.join(THINKING)}, not {thinking.type!r}")
    if thinking.type != "enabled" and thinking.budget_tokens is not None:
        raise InvalidArgumentError("thinking.budget_tokens", 'is only for type "enabled"')
    if thinking.type == "enabled" and (thinking.budget_tokens is None or thinking.budget_tokens < MIN_BUDGET):
        raise InvalidArgumentError("thinking.budget_tokens", f"must be at least {MIN_BUDGET}")
    if thinking.type == "disabled" and thinking.display is not None:
        raise InvalidArgumentError("thinking.display", 'is not for type "disabled"')
    if thinking.display not in (None, *DISPLAYS):
        raise InvalidArgumentError("thinking.display", f"must be one of {', '.join(DISPLAYS)}")


def _tool(one: MessageTool, where: str) -> Tool:
    if one.type not in (None, "custom"):
        reason = f'must be "custom", not {one.type!r}: the service runs no tools of its own'
        raise InvalidArgumentError(f"{where}.type", reason)
    if one.input_schema is None:
        raise InvalidArgumentError(f"{where}.input_schema", "is required")
    if one.eager_input_streaming is False:
        reason = "only true is supported: arguments are streamed as they come"
        raise InvalidArgumentError(f"{where}.eager_input_streaming", reason)
    refuse_if_asked(one, one.unsupported, where=where)
    refuse_unless(one, "allowed_callers", ["direct"], where=where)
    return Tool(name=one.name, description=one.description, parameters=one.input_schema, strict=bool(one.strict))
