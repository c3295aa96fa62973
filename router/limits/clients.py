"""Whose request it is, and what is charged to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import InvalidArgumentError
from common.tracing import TRACEPARENT, TRACESTATE
from router.limits.targets import NOTHING_GIVEN, TARGET_HEADERS, GivenTargets, given_in_headers

REQUEST_ID_HEADER = "x-request-id"
SESSION_HEADER = "x-session-id"
EXPLAIN_HEADER = "x-baton-explain"
PICK_HEADER = "x-baton-pick"
MAX_SESSION_CHARS = 512


@dataclass(slots=True, frozen=True)
class ApiClient:
    """Whose key came with a call."""

    name: str
    tenant: str = ""
    is_operator: bool = False  # sees where requests of all tenants went, and why

    @property
    def owner(self) -> str:
        """Whose turn its requests take in queues, and whose share of retained KV: its tenant, or itself if it has no
        tenant."""
        return f"tenant {self.tenant}" if self.tenant else f"key {self.name}"

    def cache_salt(self, given: str) -> str:
        """What separates this client's cached blocks from others': its tenant, then its own salt. As JSON, so that no
        salt spells another tenant."""
        return json.dumps([self.tenant, given]) if self.tenant or given else ""


NOBODY = ApiClient("")
"""Whose requests are those that need no key."""


@dataclass(slots=True)
class Charge:
    """Prompt tokens that were charged to the client's limits. They are given back if no worker is asked for them."""

    num_tokens: int = 0
    worker_was_asked: bool = False


@dataclass(slots=True, frozen=True)
class CallHints:
    """What a call says beside its request, in HTTP headers or gRPC metadata."""

    session: str = ""  # requests of one session should go to one worker
    explain: bool = False  # the answer's report gets the reasons of its routing
    traceparent: str = ""  # which trace it is a part of, as W3C Trace Context says it
    tracestate: str = ""
    targets: GivenTargets = NOTHING_GIVEN
    picked: str = ""  # what an endpoint picker chose, signed (`router.running.picks`)


def call_hints(headers: Mapping[str, str], session: str = "") -> CallHints:
    """`headers` by their names in lower case; `session`: what the request's body says of it, if they say nothing.

    Raises `InvalidArgumentError`.
    """
    given = headers.get(SESSION_HEADER, "")
    if len(given) > MAX_SESSION_CHARS:
        raise InvalidArgumentError(SESSION_HEADER, f"must have at most {MAX_SESSION_CHARS} characters")
    explain = headers.get(EXPLAIN_HEADER, "").lower()
    if explain not in ("", "0", "1", "false", "true"):
        raise InvalidArgumentError(EXPLAIN_HEADER, "must be true or false")
    traceparent = headers.get(TRACEPARENT, "")
    tracestate = headers.get(TRACESTATE, "") if traceparent else ""
    has_targets = any(name in headers for name in TARGET_HEADERS)
    targets = given_in_headers(headers) if has_targets else NOTHING_GIVEN
    picked = headers.get(PICK_HEADER, "")
    return CallHints(
        given or session[:MAX_SESSION_CHARS], explain in ("1", "true"), traceparent, tracestate, targets, picked
    )
