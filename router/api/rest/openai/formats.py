"""The two shapes of OpenAI's answers, chat and text completion, whole or in pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from common.types import FinishReason, SampledToken
from protos.baton.v1 import types_pb2
from router.api.rest.openai.tools import WholeCalls, delta_json
from router.running.request import Output
from text.text_offsets import TextOffsets
from text.tokenizer import Tokenizer

JsonObject = dict[str, object]

_LISTS = ("routing", "notes")  # fields of a report that are lists of lines

LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class WholeAnswer:
    """What has come of one choice so far."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: WholeCalls | None = None  # None if it has none

    def add(self, output: Output) -> None:
        self.texts.append(output.text)
        if output.reasoning:
            self.reasoning.append(output.reasoning)
        if output.tool_calls:
            self.calls = self.calls or WholeCalls()
            self.calls.add(output.tool_calls)


class AnswerFormat(Protocol):
    id_prefix: str
    whole_object: str
    chunk_object: str
    has_one_prompt: bool  # its logprobs are then part of the answer, and not of each choice

    def logprobs(self, tokens: Sequence[SampledToken], tokenizer: Tokenizer, offsets: TextOffsets) -> JsonObject:
        """`offsets`: of this choice's tokens; those of `tokens` are added."""
        ...

    def finish_reason(self, reason: FinishReason) -> FinishReason: ...

    def opening(self, index: int) -> JsonObject | None:
        """The choice of a stream's first chunk, if it has one without text."""
        ...

    def piece(self, index: int, output: Output, logprobs: JsonObject | None) -> JsonObject:
        """A choice in one chunk of a stream."""
        ...

    def whole(self, index: int, answer: WholeAnswer, logprobs: JsonObject | None) -> JsonObject:
        """A choice of an answer that is not streamed."""
        ...


class ChatFormat:
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_one_prompt = True

    def __init__(
        self, *, is_named_call: bool = False, also_reasoning: bool = False, tokens_as_ids: bool = False
    ) -> None:
        """`is_named_call`: the client named the tool that the answer calls. `also_reasoning`: see `RouterSettings`.
        `tokens_as_ids`: whether logprobs have ids in place of tokens' texts."""
        self._is_named_call = is_named_call
        self._tokens_as_ids = tokens_as_ids
        self._reasoning_names = ("reasoning_content", "reasoning") if also_reasoning else ("reasoning_content",)

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """As OpenAI has it, an answer ends with "stop" if the client itself named the tool that is called."""
        is_its_own = reason is FinishReason.TOOL_CALLS and self._is_named_call
        return FinishReason.STOP if is_its_own else reason

    def logprobs(self, tokens: Sequence[SampledToken], tokenizer: Tokenizer, offsets: TextOffsets) -> JsonObject:
        del offsets
        return {"content": chat_tokens(tokens, tokenizer, as_ids=self._tokens_as_ids), "refusal": None}

    def opening(self, index: int) -> JsonObject | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, output: Output, logprobs: JsonObject | None) -> JsonObject:
        delta: JsonObject = {}
        if output.reasoning:
            delta.update(dict.fromkeys(self._reasoning_names, output.reasoning))
        if output.text:
            delta["content"] = output.text
        if output.tool_calls:
            delta["tool_calls"] = [delta_json(call) for call in output.tool_calls]
        return {"index": index, "delta": delta, "logprobs": logprobs}

    def whole(self, index: int, answer: WholeAnswer, logprobs: JsonObject | None) -> JsonObject:
        text, reasoning = "".join(answer.texts), "".join(answer.reasoning)
        calls = [] if answer.calls is None else answer.calls.json()
        message: JsonObject = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if reasoning:
            message.update(dict.fromkeys(self._reasoning_names, reasoning))
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, "logprobs": logprobs}


class CompletionFormat:
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    has_one_prompt = False

    def __init__(self, *, tokens_as_ids: bool = False) -> None:
        """`tokens_as_ids`: see `ChatFormat`."""
        self._token = _token_as_id if tokens_as_ids else _completion_token

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        return reason

    def logprobs(self, tokens: Sequence[SampledToken], tokenizer: Tokenizer, offsets: TextOffsets) -> JsonObject:
        ids = [token.token_id for token in tokens]
        return {
            "tokens": [self._token(token_id, tokenizer) for token_id in ids],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [_tops(token, tokenizer, self._token) for token in tokens],
            "text_offset": offsets.add(tokenizer.token_bytes(one) if tokenizer.has_text(one) else b"" for one in ids),
        }

    def opening(self, index: int) -> JsonObject | None:
        del index
        return None

    def piece(self, index: int, output: Output, logprobs: JsonObject | None) -> JsonObject:
        return {"index": index, "text": output.text, "logprobs": logprobs}

    def whole(self, index: int, answer: WholeAnswer, logprobs: JsonObject | None) -> JsonObject:
        return {"index": index, "text": "".join(answer.texts), "logprobs": logprobs}


def prompt_logprob(token: SampledToken, tokenizer: Tokenizer) -> JsonObject:
    """The logprobs at one place of the prompt as vLLM gives them: by token id, the prompt's own token first. The rank
    of that token is null if it is none of the likeliest that were asked for."""
    ranks = {top.token_id: rank for rank, top in enumerate(token.top_logprobs, 1)}
    logprobs = {token.token_id: token.logprob} | {top.token_id: top.logprob for top in token.top_logprobs}
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": _token_text(token_id, tokenizer),
        }
        for token_id, logprob in logprobs.items()
    }


def usage(usages: Sequence[types_pb2.Usage], num_choices: int) -> JsonObject:
    """`usages` of all choices, those of one prompt side by side: a prompt counts once, however many answers."""
    prompts = usages[::num_choices]
    prompt_tokens = sum(one.prompt_tokens for one in prompts)
    completion_tokens = sum(one.completion_tokens for one in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
    }


def baton_report(request_id: str, reports: Sequence[types_pb2.RequestReport]) -> JsonObject:
    """What Baton adds to an answer: the first choice's report, and each one's if there are several."""
    first = _as_json(reports[0])
    several = {"choices": [_as_json(report) for report in reports]} if len(reports) > 1 else {}
    return {"request_id": request_id, **first, **several}


def _as_json(message: Message) -> JsonObject:
    """Every field of a report, set or not; times in microseconds' precision."""
    content = _unset(cast("Descriptor", message.DESCRIPTOR))
    for described, value in message.ListFields():
        name = described.name
        if isinstance(value, Message):
            content[name] = _as_json(value)
        elif name in _LISTS:
            content[name] = list(value)
        else:
            content[name] = round(value, 3) if isinstance(value, float) else value
    return content


def _unset(descriptor: Descriptor) -> JsonObject:
    """A report with nothing in it."""
    return {name: value if inner is None else _unset(inner) for name, value, inner in _defaults(descriptor)}


@functools.cache
def _defaults(descriptor: Descriptor) -> tuple[tuple[str, object, Descriptor | None], ...]:
    """Each field with its value if it is not set: None if it may be unset. Timings are always there, so they come with
    the descriptor of their message. Lists are only in reports that have something in them."""
    return tuple(
        (field.name, None, field.message_type)
        if field.name == "timings"
        else (field.name, None if field.has_presence else field.default_value, None)
        for field in descriptor.fields
        if field.name not in _LISTS
    )


def chat_tokens(tokens: Sequence[SampledToken], tokenizer: Tokenizer, *, as_ids: bool = False) -> list[JsonObject]:
    """Logprobs as answers of chat have them."""

    def one(token_id: int, logprob: float | None) -> JsonObject:
        data = tokenizer.token_bytes(token_id)
        text = _token_as_id(token_id, tokenizer) if as_ids else data.decode(errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    return [
        {
            **one(token.token_id, token.logprob),
            "top_logprobs": [one(top.token_id, top.logprob) for top in token.top_logprobs],
        }
        for token in tokens
    ]


def _tops(token: SampledToken, tokenizer: Tokenizer, text_of: Callable[[int, Tokenizer], str]) -> JsonObject | None:
    """The logprobs of the likeliest tokens, and of the token itself, which may be none of them. None for the first
    token of a prompt."""
    if token.logprob is None:
        return None
    found: JsonObject = {}
    for top in token.top_logprobs:
        found.setdefault(text_of(top.token_id, tokenizer), _finite(top.logprob))  # the likeliest of a text
    found[text_of(token.token_id, tokenizer)] = _finite(token.logprob)
    return found


def _token_as_id(token_id: int, _tokenizer: Tokenizer) -> str:
    return f"token_id:{token_id}"


def _completion_token(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's text as OpenAI's text completions write it: one that is no whole text by its bytes."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _token_text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float | None) -> float | None:
    """The logprob within JSON's range, whatever a worker said."""
    if logprob is None:
        return None
    return min(logprob, -LEAST_LOGPROB) if logprob > LEAST_LOGPROB else LEAST_LOGPROB
