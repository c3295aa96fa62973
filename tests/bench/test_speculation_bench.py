"""The benchmark of speculation runs with either drafter, and its longer model draws what its own model draws."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bench import speculation
from bench.speculation import Measured, Run, compare, write_longer
from tests.chaos.tiny_model import write_tiny_model

NUM_TOKENS = 24


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "draft", num_layers=3)
    return tmp_path / "draft"


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    monkeypatch.setattr(
        sys,
        "argv",
        ["bench.speculation", "--dtype=float32", "--batches=1", "--repeats=2", f"--tokens={NUM_TOKENS}", *flags],
    )
    speculation.main()
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_a_draft_model_before_its_longer_self(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (f"--model={model_dir}", f"--speculation={model_dir}", "--zero-layers=6")
    title, repeating, ordinary = printed(monkeypatch, capsys, *flags)
    assert "with 6 layers of zeros" in title
    accepted, of, drafted = repeating.split("; ")[1].split()[:3]
    assert of == "of"
    assert int(accepted) == int(drafted) > NUM_TOKENS // 2, "the likeliest token of either is the same"
    assert ordinary.startswith("ordinary , batch 1: ")


def test_ngram(model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, repeating, ordinary = printed(monkeypatch, capsys, f"--model={model_dir}")
    assert repeating.startswith("repeating, batch 1: ")
    assert ordinary.startswith("ordinary , batch 1: ")


def test_a_longer_model_may_have_part_of_the_layers_again(model_dir: Path, tmp_path: Path) -> None:
    write_longer(model_dir, 4, tmp_path / "longer")
    names = load_file(tmp_path / "longer" / "model.safetensors")
    assert {int(name.split(".")[2]) for name in names if ".layers." in name} == set(range(7))
    assert json.loads((tmp_path / "longer" / "config.json").read_text())["num_hidden_layers"] == 7
    for number in range(7):
        for weight in ("self_attn.o_proj", "mlp.down_proj", "self_attn.q_proj"):
            is_zero = not names[f"model.layers.{number}.{weight}.weight"].any()
            assert is_zero == (number >= 3 and weight != "self_attn.q_proj")


class Told(Measured):
    """Gives runs of a test, without and with speculation in turn."""

    def __init__(self, runs: dict[bool, list[Run]]) -> None:
        self.num_tokens = 5
        self._runs = {way: iter(of_way) for way, of_way in runs.items()}

    def answer(self, text: str, batch: int, *, speculate: bool) -> Run:
        return next(self._runs[speculate])


def test_ratios_are_of_pairs_and_of_each_step_s_fastest() -> None:
    without = [Run([1], [1.0, 3.0]), Run([1], [4.0, 1.0]), Run([1], [2.0, 2.0])]  # fastest steps: 1 + 1
    with_ = [Run([1], [4.0], 7, 6), Run([1], [2.5], 7, 6), Run([1], [1.0], 7, 6)]  # ratios 1, 2, 4; fastest step: 1
    line = compare(Told({True: with_, False: without}), "repeating", 1, 3)
    assert line == (
        "repeating, batch 1: 2.00 x [1.50 to 3.00] of 1 tokens/s, 2.000 x by each step's fastest; "
        "6 of 7 drafted tokens accepted"
    )
    with_[1].tokens = [2]
    with pytest.raises(RuntimeError, match="changed an answer"):
        compare(Told({True: with_, False: without}), "repeating", 1, 3)
