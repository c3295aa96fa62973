"""Whether a prompt is computed by a prefill worker or in place, by the decode worker. One rule, one function: a model
of time that is fitted to the workers can take its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.prefill_place import is_computed_in_place
from router.policy.base import Candidate

MOVE_COST = 0.25  # to move a token's KV, against computing the token
IN_PLACE_COST = 2.0  # of a token computed in place, since it also holds up that worker's decodes
IN_PLACE_MARGIN = 1024  # tokens by which a prefill worker has to be later before its work is done in place


@dataclass(slots=True, frozen=True)
class Place:
    in_place: bool
    reason: Callable[[], str]
    min_remote_tokens: int  # for the decode worker, which sees what is missing: it asks a prefill worker for no fewer
    is_final: bool = False  # no prefill worker can be of use


def place_of(num_prompt_tokens: int, decode: Candidate, prefill: Candidate | None, min_remote_tokens: int = 0) -> Place:
    """The prompt is computed remotely, unless that saves too little, or the prefill worker is so busy that it would
    take much longer.

    `decode` is where the request goes, `prefill` the worker that would compute the prompt; None if there is none.
    `min_remote_tokens`: see `common.prefill_place`.

    What the router knows of a worker's blocks may be out of date. So a decode worker that is to compute in place still
    asks for help if it turns out to lack much more than the router thought: `Place.min_remote_tokens`.
    """
    missing, block_size = decode.num_missing_tokens, decode.endpoint.block_size
    if prefill is None:
        return Place(True, lambda: "there is no prefill worker for it", min_remote_tokens, is_final=True)
    if is_computed_in_place(missing, min_remote_tokens, block_size):
        is_short = is_computed_in_place(num_prompt_tokens, min_remote_tokens, block_size)
        return Place(
            True,
            lambda: f"{missing} of {num_prompt_tokens} tokens are missing, which is too short for a prefill worker",
            min_remote_tokens,
            is_final=is_short,
        )
    remote = prefill.wait + prefill.work + MOVE_COST * missing
    in_place = decode.wait + IN_PLACE_COST * missing

    def costs() -> str:
        return f"{missing} tokens are missing; remote costs {remote:.0f}, in place {in_place:.0f}"

    if remote > in_place + IN_PLACE_MARGIN:
        return Place(True, costs, max(min_remote_tokens, missing + block_size))
    return Place(False, costs, min_remote_tokens)
