"""What is chosen on kinds of CPU that were measured and on those that were not. Times are made up but for one test."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from common.cpu import Cpu, read_cpu
from engine.kernels import library, trial
from engine.kernels.choice import AUTO, Choice, choose_among
from engine.kernels.library import choose_kernels
from engine.kernels.trial import Seconds, measure, tried, winner
from tests.engine.kernels.variants import VARIANTS

X86 = ["avx2", "avx512", "avx512_bf16"]
INTEL = """processor: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: {model}
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu avx2 avx512_bf16
"""
ARM = """processor: 0
Features\t: fp asimd bf16
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd4f
"""


def cpu_of(tmp_path: Path, text: str) -> Cpu:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    return read_cpu(file, {})


def test_kinds_are_named_as_the_system_does(tmp_path: Path) -> None:
    intel = cpu_of(tmp_path, INTEL.format(model=207))
    assert (intel.kind, intel.title) == (
        "GenuineIntel-6-207",
        "Intel(R) Xeon(R) Processor (GenuineIntel family 6 model 207)",
    )
    assert cpu_of(tmp_path, ARM).kind == f"0x41-8-{0xD4F}"
    assert cpu_of(tmp_path, "model name: x\nmodel: many\n").kind == ""
    assert read_cpu(tmp_path / "none", {}).title == "unknown CPU"


@pytest.mark.parametrize(
    ("vendor", "family", "model", "has", "expected"),
    [
        ("GenuineIntel", 6, 207, X86, "avx512"),  # a hypervisor hides AMX
        ("GenuineIntel", 6, 143, X86, "avx512"),
        ("GenuineIntel", 6, 207, [*X86, "amx"], "amx"),
        ("GenuineIntel", 6, 85, ["avx2", "avx512"], "avx512"),
        ("AuthenticAMD", 25, 17, X86, "avx512_bf16"),
        ("AuthenticAMD", 26, 2, X86, "avx512_bf16"),
        ("AuthenticAMD", 25, 1, ["avx2"], "avx2"),
    ],
)
def test_kinds_that_were_measured(vendor: str, family: int, model: int, has: list[str], expected: str) -> None:
    cpu = Cpu("a CPU", frozenset(), vendor=vendor, family=family, model=model)
    choice = choose_among(AUTO, has, [*X86, "amx"], {}, cpu=cpu)
    assert (choice.instruction_set, choice.rivals) == (expected, ())
    assert {*choice.slower, choice.instruction_set} == set(has)
    if expected != has[-1]:
        assert choice.reason == f"the fastest on this kind of CPU ({cpu.kind})"


def test_a_variable_that_hides_tiles_leaves_the_fastest_of_the_rest() -> None:
    cpu = Cpu("a Xeon", frozenset(), vendor="GenuineIntel", family=6, model=207)
    for value in ("AVX512_CORE_BF16", "AVX512_CORE"):
        choice = choose_among(AUTO, [*X86, "amx"], [*X86, "amx"], {"ONEDNN_MAX_CPU_ISA": value}, cpu=cpu)
        assert choice.instruction_set == "avx512"


def test_an_unknown_kind_has_rivals_only_if_it_could_go_either_way() -> None:
    cpu = Cpu("a CPU", frozenset(), vendor="GenuineIntel", family=6, model=999)

    def rivals(*has: str, wanted: str = AUTO) -> tuple[str, ...]:
        return choose_among(wanted, has, has, {}, cpu=cpu).rivals

    assert rivals(*X86) == ("avx512", "avx512_bf16")
    assert rivals(*X86, "amx") == ("avx512", "avx512_bf16", "amx")
    assert rivals("avx2", "avx512") == rivals("avx2") == rivals("neon") == ()
    assert rivals("neon", "neon_bf16") == ("neon", "neon_bf16")
    assert rivals(*X86, wanted="avx2") == ()


@pytest.mark.parametrize(
    ("weaker", "stronger", "expected"),
    [
        (Seconds(1.0, 1.0), Seconds(1.0, 2.0), "avx512"),  # half the rate
        (Seconds(1.0, 1.0), Seconds(1.0, 0.5), "avx512_bf16"),
        (Seconds(1.0, 1.0), Seconds(1.0, 1.2), "avx512_bf16"),  # too little to be a difference
        (Seconds(2.0, 1.0), Seconds(1.0, 2.0), "avx512_bf16"),  # few rows are slower
    ],
)
def test_a_weaker_variant_has_to_be_clearly_faster(weaker: Seconds, stronger: Seconds, expected: str) -> None:
    names = ("avx512", "avx512_bf16")
    assert winner(names, dict(zip(names, (weaker, stronger), strict=True))) == expected


CPU = Cpu("a CPU", frozenset(), vendor="GenuineIntel", family=6, model=999)
UNKNOWN = Choice("avx512_bf16", "the best that this CPU has", ("avx512", "avx512_bf16"))


def made_up(monkeypatch: pytest.MonkeyPatch, *, weaker_is_faster: bool) -> list[str]:
    """Returns the kinds of weights that are measured from now on."""
    measured = []

    def measure(names: tuple[str, ...], weights: str) -> dict[str, Seconds]:
        measured.append(weights)
        return {names[0]: Seconds(1.0, 1.0), names[1]: Seconds(1.0, 2.0 if weaker_is_faster else 0.5)}

    monkeypatch.setattr(trial, "measure", measure)
    return measured


def test_the_first_result_counts_for_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = made_up(monkeypatch, weaker_is_faster=True)
    folder = str(tmp_path / "cache")
    first = tried(UNKNOWN, CPU, "bfloat16", folder)
    made_up(monkeypatch, weaker_is_faster=False)
    later = tried(UNKNOWN, CPU, "bfloat16", folder)
    assert first == later
    assert later.instruction_set == "avx512"
    assert "avx512, avx512_bf16 were measured" in later.reason
    assert measured == ["bfloat16"]
    (file,) = (tmp_path / "cache").iterdir()
    assert "GenuineIntel-6-999" in file.name
    assert tried(UNKNOWN, CPU, "int4", folder).instruction_set == "avx512_bf16", "another kind of weights"
    assert tried(UNKNOWN, CPU, "float32", folder) == UNKNOWN, "all multiply alike"


def test_of_two_workers_that_measure_at_once_the_first_to_write_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(names: tuple[str, ...], weights: str) -> dict[str, Seconds]:
        made_up(monkeypatch, weaker_is_faster=False)
        tried(UNKNOWN, CPU, weights, str(tmp_path))  # by another worker, meanwhile
        return {names[0]: Seconds(1.0, 1.0), names[1]: Seconds(1.0, 2.0)}

    monkeypatch.setattr(trial, "measure", measure)
    assert tried(UNKNOWN, CPU, "bfloat16", str(tmp_path)).instruction_set == "avx512_bf16"
    assert len(os.listdir(tmp_path)) == 1


@pytest.mark.parametrize("text", ["", "{}", '{"instruction_set": "neon", "seconds": {}}'])
def test_a_file_of_no_use_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    made_up(monkeypatch, weaker_is_faster=True)
    tried(UNKNOWN, CPU, "bfloat16", str(tmp_path))
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert tried(UNKNOWN, CPU, "bfloat16", str(tmp_path)).instruction_set == "avx512"
    assert json.loads(file.read_text())["instruction_set"] == "avx512"


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, weaker_is_faster=True)
    (tmp_path / "file").touch()
    assert tried(UNKNOWN, CPU, "bfloat16", str(tmp_path / "file")).instruction_set == "avx512"


@pytest.mark.skipif(len(VARIANTS) < 2, reason="there is no choice")
def test_engines_on_an_unknown_kind_take_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weak, strong = VARIANTS[-2:]
    unknown = Choice(strong, "the best that this CPU has", (weak, strong), (weak,))
    monkeypatch.setattr(library, "choose", lambda wanted: unknown)
    made_up(monkeypatch, weaker_is_faster=True)
    given = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    assert choose_kernels(AUTO, **given, cache_dir=str(tmp_path))[0].instruction_set == weak  # type: ignore[arg-type]
    assert choose_kernels(AUTO, **given, cache_dir=None)[0] == unknown  # type: ignore[arg-type]


@pytest.mark.skipif(len(VARIANTS) < 2, reason="there is no choice")
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_products_are_measured(weights: str) -> None:
    seconds = measure(VARIANTS[-2:], weights, (64, 64))
    assert list(seconds) == VARIANTS[-2:]
    assert all(0 <= one.few < 10 and 0 <= one.many < 10 for one in seconds.values())
