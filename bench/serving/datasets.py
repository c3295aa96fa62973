"""Who asks what: made up, or from files. Each is the same for the same seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.serving.load import LoadSettings, Turn
from bench.serving.texts import Texts
from common.errors import ConfigError
from common.traffic import traces
from common.traffic.requests import TrafficRequest


@dataclass(slots=True, frozen=True)
class User:
    turns: Sequence[Turn]  # at least one
    at: float = 0.0  # seconds after the start, if the data set has times


def make_users(settings: LoadSettings, texts: Texts, seed: str) -> Iterator[User]:
    """Raises `ConfigError` for a file of no use."""
    if settings.dataset_path is None:
        return _random_users(settings, texts, seed)
    path = Path(settings.dataset_path)
    try:
        if settings.dataset_name == "sharegpt":
            return _text_users(settings, texts, traces.read_conversations(path), seed)
        read = traces.read_mooncake if settings.dataset_name == "mooncake" else traces.read_azure
        requests = traces.scaled(read(path), speed=settings.trace_speed, lengths=settings.length_scale)
        return _trace_users(settings, texts, requests, seed)
    except ConfigError as error:
        raise ConfigError("--dataset-path", error.reason) from error


def _random_users(settings: LoadSettings, texts: Texts, seed: str) -> Iterator[User]:
    draw = random.Random(f"{seed}/lengths")
    num_prefix = settings.random_prefix_len
    prefix = texts.text(num_prefix, f"{settings.seed}/prefix") if num_prefix else ""
    for number in itertools.count():
        turns = []
        for turn in range(settings.turns):
            num_tokens = _about(settings.random_input_len, settings.random_range_ratio, draw)
            text = texts.text(num_tokens, f"{seed}/{number}/{turn}")
            turns.append(
                Turn(
                    text=text if turn else prefix + text,
                    num_tokens=num_tokens if turn else num_prefix + num_tokens,
                    max_tokens=_about(
                        settings.output_len or settings.random_output_len, settings.random_range_ratio, draw
                    ),
                    wait_s=draw.expovariate(1 / settings.think_time) if turn and settings.think_time else 0.0,
                )
            )
        yield User(turns)


def _about(num_tokens: int, ratio: float, draw: random.Random) -> int:
    """Uniform over `num_tokens` times from 1 - ratio to 1 + ratio, at least 1."""
    return draw.randint(max(math.floor(num_tokens * (1 - ratio)), 1), max(math.ceil(num_tokens * (1 + ratio)), 1))


def _text_users(
    settings: LoadSettings, texts: Texts, conversations: list[list[traces.Turn]], seed: str
) -> Iterator[User]:
    """Conversations in an order of the seed. The answers of the file say how long answers are, and nothing else."""
    random.Random(f"{seed}/order").shuffle(conversations)
    wait = random.Random(f"{seed}/waits")
    for conversation in conversations:
        yield User(
            [
                Turn(
                    text=turn.question,
                    num_tokens=texts.count(turn.question),
                    max_tokens=settings.output_len
                    or (texts.count(turn.answer) if turn.answer else settings.random_output_len),
                    wait_s=wait.expovariate(1 / settings.think_time) if number and settings.think_time else 0.0,
                )
                for number, turn in enumerate(conversation[: settings.turns])
            ]
        )


def _trace_users(settings: LoadSettings, texts: Texts, requests: Iterator[TrafficRequest], seed: str) -> Iterator[User]:
    """Prompts of the trace's lengths that begin alike if those of the trace did."""
    for request in requests:
        text = "".join(texts.text(num_tokens, f"{seed}/run {run_id}") for run_id, num_tokens in request.runs)
        max_tokens = settings.output_len or request.num_output_tokens
        yield User([Turn(text=text, num_tokens=request.num_prompt_tokens, max_tokens=max_tokens)], request.at)
