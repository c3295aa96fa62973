"""Which tokens end an answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)


def known_ends(ends: Mapping[int, str], vocab_size: int) -> list[int]:
    """The ids that end an answer, of those that files name (`ModelFiles.ends`). Logs which they are and who names them.
    An id that the model's head does not have ends nothing."""
    known = [token_id for token_id in ends if 0 <= token_id < vocab_size]
    if len(known) < len(ends):
        outside = {token_id: name for token_id, name in ends.items() if token_id not in known}
        log.warning("ends of an answer outside the model's vocabulary are ignored", extra={"ends": _listed(outside)})
    log.info("tokens that end an answer", extra={"ends": _listed({each: ends[each] for each in known}) or "none"})
    return known


def _listed(ends: Mapping[int, str]) -> str:
    return "; ".join(f"{token_id} of {name}" for token_id, name in ends.items())
