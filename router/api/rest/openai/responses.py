"""The answer of `/v1/responses`: items as they come, as events, or one object in the end."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field

from common.errors import BatonError
from common.types import FinishReason, SampledToken
from router.api.rest.http.error_body import error_code
from router.api.rest.http.errors import as_baton
from router.api.rest.openai.answer_metrics import answer_metrics
from router.api.rest.openai.formats import baton_report, chat_tokens
from router.api.rest.openai.kept_reasoning import kept
from router.api.rest.openai.large_json import JsonList, json_parts
from router.api.rest.openai.tools import JsonObject
from router.running.request import OBJECT_BYTES, GenerationRequest, Output
from router.serving.choices import Hold
from router.serving.generation import Generation
from text.answer_parts import TextPart, ToolCallDelta

Keep = Callable[[JsonObject], Awaitable[bool]]
"""Stores a response. Returns False if it could not."""


@dataclass(slots=True)
class _Item:
    """One output item: reasoning, a message, or a function's call."""

    kind: str  # what OpenAI calls it: reasoning, message, function_call
    item_id: str
    index: int
    call: ToolCallDelta | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: JsonList = field(default_factory=JsonList)  # of its tokens, if they were asked for
    is_whole: bool = True  # False if the answer was cut off in it
    is_kept: bool = False  # reasoning that the client keeps for the next turn

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self, *, is_done: bool = True) -> JsonObject:
        text = self.text if is_done else ""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs if is_done else []}

    def json(self, *, is_done: bool = True) -> JsonObject:
        status = "in_progress" if not is_done else "completed" if self.is_whole else "incomplete"
        item: JsonObject = {"id": self.item_id, "type": self.kind, "status": status}
        if self.call is not None:
            arguments = self.text if is_done else ""
            return {**item, "call_id": self.call.call_id, "name": self.call.name, "arguments": arguments}
        item["content"] = [self.part()] if is_done else []
        if self.kind != "reasoning":
            return {**item, "role": "assistant"}
        return {**item, "summary": [], **({"encrypted_content": kept(self.text)} if self.is_kept and is_done else {})}


class ResponseAnswer:
    """One answer. `echoed` is what it repeats of its request."""

    def __init__(
        self,
        generation: Generation,
        request: GenerationRequest,
        request_id: str,
        echoed: JsonObject,
        *,
        wants_logprobs: bool = False,
        wants_kept_reasoning: bool = False,
        wants_metrics: bool = False,
        response_id: str = "",
        keep: Keep | None = None,
        hold: Hold,
    ) -> None:
        """`response_id`: made of `request_id` if empty. `keep` takes the whole answer before its reader has it."""
        self._generation = generation
        self._request = request
        self._wants_metrics = wants_metrics
        self._request_id = request_id
        self._response_id = response_id or f"resp_{request_id}"
        self._keep = keep
        self._echoed = echoed
        self._wants_logprobs = wants_logprobs
        self._wants_kept_reasoning = wants_kept_reasoning
        self._hold = hold
        self._unsaid: list[SampledToken] = []  # whose text has not come yet, or that have none
        self._created = int(time.time())
        self._items: list[_Item] = []
        self._last: Output | None = None
        self._num_reasoning_tokens = 0
        self._num_events = 0
        self.failure: BatonError | None = None  # what `events` told its reader as an event

    async def whole(self) -> JsonObject:
        """The whole response, as `json_parts` takes it."""
        async with aclosing(self._generation.generate(self._request)) as outputs:
            async for _, output in outputs:
                for _ in self._take(output):
                    pass  # the same as if it was streamed
        return await self._kept(self._response(self._status()))

    async def events(self, within: AbstractContextManager[object]) -> AsyncGenerator[bytes, None]:
        """As `CompletionAnswer.events`."""
        started = False
        with within:
            try:
                async with aclosing(self._generation.generate(self._request)) as outputs:
                    async for _, output in outputs:
                        if not started:
                            started = True
                            for name in ("response.created", "response.in_progress"):
                                for part in self._event(name, {"response": self._response("in_progress")}):
                                    yield part
                        for name, content in self._take(output):
                            for part in self._event(name, content):
                                yield part
            except Exception as error:
                if not started:
                    raise
                self.failure = as_baton(error)
                for item in self._items[-1:]:
                    item.is_whole = False
                response = await self._kept(self._response("failed"))
                for part in self._event("response.failed", {"response": response}):
                    yield part
                return
            status = self._status()
            response = await self._kept(self._response(status))
            for part in self._event(f"response.{status}", {"response": response}):
                yield part

    async def _kept(self, response: JsonObject) -> JsonObject:
        """`response`, which says whether it was stored."""
        if self._keep is None or await self._keep(response):
            return response
        return {**response, "store": False}

    def _event(self, name: str, content: JsonObject) -> Iterator[bytes]:
        data = {"type": name, "sequence_number": self._num_events, **content}
        self._num_events += 1
        return json_parts(data, b"event: " + name.encode() + b"\ndata: ", b"\n\n")

    # ------------------------------------------------------------------------------------------- items

    def _take(self, output: Output) -> Iterator[tuple[str, JsonObject]]:
        if self._wants_logprobs:
            self._unsaid += output.tokens
        self._num_reasoning_tokens += output.num_reasoning_tokens
        for part in output.parts or [TextPart(output.text)]:
            if isinstance(part, ToolCallDelta):
                yield from self._add_call(part)
            elif part.is_reasoning:
                yield from self._add("reasoning", "rs_", part.text)
            elif part.text:
                yield from self._add("message", "msg_", part.text)
        if output.reasoning or output.tool_calls:
            self._unsaid.clear()  # these tokens are no message's
        if output.finish_reason is None:
            return
        self._last = output
        if not self._items:  # nothing was said: that is a message, too
            yield from self._open(_Item("message", f"msg_{self._request_id}", 0))
        if self._items[-1].kind == "message":
            self._hold(self._items[-1].logprobs.add(self._take_logprobs()))  # of what ended it
        self._items[-1].is_whole = not _is_cut(output)
        yield from self._close()

    def _add(self, kind: str, prefix: str, text: str) -> Iterator[tuple[str, JsonObject]]:
        if not self._items or self._items[-1].kind != kind:
            yield from self._close()
            is_kept = kind == "reasoning" and self._wants_kept_reasoning
            yield from self._open(_Item(kind, self._new_id(prefix), len(self._items), is_kept=is_kept))
        item = self._items[-1]
        item.texts.append(text)
        self._hold(OBJECT_BYTES + len(text) * (3 if item.is_kept else 1))
        if kind == "reasoning":
            yield "response.reasoning_text.delta", {**_place(item), "content_index": 0, "delta": text}
        else:
            if len(item.texts) == 1:
                self._drop_marks(text)
            place, logprobs = {**_place(item), "content_index": 0}, self._take_logprobs()
            self._hold(item.logprobs.add(logprobs))
            yield "response.output_text.delta", {**place, "delta": text, "logprobs": logprobs}

    def _drop_marks(self, text: str) -> None:
        """Drops tokens before the one that `text`, a message's first, begins with: marks between parts of an answer."""
        begun = text.encode().lstrip()
        datas = [self._request.model.tokenizer.token_bytes(token.token_id).lstrip() for token in self._unsaid]
        first = next((index for index, data in enumerate(datas) if data and begun.startswith(data)), 0)
        del self._unsaid[:first]

    def _take_logprobs(self) -> list[JsonObject]:
        """Logprobs of the tokens whose text has come since the last call."""
        if not self._unsaid:
            return []
        taken = chat_tokens(self._unsaid, self._request.model.tokenizer)
        self._unsaid.clear()
        return taken

    def _add_call(self, call: ToolCallDelta) -> Iterator[tuple[str, JsonObject]]:
        if call.call_id:
            yield from self._close()
            yield from self._open(_Item("function_call", self._new_id("fc_"), len(self._items), call))
        item = self._items[-1]
        if call.arguments:
            item.texts.append(call.arguments)
            self._hold(OBJECT_BYTES + len(call.arguments))
            yield "response.function_call_arguments.delta", {**_place(item), "delta": call.arguments}

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}{self._request_id}" + (f"-{len(self._items)}" if self._items else "")

    def _open(self, item: _Item) -> Iterator[tuple[str, JsonObject]]:
        self._items.append(item)
        yield "response.output_item.added", {"output_index": item.index, "item": item.json(is_done=False)}
        if item.call is None:
            yield "response.content_part.added", {**_place(item), "content_index": 0, "part": item.part(is_done=False)}

    def _close(self) -> Iterator[tuple[str, JsonObject]]:
        """The last item's end, if there is one."""
        if not self._items:
            return
        item, text = self._items[-1], self._items[-1].text
        if item.call is not None:
            done = {**_place(item), "name": item.call.name, "arguments": text}
            yield "response.function_call_arguments.done", done
        else:
            place = {**_place(item), "content_index": 0}
            if item.kind == "reasoning":
                yield "response.reasoning_text.done", {**place, "text": text}
            else:
                yield "response.output_text.done", {**place, "text": text, "logprobs": item.logprobs}
            yield "response.content_part.done", {**place, "part": item.part()}
        yield "response.output_item.done", {"output_index": item.index, "item": item.json()}

    # ---------------------------------------------------------------------------------------- response

    def _status(self) -> str:
        return "incomplete" if self._last is not None and _is_cut(self._last) else "completed"

    def _incomplete_details(self) -> JsonObject | None:
        """OpenAI has words for a limit, and none for a stop string or a model's end inside a call."""
        is_at_limit = self._last is not None and self._last.finish_reason is FinishReason.LENGTH
        return {"reason": "max_output_tokens"} if is_at_limit else None

    def _response(self, status: str) -> JsonObject:
        params = self._request.sampling_params
        response: JsonObject = {
            "id": self._response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": self._incomplete_details() if status == "incomplete" else None,
            "model": self._request.model.limits.model,
            "output": [] if status == "in_progress" else [item.json() for item in self._items],
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": None,
            **self._echoed,
        }
        if self.failure is not None:
            code = error_code(self.failure) or "server_error"
            response["error"] = {"code": code, "message": self.failure.message}
        if self._last is not None and self._last.usage is not None and self._last.report is not None:
            usage = self._last.usage
            response["usage"] = {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
            if self._wants_metrics:
                response["metrics"] = answer_metrics([self._last])
            response["baton"] = baton_report(self._request_id, [self._last.report])
        return response


def _is_cut(last: Output) -> bool:
    """Whether an answer ended before it was whole."""
    return last.finish_reason is FinishReason.LENGTH or last.is_cut


def _place(item: _Item) -> JsonObject:
    return {"item_id": item.item_id, "output_index": item.index}
