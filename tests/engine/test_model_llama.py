"""Logits equal those of transformers, in whatever pieces and company a prompt is computed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.step import StepRow
from tests.engine.tiny_models import (
    SHAPES,
    Progress,
    advance,
    expected_logprobs,
    make_model,
    make_runner,
    random_sequences,
)

TOLERANCE = 2e-4  # of float32 logprobs, whose spread is about 10


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "plain")


def check(model_dir: Path, sequence: Progress) -> None:
    expected = expected_logprobs(model_dir, sequence.token_ids)
    assert sequence.logprobs, "nothing was computed"
    for position, logprobs in sequence.logprobs.items():
        torch.testing.assert_close(logprobs, expected[position], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_in_chunks_and_single_steps(tmp_path: Path, shape: str) -> None:
    path = make_model(tmp_path / shape, SHAPES[shape])
    runner = make_runner(path)
    (sequence,) = random_sequences([70])
    for size in (33, 20, 1, 1, 7, 1, 7):
        advance(runner, [sequence], [size])
    assert sequence.num_computed == 70
    check(path, sequence)


@pytest.mark.parametrize("chunk", [1, 16, 13, 100])
@pytest.mark.parametrize("attention", ["torch", "reference"])
def test_chunk_sizes(model_dir: Path, chunk: int, attention: str) -> None:
    runner = make_runner(model_dir, attention=attention)
    (sequence,) = random_sequences([50], seed=chunk)
    while sequence.num_computed < 50:
        advance(runner, [sequence], [chunk])
    check(model_dir, sequence)


@pytest.mark.parametrize("attention", ["torch", "reference"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_mixed_batches(model_dir: Path, attention: str, seed: int) -> None:
    """Prompts of very different lengths, first and later chunks and single tokens in the same steps."""
    rng = random.Random(seed)
    runner = make_runner(model_dir, attention=attention)
    sequences = random_sequences([200, 1, 90, 17, 33, 16, 120, 5], seed=seed)
    while waiting := [s for s in sequences if s.num_computed < len(s.token_ids)]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        advance(runner, chosen, [rng.choice([1, 1, 1, 16, 40]) for _ in chosen])
    for sequence in sequences:
        check(model_dir, sequence)


def test_old_style_rope_keys(tmp_path: Path) -> None:
    import json

    path = make_model(tmp_path / "old", SHAPES["llama3_rope"])
    file = path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    runner_new = make_runner(path)
    file.write_text(json.dumps({**config, "rope_scaling": rope}))
    runner_old = make_runner(path)
    results = []
    for runner in (runner_new, runner_old):
        (sequence,) = random_sequences([60])
        advance(runner, [sequence], [60])
        results.append(sequence.logprobs[59])
    assert torch.equal(*results)


def test_a_sequence_without_sample_gives_no_token(model_dir: Path) -> None:
    runner = make_runner(model_dir)
    first, second = random_sequences([20, 9])
    silent = StepRow(token_ids=first.token_ids, num_computed_tokens=0, block_ids=first.blocks)
    result = runner.execute([silent, second.step(9)])
    assert result[0] is None
    second.took(result[1])
    check(model_dir, second)
    assert runner.execute([silent]) == [None]
    assert runner.execute([]) == []


def test_weights_of_another_dtype_are_converted(tmp_path: Path) -> None:
    path = make_model(tmp_path / "half", dtype=torch.bfloat16)
    runner = make_runner(path)
    (sequence,) = random_sequences([12])
    advance(runner, [sequence], [12])
    check(path, sequence)
