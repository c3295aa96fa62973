"""Policies by name. A new one is a file of this package and a line here. It has its own text for `--help`."""

from __future__ import annotations

from common.errors import ConfigError
from router.policy.base import Policy, Ranking
from router.policy.least_load import LeastLoad
from router.policy.power_of_two import PowerOfTwo
from router.policy.prefix_aware import PrefixAware
from router.policy.round_robin import RoundRobin
from router.policy.routing import RoutingPolicy
from router.policy.session import Session

_RANKINGS: list[type[Ranking]] = [
    LeastLoad,
    PowerOfTwo,
    PrefixAware,
    RoundRobin,
    Session,
]


def policies_in_words() -> str:
    """Each policy and who comes first by it, for help."""
    *others, last = [f"{one.name} ({one.about})" for one in _by_name().values()]
    return f"{', '.join(others)} or {last}"


def policy_names() -> tuple[str, ...]:
    return tuple(_by_name())


def create_policy(
    name: str,
    *,
    prefill: str | None = None,
    decode: str | None = None,
    min_remote_tokens: int = 0,
    hedges: bool = False,
    seed: int = 0,
) -> Policy:
    """`name` is for both roles, `prefill` and `decode` for one. Raises `ConfigError` for an unknown name.
    `min_remote_tokens`: `common.prefill_place`. `hedges`: a second prefill worker may be asked if the first is late.
    `seed`: for random choices."""
    rankings = [
        _ranking(field, given or name, seed)
        for field, given in (("prefill_policy" if prefill else "policy", prefill),
                             ("decode_policy" if decode else "policy", decode))
    ]  # fmt: skip
    return RoutingPolicy(rankings[0], rankings[1], min_remote_tokens=min_remote_tokens, hedges=hedges)


def _ranking(field: str, name: str, seed: int) -> Ranking:
    by_name = _by_name()
    if name not in by_name:
        raise ConfigError(field, f"{name!r} is not one of {', '.join(by_name)}")
    return by_name[name](seed)


def _by_name() -> dict[str, type[Ranking]]:
    return {one.name: one for one in sorted(_RANKINGS, key=lambda one: one.name)}
