"""What a run will send, fixed before it begins, and what it is made from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.errors import ConfigError


@dataclass(slots=True, frozen=True, kw_only=True)
class Turn:
    """One request. In a conversation it is what the user says next."""

    text: str
    num_tokens: int  # of `text`, as planned; what the endpoint counts may differ
    max_tokens: int
    wait_s: float = 0.0  # from the end of the last answer of the conversation until this turn is due
    cancel_after_s: float | None = None  # the client gives up so long after it sent the request


@dataclass(slots=True, frozen=True, kw_only=True)
class Conversation:
    """Turns of one user, each sent with all that was said before. Most loads have one turn in each."""

    start_s: float = 0.0  # when the first turn is due, after the start of the run; of no meaning in a closed loop
    turns: Sequence[Turn]


@dataclass(slots=True, frozen=True, kw_only=True)
class Load:
    """`is_open`: requests are due at times of their own. Otherwise a request is due as soon as it has a place."""

    conversations: Sequence[Conversation]  # in the order of `start_s`
    further: Iterator[Conversation] | None = None  # after these, of a closed loop that only `stop_s` ends
    is_open: bool
    max_concurrency: int | None = None  # requests at a time; None: no limit
    stop_s: float | None = None  # no conversation begins later

    @property
    def num_requests(self) -> int:
        """Without `further` ones."""
        return sum(len(one.turns) for one in self.conversations)

    @property
    def offered_rate(self) -> float | None:
        """Requests that are due per second; None if they have no times of their own, or all have the same."""
        last_s = self.conversations[-1].start_s if self.is_open and self.conversations else 0.0
        return self.num_requests / last_s if last_s > 0 else None


@dataclass(slots=True, frozen=True)
class Dataset:
    about: str
    needs_file: bool = True
    has_times: bool = False
    turns: int = 1  # of a conversation, if --num-turns does not say


DATASETS = {
    "random": Dataset("prompts and answers of --random-input-len and --random-output-len tokens", needs_file=False),
    "conversations": Dataset("the same, several turns of one user after another", needs_file=False, turns=4),
    "sharegpt": Dataset("texts in ShareGPT's or OpenAI's format; the first question of each conversation"),
    "mooncake": Dataset("a trace in Mooncake's format: times, lengths, shared beginnings", has_times=True),
    "azure": Dataset("a trace in Azure's format: times, lengths", has_times=True),
}


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadSettings:
    """Names and meanings are those of the flags of `baton bench serve`."""

    dataset_name: str = "random"
    dataset_path: str | None = None
    num_prompts: int | None = None
    duration: float | None = None  # seconds
    request_rate: float = math.inf
    burstiness: float = 1.0
    burst_size: int = 1
    ramp_up_strategy: str | None = None  # linear or exponential
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    max_concurrency: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    output_len: int | None = None
    trace_speed: float = 1.0
    length_scale: float = 1.0
    num_turns: int | None = None
    think_time: float = 0.0
    cancel_fraction: float = 0.0
    cancel_after: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raises `ConfigError` for what does not go together."""
        ramp = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None and ramp != (None, None):
            raise ConfigError("--ramp-up-strategy", "is missing: linear or exponential")
        if self.ramp_up_strategy is not None and None in ramp:
            raise ConfigError("--ramp-up-strategy", "needs --ramp-up-start-rps and --ramp-up-end-rps")
        if self.ramp_up_strategy is not None and self.request_rate != math.inf:
            raise ConfigError("--request-rate", "is given by the ramp")
        needs_file = DATASETS[self.dataset_name].needs_file
        if needs_file is not (self.dataset_path is not None):
            raise ConfigError(
                "--dataset-path", f"{'is missing for' if needs_file else 'does not go with'} {self.dataset_name}"
            )
        if self.burst_size > 1 and self.burstiness != 1.0:
            raise ConfigError("--burst-size", "does not go with --burstiness")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError("--random-range-ratio", f"must be in [0, 1), not {self.random_range_ratio:g}")

    @property
    def has_own_times(self) -> bool:
        """Whether requests come when those of the trace came."""
        return DATASETS[self.dataset_name].has_times and self.request_rate == math.inf and self.ramp_up_strategy is None

    @property
    def is_open(self) -> bool:
        """Whether requests are due at times of their own: always, but if nothing gives any and users are the limit."""
        is_given = self.request_rate != math.inf or self.ramp_up_strategy is not None or self.has_own_times
        return is_given or self.max_concurrency is None

    @property
    def turns(self) -> int:
        """Of a conversation, at most."""
        return self.num_turns or DATASETS[self.dataset_name].turns
