"""Keeps what some layers of a forward pass begin with: EAGLE-3 heads continue that, in place of the last states."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class LayerInputs:
    def __init__(self, layers: Sequence[int] = ()) -> None:
        """`layers`: their numbers, ascending."""
        self._layers = layers
        self._kept: list[torch.Tensor] = []

    def begin(self) -> None:
        """Before each pass."""
        self._kept = []

    def note(self, layer: int, hidden: torch.Tensor, added: torch.Tensor | None = None) -> None:
        """Called before each layer with its hidden states `[num_tokens, hidden_size]`, to which `added` is still to be
        added. Layers of a call that begins after `layer` and before `stop_before` need not be told."""
        if layer in self._layers:
            self._kept.append(hidden.clone() if added is None else hidden + added)

    def stop_before(self, layer: int, stop: int) -> int:
        """`stop`, or the first layer after `layer` before it that is kept."""
        return min((one for one in self._layers if layer < one < stop), default=stop)

    def take(self) -> torch.Tensor:
        """Of the whole pass, side by side: `[num_tokens, len(layers) * hidden_size]`."""
        return torch.cat(self._kept, dim=-1)

    def __len__(self) -> int:
        return len(self._layers)
