"""What a rule of the table does that `baton doctor --tune` may find: in bfloat16, steps of 32 tokens and more go to
oneDNN, and smaller ones to the kernels. If oneDNN has no bfloat16 here, torch's plain product stands in for it.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's own documentation has it

from engine import layers
from engine.kernels import library
from engine.kernels.table import Rule, Table
from engine.layers import Linear, LinearKernel
from engine.models.decoder import Decoder
from tests.engine.kernels.variants import VARIANTS, slow_but_the_best
from tests.engine.tiny_models import advance, bfloat16_errors, make_model, make_runner, random_sequences

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no kernels were built")
each_choice = pytest.mark.parametrize("kernels", slow_but_the_best(VARIANTS))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "plain")


def give_onednn_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel:
        return lambda x: F.linear(x, weight, bias)

    monkeypatch.setattr(library, "SHIPPED", Table((Rule("bfloat16", 0, 32),)))
    if not layers._onednn_packs(torch.empty(1, 1)):
        monkeypatch.setattr(layers, "_onednn_packs", lambda weight: True)
        monkeypatch.setattr(layers, "_onednn_linear", plain)


def linears(model: object) -> list[Linear]:
    assert isinstance(model, Decoder)
    mlps = [layer.mlp for layer in model.layers]
    return [
        one
        for layer, mlp in zip(model.layers, mlps, strict=True)
        for one in (layer.qkv, layer.out, mlp.gate_up, mlp.down)
    ]


def logprobs(path: Path, kernels: str, sizes: list[int]) -> list[torch.Tensor]:
    runner = make_runner(path, dtype="bfloat16", kernels=kernels)
    (sequence,) = random_sequences([sum(sizes)])
    for size in sizes:
        advance(runner, [sequence], [size])
    return list(sequence.logprobs.values())


@each_choice
def test_steps_of_32_tokens_and_more_go_to_onednn(path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    give_onednn_many_rows(monkeypatch)
    runner = make_runner(path, dtype="bfloat16", kernels=kernels)
    found = linears(runner._model)
    assert {one.packed_below for one in found} == {32}
    rows: list[int] = []
    first = found[0]._kernel
    assert first is not None

    def counted(x: torch.Tensor) -> torch.Tensor:
        rows.append(x.shape[0])
        return first(x)

    monkeypatch.setattr(found[0], "_kernel", counted)
    (sequence,) = random_sequences([105])
    for size in (40, 31, 32, 1, 1):
        advance(runner, [sequence], [size])
    assert rows == [40, 32]


@each_choice
def test_errors_are_at_most_a_tenth_larger_than_transformers(
    path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    give_onednn_many_rows(monkeypatch)
    ours, theirs = bfloat16_errors(path, kernels=kernels)
    assert ours <= 1.1 * theirs


@each_choice
def test_smaller_steps_have_the_bits_of_the_kernels_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    sizes = [31, 9, 1, 1]
    alone = logprobs(path, kernels, sizes)
    give_onednn_many_rows(monkeypatch)
    assert all(map(torch.equal, logprobs(path, kernels, sizes), alone))


@each_choice
def test_without_onednn_the_kernels_compute_all(path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    give_onednn_many_rows(monkeypatch)
    monkeypatch.setattr(layers, "_onednn_packs", lambda weight: False)
    runner = make_runner(path, dtype="bfloat16", kernels=kernels)
    assert {one.packed_below for one in linears(runner._model)} == {math.inf}
