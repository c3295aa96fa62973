"""Which variant runs where, and what is said if none does."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from common.errors import StartupError
from engine.kernels import build as building
from engine.kernels.choice import choose_among
from engine.kernels.library import STRUCT_BYTES, Kernels, check_structs, load_kernels
from tests.engine.kernels.variants import VARIANTS, kernels

X86 = ["avx2", "avx512", "avx512_bf16"]
AMX = [*X86, "amx"]


@pytest.mark.parametrize(
    ("has", "built", "expected"),
    [
        (["avx2"], X86, "avx2"),
        (X86, X86, "avx512_bf16"),
        (X86, ["avx2", "avx512"], "avx512"),
        (AMX, AMX, "amx"),
        (AMX, X86, "avx512_bf16"),
        (AMX, ["avx2"], "avx2"),
        (["neon"], ["neon", "neon_bf16"], "neon"),
        (["neon", "neon_bf16"], ["neon", "neon_bf16"], "neon_bf16"),
        (["neon", "neon_bf16"], ["neon"], "neon"),
        ([], X86, "torch"),
        (X86, [], "torch"),
    ],
)
def test_the_best_that_is_there(has: list[str], built: list[str], expected: str) -> None:
    assert choose_among("auto", has, built, {}).instruction_set == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, "avx512"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "avx512_bf16"),
        ({"ONEDNN_MAX_CPU_ISA": "ALL"}, "amx"),
        ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, "torch"),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, "avx2"),
        ({"ATEN_CPU_CAPABILITY": "default"}, "torch"),
        ({"ATEN_CPU_CAPABILITY": "avx512"}, "amx"),
        ({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, "avx2"),
        ({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "SSE41"}, "torch"),
    ],
)
def test_limits_of_torch_and_onednn_are_limits_here(environ: dict[str, str], expected: str) -> None:
    choice = choose_among("auto", AMX, AMX, environ)
    assert choice.instruction_set == expected
    if expected != "amx":
        assert choice.reason.partition("=")[0] in environ


def test_tiles_that_the_system_refuses_leave_the_next_best_and_the_reason() -> None:
    refused = {"amx": "Operation not permitted"}
    choice = choose_among("auto", X86, AMX, {}, refused=refused)
    assert choice.instruction_set == "avx512_bf16"
    assert choice.reason == "the best that this CPU has, as the system refuses amx (Operation not permitted)"
    with pytest.raises(
        StartupError, match=r"--kernels amx is refused by the system \(Operation not permitted\); here work"
    ):
        choose_among("amx", X86, AMX, {}, refused=refused)


def test_a_setting_is_stronger_than_the_environment() -> None:
    assert choose_among("avx512", X86, X86, {"ATEN_CPU_CAPABILITY": "avx2"}).instruction_set == "avx512"
    assert choose_among("torch", X86, X86, {}).instruction_set == "torch"


@pytest.mark.parametrize(
    ("wanted", "has", "built", "words"),
    [
        ("avx512", ["avx2"], X86, "is not what this CPU has; here work auto, avx2, torch"),
        ("avx512", X86, ["avx2"], "was not built .*; here work auto, avx2, torch"),
        ("avx2", [], [], "was not built"),
        ("neon", X86, X86, "is not what this CPU has"),
        ("amx", X86, X86, "is not what this CPU has"),
        ("neon_bf16", ["neon"], ["neon", "neon_bf16"], "is not what this CPU has"),
    ],
)
def test_what_cannot_run_is_refused(wanted: str, has: list[str], built: list[str], words: str) -> None:
    with pytest.raises(StartupError, match=f"--kernels {wanted} {words}"):
        choose_among(wanted, has, built, {})


def test_without_built_kernels_torch_computes_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("engine.kernels.choice.library_file", lambda name: building.library_file(name, tmp_path))
    with caplog.at_level(logging.INFO):
        kernels, choice = load_kernels("auto", device=torch.device("cpu"), dtype=torch.float32, cache_dir="")
    assert (kernels, choice.instruction_set) == (None, "torch")
    (record,) = caplog.records
    assert vars(record)["kernels"] == "torch"
    assert "no kernels were built" in vars(record)["reason"]


@pytest.mark.skipif(not VARIANTS, reason="no kernels were built")
def test_a_dtype_without_kernels_is_torchs(tmp_path: Path) -> None:
    def load(wanted: str, device: str, dtype: torch.dtype) -> Kernels | None:
        return load_kernels(wanted, device=torch.device(device), dtype=dtype, cache_dir=str(tmp_path))[0]

    assert load("auto", "cpu", torch.float16) is None
    assert load("auto", "cpu", torch.bfloat16) is not None
    assert load("auto", "cuda", torch.bfloat16) is None
    with pytest.raises(StartupError, match="--kernels avx2 needs --device cpu"):
        load("avx2", "cuda", torch.bfloat16)


def test_without_a_compiler_nothing_is_built_and_each_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    failed = building.build(tmp_path)
    assert building.FEATURES in failed
    assert set(failed.values()) == {"there is no C++ compiler (g++, clang++ or CXX)"}
    assert not (tmp_path / "lib").exists()


def fake_compiler(path: Path, script: str) -> str:
    """A compiler that does what the shell `script` says; `$output` is the file that was asked for."""
    path.write_text(f'#!{shutil.which("sh")}\nfor output in "$@"; do :; done\n{script}\n')
    path.chmod(0o755)
    return str(path)


def test_what_the_compiler_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lacks = 'case "$*" in *avx512bf16*|*armv8*) echo "error: unrecognized option" >&2; exit 1;; esac; echo > "$output"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path / "c++", lacks))
    failed = building.build(tmp_path)
    assert list(failed) in (["avx512_bf16", "amx"], ["neon", "neon_bf16"])
    assert set(failed.values()) == {"error: unrecognized option"}
    assert building.library_file(building.FEATURES, tmp_path).exists()


def test_only_what_is_missing_is_built_and_old_libraries_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", fake_compiler(tmp_path / "c++", f'echo "$output" >> {log}; echo > "$output"'))
    assert building.build(tmp_path) == {}
    names = log.read_text().splitlines()
    features = building.library_file(building.FEATURES, tmp_path)
    features.unlink()
    old = features.with_name("avx2-0123456789ab.so")
    old.touch()
    assert building.build(tmp_path) == {}
    assert [Path(name).name for name in log.read_text().splitlines()[len(names) :]] == [features.name]
    assert not old.exists()
    assert building.build(tmp_path) == {}
    assert len(log.read_text().splitlines()) == len(names) + 1


def test_a_compiler_that_fails_half_way_leaves_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path / "c++", 'echo half > "$output"; exit 1'))
    assert building.build(tmp_path)
    assert os.listdir(tmp_path / "lib") == []


@pytest.mark.skipif(not VARIANTS, reason="no kernels were built")
def test_a_struct_of_another_size_is_one_clear_error() -> None:
    bytes_of = kernels(VARIANTS[-1]).library.baton_struct_bytes
    check_structs("here", bytes_of, STRUCT_BYTES)
    for name, size in STRUCT_BYTES.items():
        with pytest.raises(StartupError, match=f"for here do not fit .*: {name} has {size} bytes, not {size + 8}$"):
            check_structs("here", bytes_of, {**STRUCT_BYTES, name: size + 8})
    with pytest.raises(StartupError, match="Unknown has 0 bytes, not 4"):
        check_structs("here", bytes_of, {"Unknown": 4})
