"""The lines of a batch's file, as OpenAI's API has them: what comes in, and what goes out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from router.batches.records import BatchLine, BatchStatus, LineAnswer, LineError

EMBEDDINGS = "/v1/embeddings"  # the endpoint whose requests have no priority
MAX_LINES = 50_000  # of one batch
MAX_ERRORS = 20  # told of one file
MAX_CUSTOM_ID_CHARS = 512
MAX_LINE_HEAD_BYTES = 4096  # of a line beside its body


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


def split(parts: Iterable[bytes], max_line_bytes: int) -> Iterator[bytes]:
    """The lines of a file that comes in parts. Of a longer line no more than one byte too many is kept."""
    line = b""
    for part in parts:
        *ends, rest = part.split(b"\n")
        for end in ends:
            yield line + end[: max_line_bytes + 1 - len(line)]
            line = b""
        line += rest[: max_line_bytes + 1 - len(line)]
    if line:
        yield line


def read_lines(
    batch_id: str, parts: Iterable[bytes], endpoint: str, max_line_bytes: int, priority: int
) -> Iterator[BatchLine | LineError]:
    """Each line that is not empty, or what is wrong with it."""
    seen: set[str] = set()
    is_empty = True
    for number, data in enumerate(split(parts, max_line_bytes), 1):
        if not data.strip():
            continue
        is_empty = False
        read = _read(batch_id, number, data, endpoint, max_line_bytes, priority)
        if isinstance(read, BatchLine):
            if read.custom_id in seen:
                read = LineError(f"custom_id {read.custom_id!r} is on a line before, too", number, "custom_id")
            elif len(seen) == MAX_LINES:
                yield LineError(f"has more than {MAX_LINES} requests", number, code="too_many_requests")
                return
            else:
                seen.add(read.custom_id)
        yield read
    if is_empty:
        yield LineError("has no request", None, code="empty_file")


def _read(
    batch_id: str, number: int, data: bytes, endpoint: str, max_line_bytes: int, priority: int
) -> BatchLine | LineError:
    if len(data) > max_line_bytes:
        return LineError(f"has more than {max_line_bytes} bytes", number)
    try:
        data.decode()
        line = msgspec.json.decode(data, type=_Line)
        body: dict[str, Any] = msgspec.json.decode(line.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return LineError(f"is not valid: {error}", number, code="invalid_json_line")
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        return LineError(f"must have 1 to {MAX_CUSTOM_ID_CHARS} characters", number, "custom_id")
    if line.method != "POST":
        return LineError(f"must be POST, not {line.method[:20]!r}", number, "method")
    if line.url != endpoint:
        return LineError(f"must be the batch's endpoint {endpoint}, not {line.url[:60]!r}", number, "url")
    if body.get("stream"):
        return LineError("is not for batches", number, "body.stream")
    if body.get("priority"):
        return LineError("is not for batches: the router decides it", number, "body.priority")
    if "request_id" in body:
        return LineError("is not for batches: each answer tells its own", number, "body.request_id")
    if priority and endpoint != EMBEDDINGS:
        body["priority"] = priority
    return BatchLine(batch_id, number, line.custom_id, msgspec.json.encode(body))


def output_line(line: BatchLine, answer: LineAnswer | None, status: BatchStatus) -> bytes:
    """Of the output file, or of the errors'. `answer` is None if the batch ended before the line had one, by
    `status`."""
    told: dict[str, object] = {"id": f"batch_req_{line.batch_id.removeprefix('batch_')}_{line.number}"}
    told["custom_id"] = line.custom_id
    if answer is None:
        is_late = status == BatchStatus.EXPIRED
        code = "batch_expired" if is_late else "batch_cancelled"
        why = "the batch expired before this request was made" if is_late else "the batch was cancelled"
        return msgspec.json.encode({**told, "response": None, "error": {"code": code, "message": why}}) + b"\n"
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
    return msgspec.json.encode({**told, "response": response, "error": None}) + b"\n"
