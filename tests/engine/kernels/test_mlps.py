"""Experts' MLPs in one call, against the same products and activations one by one."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.library import Activation, PackedMLPs, WeightKind
from tests.engine.kernels.test_linear import KIND_ERROR, KINDS, error
from tests.engine.kernels.variants import each_variant, kernels

HIDDEN, INNER, NUM_MLPS = 70, 45, 6
NUM_ROWS = torch.tensor([3, 0, 1, 30, 0, 2])


def expected(x: torch.Tensor, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """In float64, the gates through SiLU."""
    parts = []
    for rows, (gate_up, down) in zip(x.double().split(NUM_ROWS.tolist()), weights, strict=True):
        gate, up = (rows @ gate_up.double().T).chunk(2, dim=-1)
        parts.append((torch.nn.functional.silu(gate) * up) @ down.double().T)
    return torch.cat(parts)


def packed(variant: str, kind: WeightKind, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> PackedMLPs:
    library = kernels(variant)
    gate_ups, downs = ([library.pack(one, None, kind) for one in each] for each in zip(*weights, strict=True))
    return PackedMLPs(library, gate_ups, downs, Activation.SILU)


@pytest.fixture
def weights() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2 * INNER, HIDDEN, generator=generator), torch.randn(HIDDEN, INNER, generator=generator))
        for _ in range(NUM_MLPS)
    ]


@each_variant
@pytest.mark.parametrize("kind", KINDS)
def test_each_takes_its_rows(variant: str, kind: WeightKind, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    x = torch.randn(int(NUM_ROWS.sum()), HIDDEN, generator=torch.Generator().manual_seed(2))
    mlps = packed(variant, kind, weights)
    given = mlps(x, NUM_ROWS)
    assert error(given, expected(x, weights)) < 3 * KIND_ERROR[kind]  # two products, and their activation
    start = 0
    for number, count in enumerate(NUM_ROWS.tolist()):
        alone = torch.zeros(NUM_MLPS, dtype=torch.int64)
        alone[number] = count
        assert torch.equal(mlps(x[start : start + count], alone), given[start : start + count])
        start += count


@each_variant
def test_rows_that_are_nobodys_are_refused(variant: str, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    mlps = packed(variant, WeightKind.FLOAT32, weights)
    x = torch.randn(4, HIDDEN)
    with pytest.raises(ValueError, match="4 rows"):
        mlps(x, torch.tensor([1, 0, 1, 1, 0, 0]))
    with pytest.raises(ValueError, match="6 MLPs"):
        mlps(x, torch.tensor([4]))
    with pytest.raises(TypeError, match="bfloat16"):
        mlps(x.bfloat16(), NUM_ROWS)
