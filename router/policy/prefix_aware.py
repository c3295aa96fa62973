"""Prefers the worker that would finish first: cached blocks save computing, and requests that wait there cost time.

Both are counted in seconds, or in tokens (`router.policy.costs`), so a long prefix outweighs a short queue and
no queue is too long for ever: a prefix that everybody wants spreads to other workers as soon as waiting for it costs
more than computing it there.
"""

from __future__ import annotations

from typing import ClassVar

from router.policy.base import NUM_RANKED, Candidate, Candidates, Ranked, Ranking, RoutingRequest


class PrefixAware(Ranking):
    """Least `wait + work`; ties go to the less loaded, then in rotation."""

    name: ClassVar[str] = "prefix_aware"
    about: ClassVar[str] = "the least to wait for and to compute, given what is cached"

    def rank(self, request: RoutingRequest, candidates: Candidates) -> Ranked:  # noqa: ARG002
        return Ranked(candidates.soonest(NUM_RANKED), _in_words)


def _in_words(one: Candidate) -> str:
    return f"{one.num_cached_tokens} tokens cached, work {one.in_words(one.work)} + wait {one.in_words(one.wait)}"
