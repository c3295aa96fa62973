"""Chooses, for a proxy, the router that gets a request, and the workers that this router will use.

The router's own policy chooses the workers. They travel with the request in a signed header (`router.running.picks`),
so that the router that gets it, this one or a sibling, does not choose again. A request that no model answers, or that
a router will refuse, goes to a router without such a header: what is wrong with it is said there, in the form of that
interface.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from common import metrics
from common.errors import BatonError, OverloadedError, UnauthenticatedError, UnavailableError
from router.api.api_keys import ApiKeys
from router.api.endpoint_picker.bodies import BODIES, path_of, request_of
from router.api.endpoint_picker.replicas import Replicas
from router.limits.clients import PICK_HEADER, REQUEST_ID_HEADER, ApiClient
from router.running.picks import Picks, pick_of
from router.serving.gateway import Gateway

INTERFACE = "endpoint_picker"  # in the count of calls without a known key


@dataclass(slots=True, frozen=True, kw_only=True)
class HttpRequest:
    """What a proxy tells of a request."""

    method: str
    path: str
    headers: Mapping[str, str]  # by their names in lower case, without `:method` and the like
    body: bytes | None  # None if the proxy does not tell it
    client: ApiClient | None  # whose key came with it
    has_known_key: bool = True  # or no key is asked for
    arrived_at: float  # seconds of the monotonic clock
    subset: frozenset[str] | None = None  # addresses that may be chosen; None: any


@dataclass(slots=True, frozen=True, kw_only=True)
class Choice:
    """Where a request should go."""

    addresses: tuple[str, ...]  # ip:port, the first to be tried first
    headers: Mapping[str, str] = field(default_factory=dict)  # to be set in the request
    number: str = ""  # of the pick; empty: the router chooses the workers

    @property
    def names_workers(self) -> bool:
        return bool(self.number)


class EndpointPicker:
    def __init__(
        self,
        gateway: Gateway,
        replicas: Replicas,
        picks: Picks,
        keys: ApiKeys | None = None,
        root_path: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: seconds since 1970."""
        self._gateway = gateway
        self._replicas = replicas
        self._picks = picks
        self._keys = keys
        self._root_path = root_path
        self._clock = clock

    def client(self, headers: Mapping[str, str]) -> tuple[ApiClient | None, bool]:
        """Whose request it is, and whether it may ask at all."""
        if self._keys is None:
            return None, True
        given = headers.get("authorization")
        if given is None and (key := headers.get("x-api-key")):
            given = f"Bearer {key}"
        try:
            return self._keys.client(given, INTERFACE), True
        except UnauthenticatedError:
            return None, False

    async def choose(self, asked: HttpRequest) -> Choice:
        """Raises `OverloadedError` if no router or worker should take the request now, `UnavailableError` if none can,
        `DeadlineError`. Whoever gets a choice calls `ended` once."""
        refusal = self._own_refusal(asked.client)
        addresses = tuple(self._replicas.named(asked.subset, with_own=refusal is None))
        if not addresses:
            if refusal is not None and self._replicas.named(asked.subset, with_own=True):
                raise refusal
            raise UnavailableError("none of the endpoints that the proxy allows is a router of this fleet")
        choice = Choice(addresses=addresses)
        self._replicas.opened(addresses[0])  # from now on: others come while its workers are chosen
        try:
            if asked.has_known_key and not isinstance(refusal, UnavailableError):
                choice = await self._with_workers(asked, choice)
        except BaseException:
            self._replicas.closed(addresses[0])
            raise
        return choice

    def _own_refusal(self, client: ApiClient | None) -> BatonError | None:
        """Why this router should not get one more request."""
        if reason := self._gateway.not_ready():
            return UnavailableError(reason)
        try:
            self._gateway.admission.check(client)
        except OverloadedError as error:
            return error
        return None

    async def _with_workers(self, asked: HttpRequest, choice: Choice) -> Choice:
        """`choice` with the workers, if a model answers this request."""
        client = asked.client
        gateway, body_class = self._gateway, BODIES.get(path_of(asked.path, self._root_path))
        admission = gateway.admission
        if body_class is None or asked.body is None or asked.method != "POST":
            return choice
        if admission.worker_wait_s and admission.registry.not_ready():
            return choice  # the router waits for a first worker, and tells who scales the fleet
        try:
            request = await request_of(gateway, body_class, asked.body, asked.headers, client, asked.arrived_at)
            if request.beams is not None:  # its steps are requests of their own
                return choice
            if choice.addresses[0] == self._replicas.own:
                admission.check(client, request.num_prompt_tokens)
            route, decision = await gateway.generation.choose(request)
        except BatonError as error:
            if error.http_status < 500 and not isinstance(error, OverloadedError):
                return choice
            raise
        pick = pick_of(
            decision,
            number=secrets.token_hex(8),
            made_at=self._clock(),
            picker=self._replicas.own,
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        headers = {PICK_HEADER: self._picks.signed(pick)}
        if request.request_id != asked.headers.get(REQUEST_ID_HEADER):
            headers[REQUEST_ID_HEADER] = request.request_id
        self._picks.hold(pick.number, gateway.routes.ahead(route, decision, request.num_prompt_tokens))
        return Choice(addresses=choice.addresses, headers=headers, number=pick.number)

    def answered(self, choice: Choice, served: str) -> None:
        """A response came, from `served`; empty if the proxy does not say it."""
        self._picks.let_go(choice.number)
        if not served:
            by = "unknown"
        elif served == choice.addresses[0]:
            by = "first"
        else:
            by = "fallback" if served in choice.addresses else "other"
        metrics.router_picks_served.labels(by).inc()

    def ended(self, choice: Choice) -> None:
        self._picks.let_go(choice.number)
        self._replicas.closed(choice.addresses[0])
