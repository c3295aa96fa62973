"""Headers by which callers and proxies find a call again: what came with it goes back with its answer, whatever
becomes of it. Over REST as headers, over gRPC as trailing metadata: headers before an answer would end gRPC's own
retries of a refused call.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import InvalidArgumentError
from common.tracing import TRACEPARENT
from common.validation import check_request_id
from router.limits.clients import REQUEST_ID_HEADER
from router.limits.targets import TARGET_HEADERS

ECHOED = frozenset({REQUEST_ID_HEADER, TRACEPARENT, *TARGET_HEADERS})
MAX_CHARS = 512


def echoed(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[tuple[str, str], ...]:
    """What of a gRPC call's metadata goes back."""
    return tuple(
        (name, value)
        for name, value in metadata or ()
        if name in ECHOED and isinstance(value, str) and goes_back(name, value)
    )


def goes_back(name: str, value: str) -> bool:
    """Whether the value of a header of `ECHOED` is one to send back."""
    if name == REQUEST_ID_HEADER:
        try:
            check_request_id(value)
        except InvalidArgumentError:
            return False
    return len(value) <= MAX_CHARS and value.isascii() and value.isprintable()
