"""One REST answer: its choices generated side by side, given out whole or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from common.errors import BatonError
from common.types import SampledToken
from router.api.rest.errors import as_baton, error_body
from router.api.rest.formats import AnswerFormat, JsonObject, WholeAnswer, baton_report, usage
from router.serving.generation import Generation
from router.serving.request import GenerationRequest, Output

DONE = b"data: [DONE]\n\n"
MAX_AHEAD = 16  # outputs of all choices together that wait for their reader


@dataclass(slots=True)
class _Choice:
    """What has come of one choice so far."""

    num_chars: int = 0  # of all tokens' texts, for logprobs' offsets
    num_tokens: int = 0
    whole: WholeAnswer = field(default_factory=WholeAnswer)
    logprobs: _Logprobs | None = None
    last: Output | None = None


class _Logprobs:
    """Those of a whole answer, made to JSON piece by piece as they come: the end of a long answer then costs little,
    and bytes take a fifth of the memory of what they are made of."""

    def __init__(self) -> None:
        self._lists: dict[str, list[bytes]] = {}
        self._rest: JsonObject = {}

    def add(self, piece: JsonObject) -> None:
        """Lists grow, anything else is replaced."""
        for name, value in piece.items():
            if isinstance(value, list):
                self._lists.setdefault(name, [])
                if value:
                    self._lists[name].append(msgspec.json.encode(value)[1:-1])  # without its brackets
            else:
                self._rest[name] = value

    def joined(self) -> JsonObject:
        lists = {name: msgspec.Raw(b"[" + b",".join(pieces) + b"]") for name, pieces in self._lists.items()}
        return {**lists, **self._rest}


class Answer:
    """`requests`: one for each choice; those of one prompt side by side, `num_choices` each."""

    def __init__(
        self,
        generation: Generation,
        requests: Sequence[GenerationRequest],
        answer_format: AnswerFormat,
        *,
        request_id: str,
        num_choices: int,
        wants_logprobs: bool,
        wants_usage_chunk: bool,
        wants_usage_so_far: bool = False,
    ) -> None:
        self._generation = generation
        self._requests = requests
        self._format = answer_format
        self._request_id = request_id
        self._num_choices = num_choices
        self._wants_logprobs = wants_logprobs
        self._wants_usage_chunk = wants_usage_chunk
        self._wants_usage_so_far = wants_usage_so_far
        self._created = int(time.time())
        self._choices = [_Choice() for _ in requests]
        self.failure: BatonError | None = None  # what `events` told its reader as an event

    async def whole(self) -> JsonObject:
        async with aclosing(_merged(self._generation, self._requests)) as outputs:
            async for index, output in outputs:
                choice = self._choices[index]
                choice.whole.add(output)
                if piece := self._logprobs(choice, output.tokens):
                    choice.logprobs = choice.logprobs or _Logprobs()
                    choice.logprobs.add(piece)
                if output.finish_reason is not None:
                    choice.last = output
        choices = []
        for index, choice in enumerate(self._choices):
            logprobs = None if choice.logprobs is None else choice.logprobs.joined()
            formatted = self._format.whole(index, choice.whole, logprobs)
            choices.append({**formatted, **_end(choice.last)})
        return {
            **self._head(self._format.whole_object),
            "choices": choices,
            "usage": self._usage(),
            "baton": self._report(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. An error before the first token is raised, so that it can be a status; one after it is
        an event, since the status has been sent."""
        started = False
        try:
            async with aclosing(_merged(self._generation, self._requests)) as outputs:
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
                    "baton": self._report(),
                }
            )
        yield DONE

    def _opening(self) -> list[bytes]:
        openings = (self._format.opening(index) for index in range(len(self._choices)))
        return [self._chunk(choice) for choice in openings if choice is not None]

    def _event(self, index: int, output: Output) -> bytes:
        """Empty if `output` has nothing to show."""
        choice = self._choices[index]
        choice.num_tokens += len(output.tokens)
        logprobs = self._logprobs(choice, output.tokens) if output.tokens else None
        has_text = output.text or output.reasoning or output.tool_calls
        if output.finish_reason is None and not has_text and logprobs is None:
            return b""
        if output.finish_reason is not None:
            choice.last = output
        return self._chunk({**self._format.piece(index, output, logprobs), **_end(choice.last)})

    def _chunk(self, choice: JsonObject) -> bytes:
        chunk: JsonObject = {**self._head(self._format.chunk_object), "choices": [choice]}
        if self._wants_usage_so_far:
            chunk["usage"] = self._usage_so_far()
        elif self._wants_usage_chunk:
            chunk["usage"] = None
        if not self._wants_usage_chunk and all(other.last is not None for other in self._choices):
            chunk["baton"] = self._report()
        return _sse(chunk)

    def _head(self, object_name: str) -> JsonObject:
        return {
            "id": self._format.id_prefix + self._request_id,
            "object": object_name,
            "created": self._created,
            "model": self._requests[0].model.limits.model,
        }

    def _logprobs(self, choice: _Choice, tokens: Sequence[SampledToken]) -> JsonObject | None:
        if not self._wants_logprobs:
            return None
        tokenizer = self._requests[0].model.tokenizer
        logprobs = self._format.logprobs(tokens, tokenizer, choice.num_chars)
        texts = logprobs.get("tokens")
        if isinstance(texts, list):
            choice.num_chars += sum(len(text) for text in texts)
        return logprobs

    def _usage(self) -> JsonObject:
        usages = [choice.last.usage for choice in self._choices if choice.last and choice.last.usage]
        return usage(usages, self._num_choices)

    def _usage_so_far(self) -> JsonObject:
        """Without what is only known at the end: how much of the prompt was cached."""
        prompt_tokens = sum(len(one.prompt_token_ids) for one in self._requests[:: self._num_choices])
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def _report(self) -> JsonObject:
        reports = [choice.last.report for choice in self._choices if choice.last and choice.last.report]
        return baton_report(self._request_id, reports)


def _end(last: Output | None) -> JsonObject:
    if last is None or last.finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": last.finish_reason.value, "stop_reason": last.stop_reason}


def _sse(content: JsonObject) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _merged(
    generation: Generation, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, Output], None]:
    """Outputs of all requests as they come, with their index. The first failure ends all of them. A reader that is slow
    holds up these requests, and nothing piles up here."""
    if len(requests) == 1:
        async with aclosing(generation.generate(requests[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return

    queue: asyncio.Queue[tuple[int, Output] | Exception | None] = asyncio.Queue(MAX_AHEAD)

    async def pump(index: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(generation.generate(request)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
            await queue.put(None)
        except Exception as error:  # raised where the queue is read
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index, request)) for index, request in enumerate(requests)]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
