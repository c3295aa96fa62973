"""Whether a prompt is computed by a prefill worker or in place, by the decode worker. One rule, one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from common.prefill_place import is_computed_in_place
from router.policy.base import Candidate, cost_in_words
from router.policy.costs import TOKENS, Costs, in_place_s


@dataclass(slots=True)
class Placement:
    in_place: bool
    reason: Callable[[], str]
    min_remote_tokens: int  # for the decode worker, which sees what is missing: it asks a prefill worker for no fewer
    is_final: bool = False  # no prefill worker can be of use


def placement_of(
    num_prompt_tokens: int,
    decode: Candidate,
    prefill: Candidate | None,
    min_remote_tokens: int = 0,
    costs: Costs = TOKENS,
    handoff_token_s: float | None = None,
) -> Placement:
    """The prompt is computed remotely, unless that saves too little, or the prefill worker is so busy that it would
    take much longer.

    `decode` is where the request goes, `prefill` the worker that would compute the prompt; None if there is none.
    `min_remote_tokens`: see `common.prefill_place`; 0: as `costs` say. They are those of the candidates.
    `handoff_token_s`: see `Costs.handoff`.

    What the router knows of a worker's blocks may be out of date. So a decode worker that is to compute in place still
    asks for help if it turns out to lack much more than the router thought: `Placement.min_remote_tokens`.
    """
    missing, block_size = decode.num_missing_tokens, decode.endpoint.block_size
    if prefill is None:
        return Placement(True, lambda: "there is no prefill worker for it", min_remote_tokens, is_final=True)
    worker, cached = decode.endpoint, decode.num_cached_tokens
    min_remote_tokens = min_remote_tokens or costs.least_remote(worker, prefill.endpoint, cached)
    min_remote_tokens = (
        max(min_remote_tokens, block_size) if costs.in_seconds and min_remote_tokens else min_remote_tokens
    )
    if is_computed_in_place(missing, min_remote_tokens, block_size):
        is_short = is_computed_in_place(num_prompt_tokens, min_remote_tokens, block_size)
        return Placement(
            True,
            lambda: f"{missing} of {num_prompt_tokens} tokens are missing, which is too short for a prefill worker",
            min_remote_tokens,
            is_final=is_short,
        )
    handoff = costs.handoff(prefill.endpoint, missing, cached, handoff_token_s)
    remote = prefill.wait + prefill.work + handoff
    margin = costs.margin(worker)

    def reason() -> str:
        words = partial(cost_in_words, in_seconds=costs.in_seconds)
        computing = costs.in_place(worker, missing, cached)
        in_place = decode.wait + computing
        if not costs.in_seconds:
            return f"{missing} tokens are missing; remote costs {words(remote)}, in place {words(in_place)}"
        _, lost = in_place_s(worker, missing, cached)
        return (
            f"{missing} tokens are missing; remote costs {words(remote)} (wait {words(prefill.wait)}, computing "
            f"{words(prefill.work)}, handoff {words(handoff)}), in place {words(in_place)} (wait {words(decode.wait)}, "
            f"computing {words(computing - lost)}, lost by its decodes {words(lost)})"
        )

    # What computing in place costs takes long to find, and rarely matters.
    if remote > decode.wait + margin and remote > decode.wait + costs.in_place(worker, missing, cached) + margin:
        return Placement(True, reason, max(min_remote_tokens, missing + block_size))
    return Placement(False, reason, min_remote_tokens)
