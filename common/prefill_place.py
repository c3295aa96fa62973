"""Where a prompt's KV is computed: by a prefill worker, or in place by the decode worker.

One rule. The router applies it to a whole prompt when it picks workers, and the decode worker applies it again to what
its own cache and the store lack, which the router cannot know.
"""

from __future__ import annotations

from common.batch_time import BatchTime, StepShape


def is_computed_in_place(num_missing_tokens: int, min_remote_tokens: int, block_size: int) -> bool:
    """Whether so few prompt tokens are missing that computing them costs less than asking for them.

    `min_remote_tokens`: the fewest missing tokens for which a prefill worker is asked; 0 is one KV block. A router that
    knows how long the workers' steps take finds it by `least_remote_tokens`.
    """
    return num_missing_tokens < (min_remote_tokens or block_size)


def least_remote_tokens(time: BatchTime, decodes: StepShape, asking_s: float, *, past: int, most: int) -> int:
    """The fewest tokens, after `past` computed ones, for which a decode worker with such `decodes` should ask a prefill
    worker, which costs the request `asking_s` at least; 0 if it should ask for all that it may: one KV block is the
    fallback of `is_computed_in_place`, also where no model of time is known.

    Tokens computed in place delay each decode beside them as much as the request itself. At least one counts.
    """
    if not decodes.num_decodes:
        return 0
    longer_s = asking_s / (1 + decodes.num_decodes)
    num_in_place = time.tokens_within(time.seconds(decodes) + longer_s, decodes, past, most)
    return num_in_place + 1 if num_in_place else 0
