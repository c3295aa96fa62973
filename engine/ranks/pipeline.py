"""How the stages of a model compute one step: in micro-batches, so that all stages compute at the same time.

    stage 0    | 0 | 1 | 2 | 3 |
    stage 1        | 0 | 1 | 2 | 3 |
    stage 2            | 0 | 1 | 2 | 3 | draws

A micro-batch has some of the step's tokens. A stage passes on its hidden states as soon as they are computed, and goes
on with the next one. Every stage splits a step alike, as it depends on the rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from common.errors import InternalError
from engine.models.stage import Stage
from engine.ranks.group import RankGroup
from engine.ranks.link import Link
from engine.step import StepRow

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
