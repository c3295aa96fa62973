"""What is asked, and what has to come back."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from tests.chaos.tiny_model import random_prompt, reference_answer


@dataclass(slots=True, frozen=True)
class Case:
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int


def make_cases(rng: random.Random) -> list[Case]:
    """Half of them greedy, half sampled; prompts of 1 to 1,500 tokens, answers of 1 to 300."""
    lengths = [1, 15, 16, 17, 64, 200, 500, 900, 1500, *(rng.randrange(1, 1200) for _ in range(7))]
    return [
        Case(
            random_prompt(rng, length),
            rng.choice([1, 2, 20, 100, 300]),
            0.0 if number % 2 else 0.8,
            rng.randrange(2**31),
        )
        for number, length in enumerate(lengths)
    ]


def with_references(model_dir: Path, cases: list[Case]) -> tuple[list[Case], list[tuple[int, ...]]]:
    """The cases, shortened to end before a tie, and their answers; those without any are left out."""
    torch.set_num_threads(1)  # two that share busy cores spend their time waiting for each other
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    kept, answers = [], []
    for case in cases:
        answer = reference_answer(model, case.prompt, case.max_tokens, temperature=case.temperature, seed=case.seed)
        if answer:
            kept.append(replace(case, max_tokens=len(answer)))
            answers.append(tuple(answer))
    return kept, answers
