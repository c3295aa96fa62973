"""When the tokens of one request are due, and how far it is. Seconds of the engine's clock."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Pace:
    due: float  # its first token; of best effort: it has waited long enough by then
    overdue_at: float  # when it has waited too long if this is best effort
    has_target: bool  # `due` is a target that can still be met; else this is best effort
    target_due: float = math.inf  # when the first token is too late; unlike `due` without a margin
    tpot_s: float | None = None  # most seconds for a token after the first, a margin left out; None: no such target
    work_s: float = 0.0  # predicted, until its next token if it is computed alone from now on
    num_computed: int = -1  # tokens that were computed when `work_s` was predicted
    is_late: bool = False  # a target is missed, or best effort has waited too long: it goes after all others
    is_told: bool = False  # that it is late
    num_tokens: int = 0  # of its answer, at the last look
    token_at: float = 0.0  # when the last of them was seen
    since: float | None = None  # when its first token here was seen: `tpot_s` counts from there
    num_since: int = 0  # tokens of its answer then

    @property
    def start_by(self) -> float:
        """The last moment to begin with what it lacks. Less what the clock says, this is its slack. Best effort only
        has to begin by its due time, so the request that came first is first, however long it is."""
        return self.due - self.work_s if self.has_target else self.due

    @property
    def next_due(self) -> float:
        """Of its next token by `tpot_s`; for ever if it has no such target or no token yet."""
        if self.tpot_s is None or self.since is None:
            return math.inf
        return self.since + (self.num_tokens - self.num_since + 1) * self.tpot_s

    def see(self, num_tokens: int, now: float) -> None:
        """Its answer has so many tokens."""
        if num_tokens != self.num_tokens or not self.token_at:
            self.num_tokens, self.token_at = num_tokens, now
            if self.since is None and num_tokens:
                self.since, self.num_since = now, num_tokens
