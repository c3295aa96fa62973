"""`bench.step --sampling` compares steps with the kernels and with torch, and refuses only what needs the kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import step
from tests.engine.kernels.variants import ALL
from tests.engine.tiny_models import make_model

SIZES = {"vocab_size": 41_000, "hidden_size": 16, "num_hidden_layers": 1}  # the benchmark has ids up to 40,000


def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *flags: str) -> None:
    model_dir = make_model(tmp_path / "model", dict(SIZES))
    monkeypatch.setattr(step, "ensure_model", lambda *_: model_dir)
    words = ("--batch=5", "--contexts=20", "--dtype=float32", "--repeats=2")
    monkeypatch.setattr(sys, "argv", ["bench.step", *words, *flags])
    step.main()


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ALL)
def test_sampling_is_compared_without_kernels_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], kernels: str
) -> None:
    call(monkeypatch, tmp_path, "--sampling", f"--kernels={kernels}")
    out = capsys.readouterr().out
    assert f"float32, none, {kernels}" in out
    cells = next(line for line in out.splitlines() if line.startswith("│")).strip("│").split("│")
    batch, context, greedy, own, times = map(float, cells)
    assert (batch, context) == (5, 20)
    assert greedy > 0
    assert times == pytest.approx(own / greedy, rel=0.2)  # of rounded milliseconds


def test_the_share_of_the_kernels_needs_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        call(monkeypatch, tmp_path, "--kernels=torch")
    assert "there are no kernels here" in capsys.readouterr().err
