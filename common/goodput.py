"""What a good answer keeps: `--goodput ttft:500 tpot:50 e2el:5000`, with the syntax and names of `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from common.errors import ConfigError

NAMES = ("ttft", "tpot", "e2el")
_OTHER_NAMES = {"e2e": "e2el"}

Goodput = Mapping[str, float]
"""Most milliseconds by name: to the first token, per further token, to the end of the answer. What has no name may take
any time."""


def parse_goodput(texts: Iterable[str], setting: str) -> dict[str, float]:
    """`ttft:500` and the like; several in one text have commas or spaces between. Raises `ConfigError` of `setting`."""
    targets: dict[str, float] = {}
    for text in ",".join(texts).replace(" ", ",").split(","):
        if not text:
            continue
        name, _, value = text.partition(":")
        name = _OTHER_NAMES.get(name, name)
        if name not in NAMES:
            raise ConfigError(setting, f"{name!r} is not one of {', '.join(NAMES)}, as in ttft:500")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if not 0 < limit < math.inf:
            raise ConfigError(setting, f"{text!r} has no number of milliseconds above 0")
        if name in targets:
            raise ConfigError(setting, f"{name} is given twice")
        targets[name] = limit
    return targets


def is_good(targets: Goodput, *, ttft_s: float, tpot_s: float | None, e2el_s: float) -> bool:
    """`tpot_s` is None for an answer of one token, which keeps any target of it."""
    found = {"ttft": ttft_s, "tpot": tpot_s or 0.0, "e2el": e2el_s}
    return all(1000 * found[name] <= limit for name, limit in targets.items())
