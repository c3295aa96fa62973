"""The sums of the next step's decodes, kept as requests come, grow and end. Pure.

A model of time predicts from sums (`common.batch_time.StepShape`). They are kept here, with constant work for each
request that changes, so that no prediction walks over rows. The longest context alone is looked for again, after the
request that had it went.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.batch_time import StepShape
from engine.request import Request, RequestStatus


@dataclass(slots=True)
class _Counted:
    context: int
    draws: int  # 0 or 1 each
    filters: int
    edits: int
    masks: int
    logprobs: int
    head_rows: int


class DecodeSums:
    """Of running requests that lack the KV of their last token alone."""

    def __init__(self) -> None:
        self._counted: dict[Request, _Counted] = {}
        self._context = self._longest = 0
        self._is_longest_known = True
        self._draws = self._filters = self._edits = self._masks = self._logprobs = self._head_rows = 0

    def note(self, request: Request) -> None:
        """The request has changed: it came, grew, was preempted, or ended."""
        if request.status is not RequestStatus.RUNNING or len(request.token_ids) - request.num_computed_tokens != 1:
            self._leave(request)
            return
        context = len(request.token_ids)
        if (counted := self._counted.get(request)) is not None:
            self._context += context - counted.context
            counted.context = context
        else:
            self._enter(request, context)
        if context > self._longest:
            self._longest = context

    @property
    def shape(self) -> StepShape:
        """Of a step that computes all of them, and no prompt."""
        if not self._is_longest_known:
            self._longest = max((one.context for one in self._counted.values()), default=0)
            self._is_longest_known = True
        num = len(self._counted)
        return StepShape(
            num_decodes=num,
            decode_context=self._context,
            longest_context=self._longest,
            num_head_rows=self._head_rows,
            num_drawn=self._draws,
            num_filtered=self._filters,
            num_edited=self._edits,
            num_masked=self._masks,
            num_logprobs=self._logprobs,
        )

    def _enter(self, request: Request, context: int) -> None:
        params = request.sampling_params
        answers = request.embed is None
        draws = answers and params.temperature != 0.0
        counted = self._counted[request] = _Counted(
            context,
            draws=int(draws),
            filters=int(draws and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)),
            edits=int(answers and params.changes_logits),
            masks=int(request.guide is not None),
            logprobs=int(answers and params.logprobs is not None),
            head_rows=int(answers),
        )
        self._context += context
        self._add(counted, 1)

    def _leave(self, request: Request) -> None:
        if (counted := self._counted.pop(request, None)) is None:
            return
        self._context -= counted.context
        self._add(counted, -1)
        if counted.context >= self._longest:
            self._is_longest_known = False

    def _add(self, counted: _Counted, sign: int) -> None:
        self._draws += sign * counted.draws
        self._filters += sign * counted.filters
        self._edits += sign * counted.edits
        self._masks += sign * counted.masks
        self._logprobs += sign * counted.logprobs
        self._head_rows += sign * counted.head_rows
