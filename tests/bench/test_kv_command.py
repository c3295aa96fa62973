"""`baton bench kv` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from itertools import product
from pathlib import Path

import psutil
import pytest

from baton.cli import main as cli
from bench.kv.command import BENCH, PARTS
from bench.kv.exposed import KNOWN, OVERLAP, TURN
from bench.kv.picture import draw
from bench.kv.tiny_model import make_tiny_model
from common.config import DEFAULT_MODEL, default_cache_dir
from engine.embedded_model import ensure_model
from tests.bench.test_kv_results import exposed_results

ROOT = Path(__file__).parents[2]


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install` makes of pyproject.toml, also where it was installed before that had it."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    points = EntryPoints(EntryPoint(name, value, group) for group in groups for name, value in groups[group].items())
    monkeypatch.setattr(cli, "entry_points", points.select)


@pytest.mark.usefixtures("entry_point")
def test_the_command_is_found_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "Measures Baton on this machine." in capsys.readouterr().out
    assert cli.main(["bench", "kv", "--help"]) == 0
    text = capsys.readouterr().out
    for part in PARTS:
        assert part in text


@pytest.mark.usefixtures("entry_point")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--only", "handof"], "'handof' is not one of handoff, control, exposed, store, colocated"),
        (["--connectors", "nixl,disk"], "'disk' is not one of nixl, shared_storage, lmcache"),
        (["--plot", "kv.gif"], "'kv.gif' does not end in .png, .svg, .pdf"),
        (["--repeats", "0"], "0 is not in the range x>=1"),
    ],
)
def test_asked_wrongly(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kv", *arguments]) == 2
    assert line in capsys.readouterr().err


def test_without_entry_points_all_else_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "entry_points", EntryPoints().select)
    assert cli.main([]) == 0
    assert "Measures" not in capsys.readouterr().out
    assert cli.main(["bench", "kv"]) == 2


def test_every_part_has_its_module() -> None:
    assert BENCH.commands.keys() == {"kv"}
    for module in PARTS.values():
        assert (ROOT / Path(*module.split("."))).with_suffix(".py").is_file()


def test_the_picture_has_a_panel_for_each_part_that_ran(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = exposed_results()
    results.add("exposed", {"exposed ms": [1.0, 2.0]}, connector="nixl", mode="overlap", length=128)
    results.add("handoff", {"GB/s": [1.0, 2.0, 3.0]}, shape="tiny", system="memcpy", block_size=16)
    for system in ("colocated", "disaggregated"):
        results.add("colocated", {"TTFT ms": [1.0, 20.0], "ITL ms": [3.0, 4.0]}, system=system)
    path = tmp_path / "new" / "kv.svg"
    draw(results, path, "a machine")
    text = path.read_text()
    assert text.count("axes_") == 5 + 1  # of a grid of six, one is empty
    png = tmp_path / "kv.png"
    draw(results, png, "a machine")
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer_of = ensure_model(DEFAULT_MODEL, default_cache_dir(), print)
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer_of)


def command(tiny_model: Path, *arguments: str) -> list[str]:
    base = [sys.executable, "-m", "bench.kv", "--quick", "--repeats=1", f"--model={tiny_model}"]
    return [*base, "--connectors=shared_storage", *arguments]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_parts_with_workers(tiny_model: Path, tmp_path: Path) -> None:
    arguments = command(tiny_model, "--only=control,exposed,store", "--json", f"--plot={tmp_path / 'kv.svg'}")
    done = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    assert found["machine"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert found["settings"]["only"] == ["control", "exposed", "store"]
    assert found["versions"]["torch"]
    assert found["skipped"] == {}
    assert {record["part"] for record in found["records"]} == {"control", "exposed", "orchestration", "store"}
    moved = {
        (record["labels"]["mode"], record["labels"]["length"]): record["values"]
        for record in found["records"]
        if record["quantity"] == "MB moved" and record["labels"]["mode"] in {*OVERLAP, KNOWN}
    }
    assert set(moved) == {*product(OVERLAP, (128, 512, 2048)), (KNOWN, 2048)}
    for (mode, length), values in moved.items():
        num_new = TURN if mode == KNOWN else length
        assert set(values) == {num_new * 2 * 16 * 2 / 1e6}  # one layer, K and V, one head of 16 dimensions, bfloat16
    assert len(found["bars"]) == 6
    assert (tmp_path / "kv.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process(tiny_model: Path, signum: signal.Signals) -> None:
    process = subprocess.Popen(command(tiny_model, "--only=exposed"), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            if line.startswith("exposed: "):  # a stack is up
                break
        others = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signum)
        process.stderr.read()
    assert len(others) >= 1 + 1 + 2 * 2  # baton up, a router, two workers of two processes
    assert process.wait(120) != 0
    _, alive = psutil.wait_procs(others, timeout=120)
    assert alive == []
