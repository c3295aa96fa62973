"""Checks what a decode worker says on one stream. Impossible tokens end the stream like any other failure of a worker,
before the caller has seen them. Numbers for reports and metrics are clamped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from common.peers import MAX_BYTES, MAX_COUNT, MAX_WORDS, milliseconds
from common.sampling import MAX_LOGPROBS
from common.types import SampledToken
from protos.baton.v1 import decode_pb2, types_pb2
from protos.convert import token_of
from router.fleet.endpoint import Endpoint
from router.running.request import GenerationRequest

MAX_KEPT_TOKENS = 2**15
MAX_EVENT_TOKENS = 4096  # workers send a few; each is worked on before other requests get their turn


_plain_token = lru_cache(MAX_KEPT_TOKENS)(SampledToken)  # a frozen one takes ten times as long to make


class FalseEventError(Exception):
    """The worker said something impossible."""


class DecodeEvents:
    """Takes in the events of one stream, in order."""

    def __init__(self, request: GenerationRequest, num_sent: int, num_scores_sent: int = 0) -> None:
        """The caller already has `num_sent` tokens of the answer, and the logprobs of `num_scores_sent` tokens of the
        prompt. A worker that is asked before the first token of the answer sends the prompt's logprobs again."""
        self._vocab_size = request.model.limits.vocab_size
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._max_tokens = request.sampling_params.max_tokens
        self._num_left = self._max_tokens - num_sent
        self._prompt_token_ids = request.prompt_token_ids
        self._num_scored = 1 if request.wants_prompt_logprobs and not num_sent else self._num_prompt_tokens
        self._num_known = num_scores_sent + 1

    def tokens(self, event: decode_pb2.DecodeEvent) -> list[SampledToken]:
        """Raises `FalseEventError`."""
        self._count(len(event.tokens))
        tokens = [token_of(token) for token in event.tokens]
        for token in tokens:
            if token.top_logprobs or token.token_id >= self._vocab_size:
                self._check(token)
        return tokens

    def _count(self, num: int) -> None:
        if num and self._num_scored < self._num_prompt_tokens:
            raise FalseEventError("sends a token before the prompt's logprobs")
        if num > self._num_left:
            raise FalseEventError(f"sends more tokens than max_tokens, {self._max_tokens}")
        if num > MAX_EVENT_TOKENS:
            raise FalseEventError(f"sends {num} tokens in one event")
        self._num_left -= num

    def plain_tokens(self, token_ids: list[int]) -> list[SampledToken]:
        """Takes in tokens without an event of their own. Raises `FalseEventError`."""
        self._count(len(token_ids))
        if max(token_ids) >= self._vocab_size:
            raise FalseEventError(f"sends token id {max(token_ids)}, outside the vocabulary")
        return [*map(_plain_token, token_ids)]

    def prompt_logprobs(self, event: decode_pb2.DecodeEvent) -> list[SampledToken]:
        """The prompt's logprobs that the caller does not have yet. Raises `FalseEventError`."""
        start, num = self._num_scored, len(event.prompt_logprobs)
        self._num_scored += num
        if self._num_scored > self._num_prompt_tokens or num > MAX_EVENT_TOKENS:
            raise FalseEventError(f"sends {num} logprobs of the prompt, which are too many")
        tokens = [token_of(token) for token in event.prompt_logprobs]
        for position, token in enumerate(tokens, start):
            self._check(token)
            if token.logprob is None or token.token_id != self._prompt_token_ids[position]:
                raise FalseEventError(f"sends a logprob that is none of the prompt's token {position}")
        return tokens[max(self._num_known - start, 0) :]

    def _check(self, token: SampledToken) -> None:
        if token.token_id >= self._vocab_size:
            raise FalseEventError(f"sends token id {token.token_id}, outside the vocabulary")
        if len(token.top_logprobs) > MAX_LOGPROBS:
            raise FalseEventError(f"sends {len(token.top_logprobs)} logprobs beside a token")
        if any(top.token_id >= self._vocab_size for top in token.top_logprobs):
            raise FalseEventError("sends a logprob of a token id outside the vocabulary")

    def report(self, said: types_pb2.RequestReport, earlier: types_pb2.RequestReport) -> types_pb2.RequestReport:
        """The report after a worker's part. `earlier` is the report before that worker: what earlier workers and the
        router did stays in it."""
        report = types_pb2.RequestReport()
        report.CopyFrom(earlier)
        report.prefill_worker = said.prefill_worker[:MAX_WORDS]
        report.fallback_reason = earlier.fallback_reason or said.fallback_reason[:MAX_WORDS]
        report.num_blocks_moved = min(said.num_blocks_moved + earlier.num_blocks_moved, MAX_COUNT)
        report.num_blocks_lent = min(said.num_blocks_lent + earlier.num_blocks_lent, MAX_COUNT)
        report.num_bytes_moved = min(said.num_bytes_moved + earlier.num_bytes_moved, MAX_BYTES)
        report.num_retries = min(said.num_retries + earlier.num_retries, MAX_COUNT)
        report.num_hedges = min(said.num_hedges + earlier.num_hedges, MAX_COUNT)
        report.num_hedges_won = min(said.num_hedges_won + earlier.num_hedges_won, MAX_COUNT)
        report.num_drafted_tokens = min(said.num_drafted_tokens + earlier.num_drafted_tokens, MAX_COUNT)
        report.num_accepted_tokens = min(said.num_accepted_tokens + earlier.num_accepted_tokens, MAX_COUNT)
        report.num_tail_tokens = min(said.num_tail_tokens, self._num_prompt_tokens)
        report.num_preemptions = min(said.num_preemptions + earlier.num_preemptions, MAX_COUNT)
        report.ClearField("timings")
        timings = report.timings
        for field, value in said.timings.ListFields():  # the others are 0
            setattr(timings, field.name, milliseconds(value))
        return report

    def usage(self, said: types_pb2.Usage) -> types_pb2.Usage:
        return types_pb2.Usage(cached_tokens=min(said.cached_tokens, self._num_prompt_tokens))


class PrefillBlame:
    """Which prefill workers a decode worker could not go on with: each is blamed once for one attempt at a request."""

    def __init__(self, prefill: Sequence[Endpoint]) -> None:
        """`prefill`: those that the decode worker may ask, in that order."""
        self._prefill = prefill
        self._blamed: set[str] = set()
        self._refused: set[str] = set()  # did nothing wrong: nothing more is concluded of them

    def __contains__(self, endpoint: Endpoint) -> bool:
        """Whether it is known how the worker did."""
        return endpoint.address in self._blamed or endpoint.address in self._refused

    def told(self, event: decode_pb2.DecodeEvent) -> list[Endpoint]:
        """The prefill workers that `event`, which has a report, is the first to blame.

        Older decode workers send no names: their report only counts replacements, and says whether a worker that was
        asked beside the first one won. The counts are only read if the event has no names, since they do not tell which
        of two workers failed."""
        refused = {*event.refused_prefill_addresses}
        self._refused.update(one.address for one in self._prefill if one.address in refused)
        named = {*event.blamed_prefill_addresses}
        if not named and not self._refused:
            named = self._counted(event.report)
        found = [one for one in self._prefill if one.address in named and one not in self]
        self._blamed.update(one.address for one in found)
        return found

    def _counted(self, report: types_pb2.RequestReport) -> set[str]:
        num = max(report.num_retries, min(report.num_hedges_won, 1))
        return {endpoint.address for endpoint in self._prefill[:num]}
