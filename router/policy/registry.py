"""Policies by name. A new one is a file of this package and a line here."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import ConfigError
from router.policy.base import Policy
from router.policy.least_load import LeastLoad
from router.policy.round_robin import RoundRobin

_POLICIES: dict[str, Callable[..., Policy]] = {"least_load": LeastLoad, "round_robin": RoundRobin}


def create_policy(name: str, *, min_remote_tokens: int = 0) -> Policy:
    """Raises `ConfigError` for `policy` if there is none of that name. `min_remote_tokens`: `common.prefill_place`."""
    policy = _POLICIES.get(name)
    if policy is None:
        raise ConfigError("policy", f"{name!r} is not one of {', '.join(sorted(_POLICIES))}")
    return policy(min_remote_tokens=min_remote_tokens)
