"""One REST answer: its choices generated side by side, given out whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field
from typing import cast

import msgspec

from common.choices import Choices
from common.errors import BatonError
from router.api.rest.http.error_body import error_body
from router.api.rest.http.errors import as_baton
from router.api.rest.openai.answer_metrics import answer_metrics
from router.api.rest.openai.echo import Echo, EchoedPrompt
from router.api.rest.openai.formats import AnswerFormat, JsonObject, WholeAnswer, baton_report, prompt_logprob, usage
from router.api.rest.openai.large_json import JsonList
from router.running.request import OBJECT_BYTES, GenerationRequest, Output
from router.serving.choices import Hold
from router.serving.generation import Generation
from text.text_offsets import TextOffsets

DONE = b"data: [DONE]\n\n"
MAX_CHARACTER_BYTES = 4  # in UTF-8; a token has one at least
TEXT_MARK = "<text>"  # stands where a chunk's text comes
ID_BYTES = 8  # of a token's id in a list; Python has the small numbers once


@dataclass(slots=True)
class _Choice:
    """What has come of one choice so far."""

    prompt_token_ids: list[int]
    offsets: TextOffsets | None = None  # of its tokens, if logprobs are wanted
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    logprob: float = 0.0  # of its tokens so far, together
    echo: EchoedPrompt | None = None
    prompt_logprobs: _Logprobs | None = None
    token_ids: list[int] = field(default_factory=list)  # of the answer, if they are wanted
    is_prompt_told: bool = False  # whether a stream has given the prompt's token ids
    whole: WholeAnswer = field(default_factory=WholeAnswer)
    logprobs: _Logprobs | None = None
    last: Output | None = None
    frame: tuple[bytes, bytes] | None = None  # what stands around the text in chunks that have nothing else to say


class _Logprobs:
    """The logprobs of a whole answer, made to JSON piece by piece as they come."""

    def __init__(self) -> None:
        self._lists: dict[str, JsonList] = {}
        self._rest: JsonObject = {}

    def add(self, piece: JsonObject) -> int:
        """Lists grow, anything else is replaced. Returns how many bytes the lists have grown by."""
        num_bytes = 0
        for name, value in piece.items():
            if isinstance(value, list):
                num_bytes += self._lists.setdefault(name, JsonList()).add(value)
            else:
                self._rest[name] = value
        return num_bytes

    def joined(self) -> JsonObject:
        return {**self._lists, **self._rest}


class CompletionAnswer:
    """`requests`: one for each candidate of `choices`; those of one prompt side by side."""

    def __init__(
        self,
        generation: Generation,
        requests: Sequence[GenerationRequest],
        answer_format: AnswerFormat,
        *,
        request_id: str,
        choices: Choices,
        echo: Echo | None = None,
        wants_logprobs: bool,
        wants_prompt_logprobs: bool = False,
        wants_token_ids: bool = False,
        wants_metrics: bool = False,
        wants_usage_chunk: bool,
        wants_usage_so_far: bool = False,
        hold: Hold,
    ) -> None:
        self._generation = generation
        self._requests = requests
        self._format = answer_format
        self._request_id = request_id
        self._wanted = choices
        self._num_candidates = choices.num_candidates
        self._wants_prompt_logprobs = wants_prompt_logprobs
        self._wants_token_ids = wants_token_ids
        self._wants_metrics = wants_metrics
        self._wants_logprobs = wants_logprobs
        self._wants_usage_chunk = wants_usage_chunk
        self._wants_usage_so_far = wants_usage_so_far
        self._hold = hold
        self._created = int(time.time())
        self._choices = [_Choice(request.prompt_token_ids) for request in requests]
        for index, (choice, request) in enumerate(zip(self._choices, requests, strict=True)):
            if echo is not None:
                text = echo.texts[index // self._num_candidates]
                choice.echo = EchoedPrompt(
                    text, request.prompt_token_ids, generates=echo.generates, is_prompt=echo.is_prompt
                )
            if wants_logprobs:
                choice.offsets = TextOffsets(0 if choice.echo is None else choice.echo.num_chars, _end_of(request))
        self.failure: BatonError | None = None  # what `events` told its reader as an event

    async def whole(self) -> JsonObject:
        """The whole answer, as `json_parts` takes it."""
        async with aclosing(self._generation.outputs(self._requests, self._hold)) as outputs:
            async for index, output in outputs:
                self._add(self._choices[index], output)
        choices = []
        for index, choice in enumerate(self._kept()):
            logprobs = None if choice.logprobs is None else choice.logprobs.joined()
            formatted = self._format.whole(index, choice.whole, logprobs)
            of_prompt = {} if self._format.has_one_prompt else self._of_prompt(choice)
            token_ids: JsonObject = {"token_ids": choice.token_ids} if self._wants_token_ids else {}
            choices.append({**formatted, **of_prompt, **token_ids, **self._end(choice.last)})
        return {
            **self._head(self._format.whole_object),
            "choices": choices,
            "usage": self._usage(),
            **(self._of_prompt(self._choices[0]) if self._format.has_one_prompt else {}),
            **self._metrics(),
            "baton": self._report(),
        }

    def _add(self, choice: _Choice, output: Output) -> None:
        if self._wants_prompt_logprobs:
            if choice.prompt_logprobs is None:
                choice.prompt_logprobs = _Logprobs()
                choice.prompt_logprobs.add({"prompt_logprobs": [None]})  # of the first token
            tokenizer = self._requests[0].model.tokenizer
            pieces = [prompt_logprob(token, tokenizer) for token in output.prompt_logprobs]
            self._hold(choice.prompt_logprobs.add({"prompt_logprobs": pieces}))
        if choice.echo is not None:
            output = choice.echo.before(output)
        choice.num_tokens += len(output.tokens)
        choice.num_reasoning_tokens += output.num_reasoning_tokens
        choice.logprob += sum(token.logprob or 0.0 for token in output.tokens)
        choice.whole.add(output)
        calls = sum(len(call.arguments) for call in output.tool_calls)
        self._hold(OBJECT_BYTES + len(output.text) + len(output.reasoning) + calls)
        if piece := self._logprobs(choice, output):
            choice.logprobs = choice.logprobs or _Logprobs()
            self._hold(choice.logprobs.add(piece))
        if self._wants_token_ids:
            self._hold(ID_BYTES * len(output.tokens))
            choice.token_ids += [token.token_id for token in output.tokens]
        if output.finish_reason is not None:
            choice.last = output

    def _of_prompt(self, choice: _Choice) -> JsonObject:
        """What a whole answer tells of the prompt of `choice`."""
        told: JsonObject = {}
        if choice.prompt_logprobs is not None:
            told |= choice.prompt_logprobs.joined()
        if self._wants_token_ids:
            told["prompt_token_ids"] = choice.prompt_token_ids
        return told

    def _kept(self) -> list[_Choice]:
        """The answers that the client gets: of each prompt's candidates, the likeliest."""
        kept: list[_Choice] = []
        for start in range(0, len(self._choices), self._num_candidates):
            group = self._choices[start : start + self._num_candidates]
            kept += [group[index] for index in self._wanted.likeliest([(one.logprob, one.num_tokens) for one in group])]
        return kept

    async def events(self, within: AbstractContextManager[object]) -> AsyncGenerator[bytes, None]:
        """Server-sent events. An error before the first token is raised, so that it can be a status; one after it is
        an event, since the status has been sent. `within` is left after the last event, or when this is closed: a
        generator around this one would cost each token more."""
        started = False
        with within:
            try:
                async with aclosing(self._generation.outputs(self._requests, self._hold)) as outputs:
                    async for index, output in outputs:
                        if not started:
                            for event in self._opening():
                                yield event
                            started = True
                        if event := self._event(index, output):
                            yield event
            except Exception as error:
                if not started:
                    raise
                self.failure = as_baton(error)
                yield _sse(error_body(self.failure))
                return
            if self._wants_usage_chunk:
                yield _sse(
                    {
                        **self._head(self._format.chunk_object),
                        "choices": [],
                        "usage": self._usage(),
                        **self._metrics(),
                        "baton": self._report(),
                    }
                )
            yield DONE

    def _opening(self) -> list[bytes]:
        openings = [self._format.opening(index) for index in range(len(self._choices))]
        return [
            self._chunk(choice, self._of_one_prompt() if index == 0 else None)
            for index, choice in enumerate(openings)
            if choice is not None
        ]

    def _of_one_prompt(self) -> JsonObject | None:
        """What the first chunk of a stream tells of the one prompt, beside its choice."""
        if not (self._wants_token_ids and self._format.has_one_prompt):
            return None
        return {"prompt_token_ids": self._choices[0].prompt_token_ids}

    def _token_ids(self, choice: _Choice, output: Output) -> JsonObject:
        """What a chunk tells of tokens: the answer's new ones, and once the prompt's if each choice has its own."""
        if not self._wants_token_ids:
            return {}
        told: JsonObject = {"token_ids": [token.token_id for token in output.tokens]}
        if not self._format.has_one_prompt and not choice.is_prompt_told:
            choice.is_prompt_told = True
            told["prompt_token_ids"] = choice.prompt_token_ids
        return told

    def _event(self, index: int, output: Output) -> bytes:
        """Empty if `output` has nothing to show."""
        choice = self._choices[index]
        if choice.echo is not None:
            output = choice.echo.before(output)
        choice.num_tokens += len(output.tokens)
        if output.is_only_text and not (self._wants_logprobs or self._wants_usage_so_far or self._wants_token_ids):
            return self._text_chunk(index, choice, output.text)
        choice.num_reasoning_tokens += output.num_reasoning_tokens
        logprobs = self._logprobs(choice, output) if output.tokens or output.prompt_logprobs else None
        has_text = output.text or output.reasoning or output.tool_calls or (self._wants_token_ids and output.tokens)
        if output.finish_reason is None and not has_text and logprobs is None:
            return b""
        if output.finish_reason is not None:
            choice.last = output
        piece = self._format.piece(index, output, logprobs)
        return self._chunk({**piece, **self._token_ids(choice, output), **self._end(choice.last)})

    def _text_chunk(self, index: int, choice: _Choice, text: str) -> bytes:
        """Gives what `_chunk` gives, for the pieces that most of an answer consists of: only their text differs."""
        if choice.frame is None:
            output = Output(text=TEXT_MARK, tokens=[])
            chunk = self._chunk({**self._format.piece(index, output, None), **self._end(None)})
            head, _, tail = chunk.rpartition(msgspec.json.encode(TEXT_MARK))  # no client's word is behind the text
            choice.frame = (head, tail)
        head, tail = choice.frame
        return b"%b%b%b" % (head, msgspec.json.encode(text), tail)

    def _chunk(self, choice: JsonObject, beside: JsonObject | None = None) -> bytes:
        chunk: JsonObject = {**self._head(self._format.chunk_object), "choices": [choice], **(beside or {})}
        if self._wants_usage_so_far:
            chunk["usage"] = self._usage_so_far()
        elif self._wants_usage_chunk:
            chunk["usage"] = None
        if not self._wants_usage_chunk and all(other.last is not None for other in self._choices):
            chunk |= {**self._metrics(), "baton": self._report()}
        return _sse(chunk)

    def _head(self, object_name: str) -> JsonObject:
        return {
            "id": self._format.id_prefix + self._request_id,
            "object": object_name,
            "created": self._created,
            "model": self._requests[0].model.limits.model,
        }

    def _logprobs(self, choice: _Choice, output: Output) -> JsonObject | None:
        if choice.offsets is None:
            return None
        tokenizer = self._requests[0].model.tokenizer
        logprobs = self._format.logprobs(output.tokens, tokenizer, choice.offsets)
        if choice.echo is None or not output.prompt_logprobs:
            return logprobs
        scores = output.prompt_logprobs
        of_prompt = self._format.logprobs(scores, tokenizer, TextOffsets())
        of_prompt["text_offset"] = choice.echo.offsets(scores, tokenizer)
        return _joined(of_prompt, logprobs)

    def _end(self, last: Output | None) -> JsonObject:
        if last is None or last.finish_reason is None:
            return {"finish_reason": None}
        return {"finish_reason": self._format.finish_reason(last.finish_reason), "stop_reason": last.stop_reason}

    def _usage(self) -> JsonObject:
        usages = [choice.last.usage for choice in self._choices if choice.last and choice.last.usage]
        reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self._choices)
        details: JsonObject = {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
        return {**usage(usages, self._num_candidates), **(details if reasoning_tokens else {})}

    def _usage_so_far(self) -> JsonObject:
        """Without what is only known at the end: how much of the prompt was cached."""
        prompt_tokens = sum(len(one.prompt_token_ids) for one in self._requests[:: self._num_candidates])
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def _metrics(self) -> JsonObject:
        return {"metrics": answer_metrics([choice.last for choice in self._choices])} if self._wants_metrics else {}

    def _report(self) -> JsonObject:
        reports = [choice.last.report for choice in self._choices if choice.last and choice.last.report]
        return baton_report(self._request_id, reports)


def _end_of(request: GenerationRequest) -> bytes:
    """The last bytes of the prompt: at least as many as a character has."""
    ids = request.prompt_token_ids[-MAX_CHARACTER_BYTES:]
    return b"".join(request.model.tokenizer.token_bytes(token_id) for token_id in ids)


def _joined(first: JsonObject, second: JsonObject) -> JsonObject:
    """Lists of the same names, one after the other."""
    return {name: [*cast("list[object]", value), *cast("list[object]", second[name])] for name, value in first.items()}


def _sse(content: JsonObject) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
