"""What work costs a worker: in seconds, if all workers said how long their steps take, and else in tokens. Pure.

A token is the time that a worker takes to compute one token of a prompt. The constants below are for workers that sent
no model of time; those of `SecondCosts` are of what no model of a step knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.batch_time import BatchTime, StepShape
from common.prefill_place import least_remote_tokens
from router.fleet.endpoint import Endpoint
from router.policy.least_load import load_score

MOVE_COST = 0.25  # to move a token's KV, against computing the token: no model of a step knows the network
LOAD_COST = 64  # tokens, of one request that runs on a decode worker; one that waits counts four times (`load_score`)
IN_PLACE_COST = 2.0  # of a token computed in place, since it also holds up that worker's decodes
IN_PLACE_MARGIN = 1024  # tokens by which a prefill worker has to be later before its work is done in place
HEDGE_QUEUE = 1024  # tokens, beside one prompt's, that a worker which is asked beside a late one may have to do

CHUNK = 512  # tokens of a prompt in one step: the default of --chunk-size, which workers do not tell
MAX_KEPT = 4096  # workers
ANSWER_TOKENS = 64  # of an answer that count when decode workers are compared: what all tokens cost there


class Costs(Protocol):
    in_seconds: bool

    def queue(self, endpoint: Endpoint) -> float:
        """Of the prompt tokens that are to be computed before a newcomer's."""

    def load(self, endpoint: Endpoint) -> float:
        """What a newcomer's answer loses by those that run beside it."""

    def prompt(self, endpoint: Endpoint, num_missing: int, num_cached: int) -> float:
        """To compute `num_missing` tokens of a prompt after `num_cached`, with nothing beside them."""

    def in_place(self, endpoint: Endpoint, num_missing: int, num_cached: int) -> float:
        """To compute them on a decode worker, what its decodes lose by it included."""

    def least_remote(self, decode: Endpoint, prefill: Endpoint, num_cached: int) -> int:
        """The fewest missing tokens for which it pays to ask `prefill`; 0 is one KV block."""


class TokenCosts:
    in_seconds = False

    def queue(self, endpoint: Endpoint) -> float:
        return endpoint.load.num_queued_prompt_tokens + endpoint.num_unreported_tokens

    def load(self, endpoint: Endpoint) -> float:
        return LOAD_COST * load_score(endpoint)

    def prompt(self, endpoint: Endpoint, num_missing: int, num_cached: int) -> float:  # noqa: ARG002
        return num_missing

    def in_place(self, endpoint: Endpoint, num_missing: int, num_cached: int) -> float:  # noqa: ARG002
        return IN_PLACE_COST * num_missing

    def least_remote(self, decode: Endpoint, prefill: Endpoint, num_cached: int) -> int:  # noqa: ARG002
        return 0


class SecondCosts:
    """All workers that it is asked for have a `batch_time`. What a worker's load costs is kept until it changes: an
    `Endpoint` is the same object until then."""

    in_seconds = True

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Endpoint, float, float]] = {}  # by address: of this endpoint, queue and load

    def queue(self, endpoint: Endpoint) -> float:
        return self._of(endpoint)[1]

    def load(self, endpoint: Endpoint) -> float:
        return self._of(endpoint)[2]

    def _of(self, endpoint: Endpoint) -> tuple[Endpoint, float, float]:
        kept = self._kept.get(endpoint.address)
        if kept is None or kept[0] is not endpoint:
            num_queued = endpoint.load.num_queued_prompt_tokens + endpoint.num_unreported_tokens
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            kept = endpoint, self.prompt(endpoint, num_queued, 0), ANSWER_TOKENS * step_s(endpoint, num_more=1)
            self._kept[endpoint.address] = kept
        return kept

    def prompt(self, endpoint: Endpoint, num_missing: int, num_cached: int) -> float:
        return prompt_s(_time(endpoint), num_missing, num_cached)

    def in_place(self, endpoint: Endpoint, num_missing: int, num_cached: int) -> float:
        """Every decode that runs there waits for as long as the prompt makes its steps longer. At least one does: the
        next request's, if none runs now."""
        time, decodes = _time(endpoint), decodes_of(endpoint)
        if not decodes.num_decodes:
            return 2 * prompt_s(time, num_missing, num_cached)
        with_prompt = prompt_s(time, num_missing, num_cached, decodes)
        num_steps = -(-num_missing // CHUNK)
        longer = max(0.0, with_prompt - num_steps * time.seconds(decodes))
        return with_prompt + decodes.num_decodes * longer

    def least_remote(self, decode: Endpoint, prefill: Endpoint, num_cached: int) -> int:
        """A prefill worker takes a step of its own at least."""
        asking_s = _time(prefill).seconds(StepShape(num_decodes=1, decode_context=1, longest_context=1))
        return least_remote_tokens(_time(decode), decodes_of(decode), asking_s, past=num_cached, most=CHUNK)


TOKENS = TokenCosts()
SECONDS = SecondCosts()


def all_know_their_times(endpoints: Sequence[Endpoint]) -> bool:
    """Whether costs can be in seconds: only if all of them are, they can be compared."""
    for endpoint in endpoints:  # quicker than a generator, and most fleets end it at the first one
        if endpoint.batch_time is None:
            return False
    return bool(endpoints)


def wait_of(endpoint: Endpoint, costs: Costs) -> float:
    """Until the worker comes to a new request, in either role."""
    return costs.queue(endpoint) + (costs.load(endpoint) if endpoint.can_decode else 0)


def decodes_of(endpoint: Endpoint, num_more: int = 0) -> StepShape:
    """A step of the requests that run on the worker, and of `num_more` like them; those that wait will run, too."""
    load = endpoint.load
    num = load.num_requests_running
    context = max(0, load.num_blocks - load.num_free_blocks - load.num_cached_blocks) * endpoint.block_size
    if num_more:
        more = num_more + load.num_requests_waiting + endpoint.num_unreported
        context, num = (context + more * context // num if num else 0), num + more
    return StepShape(
        num_decodes=num,
        decode_context=context,
        longest_context=context // num if num else 0,
        num_head_rows=num,
    )


def step_s(endpoint: Endpoint, num_more: int = 0) -> float:
    """Seconds of such a step: the time between two tokens of each of them."""
    return _time(endpoint).seconds(decodes_of(endpoint, num_more))


def prompt_s(time: BatchTime, num_tokens: int, past: int, beside: StepShape | None = None) -> float:
    """Seconds to compute `num_tokens` of a prompt after `past`, in chunks, with the decodes of `beside` in each step.

    Attention's part grows evenly from the first full chunk to the last one, so that their mean stands for all.
    """
    if num_tokens <= 0:
        return 0.0
    num_full, rest = divmod(num_tokens, CHUNK)
    seconds = 0.0
    if num_full:
        first = time.seconds(_chunk(CHUNK, past, beside))
        last = time.seconds(_chunk(CHUNK, past + (num_full - 1) * CHUNK, beside)) if num_full > 1 else first
        seconds = num_full * (first + last) / 2
    return seconds + (time.seconds(_chunk(rest, past + num_full * CHUNK, beside)) if rest else 0.0)


def first_token_s(endpoint: Endpoint, num_missing: int, num_cached: int) -> float:
    """Seconds until the worker has a newcomer's first token: after the prompts that were there, with its decodes in
    each step."""
    time, beside = _time(endpoint), decodes_of(endpoint) if endpoint.can_decode else None
    num_queued = endpoint.load.num_queued_prompt_tokens + endpoint.num_unreported_tokens
    return prompt_s(time, num_queued, 0, beside) + prompt_s(time, num_missing, num_cached, beside)


def _chunk(new: int, past: int, beside: StepShape | None) -> StepShape:
    decodes = beside or StepShape()
    return StepShape(
        num_decodes=decodes.num_decodes,
        decode_context=decodes.decode_context,
        longest_context=decodes.longest_context,
        num_chunks=1,
        chunk_tokens=new,
        chunk_past=past,
        chunk_pairs=new * past + new * (new + 1) // 2,
        chunk_squares=new * new,
        num_head_rows=decodes.num_head_rows + 1,
    )


def _time(endpoint: Endpoint) -> BatchTime:
    assert endpoint.batch_time is not None  # noqa: S101 - asked only if `all_know_their_times`
    return endpoint.batch_time
