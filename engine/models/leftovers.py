"""Tensors that published checkpoints hold, and that no decoder of transformers has as a parameter."""

from __future__ import annotations

import re

_LEFTOVER = re.compile(
    r"(^|\.)("
    r"(attn|attention|self_attn)(\.attention)?\.(masked_)?bias"  # masks: GPT-Neo, GPT-J; biases belong to layers in it
    r"|causal_mask|position_ids|inv_freq"
    r"|pooler\.dense\.(weight|bias)|seq_relationship\.(weight|bias)"  # what BERT was trained with beside its head
    r")$"
)


def is_leftover(name: str) -> bool:
    """Whether the tensor `name` is a mask or a table that older releases saved, or a part that only training needs."""
    return _LEFTOVER.search(name) is not None
