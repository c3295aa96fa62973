"""Bodies of REST requests for text. Types are strict, and a field that is neither supported nor harmless is refused by
name. What is only a matter of range is left to `common.validation`, which gRPC shares.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, cast

from msgspec import UNSET, Raw

from common.choices import Choices
from common.errors import InvalidArgumentError
from common.guided import Guided
from common.validation import ModelLimits
from router.api.rest.openai.body_types import (
    ALIASES,
    ALIASES_OF,
    Body,
    GivenRaw,
    asks,
    is_given,
    parameters_in,
    refuse_if_asked,
    refuse_unless,
    several,
    with_sampling,
)
from router.api.rest.openai.chat_messages import ChatMessage, conversation_of
from router.api.rest.openai.guided import GuidedFields
from router.api.rest.openai.tools import FunctionTool, NamedTool, chat_tools
from router.preparing.preparation import ONE_ANSWER
from text.conversation import Conversation, Tools, check_effort

MAX_CHOICES = 128

_RENAMED = {"guided", "logprobs", "prompt_logprobs", *(name for name, _ in ALIASES)}  # by some clients
_ONE_ANSWER_ASKED = (None, None, None, None)
_ANY_TEXT_ASKED = (None, None, None, UNSET, None, None, None)


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # as vLLM's clients ask for it: usage so far in every chunk
    include_obfuscation: GivenRaw = UNSET  # whether chunks are padded to hide their lengths; none are


class GenerationBody(GuidedFields, kw_only=True, dict=True):
    """What chat and text completion have in common, beside the sampling parameters (`with_sampling`)."""

    n: int | None = None
    use_beam_search: bool | None = None  # this and its options as vLLM's clients ask for them; n is the width
    length_penalty: float | None = None
    early_stopping: bool | None = None
    prompt_logprobs: int | None = None  # as vLLM's clients ask for them
    include_metrics: bool | None = None  # of the answer's times; as --per-request-metrics says if unset
    return_token_ids: bool | None = None  # of the prompt and of the answer, as vLLM's clients ask for them
    stream_options: StreamOptions | None = None

    # Baton's own.
    add_special_tokens: bool | None = None

    # vLLM's. Its clients write out what these are if nothing is said of them.
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # of those that are not skipped: none
    truncation_side: GivenRaw = UNSET  # of `truncate_prompt_tokens`, which keeps the last ones
    return_tokens_as_token_ids: bool | None = None  # in logprobs
    logits_processors: GivenRaw = UNSET
    guided_decoding_backend: GivenRaw = UNSET
    detokenize: bool | None = None  # whether an answer has its text
    guided_whitespace_pattern: GivenRaw = UNSET
    kv_transfer_params: GivenRaw = UNSET
    vllm_xargs: GivenRaw = UNSET

    of_vllm: ClassVar[tuple[str, ...]] = (
        "logits_processors",
        "guided_whitespace_pattern",
        "kv_transfer_params",
        "vllm_xargs",
    )
    unsupported: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Raises `InvalidArgumentError` for what is well formed and still cannot be done."""
        if self.store:
            raise InvalidArgumentError("store", "is not supported: nothing is stored")
        self.check_service_tier()
        refuse_if_asked(self, (*self.unsupported, *self.of_vllm))
        refuse_unless(self, "truncation_side", "left")
        refuse_unless(self, "guided_decoding_backend", "auto")
        if self.detokenize is False:
            raise InvalidArgumentError("detokenize", "only true is supported: answers have their text")
        if self.skip_special_tokens is False:
            raise InvalidArgumentError("skip_special_tokens", "only true is supported: special tokens have no text")
        self.choices.check()
        if self.use_beam_search and self.stream:
            raise InvalidArgumentError("stream", "is not for beam search: its answers are known when it ends")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidArgumentError("prompt_logprobs", "is not for streams, as chunks have no place for them")
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options", "is only allowed with stream")
        for name, alias in ALIASES:
            values = (getattr(self, name), getattr(self, alias))
            if None not in values and values[0] != values[1]:
                raise InvalidArgumentError(alias, f"differs from {name}, another name of it")
        self.guided_text  # noqa: B018 - raises if it is wrong

    @cached_property
    def guided_text(self) -> tuple[str, Guided] | None:
        """`form`, which is read once: a schema may be long."""
        older = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        asked = (self.response_format, self.guided, self.structured_outputs, *older)
        return None if asked == _ANY_TEXT_ASKED else self.form()

    @property
    def choices(self) -> Choices:
        asked = (self.n, self.use_beam_search, self.length_penalty, self.early_stopping)
        if asked == _ONE_ANSWER_ASKED:
            return ONE_ANSWER
        return Choices(
            n=1 if self.n is None else self.n,
            use_beam_search=bool(self.use_beam_search),
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=bool(self.early_stopping),
        )

    @property
    def wants_usage_chunk(self) -> bool:
        """If chunks have the usage so far, the last one has all of it unless the client says no: vLLM's default."""
        options = self.stream_options
        if options is None:
            return False
        return bool(options.continuous_usage_stats if options.include_usage is None else options.include_usage)

    @property
    def wants_usage_so_far(self) -> bool:
        """No chunk has any usage if the client says that it wants none, as in vLLM."""
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats) and options.include_usage is not False

    def sampling(self) -> dict[str, object]:
        """The sampling parameters that the client set."""
        given = parameters_in(self, self.field_name, _RENAMED)
        given.pop("guided", None)
        guided = self.guided_text
        return given if guided is None else {**given, "guided": guided[1]}

    def field_name(self, name: str) -> str:
        """The client's name for a sampling parameter."""
        if name == "guided" and (guided := self.guided_text):
            return guided[0]
        for alias in ALIASES_OF[name]:
            if getattr(self, alias) is not None:
                return alias
        return name


@with_sampling
class ChatBody(GenerationBody, kw_only=True):
    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the model's template
    functions: GivenRaw = UNSET
    function_call: GivenRaw = UNSET
    audio: GivenRaw = UNSET
    prediction: GivenRaw = UNSET
    reasoning_effort: str | None = None
    verbosity: GivenRaw = UNSET
    web_search_options: GivenRaw = UNSET
    # vLLM's.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # whether the answer continues the last message
    echo: bool | None = None
    include_reasoning: bool | None = None
    chat_template: str | None = None  # in place of the model's, where the router allows it
    documents: GivenRaw = UNSET
    mm_processor_kwargs: GivenRaw = UNSET
    media_io_kwargs: GivenRaw = UNSET

    unsupported: ClassVar[tuple[str, ...]] = (
        "functions",
        "audio",
        "prediction",
        "documents",
        "mm_processor_kwargs",
        "media_io_kwargs",
    )

    def check(self) -> None:
        super().check()
        if self.add_special_tokens:
            raise InvalidArgumentError("add_special_tokens", "is not for chat: the chat template writes these tokens")
        if self.include_reasoning is False:
            raise InvalidArgumentError("include_reasoning", "only true is supported: answers have their reasoning")
        if self.modalities not in (None, [], ["text"]):
            raise InvalidArgumentError("modalities", 'only ["text"] is supported')
        if asks(self.function_call) and bytes(cast("Raw", self.function_call)) not in (b'"none"', b'"auto"'):
            raise InvalidArgumentError("function_call", "is not supported: take tool_choice")
        if is_given(self.web_search_options):  # an empty object asks for a search, too
            raise InvalidArgumentError("web_search_options", "is not supported")
        refuse_unless(self, "verbosity", "medium")
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgumentError("top_logprobs", "needs logprobs to be true")

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    def echoed(self, conversation: Conversation) -> str:
        """What comes before the answer: the last message if the answer is of the same role, as in vLLM."""
        last = conversation.messages[-1]
        asks = conversation.asks_answer and not conversation.continues_last
        return str(last["content"]) if self.echo and (last["role"] == "assistant" or not asks) else ""

    def sampling(self) -> dict[str, object]:
        given = super().sampling()
        given.pop("logprobs", None)
        return {**given, "logprobs": self.top_logprobs or 0} if self.logprobs else given

    def field_name(self, name: str) -> str:
        return "top_logprobs" if name == "logprobs" else super().field_name(name)

    def conversation(self, limits: ModelLimits) -> Conversation:
        tools = Tools()
        if self.tools is not None or self.tool_choice is not None:
            tools = chat_tools(self.tools or (), self.tool_choice, parallel=self.parallel_tool_calls is not False)
        conversation = conversation_of(
            self.messages,
            tools,
            self.chat_template_kwargs,
            limits,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
        )
        effort = check_effort(self.reasoning_effort, "reasoning_effort")
        return replace(conversation, effort=effort) if effort else conversation


@with_sampling
class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    suffix: str | None = None
    prompt_embeds: GivenRaw = UNSET

    unsupported: ClassVar[tuple[str, ...]] = ("suffix", "prompt_embeds")

    def check(self) -> None:
        super().check()
        if self.choices.are_compared and self.stream:
            raise InvalidArgumentError("best_of", "must equal n in a stream: only whole answers can be compared")
        if len(self.prompts()) * self.choices.num_candidates > MAX_CHOICES:
            name = "best_of" if self.best_of else "n"
            raise InvalidArgumentError("prompt", f"prompts times {name} must be at most {MAX_CHOICES}")
        if self.is_only_echo and self.min_tokens:
            raise InvalidArgumentError("min_tokens", f"{self.min_tokens} is more than max_tokens, 0")
        if self.echo and None not in (self.logprobs, self.prompt_logprobs) and self.logprobs != self.prompt_logprobs:
            raise InvalidArgumentError("prompt_logprobs", "must equal logprobs, which echo gives of the prompt, too")

    @property
    def choices(self) -> Choices:
        choices = super().choices
        return choices if self.best_of is None else replace(choices, best_of=self.best_of)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def is_only_echo(self) -> bool:
        """Whether the client wants the prompt and no answer, as harnesses do that read its logprobs. A worker gives
        those with a token only, so it is asked for one."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> dict[str, object]:
        given = super().sampling()
        if self.is_only_echo:
            given["max_tokens"] = 1
        if self.choices.are_compared:
            given.setdefault("logprobs", 0)  # they decide which are the best
        return given

    def field_name(self, name: str) -> str:
        is_echoed = bool(self.echo) and name == "prompt_logprobs" and self.prompt_logprobs is None
        return super().field_name("logprobs" if is_echoed else name)  # which echo gives of the prompt, too

    def prompts(self) -> list[str | list[int]]:
        """One or several, each a text or token ids."""
        return several(self.prompt, "prompt")
