"""The file of a trace of steps, and what it is fitted to."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from baton.cli.main import main
from common.batch_time import BatchTimeKey
from common.batch_time_file import decode
from common.errors import StartupError
from engine.learning.step_trace import StepTrace, read_trace
from tests.common.test_batch_time import KEY, chunk, decodes, random_shape, truth


def write(path: Path, num: int = 0, key: BatchTimeKey = KEY) -> Path:
    trace, rng = StepTrace(path, key), random.Random(1)
    for _ in range(num):
        shape = random_shape(rng, 500)
        trace.add(shape, predicted=None, measured=truth(shape), host=0.001, is_clean=True)
    trace.close()
    return path


def test_a_line_for_each_step(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "steps", KEY)
    trace.add(decodes(2, 30), predicted=0.5, measured=0.25, host=0.125, is_clean=True)
    trace.add(chunk(7), predicted=None, measured=1.5, host=None, is_clean=False)
    trace.close()
    head, first, second = map(json.loads, (tmp_path / "steps").read_text().splitlines())
    assert head["schema"] == 1
    assert head["key"]["processor"] == KEY.processor
    shape = {"num_decodes": 2, "decode_context": 60, "longest_context": 30, "num_head_rows": 2}
    assert first == {"shape": shape, "predicted": 0.5, "measured": 0.25, "host": 0.125, "is_clean": True}
    assert (second["predicted"], second["host"], second["is_clean"]) == (None, None, False)


def test_a_full_disk_ends_the_trace_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = StepTrace(tmp_path / "steps", KEY)
    trace._file.close()
    trace._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    for _ in range(3):
        trace.add(decodes(2, 30), predicted=0.5, measured=0.25, host=0.125, is_clean=True)
    assert [record.message for record in caplog.records] == ["the trace of steps ends"]
    assert vars(caplog.records[0])["reason"] == "No space left on device"


def test_clean_steps_come_back(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "steps", KEY)
    trace.add(decodes(2, 30), predicted=0.5, measured=0.25, host=0.125, is_clean=True)
    trace.add(chunk(7), predicted=None, measured=1.5, host=None, is_clean=False)
    trace.close()
    key, steps = read_trace(tmp_path / "steps")
    assert key == KEY
    assert [(step.shape, step.seconds) for step in steps] == [(decodes(2, 30), 0.25)]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is no trace"),
        (b"hello\n", "is no trace"),
        (b'{"schema":2}\n', "has schema 2"),
        (b'{"schema":1}\n', "is no trace"),
        (None, "cannot be read"),
    ],
)
def test_another_file_is_refused_by_name(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "steps"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartupError, match=reason) as caught:
        read_trace(path)
    assert str(path) in caught.value.message


def test_a_damaged_line_is_named_and_one_that_was_cut_off_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "steps", 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert len(read_trace(path)[1]) == 2
    path.write_bytes(whole.replace(b'"measured"', b'"measure"'))
    with pytest.raises(StartupError, match=r"line 2 of .*steps is damaged"):
        read_trace(path)
    path.write_bytes(whole.replace(b'"num_head_rows"', b'"num_heads"'))
    with pytest.raises(StartupError, match=r"line 2 of .*steps is damaged"):
        read_trace(path)


def test_a_model_is_fitted_to_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = [write(tmp_path / name, 400) for name in ("a", "b")]
    out = tmp_path / "made" / "time.json"
    assert main(["profile", *(f"--from={trace}" for trace in traces), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "fitted to 700 steps" in said or "fitted to 600 steps" in said
    assert "steps held out" in said
    made = decode(out.read_bytes())
    assert made.key == KEY
    assert made.seconds(decodes(6, 200)) == pytest.approx(truth(decodes(6, 200)), rel=0.1)


def test_traces_of_two_machines_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write(tmp_path / "a", 50), write(tmp_path / "b", 50, replace(KEY, processor="another"))
    assert main(["profile", "--from", str(one), "--from", str(other), "--out", str(tmp_path / "x")]) != 0
    assert "is of another model or machine" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
