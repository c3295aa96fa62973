"""Positions of models that count their tokens themselves, instead of taking a position for each."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from torch import nn

from common.errors import StartupError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Those after RoBERTa: the position of the padding token and those before it are no token's. (transformers gives padding
# within a prompt that position too; here it is a token as others are.)
_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)


def first_position(config: PreTrainedConfig) -> int:
    """What the model calls the position of a sequence's first token."""
    if config.model_type not in _AFTER_PADDING:
        return 0
    padding = getattr(config, "pad_token_id", None)
    if not isinstance(padding, int):
        raise StartupError("config.json: pad_token_id has to be an integer, positions begin after it")
    return padding + 1


def max_length(config: PreTrainedConfig) -> int | None:
    """Longest sequence in tokens that config.json tells of, if it does."""
    for key in ("max_position_embeddings", "max_target_positions"):
        length = getattr(config, key, None)
        if isinstance(length, int):
            return length - first_position(config)
    return None


class GivenPositions:
    """Hands the positions of a step to embeddings whose model takes none, and would count from zero in each step.

    These are the decoders of pairs such as BART, whose `embed_positions` does take positions.
    """

    def __init__(self, base: nn.Module) -> None:
        self.current = torch.empty(0)  # [num_tokens]
        for module in base.modules():
            embedding = getattr(module, "embed_positions", None)
            if isinstance(embedding, nn.Module) and _takes_positions(embedding) and not _takes_positions(module):
                embedding.register_forward_pre_hook(self._give, with_kwargs=True)

    def _give(
        self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return args, {**kwargs, "position_ids": self.current}


def _takes_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(module.forward).parameters
