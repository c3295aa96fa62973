"""`baton bench kv` as a user types it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
import uuid
from importlib.metadata import EntryPoint, EntryPoints
from itertools import product
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from baton.cli import main as cli
from baton.stack import lmcache_server
from bench.command import BENCH
from bench.kv.colocated import CHAT_NEW, STACKS
from bench.kv.command import CONNECTORS, PARTS
from bench.kv.exposed import OVERLAP
from bench.kv.handoff import FETCH_OVER_RAW, WHOLE_OVER_RAW
from bench.kv.pair import MEMCPY, RAW_NIXL, TURNS
from bench.kv.picture import draw
from bench.kv.tiny_model import make_tiny_model
from common.config import DEFAULT_MODEL, default_cache_dir
from common.errors import StartupError
from engine.loading.embedded_model import ensure_model
from tests.bench.test_kv_results import exposed_results
from tests.nixl import HAS_NIXL

ROOT = Path(__file__).parents[2]
MARK = "MARK_OF_A_BENCH"  # in the environment of a command and of all that it starts


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install` makes of pyproject.toml, even if an older pyproject.toml was installed."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    points = EntryPoints(EntryPoint(name, value, group) for group in groups for name, value in groups[group].items())
    monkeypatch.setattr(cli, "entry_points", points.select)


@pytest.mark.usefixtures("entry_point")
def test_the_command_is_found_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "Measures Baton, and other servers beside it." in capsys.readouterr().out
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
    assert "Measures Baton" not in capsys.readouterr().out
    assert cli.main(["bench", "kv"]) == 2


def test_every_part_has_its_module() -> None:
    assert BENCH.commands.keys() == {"serve", "sweep", "compare", "latency", "throughput", "kv", "router"}
    for module in PARTS.values():
        assert (ROOT / Path(*module.split("."))).with_suffix(".py").is_file()


@pytest.mark.slow
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


def command(tiny_model: Path, *arguments: str, connectors: tuple[str, ...] = ("shared_storage",)) -> list[str]:
    base = [sys.executable, "-m", "bench.kv", "--quick", "--repeats=1", "--dtype=float32", f"--model={tiny_model}"]
    return [*base, f"--connectors={','.join(connectors)}", *arguments]


def marked(mark: str) -> list[psutil.Process]:
    """Processes that run with `mark`, whoever started them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:  # it ended meanwhile, or is another user's
            continue
    return found


def outcome(arguments: list[str], *, num_processes: int) -> Any:
    """The JSON that the command printed. While it measured there were `num_processes` at least, and all have ended."""
    mark, num_seen = uuid.uuid4().hex, 0
    with (
        tempfile.TemporaryFile() as printed,  # more than a pipe holds
        subprocess.Popen(
            [*arguments, "--json"],
            cwd=ROOT,
            env={**os.environ, MARK: mark},
            stdout=printed,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stderr is not None
        for line in process.stderr:
            if line.split(":")[0] in PARTS:
                num_seen = max(num_seen, len(marked(mark)))
        assert process.wait(120) == 0
        printed.seek(0)
        found = json.load(printed)
    assert num_seen >= num_processes
    _, alive = psutil.wait_procs(marked(mark), timeout=30)
    assert alive == []
    return found


def check_bars(found: Any) -> None:
    for bar in found["bars"]:
        assert bar["met"] is (bar["value"] <= bar["limit"])
        assert math.isfinite(bar["value"])  # a difference of times, of a tiny model, may be negative
        assert bar["limit"] > 0


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
        if record["quantity"] == "MB moved"
    }
    assert set(moved) == {*product(OVERLAP, (128, 512, 2048))}
    for (_, length), values in moved.items():
        assert set(values) == {length * 2 * 16 * 4 / 1e6}  # one layer, K and V, one head of 16 dimensions, float32
    assert len(found["bars"]) == 4
    check_bars(found)
    assert (tmp_path / "kv.svg").stat().st_size > 0


@pytest.mark.slow
def test_every_connector_hands_over_each_shape_and_block_size(tiny_model: Path) -> None:
    found = outcome(command(tiny_model, "--only=handoff", connectors=CONNECTORS), num_processes=1)
    systems = {MEMCPY, "shared_storage, tmpfs", "shared_storage, disk"}
    systems |= {"nixl", RAW_NIXL} if HAS_NIXL else set()
    systems |= {"lmcache"} if has_lmcache() else set()
    skipped = {what.removeprefix("handoff: ") for what in found["skipped"]}
    assert skipped == {MEMCPY, RAW_NIXL, "nixl", "shared_storage, tmpfs", "shared_storage, disk", "lmcache"} - systems
    assert all(found["skipped"].values())
    assert {record["part"] for record in found["records"]} == {"handoff"}
    figures = {
        (labels["system"], labels["shape"], labels["block_size"], record["quantity"]): record
        for record in found["records"]
        if (labels := record["labels"])
    }
    assert len(figures) == len(found["records"])
    token_bytes = {"SmolLM2-135M": 46_080, "Llama-3-8B": 262_144}
    for system, shape, block_size in product(systems, token_bytes, (16, 64)):
        case = system, shape, block_size
        speed, whole = figures.pop((*case, "GB/s")), figures.pop((*case, "whole ms"))
        assert len(speed["values"]) == (1 if system.startswith(("shared_storage", "lmcache")) else TURNS)
        assert speed["labels"]["block_bytes"] == block_size * token_bytes[shape]
        moved = speed["labels"]["num_blocks"] * speed["labels"]["block_bytes"]
        assert speed["values"] == pytest.approx([moved / ms / 1e6 for ms in whole["values"]])
        assert min(speed["values"]) > 0
        if system in {MEMCPY, RAW_NIXL}:
            continue
        for side in ("publish ms", "fetch ms"):
            pairs = zip(figures.pop((*case, side))["values"], whole["values"], strict=True)
            assert all(0 < part_ms <= whole_ms for part_ms, whole_ms in pairs)
        if system == "nixl":
            for quantity in (FETCH_OVER_RAW, WHOLE_OVER_RAW):
                assert min(figures.pop((*case, quantity))["values"]) > -100  # percent: it took some time
    assert figures == {}
    assert [bar["part"] for bar in found["bars"]] == ["handoff"] * HAS_NIXL
    check_bars(found)


def has_lmcache() -> bool:
    try:
        lmcache_server.executable()
    except StartupError:
        return False
    return True


@pytest.mark.slow
def test_chats_beside_long_prompts_on_both_stacks(tiny_model: Path) -> None:
    num_workers = 1 + 2
    # The bench; of each stack `baton up` and a router; of each worker two processes.
    found = outcome(command(tiny_model, "--only=colocated"), num_processes=1 + 2 * 2 + 2 * num_workers)
    assert found["skipped"] == {}
    assert {record["part"] for record in found["records"]} == {"colocated"}
    figures = {(record["labels"]["system"], record["quantity"]): record for record in found["records"]}
    assert len(figures) == len(found["records"])
    assert set(figures) == {*product(STACKS, ("TTFT ms", "ITL ms", "long prompts' TTFT ms"))}
    for record in figures.values():
        assert min(record["values"]) >= 0  # two tokens may come at once
        assert 0 < record["median"] <= record["p99"] <= max(record["values"])
    for quantity in ("TTFT ms", "long prompts' TTFT ms"):  # the same arrivals
        assert len({len(figures[name, quantity]["values"]) for name in STACKS}) == 1
    for name in STACKS:
        num_chats = len(figures[name, "TTFT ms"]["values"])
        assert num_chats >= 10
        assert len(figures[name, "ITL ms"]["values"]) == num_chats * (CHAT_NEW - 1)
    assert found["bars"] == []


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
