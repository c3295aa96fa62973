"""What became of each request. Times are seconds after the start of the run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import StrEnum


class Ending(StrEnum):
    COMPLETED = "completed"
    FAILED = "failed"  # an error, an answer that was cut off, no answer in time
    REFUSED = "refused"  # the endpoint had no room: 429 or 503
    CANCELLED = "cancelled"  # by this client, as planned


@dataclass(slots=True, kw_only=True)
class Outcome:
    number: int  # in the order of sending
    due_s: float  # latencies count from here
    ready_s: float  # when the client was about to send it: later than due if the client is slow
    sent_s: float  # later than ready if a limit of concurrency made it wait
    ended_s: float
    ending: Ending
    reason: str = ""  # why it did not complete
    token_times_s: list[float] = field(default_factory=list)  # of each event that had new text
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that the endpoint found in a prefix cache, if it says

    @property
    def send_lag_s(self) -> float:
        """How late this client was."""
        return self.ready_s - self.due_s

    @property
    def queue_s(self) -> float:
        """How long the request waited in this client for a place."""
        return self.sent_s - self.ready_s

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.due_s

    @property
    def e2el_s(self) -> float:
        """Until the last event with text."""
        return self.token_times_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None if there is only one."""
        num = self.output_tokens - 1
        return None if num < 1 else (self.token_times_s[-1] - self.token_times_s[0]) / num

    @property
    def itls_s(self) -> list[float]:
        """Times between events. One event may carry several tokens."""
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]
