"""What work costs a worker: in seconds, if all workers said how long their steps take, and else in tokens. Pure.

A token is the time that a worker takes to compute one token of a prompt. The constants below are for workers that sent
no model of time; those of `SecondCosts` are of what no model of a step knows and nobody has measured yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from common.batch_time import BatchTime, ChunkTime, StepShape
from common.prefill_place import least_remote_tokens
from common.types import SLACKS_S
from router.fleet.endpoint import Endpoint
from router.policy.least_load import load_score

MOVE_COST = 0.25  # to move a token's KV, against computing the token: until the fleet's own handoffs say what it costs
LOAD_COST = 64  # tokens, of one request that runs on a decode worker; one that waits counts four times (`load_score`)
IN_PLACE_COST = 2.0  # of a token computed in place, since it also holds up that worker's decodes
IN_PLACE_MARGIN = 1024  # tokens by which a prefill worker has to be later before its work is done in place
HEDGE_QUEUE = 1024  # tokens, beside one prompt's, that a worker which is asked beside a late one may have to do

STEP = 2048  # tokens of all prompts in one step: the default of --max-num-batched-tokens, likewise
CHUNK = 512  # tokens of a prompt in one step: the default of --chunk-size, which workers do not tell
MAX_KEPT = 4096  # workers
MAX_MODELS = 1024  # of time, which take some ten thousand bytes each
MAX_PROMPTS = 1024  # predictions that are kept: those of a few decisions
ANSWER_TOKENS = 64  # of an answer that count when decode workers are compared: what all tokens cost there


class Costs(Protocol):
    in_seconds: bool

    def queue(self, endpoint: Endpoint) -> float:
        """Of the prompt tokens that are to be computed before a newcomer's."""

    def load(self, endpoint: Endpoint) -> float:
        """What a newcomer's answer loses by those that run beside it."""

    def wait(self, endpoint: Endpoint) -> float:
        """Until the worker comes to a new request, in either role: `queue`, and `load` if it decodes."""

    def margin(self, endpoint: Endpoint) -> float:
        """By how much a prefill worker has to be later before the work of `endpoint`'s prompt is done in place."""

    def prompt(self, endpoint: Endpoint, num_missing: int, num_cached: int) -> float:
        """To compute `num_missing` tokens of a prompt after `num_cached`, with nothing beside them."""

    def in_place(self, endpoint: Endpoint, num_missing: int, num_cached: int) -> float:
        """To compute them on a decode worker, what its decodes lose by it included."""

    def handoff(self, endpoint: Endpoint, num_missing: int, num_cached: int, handoff_token_s: float | None) -> float:
        """What moving their KV from `endpoint` adds after the first token. `handoff_token_s`: seconds for a token, as
        `router.running.first_token_times` measures it; None: nobody knows yet."""

    def least_remote(self, decode: Endpoint, prefill: Endpoint, num_cached: int) -> int:
        """The fewest missing tokens for which it pays to ask `prefill`; 0 is one KV block."""


class TokenCosts:
    in_seconds = False

    def queue(self, endpoint: Endpoint) -> float:
        return endpoint.load.num_queued_prompt_tokens + endpoint.num_unreported_tokens

    def load(self, endpoint: Endpoint) -> float:
        return LOAD_COST * load_score(endpoint)

    def wait(self, endpoint: Endpoint) -> float:
        return self.queue(endpoint) + (self.load(endpoint) if endpoint.can_decode else 0)

    def margin(self, endpoint: Endpoint) -> float:  # noqa: ARG002
        return IN_PLACE_MARGIN

    def prompt(self, endpoint: Endpoint, num_missing: int, num_cached: int) -> float:  # noqa: ARG002
        return num_missing

    def in_place(self, endpoint: Endpoint, num_missing: int, num_cached: int) -> float:  # noqa: ARG002
        return IN_PLACE_COST * num_missing

    def handoff(self, endpoint: Endpoint, num_missing: int, num_cached: int, handoff_token_s: float | None) -> float:  # noqa: ARG002
        return MOVE_COST * num_missing

    def least_remote(self, decode: Endpoint, prefill: Endpoint, num_cached: int) -> int:  # noqa: ARG002
        return 0


class SecondCosts:
    """All workers that it is asked for have a `batch_time`. What a worker's load costs is kept until it changes: an
    `Endpoint` is the same object until then. So is what depends on a model of time alone."""

    in_seconds = True

    def __init__(self) -> None:
        # By address: of this endpoint, queue and load, and both together.
        self._kept: dict[str, tuple[Endpoint, float, float, float]] = {}
        # By identity: chunks with nothing beside them, margin, and one decode's step.
        self._of_models: dict[int, tuple[BatchTime, ChunkTime, float, float]] = {}
        self._beside: dict[str, tuple[Endpoint, ChunkTime]] = {}  # by address
        self._prompts: dict[tuple[int, int, int], tuple[BatchTime, float]] = {}  # by identity, missing, cached tokens
        # By both identities, decodes, their context, cached tokens.
        self._least: dict[tuple[int, int, int, int, int], tuple[BatchTime, BatchTime, int]] = {}

    def queue(self, endpoint: Endpoint) -> float:
        kept = self._kept.get(endpoint.address)
        return kept[1] if kept is not None and kept[0] is endpoint else self._keep(endpoint)[1]

    def load(self, endpoint: Endpoint) -> float:
        kept = self._kept.get(endpoint.address)
        return kept[2] if kept is not None and kept[0] is endpoint else self._keep(endpoint)[2]

    def wait(self, endpoint: Endpoint) -> float:
        kept = self._kept.get(endpoint.address)
        return kept[3] if kept is not None and kept[0] is endpoint else self._keep(endpoint)[3]

    def _keep(self, endpoint: Endpoint) -> tuple[Endpoint, float, float, float]:
        num_queued = endpoint.load.num_queued_prompt_tokens + endpoint.num_unreported_tokens
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        load = ANSWER_TOKENS * step_s(endpoint, num_more=1) if endpoint.can_decode else 0.0
        queue = prompt_s(self.alone(_time(endpoint)), num_queued, 0) if num_queued else 0.0
        kept = endpoint, queue, load, queue + load  # no load of a worker that only prefills
        self._kept[endpoint.address] = kept
        return kept

    def alone(self, time: BatchTime) -> ChunkTime:
        """Chunks with nothing beside them."""
        return self._of_model(time)[1]

    def beside(self, endpoint: Endpoint) -> ChunkTime:
        """Chunks beside the decodes that run on the worker; alone if it is only used for prompts."""
        if not endpoint.can_decode:
            return self._of_model(_time(endpoint))[1]
        kept = self._beside.get(endpoint.address)
        if kept is None or kept[0] is not endpoint:
            if len(self._beside) >= MAX_KEPT:
                self._beside.clear()
            num, context = _decodes_of(endpoint, 0)
            chunks = ChunkTime(_time(endpoint), num, context, context // num if num else 0)
            kept = self._beside[endpoint.address] = endpoint, chunks
        return kept[1]

    def _of_model(self, time: BatchTime) -> tuple[BatchTime, ChunkTime, float, float]:
        if (kept := self._of_models.get(id(time))) is None:
            if len(self._of_models) >= MAX_MODELS:
                self._of_models.clear()
            chunks = ChunkTime(time)
            kept = time, chunks, prompt_s(chunks, IN_PLACE_MARGIN, 0), time.decode_seconds(1, 1, 1)
            self._of_models[id(time)] = kept
        return kept

    def margin(self, endpoint: Endpoint) -> float:
        return self._of_model(_time(endpoint))[2]

    def prompt(self, endpoint: Endpoint, num_missing: int, num_cached: int) -> float:
        time = _time(endpoint)
        name = id(time), num_missing, num_cached
        if (kept := self._prompts.get(name)) is None:
            if len(self._prompts) >= MAX_PROMPTS:
                self._prompts.clear()
            kept = self._prompts[name] = time, prompt_s(self.alone(time), num_missing, num_cached)
        return kept[1]

    def in_place(self, endpoint: Endpoint, num_missing: int, num_cached: int) -> float:
        return sum(in_place_s(endpoint, num_missing, num_cached))

    def handoff(self, endpoint: Endpoint, num_missing: int, num_cached: int, handoff_token_s: float | None) -> float:
        """Only the last chunk's KV moves after the first token; that of the others moves during later chunks."""
        if handoff_token_s is None:
            return MOVE_COST * self.prompt(endpoint, num_missing, num_cached)
        return handoff_token_s * min(num_missing, CHUNK)

    def least_remote(self, decode: Endpoint, prefill: Endpoint, num_cached: int) -> int:
        """A prefill worker takes a step of its own at least."""
        num, context = _decodes_of(decode, 0)
        if not num:
            return 0
        time, asked = _time(decode), _time(prefill)
        name = id(time), id(asked), num, context, num_cached
        if (kept := self._least.get(name)) is None:
            if len(self._least) >= MAX_KEPT:
                self._least.clear()
            shape = StepShape(
                num_decodes=num, decode_context=context, longest_context=context // num, num_head_rows=num
            )
            least = least_remote_tokens(time, shape, self._of_model(asked)[3], past=num_cached, most=CHUNK)
            kept = self._least[name] = time, asked, least
        return kept[2]


TOKENS = TokenCosts()
SECONDS = SecondCosts()


def all_know_their_times(endpoints: Sequence[Endpoint]) -> bool:
    """Whether costs can be in seconds: only if all of them are, they can be compared."""
    for endpoint in endpoints:  # quicker than a generator, and most fleets end it at the first one
        if endpoint.batch_time is None:
            return False
    return bool(endpoints)


def _decodes_of(endpoint: Endpoint, num_more: int) -> tuple[int, int]:
    """(requests, tokens of their context): those that run, and `num_more` like them; then those that wait run, too. If
    none runs, they are like those that were sent since."""
    load = endpoint.load
    num = load.num_requests_running
    context = max(0, load.num_blocks - load.num_free_blocks - load.num_cached_blocks) * endpoint.block_size
    if num_more:
        more = num_more + load.num_requests_waiting + endpoint.num_unreported
        like, num_like = (context, num) if num else (endpoint.num_unreported_context, endpoint.num_unreported)
        # A decode costs mostly by its context: if newcomers had none, an empty worker would get all requests until its
        # next report.
        context, num = (context + more * like // num_like if num_like else 0), num + more
    return num, context


def step_s(endpoint: Endpoint, num_more: int = 0) -> float:
    """Seconds of a step of the requests that run on the worker, and of `num_more` like them; then those that wait run,
    too. It is the time between two tokens of each."""
    num, context = _decodes_of(endpoint, num_more)
    return _time(endpoint).decode_seconds(num, context, context // num if num else 0)


def prompt_s(chunks: ChunkTime, num_tokens: int, past: int) -> float:
    """Seconds to compute `num_tokens` of a prompt after `past`, in such chunks.

    Attention's part grows evenly from the first full chunk to the last one, so that their mean stands for all.
    """
    if num_tokens <= 0:
        return 0.0
    num_full, rest = divmod(num_tokens, CHUNK)
    seconds = 0.0
    if num_full:
        first = chunks.kept_seconds(CHUNK, past)
        last = chunks.kept_seconds(CHUNK, past + (num_full - 1) * CHUNK) if num_full > 1 else first
        seconds = num_full * (first + last) / 2
    return seconds + chunks.seconds(rest, past + num_full * CHUNK) if rest else seconds


def in_place_s(endpoint: Endpoint, num_missing: int, num_cached: int) -> tuple[float, float]:
    """Seconds to compute the tokens beside the decodes of a worker, and seconds that these lose together. Every decode
    that runs there waits for as long as the prompt makes its steps longer. At least one does: the next request's, if
    none runs now."""
    with_prompt = prompt_s(SECONDS.beside(endpoint), num_missing, num_cached)
    num_decodes = endpoint.load.num_requests_running
    if not num_decodes:
        return with_prompt, with_prompt
    num_steps = -(-num_missing // CHUNK)
    longer = max(0.0, with_prompt - num_steps * step_s(endpoint))
    return with_prompt, num_decodes * longer


def first_token_s(endpoint: Endpoint, num_missing: int, num_cached: int, left_s: float | None = None) -> float:
    """Seconds until the worker has a newcomer's first token, with its decodes in each step. `left_s`: until that is
    due, if it is. At a decode worker that is full it waits for room, too: meanwhile those before it are computed.
    """
    seconds = _computed_s(endpoint, num_missing, num_cached, left_s)
    if endpoint.load.room_after and endpoint.can_decode:
        return max(seconds, room_s(endpoint, left_s) + _alone_s(endpoint, num_missing, num_cached))
    return seconds


def room_s(endpoint: Endpoint, left_s: float | None = None) -> float:
    """Seconds until a decode worker has room for a newcomer, whose first token is due in `left_s` if it is; 0 if it has
    room, or does not tell. By slack, best effort may have to make room once half of a newcomer's time is gone."""
    if not (after := endpoint.load.room_after):
        return 0.0
    number = endpoint.num_unreported + 1  # of newcomers, this one included
    at = min(number.bit_length(), len(after)) - 1
    tokens = float(after[at])
    if (num_beyond := number - 2**at) and len(after) > 1:
        low = min(at, len(after) - 2)  # beyond the last one, the same pace goes on
        tokens += num_beyond * max(after[low + 1] - after[low], 0) / 2**low
    seconds = tokens * step_s(endpoint)
    return min(seconds, max(left_s, 0.0) / 2) if left_s is not None and endpoint.load.goes_by_slack else seconds


def _computed_s(endpoint: Endpoint, num_missing: int, num_cached: int, left_s: float | None) -> float:
    """`first_token_s`, of a worker that has room.

    By arrival, a step has chunks of the first `STEP / CHUNK` prompts: those before these come first, and the newcomer
    shares its steps with the others, which are thought to be equally long. By slack, one prompt comes after the other:
    first those that have to begin sooner.
    """
    load, num_unreported, chunks = endpoint.load, endpoint.num_unreported_tokens, SECONDS.beside(endpoint)
    if len(load.queued_by_slack) == len(SLACKS_S) and (left_s is not None or load.goes_by_slack):
        num_before = load.num_queued_prompt_tokens + num_unreported
        if left_s is not None:
            slack_s, by_slack = left_s - SECONDS.prompt(endpoint, num_missing, num_cached), endpoint.unreported_by_slack
            num_before = _within(load.queued_by_slack, slack_s)
            urgent = _within(by_slack, slack_s) if by_slack else num_unreported
            num_before += urgent + min(num_unreported - urgent, CHUNK)  # of the others, what is computed just now
        queued_s = _steps_s(chunks, num_before, CHUNK)
        return queued_s + _alone_s(endpoint, num_missing, num_cached)
    num_queued = load.num_queued_prompt_tokens + num_unreported
    if not num_queued:
        return _alone_s(endpoint, num_missing, num_cached)
    if not load.num_queued_prompts and load.num_queued_prompt_tokens:  # a worker that does not tell
        return _steps_s(chunks, num_queued, STEP) + _alone_s(endpoint, num_missing, num_cached)
    num_prompts = load.num_queued_prompts + (endpoint.num_unreported if num_unreported else 0)
    num_before = num_queued * max(num_prompts + 1 - STEP // CHUNK, 0) // max(num_prompts, 1)
    num_chunks = max(-(-num_missing // CHUNK), 1)
    num_sharing = min((num_queued - num_before) // num_chunks, STEP - CHUNK)  # tokens of others in each of its steps
    queued_s = _steps_s(chunks, num_before, STEP)
    if num_sharing and num_chunks == 1 and not num_cached:
        return queued_s + chunks.seconds(num_missing + num_sharing, 0)
    alone_s = _alone_s(endpoint, num_missing, num_cached)
    if not num_sharing:
        return queued_s + alone_s
    new = min(num_missing, CHUNK)
    longer_s = chunks.seconds(new + num_sharing, 0) - chunks.seconds(new, 0)
    return queued_s + alone_s + num_chunks * longer_s


def _alone_s(endpoint: Endpoint, num_missing: int, num_cached: int) -> float:
    """With no other prompts."""
    if endpoint.can_decode:
        return prompt_s(SECONDS.beside(endpoint), num_missing, num_cached)
    return SECONDS.prompt(endpoint, num_missing, num_cached)


def _steps_s(chunks: ChunkTime, num_tokens: int, most: int) -> float:
    """Seconds to compute tokens of short prompts, in steps of `most`."""
    if num_tokens <= 0:
        return 0.0
    num_full, rest = divmod(num_tokens, most)
    seconds = num_full * chunks.kept_seconds(most, 0) if num_full else 0.0
    return seconds + chunks.seconds(rest, 0) if rest else seconds


def _within(by_slack: Sequence[int], slack_s: float) -> int:
    """Of `WorkerLoad.queued_by_slack`, between the two seconds that are told for."""
    at = bisect_left(SLACKS_S, slack_s)
    if slack_s <= 0 or at == len(SLACKS_S):
        return 0 if slack_s <= 0 else by_slack[-1]
    low_s, low = (SLACKS_S[at - 1], by_slack[at - 1]) if at else (0.0, 0)
    return low + int((by_slack[at] - low) * (slack_s - low_s) / (SLACKS_S[at] - low_s))


def _time(endpoint: Endpoint) -> BatchTime:
    assert endpoint.batch_time is not None  # noqa: S101 - asked only if `all_know_their_times`
    return endpoint.batch_time
