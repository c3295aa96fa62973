"""Requests that are made: from times and lengths, and conversations of users who come back."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from common.traffic.arrivals import poisson
from common.traffic.requests import MAX_RUN_ID, Run, TrafficRequest, answer_id


def independent(
    times: Iterable[float],
    num_prompt_tokens: Iterator[int],
    num_output_tokens: Iterator[int],
    *,
    num_shared_tokens: int = 0,
) -> Iterator[TrafficRequest]:
    """Prompts of these lengths that have nothing in common but their first `num_shared_tokens`, if they are as long."""
    for number, at in enumerate(times, 1):
        length = next(num_prompt_tokens)
        shared = min(num_shared_tokens, length)
        runs = ((0, shared), (_checked(number), length - shared))
        yield TrafficRequest(
            at=at, runs=tuple(run for run in runs if run[1]), num_output_tokens=next(num_output_tokens)
        )


def conversations(
    rate: float,
    question_tokens: Iterator[int],
    answer_tokens: Iterator[int],
    seed: int | str,
    *,
    turns: float = 5.0,
    think_s: float = 20.0,
    system_tokens: int = 64,
    max_prompt_tokens: int,
) -> Iterator[TrafficRequest]:
    """Users who come back with the whole conversation so far: `rate` requests a second in the long run, for ever, in
    the order of time.

    Users come at random (Poisson). Each begins with the same `system_tokens`, has `turns` turns on average (geometric),
    and thinks for `think_s` on average (exponential) before each further one: seconds from question to question, since
    how long an answer takes is not known beforehand. A conversation that gets longer than `max_prompt_tokens` ends.
    """
    if turns < 1 or think_s <= 0:
        raise ValueError(f"turns: must be 1 at least, and think_s above 0, not {turns:g} and {think_s:g}")
    draw, numbers = random.Random(f"conversations/{seed}"), itertools.count(1)
    users, arrivals = itertools.count(), poisson(rate / turns, draw)
    begin: tuple[Run, ...] = ((0, system_tokens),) if system_tokens else ()
    due: list[tuple[float, int, tuple[Run, ...]]] = [(next(arrivals), next(users), begin)]
    while True:
        at, user, runs = heapq.heappop(due)
        if runs is begin:
            heapq.heappush(due, (next(arrivals), next(users), begin))
        number, num_new, num_output = _checked(next(numbers)), next(question_tokens), next(answer_tokens)
        asked = (*runs, (number, num_new))
        if sum(num for _, num in asked) > max_prompt_tokens:
            if len(asked) == len(begin) + 1:
                raise ValueError(f"max_prompt_tokens: a question of {num_new} tokens does not fit")
            continue
        yield TrafficRequest(at=at, runs=asked, num_output_tokens=num_output, session=f"user-{user}")
        if draw.random() >= 1 / turns:
            after = at + draw.expovariate(1 / think_s)
            heapq.heappush(due, (after, user, (*asked, (answer_id(number), num_output))))


def of_tenants(
    requests: Iterable[TrafficRequest], shares: Mapping[str, float], seed: int | str
) -> Iterator[TrafficRequest]:
    """Each request, or each conversation as a whole, is one tenant's, drawn by their `shares`."""
    draw, names, weights = random.Random(f"tenants/{seed}"), [*shares], [*shares.values()]
    of_sessions: dict[str, str] = {}
    for one in requests:
        tenant = of_sessions.get(one.session) or draw.choices(names, weights)[0]
        if one.session:
            of_sessions[one.session] = tenant
        yield replace(one, tenant=tenant)


def _checked(run_id: int) -> int:
    if run_id > MAX_RUN_ID:
        raise ValueError(f"requests: {MAX_RUN_ID} at most")
    return run_id
