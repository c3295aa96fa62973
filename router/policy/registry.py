"""Policies by name. A new one is a file of this package and a line here."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import ConfigError
from router.policy.base import Policy, Ranking
from router.policy.least_load import LeastLoad
from router.policy.power_of_two import PowerOfTwo
from router.policy.prefix_aware import PrefixAware
from router.policy.round_robin import RoundRobin
from router.policy.routing import RoutingPolicy
from router.policy.session import Session

_RANKINGS: dict[str, Callable[[int], Ranking]] = {
    "least_load": lambda _: LeastLoad(),
    "power_of_two": PowerOfTwo,
    "prefix_aware": lambda _: PrefixAware(),
    "round_robin": lambda _: RoundRobin(),
    "session": lambda _: Session(),
}


def create_policy(
    name: str,
    *,
    prefill: str | None = None,
    decode: str | None = None,
    min_remote_tokens: int = 0,
    hedges: bool = False,
    seed: int = 0,
) -> Policy:
    """`name` is for both roles, `prefill` and `decode` for one. Raises `ConfigError` for a name that there is not.
    `min_remote_tokens`: `common.prefill_place`. `hedges`: a second prefill worker may be asked if the first is late.
    `seed`: what decides lots."""
    rankings = [
        _ranking(field, given or name, seed)
        for field, given in (("prefill_policy" if prefill else "policy", prefill),
                             ("decode_policy" if decode else "policy", decode))
    ]  # fmt: skip
    return RoutingPolicy(rankings[0], rankings[1], min_remote_tokens=min_remote_tokens, hedges=hedges)


def _ranking(field: str, name: str, seed: int) -> Ranking:
    make = _RANKINGS.get(name)
    if make is None:
        raise ConfigError(field, f"{name!r} is not one of {', '.join(sorted(_RANKINGS))}")
    return make(seed)
