"""Greedy tokens without logits: the very ones that torch's argmax finds in the logits that the head would give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.sampling import SamplingParams
from engine.kernels.grouped import PackedParts
from engine.kernels.library import PackedLinear, WeightKind
from engine.models.decoder import Decoder
from engine.sampling.draws import draw
from engine.step import StepRow
from tests.engine.kernels.variants import VARIANTS, each_variant, kernels
from tests.engine.tiny_models import make_model, make_runner

KINDS = [WeightKind.FLOAT32, WeightKind.BFLOAT16, WeightKind.INT8, WeightKind.INT4]
K = 70


def hidden_states(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, K, generator=torch.Generator().manual_seed(num_rows))


def check(variant: str, head: PackedLinear, hidden: torch.Tensor) -> torch.Tensor:
    """The tokens, which have to be those of the logits."""
    norm = torch.ones(K)
    tokens = kernels(variant).best_tokens(head, norm, 1e-5, hidden)
    logits = kernels(variant).head(head, norm, 1e-5, hidden)
    assert torch.equal(tokens, logits.argmax(-1))
    return tokens


@each_variant
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 5, 31, 64, 1000, 5003])
def test_tokens_are_the_argmax_of_the_logits(variant: str, kind: WeightKind, n: int) -> None:
    weight = torch.randn(n, K, generator=torch.Generator().manual_seed(n))
    head = kernels(variant).pack(weight, torch.linspace(0, 1, n), kind)
    for num_rows in (1, 2, 13, 40):
        check(variant, head, hidden_states(num_rows))


@each_variant
def test_of_equal_logits_the_first_counts(variant: str) -> None:
    """In one vector, in one task, and in tasks far apart; whoever computes which first."""
    weight = torch.randn(7, K, generator=torch.Generator().manual_seed(0))
    head = kernels(variant).pack(weight.repeat(600, 1), None)
    for num_rows in (1, 30, 400):
        assert check(variant, head, hidden_states(num_rows)).max() < 7
    nothing = kernels(variant).pack(torch.zeros(4200, K), None)
    assert check(variant, nothing, hidden_states(3)).tolist() == [0, 0, 0]
    least = kernels(variant).pack(torch.zeros(4200, K), torch.full((4200,), float("-inf")))
    assert check(variant, least, hidden_states(2)).tolist() == [0, 0]


@each_variant
@pytest.mark.parametrize("place", [0, 17, 2999])
def test_the_first_nan_counts_as_the_largest(variant: str, place: int) -> None:
    bias = torch.zeros(3000)
    bias[[place, -1]] = float("nan")
    bias[5] = float("inf")
    head = kernels(variant).pack(torch.ones(3000, K), bias)
    assert check(variant, head, hidden_states(2)).tolist() == [place, place]


@each_variant
def test_weights_in_parts_are_one_vocabulary(variant: str) -> None:
    own = kernels(variant)
    weight = torch.randn(300, K, generator=torch.Generator().manual_seed(1))
    weight[200] = weight[290] = weight[3]
    parts = [own.pack(weight[:90], None), own.pack(weight[90:250], None), own.pack(weight[250:], None)]
    head = PackedParts(own, parts)
    tokens = check(variant, head, hidden_states(100))
    assert {bool(token < 90) for token in tokens} == {True, False}
    assert check(variant, head, weight[3:4].contiguous()).tolist() == [3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model")


@pytest.mark.skipif(not VARIANTS, reason="no kernels were built")
@pytest.mark.parametrize("asked", [{}, {"logprobs": 1}, {"temperature": 1.0, "seed": 3}])
def test_logits_are_made_only_for_those_who_need_them(
    model: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, float]
) -> None:
    """The token is the same, whoever else is in the batch."""
    runner = make_runner(model, num_threads=2)
    calls = []
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda *args: calls.append(1) or logits(*args))

    def first_token(*params: SamplingParams) -> int:
        calls.clear()
        sequences = [
            StepRow(
                token_ids=[5, 6, 7],
                num_computed_tokens=0,
                block_ids=[n],
                draw=draw(params=p, num_output_tokens=0),
            )
            for n, p in enumerate(params)
        ]
        return runner.execute(sequences)[0].token_id  # type: ignore[union-attr]

    greedy = SamplingParams(temperature=0.0)
    alone = first_token(greedy)
    assert not calls
    other = SamplingParams(**{"temperature": 0.0, **asked})
    assert first_token(greedy, other) == alone
    assert bool(calls) == bool(asked)
