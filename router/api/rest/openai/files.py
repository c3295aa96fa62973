"""`/v1/files`: files for batches, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from common.errors import InvalidArgumentError
from router.api.api_keys import caller
from router.api.rest.http.error_body import BodyTooLargeError, BodyTooLateError, BodyTypeError
from router.api.rest.http.errors import json_response
from router.batches.records import StoredFile
from router.batches.runner import new_file_id
from router.batches.store import PART_BYTES, BatchStore

UPLOAD_TYPE = b"multipart/form-data"
MAX_NAME_CHARS = 255
MAX_FIELD_BYTES = 1024  # of `purpose`
MAX_LISTED, DEFAULT_LISTED = 100, 20
OVERHEAD_BYTES = 16 * 2**10  # of an upload: its fields and marks


class Listed(Protocol):
    def told(self) -> dict[str, object]: ...


ListedT = TypeVar("ListedT", bound=Listed)


class FileHandlers:
    def __init__(self, store: BatchStore, *, max_bytes: int, max_stored_bytes: int, receive_timeout_s: float) -> None:
        """`max_bytes`: of one file; `max_stored_bytes`: of all of one owner. `receive_timeout_s`: for each piece of an
        upload to come."""
        self._store = store
        self._max_bytes = max_bytes
        self._max_stored_bytes = max_stored_bytes
        self._receive_timeout_s = receive_timeout_s

    async def upload(self, request: Request) -> Response:
        file_id = new_file_id()
        upload = _Upload(_boundary(request))
        is_stored = False
        number = 0
        try:
            num_stored = await asyncio.to_thread(self._store.num_bytes, caller().owner)
            async for piece in self._pieces(request):
                upload.add(piece)
                if num_stored + upload.num_bytes > self._max_stored_bytes:
                    raise BodyTooLargeError(
                        f"file: all files together may have {self._max_stored_bytes} bytes: delete some first"
                    )
                if upload.num_bytes > self._max_bytes:
                    raise BodyTooLargeError(f"file: has more than {self._max_bytes} bytes")
                while len(upload.data) >= PART_BYTES:
                    if not is_stored:
                        await asyncio.to_thread(self._store.begin_file, file_id, caller().owner, upload.name, "batch")
                        is_stored = True
                    part = bytes(upload.data[:PART_BYTES])
                    del upload.data[:PART_BYTES]
                    await asyncio.to_thread(self._store.add_part, file_id, number, part)
                    number += 1
            upload.check_end()
            if not is_stored:
                await asyncio.to_thread(self._store.begin_file, file_id, caller().owner, upload.name, "batch")
                is_stored = True
            await asyncio.to_thread(self._store.add_part, file_id, number, bytes(upload.data))
            stored = await asyncio.to_thread(self._store.end_file, file_id)
        except BaseException:
            if is_stored:
                await asyncio.shield(asyncio.to_thread(self._store.forget_file, file_id))
            raise
        return json_response(stored.told())

    async def _pieces(self, request: Request) -> AsyncGenerator[bytes, None]:
        size = 0
        while True:
            try:
                async with asyncio.timeout(self._receive_timeout_s):
                    message = await request.receive()
            except TimeoutError as error:
                raise BodyTooLateError(f"no more of the file came for {self._receive_timeout_s:g} s") from error
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece = message.get("body", b"")
            size += len(piece)
            if size > self._max_bytes + OVERHEAD_BYTES:
                raise BodyTooLargeError(f"file: has more than {self._max_bytes} bytes")
            yield piece
            if not message.get("more_body", False):
                return

    async def listed(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        files = await asyncio.to_thread(self._store.listed_files, caller().owner, purpose)
        return page(request, files, lambda file: file.file_id)

    async def told(self, request: Request) -> Response:
        return json_response((await self._file(request)).told())

    async def content(self, request: Request) -> Response:
        file = await self._file(request)
        parts = self._store.content(file.file_id)

        async def pieces() -> AsyncGenerator[bytes, None]:
            while (part := await asyncio.to_thread(next, parts, None)) is not None:
                yield part

        headers = {"Content-Length": str(file.num_bytes)}
        return StreamingResponse(pieces(), headers=headers, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await asyncio.to_thread(self._store.delete_file, file_id, caller().owner)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> StoredFile:
        return await asyncio.to_thread(self._store.file, request.path_params["file_id"], caller().owner)


class _Upload:
    """A form that is arriving, with a file and what it is for."""

    def __init__(self, boundary: bytes) -> None:
        self.name = "file"
        self.data = bytearray()  # of the file, taken from the front
        self.num_bytes = 0
        self._purpose = bytearray()
        self._seen: set[str] = set()  # names of fields
        self._has_ended = False
        self._field = ""  # that is arriving
        self._head, self._value = bytearray(), bytearray()  # of a field's header
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_header_begin": self._begin_head,
                    "on_header_field": self._add_head,
                    "on_header_value": self._add_value,
                    "on_header_end": self._end_head,
                    "on_headers_finished": self._check_field,
                    "on_part_data": self._add_data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise BodyTypeError(f"the boundary of the form cannot be used: {error}") from error

    def add(self, piece: bytes) -> None:
        """Raises `InvalidArgumentError`."""
        try:
            self._parser.write(piece)
        except MultipartParseError as error:
            raise InvalidArgumentError("file", f"the body is not a form: {error}") from error

    def check_end(self) -> None:
        """Raises `InvalidArgumentError` for what is missing or wrong."""
        if not self._has_ended:
            raise InvalidArgumentError("file", "the body ends inside the form")
        for name in ("file", "purpose"):
            if name not in self._seen:
                raise InvalidArgumentError(name, "is required")
        if (purpose := self._purpose.decode("utf-8", "replace")) != "batch":
            raise InvalidArgumentError("purpose", f'must be "batch", not {purpose[:40]!r}')
        if not self.num_bytes:
            raise InvalidArgumentError("file", "is empty")

    def _begin_head(self) -> None:
        self._head.clear()
        self._value.clear()

    def _add_head(self, data: bytes, start: int, end: int) -> None:
        self._head += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_head(self) -> None:
        if bytes(self._head).lower() != b"content-disposition":
            return
        _, options = parse_options_header(bytes(self._value))
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        if self._field == "file" and (name := options.get(b"filename", b"").decode("utf-8", "replace")):
            self.name = name[-MAX_NAME_CHARS:]

    def _check_field(self) -> None:
        if self._field not in ("file", "purpose"):
            raise InvalidArgumentError(self._field[:100] or "file", "is not a known field")
        if self._field in self._seen:
            raise InvalidArgumentError(self._field, "is given twice")
        self._seen.add(self._field)

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == "file":
            self.data += data[start:end]
            self.num_bytes += end - start
        else:
            self._purpose += data[start : min(end, start + MAX_FIELD_BYTES - len(self._purpose))]

    def _end(self) -> None:
        self._has_ended = True


def _boundary(request: Request) -> bytes:
    """Raises `BodyTypeError` if the body is no form. A page of any other site may have its visitors' browsers send one
    without asking first, so that pages may not."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != UPLOAD_TYPE or not boundary:
        raise BodyTypeError(f"the body must be {UPLOAD_TYPE.decode()} with a boundary")
    if "origin" in request.headers:
        raise BodyTypeError("pages cannot upload files: the request has Origin")
    return boundary


def page(request: Request, listed: list[ListedT], id_of: Callable[[ListedT], str]) -> Response:
    """Some of what is `listed`: as many as `limit`, behind the one of id `after`. Raises `InvalidArgumentError`."""
    given, after = request.query_params.get("limit", str(DEFAULT_LISTED)), request.query_params.get("after")
    if not (given.isascii() and given.isdecimal() and len(given) <= 4 and 1 <= int(given) <= MAX_LISTED):
        raise InvalidArgumentError("limit", f"must be a number from 1 to {MAX_LISTED}")
    ids = [id_of(one) for one in listed]
    if after is not None and after not in ids:
        raise InvalidArgumentError("after", "is none of these")
    begin = 0 if after is None else ids.index(after) + 1
    shown = listed[begin : begin + int(given)]
    return json_response(
        {
            "object": "list",
            "data": [one.told() for one in shown],
            "first_id": id_of(shown[0]) if shown else None,
            "last_id": id_of(shown[-1]) if shown else None,
            "has_more": begin + len(shown) < len(listed),
        }
    )
