"""The table of the fastest library for a product: which rule counts, what a tuned file may hold, that it is obeyed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.cpu import read_cpu
from common.errors import StartupError
from engine.kernels.choice import choose
from engine.kernels.table import Rule, Table, Tuned, load_table, shipped, tuned_file, write_tuned
from engine.models.decoder import Decoder
from tests.engine.kernels.variants import VARIANTS
from tests.engine.tiny_models import advance, expected_logprobs, make_model, make_runner, random_sequences

RULES = (Rule("bfloat16", 0, None), Rule("bfloat16", 1000, 32), Rule("bfloat16", 5000, 8), Rule("float32", 10, 4))


@pytest.mark.parametrize(
    ("dtype", "num_weights", "expected"),
    [
        ("bfloat16", 1, None),
        ("bfloat16", 999, None),
        ("bfloat16", 1000, 32),
        ("bfloat16", 4999, 32),
        ("bfloat16", 9999, 8),
        ("float32", 9, None),
        ("float32", 10, 4),
    ],
)
def test_the_rule_of_the_largest_size_that_fits_counts(dtype: str, num_weights: int, expected: int | None) -> None:
    for rules in (RULES, RULES[::-1]):
        assert Table(rules).torch_from(dtype, num_weights) == expected


def test_what_is_shipped() -> None:
    assert shipped("amx").torch_from("bfloat16", 1) == 32
    assert all(shipped(name) == Table(()) for name in ("avx2", "avx512", "avx512_bf16", "neon", "neon_bf16"))


def test_a_tuned_file_is_for_one_kind_of_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert load_table(str(folder), "a CPU", "amx") == shipped("amx")
    write_tuned(tuned_file(str(folder)), Tuned("a CPU", "amx", RULES))
    assert load_table(str(folder), "a CPU", "amx") == Table(RULES, str(folder / "kernels.json"))
    assert load_table(str(folder), "another CPU", "amx") == shipped("amx")
    assert load_table(str(folder), "a CPU", "avx512_bf16") == shipped("avx512_bf16")


@pytest.mark.parametrize("text", ["", "[]", '{"cpu": "a CPU"}', '{"cpu": "", "instruction_set": "", "rules": [1]}'])
def test_a_file_that_is_broken_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "kernels.json").write_text(text)
    with pytest.raises(StartupError, match=r"kernels\.json: .*baton doctor --tune"):
        load_table(str(tmp_path), "a CPU", "amx")


@pytest.mark.skipif(not VARIANTS, reason="no kernels were built")
def test_engines_compute_as_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The MLP of this model is large enough for a rule. Its whole layers go by torch's way then, and its attention's
    weights stay the kernels'."""
    path = make_model(tmp_path / "model", {"intermediate_size": 200})
    rules = (Rule("float32", 0, None), Rule("float32", 12_000, 8))
    write_tuned(tuned_file(str(tmp_path)), Tuned(read_cpu().name, choose().instruction_set, rules))
    runner = make_runner(path, cache_dir=str(tmp_path))
    assert isinstance(runner._model, Decoder)
    layer = runner._model.layers[0]
    assert layer.mlp is not None
    assert [one.packed_below for one in (layer.qkv, layer.mlp.gate_up, layer.mlp.down)] == [float("inf"), 8, 8]
    sizes: list[int] = []
    plain = layer.mlp.gate_up._kernel
    assert plain is not None

    def counted(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.shape[0])
        return plain(x)

    monkeypatch.setattr(layer.mlp.gate_up, "_kernel", counted)
    (sequence,) = random_sequences([40])
    for size in (20, 7, 8, 1, 1):
        advance(runner, [sequence], [size])
    assert sizes == [20, 8]
    expected = expected_logprobs(path, sequence.token_ids)
    for position, logprobs in sequence.logprobs.items():
        torch.testing.assert_close(logprobs, expected[position], atol=2e-4, rtol=0)
