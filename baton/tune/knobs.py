"""What is searched: the knobs of a fleet, the values of each, and what stays as it is."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast, get_args

from common.config import EngineSettings, TuneSettings
from common.errors import ConfigError
from common.types import WorkerRole
from router.policy.registry import policy_names

ROLES = "roles"
MAX_LISTED = 13  # fleets that are tried in any case; of a larger one, the search comes to the others step by step


@dataclass(slots=True, frozen=True)
class Roles:
    prefill: int
    decode: int
    both: int = 0

    @property
    def num_workers(self) -> dict[WorkerRole, int]:
        return {WorkerRole.PREFILL: self.prefill, WorkerRole.DECODE: self.decode, WorkerRole.BOTH: self.both}

    def __str__(self) -> str:
        parts = [f"{num}{letter}" for num, letter in ((self.prefill, "P"), (self.decode, "D"), (self.both, "B")) if num]
        return " + ".join(parts)


Value = Roles | int | str | None
Config = tuple[Value, ...]
"""A value for each knob of a `Space`, in its order."""


@dataclass(slots=True, frozen=True)
class Knob:
    name: str  # of the setting, or `ROLES`
    default: Value
    values: tuple[Value, ...]  # with the default; one alone is not searched


@dataclass(slots=True, frozen=True)
class Space:
    knobs: tuple[Knob, ...]

    @property
    def default(self) -> Config:
        return tuple(knob.default for knob in self.knobs)

    def named(self, config: Config) -> dict[str, Value]:
        return {knob.name: value for knob, value in zip(self.knobs, config, strict=True)}

    def roles(self, config: Config) -> Roles:
        return cast("Roles", self.named(config)[ROLES])

    def num_changed(self, config: Config) -> int:
        """Knobs that are not at their defaults."""
        return sum(value != knob.default for knob, value in zip(self.knobs, config, strict=True))

    def at(self, config: Config, index: int, value: Value) -> Config:
        """`config` with another value of one knob, in its plainest form: a knob that does nothing beside the others is
        at its default."""
        changed = dict(enumerate(config)) | {index: value}
        return self._plain(changed[number] for number in range(len(self.knobs)))

    def moves(self, config: Config, index: int) -> list[Config]:
        """Every config that differs in this knob, as far as it is listed; of fleets also those near this one."""
        current, knob = config[index], self.knobs[index]
        values = [*knob.values, *(_near(current) if isinstance(current, Roles) and len(knob.values) > 1 else ())]
        found = dict.fromkeys(self.at(config, index, value) for value in values)
        found.pop(config, None)
        return [*found]

    def drawn(self, draw: random.Random) -> Config:
        return self._plain(draw.choice(knob.values) for knob in self.knobs)

    def _plain(self, values: Iterable[Value]) -> Config:
        found = dict(zip((knob.name for knob in self.knobs), values, strict=True))
        searched = {knob.name: knob.default for knob in self.knobs if len(knob.values) > 1}
        roles, chunk, budget = found[ROLES], found["chunk_size"], found["max_num_batched_tokens"]
        if "chunk_size" in searched and isinstance(chunk, int) and isinstance(budget, int):
            found["chunk_size"] = min(chunk, budget)
        if "min_remote_tokens" in searched and isinstance(roles, Roles) and not roles.prefill:
            found["min_remote_tokens"] = searched["min_remote_tokens"]  # who computes all in place asks nobody
        return tuple(found.values())


def make_space(settings: TuneSettings, *, longest_prompt: int, has_sessions: bool, has_targets: bool) -> Space:
    """`longest_prompt`: tokens. `has_sessions`: requests belong to sessions. `has_targets`: for the time to the first
    token, or from one to the next. Raises `ConfigError`."""
    given = settings.model_fields_set
    roles = _given_roles(settings)
    half = settings.workers // 2
    default = roles or (Roles(half, settings.workers - half) if half else Roles(0, 0, 1))
    knobs = [Knob(ROLES, default, (default,) if roles else tuple(fleets(settings.workers)))]

    queues = get_args(EngineSettings.model_fields["queue_policy"].annotation)
    if settings.queue_policy not in queues:
        raise ConfigError("queue_policy", f"{settings.queue_policy!r} is not one of {', '.join(queues)}")
    lists: Mapping[str, Iterable[Value]] = {
        "policy": [name for name in policy_names() if name != "session" or has_sessions],
        "queue_policy": ["fcfs"] if has_targets else [],  # `auto` is `slo` if all have targets, and `fcfs` if none has
        "max_num_batched_tokens": (256, 512, 1024, 2048, 4096, 8192, 16384),
        "chunk_size": (128, 256, 512, 1024, 2048, 4096, 8192),
        "max_num_seqs": (8, 16, 32, 64, 128, 256),
        "min_remote_tokens": [num for num in (64, 128, 256, 512, 1024, 2048, 4096, 8192) if num <= longest_prompt],
    }
    for name, values in lists.items():
        stays = name in given or (name == "policy" and settings.prefill_policy and settings.decode_policy)
        own: Value = getattr(settings, name)
        knobs.append(Knob(name, own, (own,) if stays else tuple(dict.fromkeys([own, *values]))))
    return Space(tuple(knobs))


def fleets(num_workers: int) -> Iterator[Roles]:
    """All with both roles, and prefill and decode workers in every ratio; of many ratios, some."""
    yield Roles(0, 0, num_workers)
    num_ratios = num_workers - 1
    listed = min(num_ratios, MAX_LISTED - 1)
    for number in range(listed):
        prefill = 1 + (number * (num_ratios - 1) // (listed - 1) if listed > 1 else 0)
        yield Roles(prefill, num_workers - prefill)


def _near(roles: Roles) -> Iterator[Roles]:
    """With one, two, four … workers more or fewer that prefill."""
    num, step = roles.prefill + roles.decode, 1
    while step < num:
        for prefill in (roles.prefill - step, roles.prefill + step):
            if 0 < prefill < num:
                yield Roles(prefill, num - prefill, roles.both)
        step *= 2


def _given_roles(settings: TuneSettings) -> Roles | None:
    if settings.prefill is settings.decode is settings.both is None:
        return None
    roles = Roles(settings.prefill or 0, settings.decode or 0, settings.both or 0)
    if not roles.decode + roles.both:
        raise ConfigError("decode", "a fleet needs a decode worker, or one of both roles")
    if "workers" in settings.model_fields_set and settings.workers != sum(roles.num_workers.values()):
        raise ConfigError("workers", f"{settings.workers} are not {roles}")
    return roles
