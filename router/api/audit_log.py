"""A line in the log for each order of an operator, carried out or refused: who asked, for what, and what came of it.

    order call=baton.v1.AdminService.Pause client=ops peer=ipv4:10.0.0.7:51234 request_id=… target=all_workers status=OK

Whatever `--log-level` says, these lines are shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextvars import ContextVar

from common.errors import BatonError, ForbiddenError, InvalidArgumentError, UnauthenticatedError
from common.grpc.calls import Context
from common.logs import RareLine
from common.validation import check_request_id
from router.api.api_keys import check_operator, current_client
from router.limits.clients import REQUEST_ID_HEADER
from router.running.request import new_request_id

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # of its own, so that no other level hides it

NO_KEYS = "anybody (no keys are asked for)"
MAX_FACT_CHARS = 200  # of what a caller writes
_LOCAL = ("unix:", "ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")

_facts: ContextVar[dict[str, object] | None] = ContextVar("facts_of_order", default=None)
_unauthenticated = RareLine(log, "order refused: no known API key")


def note(**facts: object) -> None:
    """Adds to the line of the order that is being carried out."""
    found = _facts.get()
    if found is not None:
        found.update({name: one[:MAX_FACT_CHARS] if isinstance(one, str) else one for name, one in facts.items()})


@contextlib.asynccontextmanager
async def audited(call: str, context: Context) -> AsyncIterator[None]:
    """Use it around an order. The caller gets the order's id back, as `x-request-id` in trailing metadata: its
    own, or a new one."""
    client = current_client.get()
    request_id = new_request_id()  # unless the caller has one
    facts: dict[str, object] = {"call": call, "client": client.name if client else NO_KEYS, "peer": context.peer()}
    facts["request_id"] = request_id
    _facts.set(facts)
    status, reason = "UNKNOWN", ""
    try:
        facts["request_id"] = request_id = _given_id(context) or request_id
        context.set_trailing_metadata((*_others(context), (REQUEST_ID_HEADER, request_id)))
        yield
        status = "OK"
    except BatonError as error:
        status, reason = error.grpc_code, error.message
        raise
    except (asyncio.CancelledError, GeneratorExit):
        status, reason = "CANCELLED", "by its caller, or too late"
        raise
    except Exception as error:
        status, reason = "INTERNAL", type(error).__name__
        raise
    finally:
        if reason:
            facts["reason"] = reason[: 2 * MAX_FACT_CHARS]
        log.info("order", extra={**facts, "status": status})


@contextlib.asynccontextmanager
async def administration(call: str, context: Context) -> AsyncIterator[None]:
    """Use it around a call of `AdminService`, before its message is read. Raises `ForbiddenError` if the caller may not
    give orders: without keys, only who calls from this machine may."""
    async with audited(call, context):
        check_operator("administration is for")
        if current_client.get() is None and not is_local(context.peer()):
            raise ForbiddenError(
                "administration from other machines asks for keys: this router has none (api_keys_file)"
            )
        yield


def is_local(peer: str) -> bool:
    """Whether gRPC's name for a caller is of this machine."""
    return peer.startswith(_LOCAL)


def unauthenticated(method: str, context: Context, error: UnauthenticatedError) -> None:
    """Somebody without a known key called. Strangers could fill the log, so such lines are rare."""
    _unauthenticated.happened({"call": method, "peer": context.peer(), "status": error.grpc_code})


def _others(context: Context) -> list[tuple[str, str | bytes]]:
    return [(name, value) for name, value in context.trailing_metadata() or () if name != REQUEST_ID_HEADER]


def _given_id(context: Context) -> str:
    """Empty if there is none. Raises `InvalidArgumentError`."""
    given = dict(context.invocation_metadata() or ()).get(REQUEST_ID_HEADER)
    if given is None:
        return ""
    if not isinstance(given, str):
        raise InvalidArgumentError(REQUEST_ID_HEADER, "must be text")
    check_request_id(given, REQUEST_ID_HEADER)
    return given
