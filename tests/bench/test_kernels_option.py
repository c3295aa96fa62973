"""`--kernels` of the benchmarks: what it takes, where it is read, and that the engine computes with it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench import engine as bench_engine
from bench import engine_systems
from bench.engine_systems import BatonEngine, Row, Transformers, add_kernels_option, check_kernels
from engine.kernels.choice import AUTO
from tests.engine.kernels.variants import ALL, VARIANTS
from tests.engine.tiny_models import make_model


def parse(*words: str) -> str:
    parser = argparse.ArgumentParser()
    add_kernels_option(parser)
    args = parser.parse_args(words)
    check_kernels(parser, args)
    return str(args.kernels)


def test_the_flag_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_KERNELS", raising=False)
    assert parse() == AUTO
    monkeypatch.setenv("BATON_KERNELS", "torch")
    assert parse() == "torch"
    assert parse("--kernels", AUTO) == AUTO


def test_what_does_not_run_here_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    other = "avx2" if "neon" in VARIANTS else "neon"
    for given, reason in ((other, f"--kernels {other}"), ("sse9", "BATON_KERNELS: 'sse9' is none of auto, avx2")):
        monkeypatch.setenv("BATON_KERNELS", given)
        for command in (parse, lambda: bench_engine.main()):
            monkeypatch.setattr("sys.argv", ["bench.engine"])
            with pytest.raises(SystemExit):
                command()
            assert reason in capsys.readouterr().err


@pytest.mark.parametrize("kernels", ALL)
def test_the_engine_computes_with_it(tmp_path: Path, kernels: str) -> None:
    path = make_model(tmp_path / "model")
    engine = BatonEngine(path, "float32", 1, num_blocks=20, kernels=kernels)
    assert (engine.kernels.choice.instruction_set if engine.kernels is not None else "torch") == kernels


def test_a_mixed_row_decodes_beside_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_systems, "_prompt", lambda num_tokens: [1] * num_tokens)
    path = make_model(tmp_path / "model", {"vocab_size": 128})
    row = Row(2, 20, 3, 16)
    engine = BatonEngine(path, "float32", 1, num_blocks=row.num_blocks + 8, kernels="torch")
    assert engine.measure(row) > 0
    assert not engine.core.has_work
    assert Transformers(path, "float32", 1).measure(row) > 0
