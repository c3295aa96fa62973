"""Experts' MLPs in one call, against the same products and activations one by one."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.grouped import Layout, PackedGrouped, PackedParts
from engine.kernels.library import Activation, PackedLinear, PackedMLPs, WeightKind
from tests.engine.kernels.test_grouped import Random, each_layout
from tests.engine.kernels.test_linear import KIND_ERROR, KINDS, error
from tests.engine.kernels.variants import best_and_slow_other_variants, each_variant, kernels

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


@best_and_slow_other_variants
@each_layout
@pytest.mark.parametrize("are_apart", [False, True])
def test_weights_that_stay_as_a_file_has_them(variant: str, layout: Layout, are_apart: bool) -> None:
    """Gates and what they gate are one weight, or two that follow each other, as in checkpoints of mixtures."""
    library, hidden, inner = kernels(variant), 512, 256
    gate_ups: list[PackedLinear] = []
    downs: list[PackedLinear] = []
    weights = []
    for number in range(NUM_MLPS):
        parts = [Random(layout, inner, hidden, 3 * number + index) for index in range(2)]
        whole, down = Random(layout, 2 * inner, hidden, number), Random(layout, hidden, inner, 3 * number + 2)
        packed_parts: list[PackedLinear] = [PackedGrouped(library, part) for part in parts]
        gate_ups.append(PackedParts(library, packed_parts) if are_apart else PackedGrouped(library, whole))
        downs.append(PackedGrouped(library, down))
        gate_up = torch.cat([part.all.dequantize() for part in parts]) if are_apart else whole.all.dequantize()
        weights.append((gate_up, down.all.dequantize()))
    x = torch.randn(int(NUM_ROWS.sum()), hidden, generator=torch.Generator().manual_seed(2))
    given = PackedMLPs(library, gate_ups, downs, Activation.SILU)(x, NUM_ROWS)
    wanted = expected(x, weights)
    assert (given - wanted).norm() < 1e-5 * wanted.norm()


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
