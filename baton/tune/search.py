"""Finds the settings that serve one traffic best: successive halving, then coordinate descent.

    halving   every fleet with the defaults, and settings drawn at random, on a part of the traffic; the best third of
              them on a larger part, and so on (Jamieson and Talwalkar, "Non-stochastic Best Arm Identification", 2016)
    descent   from the best of them one knob after another to its best value, until no knob changes any more

All settings serve the same requests at the same times (common random numbers), so what differs is due to the settings.
Nothing here knows of simulations or clocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.tune.knobs import ROLES, Config, Space

POOL = 27  # settings that the halving begins with, at least
KEPT = 3  # of a round one in so many goes on
SHARES = (1 / 9, 1 / 3, 1.0)  # of the traffic, round by round
LEAST = 40  # requests of a round: fewer tell nothing
MAX_PASSES = 8  # over all knobs


@dataclass(slots=True, frozen=True)
class Score:
    """What settings are worth on some requests."""

    good_share: float  # of all requests
    closeness: float  # mean over requests of the largest share of a target that was taken; a failed one took 10

    @property
    def order(self) -> tuple[float, float]:
        """The smaller, the better. A hundredth of the targets is not worth another setting."""
        return -self.good_share, round(self.closeness, 2)


class OutOfTimeError(Exception):
    """There is no time for a further simulation, or for the rest of one."""


Measure = Callable[[Config, int], Score]
"""Serves the first so many requests. Raises `OutOfTimeError`."""


@dataclass(slots=True, frozen=True)
class Found:
    scores: Mapping[Config, Score]  # of all requests
    is_complete: bool  # the time was enough

    def ranked(self, space: Space) -> list[Config]:
        """The best first. Of equals, the one with more defaults."""
        return sorted(self.scores, key=lambda one: (*self.scores[one].order, space.num_changed(one)))


def search(space: Space, measure: Measure, num_requests: int, seed: int, start: Sequence[Config] = ()) -> Found:
    """`measure` is asked for `space.default` and all requests first, which has to be in time. `start`: what is good
    already, in place of the halving."""
    scores = {space.default: measure(space.default, num_requests)}

    def whole(config: Config) -> Score:
        if config not in scores:
            scores[config] = measure(config, num_requests)
        return scores[config]

    try:
        if start:
            best = _best(space, {one: whole(one) for one in start})[0]
        else:
            best = _halved(space, measure, whole, num_requests, seed)
        _descend(space, whole, best)
    except OutOfTimeError:
        return Found(scores, is_complete=False)
    return Found(scores, is_complete=True)


def pool(space: Space, seed: int) -> list[Config]:
    """What the halving begins with."""
    draw = random.Random(f"tune/{seed}")  # noqa: S311 (no secret)
    index = next(number for number, knob in enumerate(space.knobs) if knob.name == ROLES)
    found = dict.fromkeys([space.default, *space.moves(space.default, index)])
    for _ in range(10 * POOL):  # a small space has fewer
        if len(found) >= POOL:
            break
        found[space.drawn(draw)] = None
    return [*found]


def _halved(space: Space, measure: Measure, whole: Callable[[Config], Score], num_requests: int, seed: int) -> Config:
    left = pool(space, seed)
    sizes = dict.fromkeys(min(max(round(share * num_requests), LEAST), num_requests) for share in SHARES)
    for size in sizes:
        scores = {one: whole(one) if size == num_requests else measure(one, size) for one in left}
        left = _best(space, scores)[: max(len(left) // KEPT, 1)]
    return left[0]


def _descend(space: Space, whole: Callable[[Config], Score], config: Config) -> Config:
    for _ in range(MAX_PASSES):
        before = config
        for index in range(len(space.knobs)):
            tried = [config, *space.moves(config, index)]
            config = _best(space, {one: whole(one) for one in tried})[0]
        if config == before:
            break
    return config


def _best(space: Space, scores: Mapping[Config, Score]) -> list[Config]:
    return Found(scores, is_complete=True).ranked(space)
