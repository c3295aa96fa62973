"""How the stages of a model compute steps, so that all of them compute at the same time.

A step with many tokens is computed in micro-batches, which have some of its tokens each. A stage passes on the hidden
states of one as soon as they are computed, and goes on with the next one.

    stage 0    | 0 | 1 | 2 | 3 |
    stage 1        | 0 | 1 | 2 | 3 |
    stage 2            | 0 | 1 | 2 | 3 | draws

Decodes that begin while the step before is under way are computed in groups of rows. The last stage draws a group's
tokens and tells them to the first one (engine/ranks/drawn_tokens.py), which begins the group's next step with them.

    stage 0    | n, a | n, b |n+1, a|n+1, b|
    stage 1           | n, a | n, b |n+1, a|n+1, b|    draws after each

Every stage splits a step alike, as it depends on the rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from common.errors import InternalError
from common.types import SampledToken
from engine.models.stage import Stage
from engine.ranks.group import RankGroup
from engine.ranks.link import Link
from engine.step import Drawn, StepRow

GROUP_ROWS = 8  # at least: with fewer, reading the head's weights for each group takes what the stages gain
MICRO_BATCH_TOKENS = 64  # at least: with fewer, products take the time that reading the weights takes
_MOST_PER_STAGE = 4  # micro-batches of a step: a stage waits for no more than a fifth of a long one

Compute = Callable[[Sequence[StepRow], torch.Tensor | None], torch.Tensor]
"""The hidden states that this stage's layers give for rows, from what the stage before gave; None in the first."""


@dataclass(slots=True, frozen=True)
class Pipeline:
    """One rank's place in it."""

    stage: Stage
    everybody: RankGroup  # the ranks of all stages
    before: Link | None = None  # that hidden states come by; None in the first stage
    after: Link | None = None  # that they go on by; None in the last stage
    drawn: Callable[[Drawn], int] | None = None  # of the first stage of several: waits for what the last one drew
    tell: Callable[[int, Sequence[int], Sequence[SampledToken | None]], None] | None = None
    """Of rank 0, if there are several stages: called with a step's number, some of its rows and what they drew."""

    def groups(self, rows: Sequence[StepRow]) -> list[list[int]] | None:
        """The rows that are computed one group after the other; None if the step is computed as one. A step is if it
        was not begun while another one was under way: then the next one is likely to wait for its end, too."""
        count = min(self.stage.count, len(rows) // GROUP_ROWS)
        if count < 2 or not all(_only_draws_next(row) for row in rows):
            return None
        stops = [len(rows) * number // count for number in range(count + 1)]
        return [list(range(start, stop)) for start, stop in pairwise(stops)]

    def order(self, rows: Sequence[StepRow]) -> list[int] | None:
        """The order in which a step's rows are split into micro-batches; None if the step is one.

        A row may read KV that another row of the step writes, as a drafted token does. It begins at a later position
        than that row then, so in this order it is in the same micro-batch or in a later one."""
        if self._count(rows) == 1:
            return None
        return sorted(range(len(rows)), key=lambda index: rows[index].num_computed_tokens)

    def forward(self, rows: Sequence[StepRow], compute: Compute, meanwhile: Callable[[], None]) -> torch.Tensor:
        """What this stage gives for all new tokens of `rows`, row by row."""
        given: list[torch.Tensor] = []
        count = self._count(rows)
        for part in [rows] if count == 1 else split(rows, count):
            hidden = None
            if self.before is not None:
                hidden = self.before.receive(meanwhile)
                if len(hidden) != (wanted := sum(len(row.token_ids) for row in part)):
                    raise InternalError(f"hidden states of {len(hidden)} tokens came for {wanted}")
            given.append(compute(part, hidden))
            if self.after is not None:
                self.after.send(given[-1])
        return given[0] if len(given) == 1 else torch.cat(given)

    def close(self) -> None:
        for link in (self.before, self.after):
            if link is not None:
                link.close()

    def _count(self, rows: Sequence[StepRow]) -> int:
        if self.stage.count == 1:
            return 1
        num_tokens = sum(len(row.token_ids) for row in rows)
        return max(1, min(num_tokens // MICRO_BATCH_TOKENS, _MOST_PER_STAGE * self.stage.count))


def _only_draws_next(row: StepRow) -> bool:
    """Whether a row begins with a token of a step under way, and asks for the next one alone."""
    return row.first is not None and row.draw is not None and row.score is None and not row.num_pooled


def split(rows: Sequence[StepRow], count: int) -> list[list[StepRow]]:
    """`count` parts of the new tokens of `rows`, in their order, of as many tokens each, or one more. A row may be in
    several parts. Parts ask for no results: hidden states are all that they are for."""
    num_tokens = sum(len(row.token_ids) for row in rows)
    parts: list[list[StepRow]] = [[] for _ in range(count)]
    number = start = 0  # the part that takes the next token, and how many tokens were taken
    for row in rows:
        taken = 0
        while taken < len(row.token_ids):
            if start == num_tokens * (number + 1) // count:
                number += 1
            size = min(len(row.token_ids) - taken, num_tokens * (number + 1) // count - start)
            parts[number].append(
                replace(
                    row,
                    token_ids=row.token_ids[taken : taken + size],
                    num_computed_tokens=row.num_computed_tokens + taken,
                    draw=None,
                    score=None,
                    num_pooled=0,
                )
            )
            taken, start = taken + size, start + size
    return parts
