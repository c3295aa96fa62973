"""What one body of a client takes of its limits: on the way in all of it, on the way out back what nobody computed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from router.limits.clients import ApiClient
from router.limits.demand import Demand
from router.limits.gate import Gate
from router.limits.quotas import Quotas


@dataclass(slots=True)
class Charge:
    """Prompt tokens that were charged to the client's limits. They are given back if no worker is asked for them."""

    num_tokens: int = 0
    worker_was_asked: bool = False


class Charged:
    """See `Admission.charged`. A generator would cost each request more."""

    __slots__ = ("_charges", "_client", "_demand", "_field", "_gate", "_num_answers", "_num_places", "_quotas", "_undo")

    def __init__(
        self,
        gate: Gate,
        quotas: Quotas,
        demand: Demand,
        client: ApiClient,
        charges: Sequence[Charge],
        num_answers: int,
        num_places: int,
        field: str,
    ) -> None:
        self._gate = gate
        self._quotas = quotas
        self._demand = demand
        self._client = client
        self._charges = charges
        self._num_answers = num_answers
        self._num_places = num_places
        self._field = field
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> None:
        key, tenant, quotas, num_answers = self._client.name, self._client.tenant, self._quotas, self._num_answers
        num_tokens = sum([one.num_tokens for one in self._charges])
        with contextlib.ExitStack() as undo:
            if self._num_places > 1:
                undo.enter_context(self._gate.requests(key, self._num_places - 1))
            undo.enter_context(quotas.streams(key, tenant, num_answers, self._field))
            quotas.prompt(key, tenant, num_tokens)
            if num_answers > 1:
                quotas.more_requests(key, tenant, num_answers - 1)
            self._undo = undo.pop_all()
        if num_answers:
            self._demand.prompt(num_tokens)  # before they get a place: autoscalers make places of it

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._undo:
            num_left = sum([one.num_tokens for one in self._charges if not one.worker_was_asked])
            self._quotas.give_back(self._client.name, self._client.tenant, num_left)
