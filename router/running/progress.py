"""What the fleet has done for one request so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.types import FinishReason, SampledToken
from protos.baton.v1 import types_pb2


@dataclass(slots=True)
class NewTokens:
    """What came from the fleet; the last one has `finish_reason`. Not frozen, as `Output`."""

    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_logprobs: Sequence[SampledToken] = ()  # all of them come before the first token


@dataclass(slots=True)
class Progress:
    """What happened to one request so far; complete once its last tokens came."""

    report: types_pb2.RequestReport = field(default_factory=types_pb2.RequestReport)
    usage: types_pb2.Usage = field(default_factory=types_pb2.Usage)
    num_retries: int = 0  # other decode workers tried before the first token; the report counts prefill workers, too
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_output_tokens: int = 0
    num_prompt_logprobs: int = 0  # that the caller has

    def came(self, num_tokens: int, now: float) -> None:
        """Counts tokens of the answer."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.num_output_tokens += num_tokens
