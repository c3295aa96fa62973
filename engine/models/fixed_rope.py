"""One set of rotary frequencies for all steps of a model on transformers' code.

With longrope transformers takes the short or the long set by the highest position of each call, so the same tokens
would get another KV as a text grows. Here each call looks as long as the longest sequence that is served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.models.attention_interface import UnsupportedAttentionError
from engine.models.base import ConfigReader

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def longrope_variant(config: PreTrainedConfig, num_positions: int) -> str:
    """Names the frequencies for sequences up to `num_positions`; empty if they do not depend on it. Raises
    `StartupError` if config.json does not tell the length up to which the short ones are."""
    given = getattr(config, "rope_parameters", None) or {}
    sections = given.values() if all(isinstance(each, dict) for each in given.values()) else [given]
    chosen = set()
    for section in sections:
        if section.get("rope_type") == "longrope":
            limit = ConfigReader(section, "config.json: rope_parameters").integer("original_max_position_embeddings")
            chosen.add("long" if num_positions > limit else "short")
    return f"longrope {' and '.join(sorted(chosen))}" if chosen else ""


def fix_frequencies(base: nn.Module, num_positions: int) -> None:
    """Gives each rotary embedding one more position, the last one, and takes what that gave away again. Raises
    `UnsupportedAttentionError` if there is none."""
    embeddings = [module for module in base.modules() if "rope_type" in vars(module)]
    if not embeddings:
        raise UnsupportedAttentionError("longrope in code of its own")

    def add_last(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if not isinstance(positions, torch.Tensor):
            raise UnsupportedAttentionError("rotary embeddings without positions")
        last = positions.new_full((*positions.shape[:-1], 1), num_positions - 1)
        return (args[0], *args[2:]), {**kwargs, "position_ids": torch.cat((positions, last), -1)}

    def drop_last(_: nn.Module, __: object, out: torch.Tensor | tuple[torch.Tensor, ...]) -> object:
        return out[..., :-1, :] if isinstance(out, torch.Tensor) else tuple(each[..., :-1, :] for each in out)

    for embedding in embeddings:
        embedding.register_forward_pre_hook(add_last, with_kwargs=True)
        embedding.register_forward_hook(drop_last)
