"""What an endpoint picker chose for a request, in a header that it has the proxy add: the router that gets the
request then sends it to the same workers.

The header is signed, so no client can make one, and holds for one request and a short time. It is only a hint: a
request whose header is wrong, late or about workers that are gone is routed as if it had none.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import msgspec

from common import metrics
from common.errors import StartupError
from common.logs import RareLine
from common.process.watched_files import WatchedFiles, read_file
from router.fleet.endpoint import Endpoint
from router.policy.base import Reasons, RoutingDecision

log = logging.getLogger(__name__)

LIFETIME_S = 10.0  # a proxy forwards at once; who waits longer for a turn is better off with a new choice
CLOCK_SKEW_S = 60.0  # of another replica's clock, at most: a choice of a later time is none
HOLD_S = 5.0  # for the request to come: so long it counts as load of the workers that were chosen
MAX_HEADER_CHARS = 8192
MIN_KEY_CHARS = 16
MAX_REASONS = 4  # the last ones, which say why these workers
MAX_REASON_CHARS = 240
_PURPOSE = b"baton endpoint pick 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size

Incarnation = tuple[str, str]


Fact = bool | int | float | None

_DECISION = {one.name: one.default for one in msgspec.structs.fields(RoutingDecision)}
_CARRIED = tuple(_DECISION.keys() - {"decode", "prefill", "reasons", "late"})  # plain values, all of them with defaults


class Pick(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A decision about a request that has not come yet. Workers are named as `Endpoint.incarnation`."""

    number: str  # another one for each choice
    made_at: float  # seconds since 1970
    picker: str  # REST address of the router that chose
    request_id: str
    num_prompt_tokens: int
    decode: Incarnation
    prefill: tuple[Incarnation, ...]
    facts: dict[str, Fact]  # other fields of `RoutingDecision` that do not have their defaults
    reasons: tuple[str, ...]

    def decision(self, decode: Endpoint, prefill: Sequence[Endpoint]) -> RoutingDecision:
        """With the workers that are there now. Raises `UnusablePickError`."""
        if unknown := self.facts.keys() - set(_CARRIED):
            raise UnusablePickError("unknown", f"a router of another version signed it: {min(unknown)[:40]!r}")
        lines = (f"chosen by the endpoint picker of {self.picker}", *self.reasons)
        reasons = Reasons(choices=[partial(str, line) for line in lines])
        facts = {**self.facts, "may_hedge": bool(self.facts.get("may_hedge")) and len(prefill) > 1}
        return RoutingDecision(decode=decode, prefill=tuple(prefill), reasons=reasons, **facts)  # type: ignore[arg-type]


def pick_of(
    decision: RoutingDecision, *, number: str, made_at: float, picker: str, request_id: str, num_prompt_tokens: int
) -> Pick:
    told = {name: getattr(decision, name) for name in _CARRIED}
    return Pick(
        number=number,
        made_at=made_at,
        picker=picker,
        request_id=request_id,
        num_prompt_tokens=num_prompt_tokens,
        decode=decision.decode.incarnation,
        prefill=tuple([one.incarnation for one in decision.prefill]),
        facts={name: value for name, value in told.items() if value != _DECISION[name]},
        reasons=tuple([line[:MAX_REASON_CHARS] for line in decision.reasons.lines()[-MAX_REASONS:]]),
    )


class UnusablePickError(Exception):
    """Why a request goes its own way. `outcome` is the metric's word for it."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


_DECODER = msgspec.msgpack.Decoder(Pick)


class PickKeys:
    """The secrets in a file, one in a line; `#` begins a comment. Raises `StartupError` if one is too short, or if
    there is none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._watched = WatchedFiles("endpoint_picker_keys", [path], self._load)

    def current(self) -> Sequence[bytes]:
        return self._watched.current()

    def _load(self) -> Sequence[bytes]:
        field = "endpoint_picker_key_file"
        found = []
        for number, line in enumerate(read_file(field, self._path).splitlines(), start=1):
            key = line.partition(b"#")[0].strip()
            if not key:
                continue
            if len(key) < MIN_KEY_CHARS:
                raise StartupError(
                    f"{field}: {self._path}, line {number}: a secret has {MIN_KEY_CHARS} characters at least"
                )
            found.append(key)
        if not found:
            raise StartupError(f"{field}: {self._path} holds no secret")
        return found


class Picks:
    """Signs and checks what is chosen, and holds the load of it until the request comes."""

    def __init__(
        self,
        keys: Callable[[], Sequence[bytes]],
        clock: Callable[[], float] = time.time,
        *,
        lifetime_s: float = LIFETIME_S,
        hold_s: float = HOLD_S,
    ) -> None:
        """`keys`: the first one signs. `clock`: seconds since 1970."""
        self._keys = keys
        self._clock = clock
        self._lifetime_s = lifetime_s
        self._hold_s = hold_s
        self._held: dict[str, ExitStack] = {}
        self._unfollowed = RareLine(log, "an endpoint picker's choice was not followed")

    # ------------------------------------------------------------------------------------------------ the header

    def signed(self, pick: Pick) -> str:
        """The header's value."""
        content = msgspec.msgpack.encode(pick)
        return base64.urlsafe_b64encode(_digest(self._keys()[0], content) + content).decode()

    def read(self, header: str) -> Pick:
        """Raises `UnusablePickError`."""
        if len(header) > MAX_HEADER_CHARS:
            raise UnusablePickError("unknown", f"it has more than {MAX_HEADER_CHARS} characters")
        try:
            signed = base64.b64decode(header, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):  # the second for what is not ASCII
            raise UnusablePickError("unknown", "it is not base64") from None
        digest, content = signed[:_DIGEST_BYTES], signed[_DIGEST_BYTES:]
        if not any(hmac.compare_digest(_digest(key, content), digest) for key in self._keys()):
            raise UnusablePickError("unknown", "no key of this router signed it")
        try:
            pick = _DECODER.decode(content)
        except (msgspec.DecodeError, msgspec.ValidationError):
            raise UnusablePickError("unknown", "a router of another version signed it") from None
        age_s = self._clock() - pick.made_at
        if not -CLOCK_SKEW_S <= age_s <= self._lifetime_s:
            raise UnusablePickError("expired", f"it was made {age_s:.1f} s ago")
        return pick

    def count(self, outcome: str) -> None:
        metrics.router_picked_requests.labels(outcome).inc()

    def not_followed(self, request_id: str, error: UnusablePickError) -> None:
        """Counts and logs a request that is routed anew."""
        self.count(error.outcome)
        facts: Mapping[str, object] = {"request_id": request_id, "outcome": error.outcome, "reason": str(error)}
        self._unfollowed.happened(facts)

    # -------------------------------------------------------------------------------------------------- the load

    def hold(self, number: str, load: AbstractContextManager[None]) -> None:
        """Enters `load` until `let_go`, and for a while at most."""
        held = ExitStack()
        held.enter_context(load)
        timer = asyncio.get_running_loop().call_later(self._hold_s, self.let_go, number)
        held.callback(timer.cancel)
        self._held[number] = held

    def let_go(self, number: str) -> None:
        """The request has come, or does not come. Does nothing if that is known."""
        held = self._held.pop(number, None)
        if held is not None:
            held.close()

    @property
    def num_held(self) -> int:
        return len(self._held)


def _digest(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + content, "sha256")
