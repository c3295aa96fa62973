"""The table of the fastest library for a product: which rule counts, what a tuned file may hold, that it is obeyed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.cpu import read_cpu
from common.errors import StartupError
from common.model_files import model_identity
from engine.kernels.choice import choose
from engine.kernels.table import Rule, Table, Tuned, TunedFor, keep_tuned, load_tuned, tuned_file
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


def tuned_for(**changes: str) -> TunedFor:
    given = {"cpu": "GenuineIntel-6-999", "model": "m", "dtype": "bfloat16", "quantization": "none", **changes}
    return TunedFor(**given)


def test_what_was_tuned_is_for_one_model_on_one_kind_of_cpu(tmp_path: Path) -> None:
    folder = str(tmp_path / "new")
    assert load_tuned(folder, tuned_for()) is None
    tuned = Tuned(tuned_for(), "avx512", RULES)
    assert keep_tuned(folder, tuned_for(), tuned) == tuned_file(folder)
    assert load_tuned(folder, tuned_for()) == tuned
    for other in ({"cpu": "GenuineIntel-6-998"}, {"model": "n"}, {"dtype": "float32"}, {"quantization": "int8"}):
        assert load_tuned(folder, tuned_for(**other)) is None


def test_results_replace_their_own_kind_only(tmp_path: Path) -> None:
    folder, other = str(tmp_path), tuned_for(model="n")
    keep_tuned(folder, other, Tuned(other, "avx2", ()))
    keep_tuned(folder, tuned_for(), Tuned(tuned_for(), "avx512", RULES))
    keep_tuned(folder, tuned_for(), Tuned(tuned_for(), "avx2", ()))
    assert load_tuned(folder, tuned_for()) == Tuned(tuned_for(), "avx2", ())
    keep_tuned(folder, tuned_for(), None)
    assert load_tuned(folder, tuned_for()) is None
    assert load_tuned(folder, other) == Tuned(other, "avx2", ())
    keep_tuned(folder, other, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["", "[]", '{"tuned": 1}', '{"tuned": [{"of": {}, "instruction_set": "", "rules": []}]}']
)
def test_a_file_that_is_broken_is_named_and_tuning_writes_it_anew(tmp_path: Path, text: str) -> None:
    tuned_file(str(tmp_path)).write_text(text)
    with pytest.raises(StartupError, match=r"tuned-kernels\.json: .*baton doctor --tune"):
        load_tuned(str(tmp_path), tuned_for())
    keep_tuned(str(tmp_path), tuned_for(), Tuned(tuned_for(), "avx2", ()))
    assert load_tuned(str(tmp_path), tuned_for()) is not None


@pytest.mark.skipif(not VARIANTS, reason="no kernels were built")
def test_engines_compute_as_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The MLP of this model is large enough for a rule. Its whole layers go by torch's way then, and its attention's
    weights stay the kernels'."""
    path = make_model(tmp_path / "model", {"intermediate_size": 200})
    rules = (Rule("float32", 0, None), Rule("float32", 12_000, 8))
    of = TunedFor(read_cpu().kind or read_cpu().name, model_identity(path), "float32", "none")
    keep_tuned(str(tmp_path), of, Tuned(of, choose().instruction_set, rules))
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


@pytest.mark.skipif(len(VARIANTS) < 2, reason="there is no choice")
def test_engines_take_the_variant_that_was_tuned_unless_another_is_asked_for(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    of = TunedFor(read_cpu().kind or read_cpu().name, model_identity(path), "float32", "none")
    other = next(name for name in VARIANTS if name != choose().instruction_set)
    keep_tuned(str(tmp_path), of, Tuned(of, other, ()))
    info = make_runner(path, cache_dir=str(tmp_path)).info
    assert info.kernels == other
    assert str(tuned_file(str(tmp_path))) in info.kernels_reason
    asked = choose().instruction_set
    assert make_runner(path, cache_dir=str(tmp_path), kernels=asked).info.kernels == asked
