"""One request of a load, and what its prompt has in common with others.

A prompt is a sequence of runs, each an id and a number of tokens. Prompts that begin with the same runs begin with the
same tokens; runs of different ids have different tokens. So shared beginnings need no tokens to be told.

    Mooncake's hash_ids    (0, 512) (17, 512) (18, 213)
    a conversation         (system, 64) (question 1, 120) (answer 1, 80) (question 2, 45)
    nothing in common      (its own number, 1024)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

ANSWER = 2**30
MAX_RUN_ID = ANSWER - 1

Run = tuple[int, int]
"""(id, number of tokens)"""


@dataclass(slots=True, frozen=True, kw_only=True)
class TrafficRequest:
    at: float  # seconds after the start
    runs: tuple[Run, ...]  # of the prompt
    num_output_tokens: int
    session: str = ""  # requests of one conversation; empty: it belongs to none
    tenant: str = ""  # whose it is; empty: nobody's

    @property
    def num_prompt_tokens(self) -> int:
        return sum([num for _, num in self.runs])


def answer_id(run_id: int) -> int:
    """The id of the answer to a prompt whose last run has the id `run_id`, if a later prompt repeats that answer."""
    return run_id | ANSWER


def prompt_token_ids(request: TrafficRequest, vocabulary: Sequence[int], seed: int) -> list[int]:
    """Tokens of the prompt, drawn from `vocabulary`: the same for runs of the same id, as far as these reach."""
    token_ids: list[int] = []
    for run_id, num_tokens in request.runs:
        token_ids += random.Random(f"{seed}/{run_id}").choices(vocabulary, k=num_tokens)
    return token_ids
