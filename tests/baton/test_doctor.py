"""What `baton doctor` finds, and what it advises. Speeds are made up here but for one test."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from baton.cli.main import main
from baton.doctor import checks as doctor
from baton.doctor import tuning
from baton.doctor.checks import Level, examine
from baton.doctor.speed import CpuSpeed, measure_cpu
from baton.doctor.tuning import Candidate, Found, StepMeasurer
from baton.settings import UP_SETTINGS
from baton.stack import lmcache_server
from common.config import EngineSettings
from common.cpu import read_cpu
from common.errors import StartupError
from common.model_files import model_identity, open_model
from engine.kernels.choice import TORCH, Choice, choose, choose_among
from engine.kernels.table import Rule, Tuned, TunedFor, keep_tuned, tuned_file
from engine.loading.dtype import DtypeChoice, choose_dtype
from engine.local.device_choice import DeviceChoice
from engine.local.memory import weight_bytes
from engine.profile.design import Point
from tests.engine.tiny_models import make_model, make_runner

NAMES = ["cpu", "kernels", "device", "model", "dtype", "bandwidth", "products"]
NAMES += ["shared_storage", "nixl", "lmcache", "cluster"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure_cpu", lambda *_: CpuSpeed(20.0, 300.0, 200.0, 15.0))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def keep(model: Path, folder: Path, *rules: Rule) -> Path:
    """What tuning would have found for this model in float32."""
    of = TunedFor(read_cpu().kind or read_cpu().name, model_identity(model), "float32", "none")
    return keep_tuned(str(folder), of, Tuned(of, choose().instruction_set, rules))


def findings(model: Path, **settings: object) -> dict[str, doctor.Finding]:
    given = {"model": str(model), "http_port": 0, "grpc_port": 0, **settings}
    return {one.name: one for one in examine(UP_SETTINGS.model_validate(given))}


def test_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--model", str(model), "--http-port=0", "--grpc-port=0"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {one["name"]: one for one in report["findings"]}
    assert report["problems"] == 0
    assert list(found) == [*NAMES, "http_port", "grpc_port"]
    assert found["kernels"]["facts"]["kernels"] == choose().instruction_set
    assert found["bandwidth"]["facts"]["read_gb_s"] == 20.0
    assert found["products"]["facts"]["kernels_gflop_s"] == 300.0


def test_text_has_a_line_for_each_finding_and_one_for_each_advice(
    model: Path, taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--model", str(model), "--grpc-port=0", f"--http-port={taken}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line[:1].strip() and line[0] != "→"][:4] == NAMES[:4]
    at = next(number for number, line in enumerate(lines) if line.startswith("✗ http_port"))
    assert f"127.0.0.1:{taken}: Address already in use" in lines[at]
    assert "→ --http-port 0 takes a free one" in lines[at + 1]
    assert lines[-1].startswith("1 problem, ")


def test_ascii_terminals(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("baton.cli.doctor._encoding", lambda: "ascii")
    assert main(["doctor", "--model", str(model), "--http-port=0", "--grpc-port=0"]) == 0
    assert capsys.readouterr().out.isascii()


needs_kernels = pytest.mark.skipif(choose().instruction_set == TORCH, reason="no kernels were built")


@needs_kernels
def test_a_table_that_engines_read_is_named(model: Path, tmp_path: Path) -> None:
    file = keep(model, tmp_path, Rule("float32", 0, 8))
    found = findings(model, cache_dir=str(tmp_path), dtype="float32")["kernels"]
    assert (found.level, found.facts["tuned_in"]) == (Level.OK, str(file))
    assert f"tuned for this model: float32 with torch from 8 tokens on ({file})" in found.text
    assert "tuned_in" not in findings(model, cache_dir=str(tmp_path), dtype="bfloat16")["kernels"].facts


@needs_kernels
def test_a_table_that_stops_engines_is_a_problem(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tuned-kernels.json"
    file.write_text('{"tuned": 1}')
    found = findings(model, cache_dir=str(tmp_path))["kernels"]
    assert found.level is Level.PROBLEM
    assert found.text.startswith(f"{file}: ")
    assert found.advice == f"delete {file}, or run baton doctor --tune again"
    assert findings(model, cache_dir=str(tmp_path), dtype="float16")["kernels"].level is Level.OK  # has no kernels
    made_up_steps(monkeypatch)
    settings = UP_SETTINGS.model_validate({"model": str(model), "cache_dir": str(tmp_path)})
    tuning_now = {one.name: one for one in examine(settings, tune=True)}
    assert (tuning_now["kernels"].level, tuning_now["tune"].level) == (Level.OK, Level.OK)


@needs_kernels
def test_kernels_beside_a_cuda_device(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "choose_device", lambda _: DeviceChoice("cuda", "for a reason"))
    (tmp_path / "tuned-kernels.json").write_text("{")
    assert findings(model, cache_dir=str(tmp_path))["kernels"].level is Level.OK  # engines do not read the table
    found = findings(model, kernels=choose().instruction_set)["kernels"]
    assert found.level is Level.PROBLEM
    assert "needs --device cpu" in found.text
    found = findings(model, quantization="int8")["quantization"]
    assert (found.level, found.advice) == (Level.PROBLEM, "take --quantization away; or --device cpu")


@pytest.mark.parametrize(
    ("settings", "advice"),
    [({"kernels": "torch"}, "--kernels auto"), ({"dtype": "float16"}, "--dtype float32")],
)
@needs_kernels
def test_quantization_needs_kernels(model: Path, settings: dict[str, str], advice: str) -> None:
    found = findings(model, quantization="int4", **settings)["quantization"]
    assert (found.level, found.advice) == (Level.PROBLEM, f"take --quantization away; or {advice}")
    assert "needs the CPU kernels" in found.text
    assert findings(model, quantization="int4")["quantization"].level is Level.OK
    wrong = "avx2" if choose().instruction_set.startswith("neon") else "neon"
    found_all = findings(model, quantization="int4", kernels=wrong)
    assert [name for name, one in found_all.items() if one.level is Level.PROBLEM] == ["kernels"]


@needs_kernels
def test_quantised_weights_decode_faster(model: Path) -> None:
    most = {
        kind: findings(model, quantization=kind, dtype="bfloat16")["bandwidth"].facts["max_decode_tokens_s"]
        for kind in ("none", "int8", "int4")
    }
    num_weights = weight_bytes(open_model(model), 1)
    assert most == {
        kind: round(20e9 / (num_weights * size), 1) for kind, size in {"none": 2, "int8": 1.06, "int4": 0.63}.items()
    }


@pytest.mark.parametrize(
    ("torch_gflop_s", "rules", "level"),
    [
        (329.0, (), Level.OK),
        (331.0, (), Level.HINT),
        (331.0, (Rule("float32", 0, 1024),), Level.HINT),
        (331.0, (Rule("float32", 0, 512),), Level.OK),  # engines take torch there
    ],
)
@needs_kernels
def test_tuning_is_advised_if_torch_is_faster(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    torch_gflop_s: float,
    rules: tuple[Rule, ...],
    level: Level,
) -> None:
    monkeypatch.setattr(doctor, "measure_cpu", lambda *_: CpuSpeed(20.0, 300.0, torch_gflop_s))
    if rules:
        keep(model, tmp_path, *rules)
    found = findings(model, cache_dir=str(tmp_path), dtype="float32")["products"]
    assert (found.level, "--tune" in found.advice) == (level, level is Level.HINT)


@pytest.mark.parametrize("cut", [100, -100])
def test_weights_that_are_not_whole(model: Path, tmp_path: Path, cut: int) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:cut])
    found = findings(broken)
    assert found["model"].level is Level.PROBLEM
    assert "model.safetensors" in found["model"].text
    assert "grpc_port" in found, "the other checks go on"


def test_kernels_that_cannot_run_here(model: Path) -> None:
    wrong = "avx2" if choose().instruction_set.startswith("neon") else "neon"
    found = findings(model, kernels=wrong)["kernels"]
    assert (found.level, found.advice) == (Level.PROBLEM, f"--kernels {choose().instruction_set}")
    assert f"--kernels {wrong}" in found.text


def test_kernels_that_were_not_built(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "choose", lambda wanted: Choice("torch", "no kernels were built"))
    monkeypatch.setattr(doctor, "built_variants", list)
    found = findings(model)["kernels"]
    assert (found.level, found.text) == (Level.HINT, "torch: no kernels were built")
    assert "engine.kernels.build" in found.advice


@pytest.mark.parametrize(
    ("has", "built", "advice"),
    [
        ([], ["avx2"], "a CPU with AVX2"),
        (["avx2"], ["avx512"], "builds avx2; there is avx512 only"),
        (["avx2", "avx512"], ["avx2", "avx512"], "unset ATEN_CPU_CAPABILITY=default"),
    ],
)
def test_built_kernels_that_cannot_run(
    model: Path, monkeypatch: pytest.MonkeyPatch, has: list[str], built: list[str], advice: str
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(doctor, "cpu_instruction_sets", lambda: has)
    monkeypatch.setattr(doctor, "built_variants", lambda: built)
    monkeypatch.setattr(doctor, "choose", lambda wanted: choose_among(wanted, has, built, os.environ))
    found = findings(model)["kernels"]
    assert found.level is Level.HINT
    assert found.text.startswith("torch: ")
    assert advice in found.advice


def test_a_limited_cpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    found = findings(model)["cpu"]
    assert found.level is Level.HINT
    assert "ATEN_CPU_CAPABILITY=avx2" in found.advice


@pytest.mark.parametrize(("connector", "level"), [("shared_storage", Level.HINT), ("lmcache", Level.PROBLEM)])
def test_a_connector_that_is_not_installed_is_a_problem_if_it_is_used(
    connector: str, level: Level, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Path:
        raise StartupError("it is not installed")

    monkeypatch.setattr(lmcache_server, "executable", missing)
    found = findings(model, connector=connector)["lmcache"]
    assert (found.level, found.advice) == (level, "make lmcache")


def test_a_model_that_cannot_be_served(model: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    (broken / "config.json").unlink()
    found = findings(broken)["model"]
    assert found.level is Level.PROBLEM
    assert "copy it again" in found.advice
    found = findings(tmp_path / "nowhere")["model"]
    assert found.level is Level.PROBLEM
    assert "nowhere" in found.text
    assert "--model smollm2-135m-instruct" in found.advice


def test_a_model_that_is_not_converted_yet(tmp_path: Path) -> None:
    found = findings(Path("smollm2-135m-instruct"), cache_dir=str(tmp_path))
    assert found["model"].level is Level.HINT
    assert str(tmp_path) in found["model"].text
    assert not list(tmp_path.iterdir())
    chosen = choose_dtype("auto", checkpoint="bfloat16", device="cpu", cpu=read_cpu(), kernels=choose())
    assert found["dtype"].facts == {"dtype": chosen.dtype, "reason": chosen.reason}
    found = findings(Path("smollm2-135m-instruct"), cache_dir=str(tmp_path), kernels="torch", dtype="float32")
    assert found["dtype"].text.startswith("float32: ")


def test_a_model_that_is_not_downloaded_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = findings(Path("nobody/nothing"))["model"]
    assert (found.level, found.advice) == (Level.HINT, "the first `baton up` downloads it")


def test_a_folder_for_kv_files_that_is_full(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    found = findings(model, kv_dir=str(tmp_path / "kv"))["shared_storage"]
    assert found.level is Level.HINT
    assert str(tmp_path / "kv") in found.text


def test_a_checkpoint_whose_dtype_is_fast_here(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "resolve_dtype", lambda *_: DtypeChoice("float32", "for a reason"))
    found = findings(model)["dtype"]
    assert (found.level, found.text, found.advice) == (Level.OK, "float32: for a reason", "")


@pytest.mark.parametrize(
    ("checkpoint", "taken", "advice"),
    [
        ("bfloat16", "float32", "let the CPU kernels run"),
        ("bfloat16", "bfloat16", "--dtype auto takes float32"),
        ("float16", "float32", "--dtype bfloat16 does not"),
        ("float16", "float16", "--dtype auto takes float32"),
    ],
)
def test_a_checkpoint_whose_dtype_is_slow_here(
    model: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str, taken: str, advice: str
) -> None:
    chosen = DtypeChoice(taken, "for a reason", is_checkpoint_slow=True)
    monkeypatch.setattr(doctor, "resolve_dtype", lambda *_: chosen)
    monkeypatch.setattr(doctor, "checkpoint_dtype", lambda _: checkpoint)
    found = findings(model)["dtype"]
    assert (found.level, found.text) == (Level.HINT, f"{taken}: for a reason")
    assert advice in found.advice


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_a_cuda_device_that_torch_cannot_use(model: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    chosen = DeviceChoice("cpu", "for a reason", is_cuda_unusable=True)
    monkeypatch.setattr(doctor, "choose_device", lambda _: chosen)
    found = findings(model, device=asked)["device"]
    assert found.level is (Level.HINT if asked == "auto" else Level.OK)
    assert ("CUDA" in found.advice) == (asked == "auto"), "nothing is advised to those who asked for the CPU"


SHIPPED = {"prefill": 100.0, "mixed": 50.0, "batch 1": 5.0, "batch 8": 6.0, "batch 32": 9.0}


def made_up_steps(
    monkeypatch: pytest.MonkeyPatch, times: Callable[[Candidate], Mapping[str, float]] = lambda _: {}
) -> None:
    """Steps take as long as shipped but for what `times` says of a candidate."""

    def measure(candidate: Candidate | None, against: object) -> Mapping[str, float]:
        return SHIPPED if candidate is None else {**SHIPPED, **times(candidate)}

    monkeypatch.setattr(doctor, "StepMeasurer", lambda *_: measure)


def tuned_with(times: Callable[[Candidate], Mapping[str, float]], *, has_rules: bool = True) -> Found:
    def measure(candidate: Candidate | None, against: object) -> Mapping[str, float]:
        return SHIPPED if candidate is None else {**SHIPPED, **times(candidate)}

    return tuning.tune(["avx512", "avx512_bf16"], has_rules=has_rules, measure=measure, progress=lambda *_: None)


def test_tuning_takes_what_makes_a_step_faster_and_none_slower() -> None:
    def times(one: Candidate) -> Mapping[str, float]:
        if one.instruction_set == "avx512_bf16":
            return {"prefill": 160.0}
        return {32: {"prefill": 50.0, "batch 32": 10.0}, 128: {"prefill": 60.0}, None: {"batch 8": 5.9}}[one.torch_from]

    found = tuned_with(times)
    assert found.best == Candidate("avx512", 128), "with torch from 32 tokens on, batch 32 is slower"
    assert set(found.seconds) == {
        None,
        *(Candidate("avx512", torch_from) for torch_from in (None, 32, 128)),
        Candidate("avx512_bf16"),
    }
    assert tuned_with(times, has_rules=False).best is None, "too little is gained"


@pytest.mark.parametrize("step", SHIPPED)
def test_no_table_makes_any_step_slower(step: str) -> None:
    gains = dict.fromkeys(SHIPPED, 1.0)
    assert tuned_with(lambda _: gains).best is not None
    assert tuned_with(lambda _: {**gains, step: SHIPPED[step] * 1.03}).best is None


def test_what_was_faster_once_only_is_not_taken() -> None:
    seen: list[Candidate | None] = []

    def measure(candidate: Candidate | None, against: object) -> Mapping[str, float]:
        seen.append(candidate)
        is_lucky = candidate == Candidate("avx512") and seen.count(candidate) == 1
        return {**SHIPPED, "prefill": 70.0} if is_lucky else SHIPPED

    shares: list[float] = []
    found = tuning.tune(["avx512"], has_rules=False, measure=measure, progress=lambda what, share: shares.append(share))
    assert found.best is None
    assert seen == [None, Candidate("avx512"), None, Candidate("avx512")]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("given_up", [{"prefill": 40.0}, {}])
def test_a_candidate_that_was_given_up_is_not_taken(given_up: dict[str, float]) -> None:
    def measure(candidate: Candidate | None, against: object) -> Mapping[str, float]:
        return SHIPPED if candidate is None else given_up

    assert tuning.tune(["avx512"], has_rules=True, measure=measure, progress=lambda *_: None).best is None


@needs_kernels
def test_tuning_writes_what_engines_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up_steps(monkeypatch, lambda one: {"prefill": 50.0} if one.torch_from == 128 else {})
    flags = ["--model", str(model), "--http-port=0", "--grpc-port=0", f"--cache-dir={tmp_path}", "--dtype=float32"]
    assert main(["doctor", "--json", "--tune", *flags]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}["tune"]
    assert "torch from 128 tokens on" in found["text"]
    assert "prefill 2.00 times" in found["text"]
    assert found["facts"]["milliseconds"]["as shipped"]["prefill"] == 100_000
    runner = make_runner(model, cache_dir=str(tmp_path))
    assert runner._kernels is not None
    assert runner._kernels.table.torch_from("float32", 1) == 128
    made_up_steps(monkeypatch)
    assert main(["doctor", "--json", "--tune", *flags]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}["tune"]
    assert "nothing makes some step faster" in found["text"]
    assert not tuned_file(str(tmp_path)).exists(), "what an earlier run found is no longer so"


def test_a_table_that_cannot_be_written_is_a_problem(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_steps(monkeypatch, lambda _: {"prefill": 50.0})
    (tmp_path / "file").touch()
    settings = UP_SETTINGS.model_validate({"model": str(model), "cache_dir": str(tmp_path / "file"), "http_port": 0})
    found = {one.name: one for one in examine(settings, tune=True)}["tune"]
    expected = Level.HINT if choose().instruction_set == TORCH else Level.PROBLEM
    assert found.level is expected


@needs_kernels
def test_there_is_nothing_to_tune_without_a_model_or_without_kernels(model: Path, tmp_path: Path) -> None:
    for changes in ({"model": "nobody/nothing"}, {"kernels": "torch"}, {"dtype": "float16"}):
        given = {"model": str(model), "cache_dir": str(tmp_path), "http_port": 0, "grpc_port": 0, **changes}
        found = {one.name: one for one in examine(UP_SETTINGS.model_validate(given), tune=True)}["tune"]
        assert found.level is Level.HINT
    assert not list(tmp_path.iterdir())


@needs_kernels
def test_steps_are_measured_on_engines_with_the_candidate(model: Path) -> None:
    steps = {"prefill": Point(chunks=((20, 0),)), "batch 2": Point(decodes=(9, 9)), "long": Point((9999,))}
    settings = EngineSettings(device="cpu", dtype="float32", num_blocks=8, num_threads=1)
    of = TunedFor(read_cpu().kind or read_cpu().name, model_identity(model), "float32", "none")
    measure = StepMeasurer(model, settings, of, steps, long_s=0.0)
    for candidate in (None, Candidate(choose().instruction_set, 8)):
        seconds = measure(candidate, None)
        assert list(seconds) == ["prefill", "batch 2"], "there is no room for the third"
        assert min(seconds.values()) > 0
    assert list(measure(None, {"prefill": 1e-9})) == ["prefill"], "a hopeless candidate is given up"


@pytest.mark.parametrize(("torch_from", "used"), [(None, None), (512, TORCH), (1024, None)])
@needs_kernels
def test_products_are_those_that_engines_use_and_held_to_the_fastest(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_from: int | None, used: str | None
) -> None:
    monkeypatch.setattr(doctor, "measure_cpu", lambda *_: CpuSpeed(20.0, 300.0, 600.0, 15.0, {"other": 1200.0}))
    keep(model, tmp_path, Rule("float32", 0, torch_from))
    found = findings(model, cache_dir=str(tmp_path), dtype="float32")
    used = used or choose().instruction_set
    facts = found["products"].facts
    assert (facts["used"], facts["limit"], facts["limit_gflop_s"]) == (used, "other", 1200.0)
    share = "50%" if used == TORCH else "25%"
    assert f"with {used}, which engines use: {share} of the fastest way here; 1200 with other" in found["products"].text
    assert "75% of it by the kernels with one token" in found["bandwidth"].text


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_speeds(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_READ_BYTES", 32 << 20), ("ROWS", 32), ("_REPETITIONS", 1)):  # what figures these are is all
        monkeypatch.setattr(f"baton.doctor.speed.{name}", value)
    for kernels in {choose(), Choice("torch", "")}:
        others = [] if kernels.instruction_set == TORCH else [*kernels.slower][-1:]
        speed = measure_cpu(kernels, dtype, 1, others)
        assert list(speed.others_gflop_s) == others
        assert speed.read_gb_s > 0.1
        assert speed.torch_gflop_s > 0.1
        assert (speed.kernels_gflop_s is None) == (kernels.instruction_set == "torch")
