"""A fleet that serves the tiny random model, and long answers of it: for what happens to streams that take a while."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.sampling import SamplingOptions
from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.integration.stack import Fleet

OPTIONS: tuple[SamplingOptions, ...] = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "top_k": 2, "seed": 7, "ignore_eos": True},  # of many likely tokens some are nearly ties
)


@dataclass(slots=True, frozen=True)
class Case:
    prompt: list[int]
    options: SamplingOptions
    answer: tuple[int, ...]


def tiny_fleet(
    folder: Path, *flags: str, prefill: int, decode: int, both: int = 0, router_flags: Sequence[str] = ()
) -> Fleet:
    model_dir = folder / "model"
    write_tiny_model(model_dir)
    flags = (f"--model={model_dir}", "--num-blocks=2048", *flags)
    return Fleet(folder, *flags, prefill=prefill, decode=decode, both=both, router_flags=router_flags)


def make_cases(fleet: Fleet, num_tokens: int) -> list[Case]:
    """A greedy and a sampled one, with what the undisturbed fleet answers."""
    cases = []
    with fleet.client() as client:
        for number, options in enumerate(OPTIONS):
            options = options | {"max_tokens": num_tokens}
            prompt = random_prompt(random.Random(number), 50)
            answer = client.generate(prompt, cache_salt=f"reference {number}", **options).result()
            assert len(answer.token_ids) == num_tokens
            assert answer.report.num_migrations == 0
            cases.append(Case(prompt, options, answer.token_ids))
    return cases
