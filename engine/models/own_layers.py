"""Baton's layers in the place of torch's, in models that run on transformers' code."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from engine.kernels.library import Kernels, PackedLinear
from engine.layers import Linear

_NOTHING = torch.empty(0)


class _Product:
    """One linear layer for several that are given the same tensor, such as Q, K and V."""

    def __init__(
        self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], *, is_head: bool
    ) -> None:
        self.sizes = [len(weight) for weight in weights]
        bias = None
        if any(each is not None for each in biases):
            bias = torch.cat(
                [weights[0].new_zeros(n) if b is None else b for n, b in zip(self.sizes, biases, strict=True)]
            )
        whole = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.linear = Linear.of(whole, bias, is_head=is_head)
        self._in_features = weights[0].shape[1]
        self._starts = [0, *accumulate(self.sizes)]
        self._x: torch.Tensor | None = None  # what `_out` was computed of; None if all parts of that were taken
        self._out = _NOTHING
        self._num_left = 0

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self._x is not x:
            out = self.linear(x.reshape(-1, self._in_features)).view(*x.shape[:-1], sum(self.sizes))
            if len(self.sizes) == 1:
                return out
            self._x, self._out, self._num_left = x, out, len(self.sizes)
        result = self._out.narrow(-1, self._starts[index], self.sizes[index])
        self._num_left -= 1
        if not self._num_left:
            self._x, self._out = None, _NOTHING
        return result


class OwnLinear(nn.Module):
    """Stands in the place of torch's linear layer, or of transformers' Conv1D, whose weight is the transpose."""

    def __init__(self, product: _Product, index: int, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._product, self._index = product, index
        self.out_features, self.in_features = weight.shape
        # For code that asks for its dtype; computing with it fails.
        self.weight = torch.empty_like(weight, device="meta")
        self.bias = None if bias is None else torch.empty_like(bias, device="meta")

    @property
    def packed(self) -> PackedLinear | None:
        return self._product.linear.packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product.part(self._index, x)


def own_linears(modules: Sequence[nn.Module], kernels: Kernels | None, *, is_head: bool = False) -> list[OwnLinear]:
    """Layers of ours for torch's linear layers, or transformers' Conv1D, that are given the same tensor. Those lose
    their weights, which would otherwise be in memory three times while they are packed."""
    weights, biases = [], []
    for module in modules:
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        weights.append(weight if isinstance(module, nn.Linear) else weight.T.contiguous())
        biases.append(module.bias)
    shapes = [torch.empty_like(weight, device="meta") for weight in weights]
    product = _Product(weights, biases, is_head=is_head)  # type: ignore[arg-type]
    weights.clear()
    for module in modules:
        del module.weight
    del weight
    product.linear.finish(kernels)
    return [
        OwnLinear(product, index, weight, bias)  # type: ignore[arg-type]
        for index, (weight, bias) in enumerate(zip(shapes, biases, strict=True))
    ]


class OwnEmbedding(nn.Module):
    """Rows of a head's packed weight, in the place of an embedding that shares it."""

    def __init__(self, packed: PackedLinear, embedding: nn.Embedding) -> None:
        super().__init__()
        self._packed = packed
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.weight = torch.empty_like(embedding.weight, device="meta")  # for its dtype and shape

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = self._packed.look_up(token_ids.reshape(-1)).to(self.weight.dtype)
        return rows.view(*token_ids.shape, self.embedding_dim)


class Calls:
    """Which modules were called, and with what, while a model computed two tokens."""

    def __init__(self) -> None:
        self._called: set[nn.Module] = set()
        # The tensors, and copies of what was in them: some code writes into a tensor between two layers.
        self._inputs: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def note(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        self._called.add(module)
        if inputs and isinstance(inputs[0], torch.Tensor):
            self._inputs.setdefault(module, []).append((inputs[0], inputs[0].clone()))

    def linears_of(self, parent: nn.Module) -> list[list[str]]:
        """Names of the linear layers right below `parent`, in groups of those that were given one and the same tensor.

        One that was called twice, or whose parent was not called, is alone. One that was not called although its parent
        was is left out: its weight is used in another way."""
        from transformers.pytorch_utils import Conv1D

        groups: list[tuple[list[str], list[tuple[torch.Tensor, torch.Tensor]]]] = []
        for name, child in parent.named_children():
            is_plain = type(child) in (nn.Linear, Conv1D) or type(child).__name__ == "FalconLinear"
            if is_plain and (child in self._called or parent not in self._called):
                inputs = self._inputs.get(child, [])
                for names, others in groups:
                    if len(inputs) == len(others) == 1 and _are_same(inputs[0], others[0]):
                        names.append(name)
                        break
                else:
                    groups.append(([name], inputs))
        return [names for names, _ in groups]


def _are_same(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether two layers were given one tensor, and the same numbers in it. Tensors of inference have no version that
    would tell whether they were written to."""
    return one[0] is other[0] and torch.equal(one[1], other[1])


def swap_heads(heads: Sequence[tuple[nn.Module, str]], base: nn.Module, kernels: Kernels | None) -> int:
    """Swaps the heads, each given by its parent and its name there. Returns how many weights are Baton's now.

    An embedding of `base` that has the same weight looks its rows up in what was packed. If weights are quantised it
    stays as it is; if it does more than to look up, both stay.
    """
    num_swapped = 0
    for top, name in heads:
        head = getattr(top, name)
        num_weights = head.weight.numel()
        sharing = [
            (parent, child_name, child)
            for parent in base.modules()
            for child_name, child in parent.named_children()
            if isinstance(child, nn.Embedding) and child.weight is head.weight
        ]
        is_plain = len(sharing) == 1 and type(sharing[0][2]) is nn.Embedding and sharing[0][2].max_norm is None
        is_exact = kernels is not None and kernels.quantization == "none"
        if sharing and (kernels is None or (is_exact and not is_plain)):
            continue
        (own,) = own_linears([head], kernels, is_head=True)
        setattr(top, name, own)
        num_swapped += num_weights
        if sharing and is_exact and own.packed is not None:
            parent, child_name, embedding = sharing[0]
            setattr(parent, child_name, OwnEmbedding(own.packed, embedding))
    return num_swapped
