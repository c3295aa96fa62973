"""Products with packed weights against float64, for every variant that this CPU can run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from engine.kernels.choice import Choice
from engine.kernels.library import Kernels, WeightKind
from engine.layers import Linear
from tests.engine.kernels.variants import VARIANTS, each_variant, kernels

KINDS = [WeightKind.FLOAT32, WeightKind.BFLOAT16, WeightKind.INT8, WeightKind.INT4]
# Relative errors of one result: rounding only, 8 bits of mantissa, 127 steps, 15 steps between least and most.
KIND_ERROR = {WeightKind.FLOAT32: 2e-6, WeightKind.BFLOAT16: 8e-3, WeightKind.INT8: 2e-2, WeightKind.INT4: 0.2}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@each_variant
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (31, 7), (33, 64), (48, 100), (96, 576), (130, 257), (64, 2048), (70, 3001)]
)
def test_odd_sizes(variant: str, kind: WeightKind, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n * k)
    weight = torch.randn(n, k, generator=generator)
    bias = torch.randn(n, generator=generator)
    linear = kernels(variant).pack(weight, bias, kind)
    for m in (1, 2, 3, 5, 11, 12, 13, 64, 200):
        x = torch.randn(m, k, generator=generator)
        expected = x.double() @ weight.double().T + bias
        assert error(linear(x), expected) < KIND_ERROR[kind], m


@each_variant
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [192, 2113])
def test_a_row_does_not_depend_on_the_batch(variant: str, kind: WeightKind, k: int) -> None:
    """Few rows widen weights in registers, many widen them to memory, a stretch of k at a time."""
    weight, x = torch.randn(100, k), torch.randn(256, k)
    linear = kernels(variant).pack(weight, None, kind)
    whole = linear(x)
    for rows in (1, 2, 3, 7, 12, 13, 24, 25, 31, 100):
        assert torch.equal(linear(x[:rows]), whole[:rows])
    assert torch.equal(kernels(variant, 1).pack(weight, None, kind)(x), whole)


@each_variant
def test_bfloat16_weights_are_kept_exactly(variant: str) -> None:
    """What is left is the rounding of x, and only if the CPU multiplies bfloat16 itself."""
    weight = torch.randn(70, 128).bfloat16()
    x = torch.randn(9, 128).bfloat16()
    result = kernels(variant).pack(weight, None)(x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, (x.double() @ weight.double().T).bfloat16(), rtol=2**-7, atol=1e-5)


@each_variant
@pytest.mark.parametrize("kind", [WeightKind.INT8, WeightKind.INT4])
def test_quantised_weights_are_within_half_a_step(variant: str, kind: WeightKind) -> None:
    group, steps = (64, 127) if kind is WeightKind.INT8 else (32, 15)
    weight = torch.randn(40, 96)
    kept = kernels(variant).pack(weight, None, kind)(torch.eye(96)).T
    for start in range(0, 96, group):
        part = weight[:, start : start + group]
        span = part.abs().amax(1) if kind is WeightKind.INT8 else part.amax(1) - part.amin(1)
        # A little more for the scale and the minimum of int4, which are bfloat16.
        step = span / steps * (0.501 if kind is WeightKind.INT8 else 0.6)
        assert ((kept[:, start : start + group] - part).abs() <= step[:, None] + span[:, None] * 2**-8).all()


@each_variant
@pytest.mark.parametrize("kind", [WeightKind.INT8, WeightKind.INT4])
def test_nothing_but_the_weights_is_rounded_if_x_is_in_bfloat16(variant: str, kind: WeightKind) -> None:
    """Products in float32's precision with the weights as they are kept, also if int4 multiplies in bfloat16."""
    linear = kernels(variant).pack(torch.randn(70, 416), None, kind)
    kept = linear(torch.eye(416)).T.double()
    for m in (1, 2, 7, 40):
        x = (torch.randn(m, 416) + 0.5).bfloat16().float()
        assert error(linear(x), x.double() @ kept.T) < KIND_ERROR[WeightKind.FLOAT32], m


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 7), (70, 130), (1030, 64)])
def test_rows_that_are_looked_up_are_those_packed(variant: str, dtype: torch.dtype, n: int, k: int) -> None:
    weight = torch.randn(n, k)
    linear = kernels(variant).pack(weight.to(dtype), None)
    rows = torch.tensor([n - 1, 0, n // 2, n // 2])
    assert torch.equal(linear.look_up(rows), weight.to(dtype)[rows].float())
    assert linear.look_up(rows[:0]).shape == (0, k)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_file", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_packed_part_by_part_is_the_layer_packed_whole(
    variant: str, of_file: torch.dtype, dtype: torch.dtype
) -> None:
    """Parts that begin a panel go straight into the kernels' layout, others by way of the plain weight."""
    used = kernels(variant)
    for first in (used.panel * 40, used.panel - 1):
        n, k = first + 2 * used.panel + 3, 65
        weight, x, bias = torch.randn(n, k).to(of_file), torch.randn(5, k), torch.randn(n).to(dtype)
        part_by_part, whole = (Linear(k, n, bias=True, dtype=dtype, device=x.device) for _ in range(2))
        parts = [part_by_part.rows(0, first), part_by_part.rows(first, n)]
        for part in reversed(parts):
            piece = weight[part.start : part.stop]
            assert part.pack(0, piece, used) == (first % used.panel == 0)
            part.plain().copy_(piece)
        whole.whole().plain().copy_(weight)
        for layer in (part_by_part, whole):
            assert layer.bias is not None
            layer.bias.copy_(bias)
            layer.finish(used)
        assert torch.equal(part_by_part(x), whole(x))


@each_variant
@pytest.mark.parametrize(("quantization", "is_head"), [("int8", False), ("int4", False), ("int4", True)])
def test_a_layer_quantised_piece_by_piece_is_the_layer_quantised_whole(
    variant: str, quantization: str, is_head: bool
) -> None:
    used = Kernels(Choice(variant, "a test"), 2, quantization)
    n, k = 600, 129
    weight, x = torch.randn(n, k).bfloat16(), torch.randn(5, k)
    by_pieces, whole = (
        Linear(k, n, bias=False, is_head=is_head, dtype=weight.dtype, device=x.device) for _ in range(2)
    )
    for start in (0, 256, 512):
        assert by_pieces.whole().pack(start, weight[start : start + 256], used)
    whole.whole().plain().copy_(weight)
    for layer in (by_pieces, whole):
        layer.finish(used)
        assert layer.packed is not None
        assert layer.packed.struct.kind == (
            WeightKind.INT4 if quantization == "int4" and not is_head else WeightKind.INT8
        )
    assert torch.equal(by_pieces(x), whole(x))


@each_variant
def test_rows_within_a_panel_cannot_be_filled(variant: str) -> None:
    linear = kernels(variant).pack(torch.randn(40, 8), None)
    with pytest.raises(ValueError, match="rows from 1 on"):
        linear.fill(1, torch.randn(2, 8))


@each_variant
def test_rows_with_strides_and_columns_that_are_not_contiguous(variant: str) -> None:
    weight, wide = torch.randn(30, 48), torch.randn(10, 96)
    linear = kernels(variant).pack(weight, None)
    for x in (wide[:, :48], wide[::2, 3:51], wide[:, ::2], torch.randn(48, 10).T):
        torch.testing.assert_close(linear(x), x @ weight.T, rtol=1e-5, atol=1e-5)


@each_variant
def test_nan_stays_in_its_row(variant: str) -> None:
    linear = kernels(variant).pack(torch.randn(40, 33), None)
    x = torch.randn(14, 33)
    x[5, 3] = float("nan")
    result = linear(x)
    assert result[5].isnan().all()
    assert not result[torch.arange(14) != 5].isnan().any()


@each_variant
def test_a_wrong_shape_is_refused(variant: str) -> None:
    linear = kernels(variant).pack(torch.randn(4, 8), None)
    with pytest.raises(TypeError, match="8 inputs"):
        linear(torch.randn(2, 9))
    with pytest.raises(TypeError, match="float16"):
        linear(torch.randn(2, 8).half())


@each_variant
def test_callers_take_turns(variant: str) -> None:
    """One team, several threads of Python: each gets its own results."""
    weight = torch.randn(96, 128)
    linear = kernels(variant, 3).pack(weight, None)
    wrong: list[int] = []

    def call(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x = torch.randn(5, 128, generator=generator)
            if not torch.allclose(linear(x), x @ weight.T, atol=1e-3):
                wrong.append(seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


CROWD = """
import os, sys, torch
from engine.kernels.choice import Choice
from engine.kernels.library import Kernels
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
child = os.fork()  # before either has a team
linear = Kernels(Choice(sys.argv[1], ""), 4).pack(torch.ones(64, 64), None)
for _ in range(3000):
    assert linear(torch.ones(3, 64))[0, 0] == 64
sys.exit(child and os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not VARIANTS, reason="no kernels were built")
def test_more_threads_than_cores_end_their_work() -> None:
    """Two processes with four threads each on one core. 6,000 products: a team that spun would take minutes."""
    subprocess.run([sys.executable, "-c", CROWD, VARIANTS[-1]], timeout=120, check=True)


RACE = """
import os, sys, time, torch
from engine.kernels.choice import Choice
from engine.kernels.library import Kernels
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(sys.argv[2])])
weight, x = torch.ones(512, 512), torch.ones(16, 512)
teams = [Kernels(Choice(sys.argv[1], ""), number).pack(weight, None) for number in (1, 4)]
best = [float("inf"), float("inf")]
for _ in range(6):
    for number, linear in enumerate(teams):
        start = time.perf_counter()
        for _ in range(50):
            linear(x)
        best[number] = min(best[number], time.perf_counter() - start)
print(best[0] / best[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not VARIANTS, reason="no kernels were built")
@pytest.mark.parametrize(("num_processes", "num_cores"), [(1, 2), (2, 1), (2, 2)])
def test_more_threads_than_cores_are_not_ten_times_slower_than_one(num_processes: int, num_cores: int) -> None:
    """Each process takes turns with one thread and with four, on the same cores and beside the same other work, so the
    ratio does not depend on how fast or busy the machine is. A team that waits for threads that do not run is dozens of
    times slower."""
    if len(os.sched_getaffinity(0)) < num_cores:
        pytest.skip("needs two cores")
    command = [sys.executable, "-c", RACE, VARIANTS[-1], str(num_cores)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num_processes)]
    ratios = [float(process.communicate(timeout=240)[0]) for process in processes]
    assert min(ratios) >= 0.1
