"""Products with weights that stay as a file has them quantised, for every variant and every format."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.grouped import Codes, GroupedRows, Layout, PackedGrouped, PackedParts, QuantizedTensor, Scales
from engine.kernels.library import WeightKind
from tests.engine.kernels.variants import VARIANTS, each_variant, kernels

LAYOUTS = [
    Layout(codes, scales, group)
    for codes, scales, group in (
        *((codes, Scales.HALF, 32) for codes in (Codes.BITS4, Codes.BITS5, Codes.BITS8)),
        *((codes, Scales.HALF_PAIR, 32) for codes in (Codes.BITS4, Codes.BITS5)),
        *((codes, Scales.TWO_LEVELS, 256) for codes in (Codes.BITS4, Codes.BITS5)),
        (Codes.BITS6, Scales.TWO_SIGNED, 256),
        (Codes.BITS4, Scales.SINGLE, 128),
        (Codes.BITS4, Scales.SINGLE_PAIR, 64),
        (Codes.BITS8, Scales.SINGLE, 256),
        (Codes.BITS8, Scales.SINGLE_PAIR, 32),
        (Codes.FP8, Scales.SINGLE, 128),
    )
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: f"{each.codes.name}-{each.scales.name}")
MOST = {Codes.BITS4: 16, Codes.BITS5: 32, Codes.BITS6: 64, Codes.BITS8: 256, Codes.FP8: 256}


class Random(QuantizedTensor):
    def __init__(self, layout: Layout, n: int, k: int, seed: int = 0) -> None:
        self.shape, self.layout = (n, k), layout
        generator = torch.Generator().manual_seed(n * k + seed)
        codes = torch.randint(MOST[layout.codes], (n, k), generator=generator, dtype=torch.uint8)
        if layout.codes is Codes.FP8:
            codes[(codes & 127) == 127] = 0  # not a number
        is_half = layout.scales not in (Scales.SINGLE, Scales.SINGLE_PAIR)
        size = 2 if is_half else 4
        factors = torch.randn(n, k // layout.group, layout.scales.head_width // size, generator=generator) * 0.1
        heads = (factors.half() if is_half else factors).view(torch.uint8)
        blocks = torch.randint(256, (n, k // 32, 2), generator=generator, dtype=torch.uint8)
        self.all = GroupedRows(
            layout, codes, heads, blocks if layout.scales in (Scales.TWO_LEVELS, Scales.TWO_SIGNED) else None
        )

    def rows(self, start: int, stop: int) -> GroupedRows:
        blocks = None if self.all.blocks is None else self.all.blocks[start:stop]
        return GroupedRows(self.layout, self.all.codes[start:stop], self.all.heads[start:stop], blocks)


@each_variant
@each_layout
@pytest.mark.parametrize(("n", "blocks"), [(1, 1), (33, 1), (70, 3), (1030, 5)])
def test_products_are_those_of_the_dequantised_weight(variant: str, layout: Layout, n: int, blocks: int) -> None:
    tensor = Random(layout, n, layout.group * blocks)
    weight, bias = tensor.all.dequantize(), torch.randn(n)
    linear = PackedGrouped(kernels(variant), tensor)
    linear.set_bias(bias)
    x = torch.randn(40, tensor.shape[1])
    expected = x.double() @ weight.double().T + bias
    whole = linear(x)
    assert (whole - expected).norm() < 3e-6 * expected.norm()
    for rows in (1, 2, 3, 13, 31):  # widened in registers, or to memory
        assert torch.equal(linear(x[:rows]), whole[:rows])


@each_variant
@each_layout
def test_rows_that_are_looked_up_are_the_factors_of_products(variant: str, layout: Layout) -> None:
    tensor = Random(layout, 50, layout.group * 5)
    linear = PackedGrouped(kernels(variant), tensor)
    rows = torch.tensor([49, 0, 3, 3, 17])
    found = linear.look_up(rows)
    torch.testing.assert_close(found, tensor.all.dequantize()[rows], rtol=1e-6, atol=1e-6)
    assert torch.equal(linear(torch.eye(tensor.shape[1])).T[rows], found)


@each_variant
def test_parts_of_unlike_kinds(variant: str) -> None:
    tensors = [Random(LAYOUTS[0], 40, 256), Random(LAYOUTS[7], 24, 256)]
    plain, biases = torch.randn(17, 256), [torch.randn(40), torch.randn(24), torch.randn(17)]
    parts = [PackedGrouped(kernels(variant), tensor) for tensor in tensors]
    parts.append(kernels(variant).pack(plain, None, WeightKind.FLOAT32))
    for part, bias in zip(parts, biases, strict=True):
        part.set_bias(bias)
    linear = PackedParts(kernels(variant), parts)
    for x in (torch.randn(9, 256), torch.randn(1, 256).bfloat16()):
        expected = torch.cat([part(x) for part in parts], 1)
        assert torch.equal(linear(x), expected)


@pytest.mark.skipif(not VARIANTS, reason="no kernels were built")
def test_a_row_without_whole_groups_is_no_weight() -> None:
    tensor = Random(Layout(Codes.BITS4, Scales.HALF, 32), 4, 64)
    tensor.shape = (4, 63)
    with pytest.raises(ValueError, match="a row of 63 weights has no groups of 32"):
        PackedGrouped(kernels(VARIANTS[0]), tensor)
