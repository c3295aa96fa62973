"""The requests that routing policies are compared with: those of a trace, and chats that go on. Both have a seed: each
policy gets the same prompts at the same times."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.block_hash import block_hashes, root_hash
from common.errors import ConfigError
from common.traffic import arrivals

TRACE_BLOCK = 512  # tokens that one of a trace's hash ids stands for
BLOCK_SIZE = 16
TOKEN_IDS = range(10, 30_000)  # in any vocabulary


@dataclass(slots=True, frozen=True)
class Request:
    at: float  # seconds after the start
    prompt: list[int]
    num_output_tokens: int


def read_trace(
    path: Path,
    *,
    skip: int,
    num: int,
    rate: float,
    divide: int,
    max_prompt_tokens: int,
    max_output_tokens: int,
    seed: int,
    is_shared: bool = True,
) -> list[Request]:
    """`num` requests of a trace in Mooncake's format, after its first `skip` lines, `rate` a second (Poisson). Lengths
    are divided by `divide`; prompts that are too long then are left out. Without `is_shared` every prompt is new."""
    size = TRACE_BLOCK // divide
    requests: list[Request] = []
    times = arrivals.poisson(rate, seed)
    with path.open() as file:
        for number, line in enumerate(file):
            if number < skip:
                continue
            if len(requests) == num:
                break
            entry = json.loads(line)
            num_tokens = max(entry["input_length"] // divide, 1)
            if num_tokens > max_prompt_tokens:
                continue
            prompt: list[int] = []
            for hash_id in entry["hash_ids"]:
                block_seed = f"{seed}/{hash_id}" + ("" if is_shared else f"/{number}")
                prompt += random.Random(block_seed).choices(TOKEN_IDS, k=size)
            num_output = max(min(entry["output_length"] // divide, max_output_tokens), 1)
            requests.append(Request(next(times), prompt[:num_tokens], num_output))
    return requests


def make_chats(
    *,
    num: int,
    rate: float,
    seed: int,
    turns: float = 5.0,
    think_s: float = 20.0,
    system_tokens: int = 64,
    turn_tokens: float = 150.0,
    max_prompt_tokens: int,
    max_output_tokens: int,
) -> list[Request]:
    """`num` requests of users who come back with the whole conversation so far, in the order of time.

    Users come at random (Poisson), so many that there are `rate` requests a second in the long run. Each begins with
    the same `system_tokens`, has `turns` turns on average (geometric), and thinks for `think_s` on average
    (exponential) before each further one. A turn adds `turn_tokens` on average (exponential): the answer before, and
    what is asked next. Answers in prompts are made up, since prompts are the same for each policy. A chat that gets too
    long ends.
    """
    if max_prompt_tokens <= system_tokens + turn_tokens:
        raise ConfigError("--max-prompt-tokens", f"a chat needs more than {system_tokens + turn_tokens:g}")
    draw, numbers = random.Random(f"chats/{seed}"), itertools.count()
    system = draw.choices(TOKEN_IDS, k=system_tokens)
    turns_to_come: list[tuple[float, int, list[int]]] = []  # when, what breaks ties, the conversation so far
    requests: list[Request] = []

    def come(at: float, conversation: list[int]) -> None:
        heapq.heappush(turns_to_come, (at, next(numbers), conversation))

    come(draw.expovariate(rate / turns), system)
    while len(requests) < num:
        at, _, conversation = heapq.heappop(turns_to_come)
        if conversation is system:
            come(at + draw.expovariate(rate / turns), system)  # the next user
        prompt = conversation + draw.choices(TOKEN_IDS, k=1 + int(draw.expovariate(1 / turn_tokens)))
        if len(prompt) > max_prompt_tokens:
            continue
        requests.append(Request(at, prompt, draw.randint(1, max_output_tokens)))
        if draw.random() >= 1 / turns:
            come(at + draw.expovariate(1 / think_s), prompt)
    return requests


def num_distinct_blocks(requests: Sequence[Request]) -> int:
    """Full blocks that an endless cache would hold at the end."""
    return len({name for one in requests for name in block_hashes(root_hash("bench"), one.prompt, BLOCK_SIZE)})
