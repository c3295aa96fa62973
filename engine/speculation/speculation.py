"""Which tokens the next step checks beyond those that it has to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from common.batch_time import BatchTime, StepShape
from engine.request import Request
from engine.scheduling.schedule import SchedulerConfig
from engine.speculation.step_cost import cost_by_rows, predicted_cost


class Drafter(Protocol):
    @property
    def cost(self) -> float:
        """The cost of guessing one token for each request, as a share of a step of the model."""

    def draft(self, lengths: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Guesses at most so many tokens for each request, which may follow its tokens."""


@runtime_checkable
class Follower(Protocol):
    """A drafter that wants to see every step's requests, also those that get no draft."""

    def follow(self, requests: Iterable[Request]) -> None:
        """`requests` are all that steps compute. Called when a step has ended, before the next one is decided."""


class Speculation:
    def __init__(
        self,
        drafter: Drafter,
        max_tokens: int,
        config: SchedulerConfig,
        free_rows: float,
        batch_time: Callable[[], BatchTime | None] = lambda: None,
    ) -> None:
        """`max_tokens` of one draft. `batch_time`: how long a step takes, if the engine is sure of it; until then costs
        are estimated by `free_rows` of the model (`step_cost`)."""
        self._drafter = drafter
        self._follower = drafter if isinstance(drafter, Follower) else None
        self._max_tokens = max_tokens
        self._eos_token_ids = config.eos_token_ids
        self._max_model_len = config.max_model_len
        self._estimated = cost_by_rows(free_rows)
        self._batch_time = batch_time

    def follow(self, requests: Iterable[Request]) -> None:
        """As `Follower.follow`."""
        if self._follower is not None:
            self._follower.follow(requests)

    def drafts(self, decodes: Sequence[Request], shape: StepShape | None = None) -> dict[Request, list[int]]:
        """The drafts for requests that lack no more than the KV of their last token. `shape`: of a step of them."""
        lengths = {}
        time = self._batch_time()
        if time is not None and shape is not None and shape.num_decodes:
            cost_of = predicted_cost(time, shape)
        else:
            cost_of = self._estimated
        for request in decodes:
            most = min(self._max_tokens, self._num_left(request) - 1)
            if not request.sampling_params.speculate or most < 1:
                continue
            if length := request.drafts.next_length(len(decodes), most, cost_of, self._drafter.cost):
                lengths[request] = length
        drafts = self._drafter.draft(lengths) if lengths else {}
        return {request: kept for request, draft in drafts.items() if (kept := self._before_end(request, draft))}

    def _num_left(self, request: Request) -> int:
        """How many tokens the request's answer may still get."""
        in_answer = request.sampling_params.max_tokens - request.num_output_tokens
        return min(in_answer, self._max_model_len - request.num_tokens)

    def _before_end(self, request: Request, draft: list[int]) -> list[int]:
        """Cuts a draft before a token that ends the answer: nothing follows that token, and its KV is of no use."""
        params = request.sampling_params
        for index, token_id in enumerate(draft):
            if token_id in params.stop_token_ids or (token_id in self._eos_token_ids and not params.ignore_eos):
                return draft[:index]
        return draft
