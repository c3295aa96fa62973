"""`/v1/responses` with a store: conversations that go on by `previous_response_id`, responses that are read again."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
from fastapi import Request
from fastapi.responses import Response

from common import metrics
from common.errors import InvalidArgumentError, NotFoundError, PreviousResponseError, UnavailableError
from common.logs import RareLine
from common.validation import ModelLimits
from router.api.api_keys import caller
from router.api.rest.http.errors import json_response
from router.api.rest.openai.files import page
from router.api.rest.openai.large_json import json_parts
from router.api.rest.openai.responses import Keep
from router.api.rest.openai.responses_body import ResponsesBody, ResponseTool
from router.api.rest.openai.responses_input import InputItem, items_of
from router.api.rest.openai.tools import JsonObject
from router.limits.gate import HeldBytes
from router.responses.store import Earlier, ResponseStore, StoredResponse
from text.conversation import Conversation

log = logging.getLogger(__name__)

WAIT_S = 10.0  # for the file, with all that is asked of it before

T = TypeVar("T")

_FAILURES = (sqlite3.Error, TimeoutError)
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_TEXTS = {"assistant": "output_text"}  # what a part of a message's text is called, by role; of others: input_text


class _Told(msgspec.Struct):
    """What a conversation needs of its last response, beside the items."""

    instructions: str | None = None
    tools: list[ResponseTool] | None = None


@dataclass(slots=True, frozen=True)
class Continued:
    """A conversation that a request continues."""

    session: str
    items: list[InputItem]
    last: _Told

    def conversation(self, options: dict[str, Any] | None, template: str | None, limits: ModelLimits) -> Conversation:
        """As the next request's, if it has the last one's instructions and tools, and as far as it is known."""
        body = ResponsesBody(
            input=self.items,
            instructions=self.last.instructions,
            tools=self.last.tools,
            chat_template_kwargs=options,
            chat_template=template,
        )
        return body.response_conversation(limits)


class StoredResponses:
    """A thread of its own waits for the file: if that is slow, requests that do not use it wait for no thread."""

    def __init__(self, store: ResponseStore, max_bytes: Callable[[], int]) -> None:
        """`max_bytes`: of a conversation that is continued."""
        self._store = store
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._unused = RareLine(log, "the file of responses cannot be used", level=logging.ERROR)
        self._unkept = RareLine(log, "a response could not be stored", level=logging.WARNING)

    async def close(self) -> None:
        """Closes the file, after what is under way."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        """Raises `TimeoutError` if that takes too long. What has not begun by then never does."""
        try:
            async with asyncio.timeout(WAIT_S):
                return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        except TimeoutError as error:
            raise TimeoutError(f"it took more than {WAIT_S:g} s") from error

    def new_id(self) -> str:
        return self._store.new_id()

    async def continued(self, response_id: str, held: HeldBytes) -> Continued:
        """The conversation up to a response. Raises `PreviousResponseError` if it is not there, and
        `InvalidArgumentError` if it cannot be continued."""
        try:
            earlier = await self._earlier(response_id)
        except NotFoundError as error:
            raise PreviousResponseError(error.reason) from error
        except ValueError as error:
            raise InvalidArgumentError("previous_response_id", str(error)) from error
        if earlier.last.status == "failed":
            reason = f"{response_id!r} failed: continue the response before it"
            raise InvalidArgumentError("previous_response_id", reason)
        held.add(earlier.num_bytes)
        items: list[InputItem] = []
        for one in earlier.turns:
            for given in (one.input, one.output):
                items += msgspec.json.decode(given, type=list[InputItem])
        return Continued(earlier.session, items, msgspec.json.decode(earlier.last.response, type=_Told))

    async def _earlier(self, response_id: str) -> Earlier:
        try:
            return await self._in_thread(self._store.earlier, response_id, caller().owner, self._max_bytes())
        except _FAILURES as error:
            raise self._unusable(error) from error

    def keeper(self, body: ResponsesBody, response_id: str, session: str) -> Keep:
        """What stores the answer to `body`."""
        owner = caller().owner

        async def keep(response: JsonObject) -> bool:
            output = cast("list[JsonObject]", response["output"])
            one = StoredResponse(
                response_id=response_id,
                previous_id=body.previous_response_id or None,
                status=str(response["status"]),
                input=msgspec.json.encode([item for _, item in items_of(body.input)]),
                output=msgspec.json.encode([_that_goes_on(item) for item in output]),
                response=b"".join(json_parts(response)),
            )
            reason = "its conversation is gone, or takes more than one tenant may have"
            is_wanted = True  # until its client is told that it is not stored
            try:
                is_stored = await self._in_thread(self._store.add, one, owner, session, lambda: is_wanted)
            except _FAILURES as error:
                is_stored, reason = False, str(error)
            finally:
                is_wanted = False
            if not is_stored:
                metrics.router_stored_responses.labels("lost").inc()
                self._unkept.happened({"response_id": response_id, "reason": reason})
            return is_stored

        return keep

    def _unusable(self, error: Exception) -> UnavailableError:
        self._unused.happened({"reason": str(error)})
        return UnavailableError("stored responses cannot be read now")

    # -------------------------------------------------------------------------------------------------------- handlers

    async def told(self, request: Request) -> Response:
        _check_query(request, ())
        stored = await self._get(request)
        request.state.held_bytes.add(stored.num_bytes)
        return Response(stored.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        try:
            await self._in_thread(self._store.delete, response_id, caller().owner)
        except _FAILURES as error:
            raise self._unusable(error) from error
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        await self._get(request)
        raise InvalidArgumentError("response_id", "has ended: only a response in the background can be cancelled")

    async def input_items(self, request: Request) -> Response:
        """All that the response answered: earlier turns, too."""
        _check_query(request, ("limit", "order", "after"))
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidArgumentError("order", 'must be "asc" or "desc"')
        try:
            earlier = await self._earlier(request.path_params["response_id"])
        except NotFoundError as error:
            raise NotFoundError(error.reason, field="response_id") from error
        except ValueError as error:
            raise InvalidArgumentError("response_id", str(error)) from error
        request.state.held_bytes.add(earlier.num_bytes)
        items: list[_Listed] = []
        for number, one in enumerate(earlier.turns, 1):
            given = msgspec.json.decode(one.input, type=list[dict[str, Any]])
            said = msgspec.json.decode(one.output, type=list[dict[str, Any]]) if number < len(earlier.turns) else []
            tag = one.response_id.removeprefix("resp_")
            items += [_listed(item, f"{tag}-{index}") for index, item in enumerate([*given, *said])]
        return page(request, items if order == "asc" else items[::-1], lambda item: item.item_id)

    async def _get(self, request: Request) -> StoredResponse:
        try:
            return await self._in_thread(self._store.get, request.path_params["response_id"], caller().owner)
        except _FAILURES as error:
            raise self._unusable(error) from error


@dataclass(slots=True, frozen=True)
class _Listed:
    item_id: str
    item: JsonObject

    def told(self) -> JsonObject:
        return self.item


def _that_goes_on(item: JsonObject) -> JsonObject:
    """An answer's item as a conversation has it: without what is far longer than its text, and is not read again."""
    if not isinstance(parts := item.get("content"), list):
        return item
    return {**item, "content": [{**part, "logprobs": []} if "logprobs" in part else part for part in parts]}


def _listed(item: JsonObject, tag: str) -> _Listed:
    """As answers have items, whatever the client left out."""
    kind, role = str(item.get("type", "message")), str(item.get("role", ""))
    told = {"id": f"{_PREFIXES.get(kind, 'item')}_{tag}", "type": kind, "status": "completed", **item}
    if kind == "message" and isinstance(text := item.get("content"), str):
        part: JsonObject = {"type": _TEXTS.get(role, "input_text"), "text": text}
        told["content"] = [part if part["type"] == "input_text" else {**part, "annotations": []}]
    return _Listed(str(told["id"]), told)


def _check_query(request: Request, known: tuple[str, ...]) -> None:
    """Raises `InvalidArgumentError` for what nothing would come of."""
    for name, value in request.query_params.multi_items():
        if name not in known and not (name == "stream" and value == "false"):
            raise InvalidArgumentError(name[:100], "is not supported: a stored response is as it was told")
