"""The answer of `/v1/messages`: blocks as they come, as events, or one message in the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field

import msgspec

from common.errors import BatonError
from common.types import FinishReason
from protos.baton.v1 import types_pb2
from router.api.rest.http.error_body import anthropic_body
from router.api.rest.http.errors import as_baton
from router.api.rest.openai.answer_metrics import answer_metrics
from router.api.rest.openai.formats import baton_report
from router.api.rest.openai.kept_reasoning import kept
from router.api.rest.openai.large_json import json_parts
from router.api.rest.openai.tools import JsonObject
from router.running.request import OBJECT_BYTES, GenerationRequest, Output
from router.serving.choices import Hold
from router.serving.generation import Generation
from text.answer_parts import TextPart, ToolCallDelta

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}
_TEXT_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
    b'"delta":{"type":"text_delta","text":%b}}\n\n'
)


@dataclass(slots=True)
class _Block:
    """One block of the content: thinking, text, or a tool's call."""

    kind: str  # what Anthropic calls it: thinking, text, tool_use
    index: int
    call: ToolCallDelta | None = None
    texts: list[str] = field(default_factory=list)  # what has come of it, if it is kept

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def opening(self) -> JsonObject:
        """The block before anything of it has come."""
        if self.call is not None:
            return {"type": "tool_use", "id": self.call.call_id, "name": self.call.name, "input": {}}
        return {"type": "text", "text": ""} if self.kind == "text" else _thinking("", "")


class MessageAnswer:
    """One answer. Not `shows_thinking`: blocks of thinking have a signature alone, which keeps their text for the next
    turn."""

    def __init__(
        self,
        generation: Generation,
        request: GenerationRequest,
        request_id: str,
        *,
        shows_thinking: bool = True,
        wants_metrics: bool = False,
        hold: Hold,
    ) -> None:
        self._generation = generation
        self._request = request
        self._request_id = request_id
        self._shows_thinking = shows_thinking
        self._wants_metrics = wants_metrics
        self._hold = hold
        self._keeps_all = False
        self._blocks: list[_Block] = []
        self._is_open = False  # whether the last of them may go on
        self._num_reasoning_tokens = 0
        self._last: Output | None = None
        self.failure: BatonError | None = None  # what `events` told its reader as an event

    async def whole(self) -> JsonObject:
        """The whole message, as `json_parts` takes it."""
        self._keeps_all = True
        async with aclosing(self._generation.generate(self._request)) as outputs:
            async for _, output in outputs:
                for _ in self._take(output):
                    pass  # the same as if it was streamed
        content = [self._content(block) for block in self._blocks]
        return {**self._head(content), **self._stop(), "usage": self._usage(), **self._of_baton()}

    async def events(self, within: AbstractContextManager[object]) -> AsyncGenerator[bytes, None]:
        """As `CompletionAnswer.events`."""
        started = False
        with within:
            try:
                async with aclosing(self._generation.generate(self._request)) as outputs:
                    async for _, output in outputs:
                        if not started:
                            started = True
                            yield _event("message_start", {"message": self._begun()})
                        if output.is_only_text and self._is_open and self._blocks[-1].kind == "text":  # most pieces
                            yield _TEXT_DELTA % (self._blocks[-1].index, msgspec.json.encode(output.text))
                            continue
                        for name, content in self._take(output):
                            for part in json_parts({"type": name, **content}, _before(name), b"\n\n"):
                                yield part
            except Exception as error:
                if not started:
                    raise
                self.failure = as_baton(error)
                body = anthropic_body(self.failure.message, self.failure.http_status, self._request_id)
                yield _before("error") + msgspec.json.encode(body) + b"\n\n"
                return
            end = {"delta": self._stop(), "usage": self._usage(), **self._of_baton()}
            yield _event("message_delta", end)
            yield _event("message_stop", {})

    # ------------------------------------------------------------------------------------------ blocks

    def _take(self, output: Output) -> Iterator[tuple[str, JsonObject]]:
        self._num_reasoning_tokens += output.num_reasoning_tokens
        for part in output.parts or [TextPart(output.text)]:
            if isinstance(part, ToolCallDelta):
                if part.call_id:
                    yield from self._open(_Block("tool_use", len(self._blocks), part))
                if part.arguments:
                    yield self._add(part.arguments, {"type": "input_json_delta", "partial_json": part.arguments})
            elif part.text:
                kind = "thinking" if part.is_reasoning else "text"
                if not self._is_open or self._blocks[-1].kind != kind:
                    yield from self._open(_Block(kind, len(self._blocks)))
                if kind == "text":
                    yield self._add(part.text, {"type": "text_delta", "text": part.text})
                elif self._shows_thinking:
                    yield self._add(part.text, {"type": "thinking_delta", "thinking": part.text})
                else:
                    self._keep(part.text, 3)  # the signature has it, too
        if output.finish_reason is not None:
            self._last = output
            yield from self._close()

    def _add(self, text: str, delta: JsonObject) -> tuple[str, JsonObject]:
        if self._keeps_all:
            self._keep(text)
        return "content_block_delta", {"index": self._blocks[-1].index, "delta": delta}

    def _keep(self, text: str, times: int = 1) -> None:
        self._blocks[-1].texts.append(text)
        self._hold(OBJECT_BYTES + times * len(text))

    def _open(self, block: _Block) -> Iterator[tuple[str, JsonObject]]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        yield "content_block_start", {"index": block.index, "content_block": block.opening()}

    def _close(self) -> Iterator[tuple[str, JsonObject]]:
        """The last block's end, if it is open."""
        if not self._is_open:
            return
        self._is_open, block = False, self._blocks[-1]
        if block.kind == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature(block)}
            yield "content_block_delta", {"index": block.index, "delta": delta}
        yield "content_block_stop", {"index": block.index}

    def _signature(self, block: _Block) -> str:
        """Keeps what the block does not show."""
        return kept("" if self._shows_thinking else block.text)

    def _content(self, block: _Block) -> JsonObject:
        if block.call is not None:
            return {**block.opening(), "input": _input(block.text)}
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        return _thinking(block.text if self._shows_thinking else "", self._signature(block))

    # ----------------------------------------------------------------------------------------- message

    def _head(self, content: list[JsonObject]) -> JsonObject:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._request.model.limits.model,
            "content": content,
        }

    def _begun(self) -> JsonObject:
        """The message when its first token is there. How much of the prompt was cached is only known at the end."""
        usage = types_pb2.Usage(prompt_tokens=self._request.num_prompt_tokens)
        return {**self._head([]), "stop_reason": None, "stop_sequence": None, "usage": _usage(usage, 0)}

    def _stop(self) -> JsonObject:
        """A call that the answer ended in is no reason: the limit or the model's end is."""
        if self._last is None or self._last.finish_reason is None:
            return {"stop_reason": None, "stop_sequence": None}
        reason, sequence = _STOP_REASONS[self._last.finish_reason], self._last.stop_reason
        if reason == "end_turn" and isinstance(sequence, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> JsonObject:
        usage = self._last.usage if self._last is not None else None
        return _usage(usage or types_pb2.Usage(), self._num_reasoning_tokens)

    def _of_baton(self) -> JsonObject:
        if self._last is None or self._last.report is None:
            return {}
        metrics: JsonObject = {"metrics": answer_metrics([self._last])} if self._wants_metrics else {}
        return {**metrics, "baton": baton_report(self._request_id, [self._last.report])}


def _usage(usage: types_pb2.Usage, num_reasoning_tokens: int) -> JsonObject:
    """Input tokens are those that were not cached; all three kinds together are the prompt. Nobody pays for what is
    written to the cache, so none count as that."""
    details = {"output_tokens_details": {"thinking_tokens": num_reasoning_tokens}} if num_reasoning_tokens else {}
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **details,
    }


def _thinking(text: str, signature: str) -> JsonObject:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _input(text: str) -> msgspec.Raw | JsonObject:
    """The arguments of a call, as the model wrote them. Those that are not the JSON text of an object, as of a call
    that was cut off, are its only member: the type has no place for a text."""
    written = text or "{}"
    try:
        msgspec.json.decode(written, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": text}
    return msgspec.Raw(written.encode())


def _before(name: str) -> bytes:
    return b"event: " + name.encode() + b"\ndata: "


def _event(name: str, content: JsonObject) -> bytes:
    return _before(name) + msgspec.json.encode({"type": name, **content}) + b"\n\n"
