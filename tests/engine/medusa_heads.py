"""Medusa heads for tiny models: of random weights, and such as are right for given texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.sampling import SamplingParams
from engine.local.device import LocalDevice
from engine.local.medusa import MedusaHead, heads_of
from engine.sampling.draws import draw
from engine.step import StepRow

_LIKELIEST = draw(SamplingParams(temperature=0.0), 0)


def random_weights(device: LocalDevice, num_heads: int, num_blocks: int = 1) -> dict[str, torch.Tensor]:
    """By the names of the published heads."""
    generator = torch.Generator().manual_seed(num_heads)
    hidden, vocab = device.info.hidden_size, device.info.vocab_size
    weights = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            weights[f"{head}.{block}.linear.weight"] = 0.1 * torch.randn(hidden, hidden, generator=generator)
            weights[f"{head}.{block}.linear.bias"] = 0.1 * torch.randn(hidden, generator=generator)
        weights[f"{head}.{num_blocks}.weight"] = torch.randn(vocab, hidden, generator=generator)
    return weights


def random_heads(device: LocalDevice, num_heads: int) -> list[MedusaHead]:
    return [head for head, _ in heads_of(random_weights(device, num_heads), device, "random heads")]


def right_weights(device: LocalDevice, texts: Sequence[Sequence[int]], num_heads: int) -> dict[str, torch.Tensor]:
    """Of heads without blocks that name the tokens of `texts`: least squares from each token's state. There have to be
    fewer tokens than the states are wide."""
    device.keep_states()
    states, texts_of = [], []
    for text in texts:
        for position, token_id in enumerate(text):
            blocks = list(range(-(-len(text) // device.info.spec.block_size)))
            row = StepRow(token_ids=[token_id], num_computed_tokens=position, block_ids=blocks, draw=_LIKELIEST)
            device.execute([row])
            found = device.row_of_state(blocks, position)
            assert found is not None
            states.append(device.states([found])[0].double())
            texts_of.append((text, position))
    known = torch.stack(states)
    weights = {}
    for head in range(num_heads):
        wanted = torch.zeros(len(states), device.info.vocab_size, dtype=torch.float64)
        for number, (text, position) in enumerate(texts_of):
            if position + 2 + head < len(text):
                wanted[number, text[position + 2 + head]] = 1.0
        weights[f"{head}.0.weight"] = (torch.linalg.pinv(known) @ wanted).T.float()
    return weights
