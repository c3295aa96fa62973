"""Where a prompt's KV is computed: by a prefill worker, or in place by the decode worker.

One rule. The router applies it to a whole prompt when it picks workers, and the decode worker applies it again to what
its own cache and the store lack, which the router cannot know.
"""

from __future__ import annotations


def is_computed_in_place(num_missing_tokens: int, min_remote_tokens: int, block_size: int) -> bool:
    """Whether so few prompt tokens are missing that computing them costs less than asking for them.

    `min_remote_tokens`: the fewest missing tokens for which a prefill worker is asked; 0 is one KV block.
    """
    return num_missing_tokens < (min_remote_tokens or block_size)
