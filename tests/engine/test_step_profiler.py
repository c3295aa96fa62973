"""Traces of an engine's steps: what is in them, when they end, and what whoever asked is told."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine import messages as m
from engine.kernels import library
from engine.request import Request
from engine.scheduling.schedule import SchedulerOutput
from engine.step_profiler import StepProfiler


class Engine:
    """Its steps, and a clock that stands still."""

    def __init__(self, device: str = "cpu") -> None:
        self.now = 100.0
        self.woken = threading.Event()
        self.news: list[m.StepsProfiled] = []
        self.profiler = StepProfiler(device, self.woken.set, lambda: self.now)

    def asks(self, path: Path, call_id: int = 1, num_steps: int = 2) -> None:
        command = m.ProfileSteps(call_id=call_id, num_steps=num_steps, timeout_s=5.0, path=str(path))
        self.profiler.begin(command)

    def step(
        self, num_tokens: int = 3, during: Callable[[], Any] = lambda: torch.ones(2, 2) @ torch.ones(2, 2)
    ) -> None:
        output = SchedulerOutput(num_tokens={cast("Request", object()): num_tokens} if num_tokens else {})
        with self.profiler.step(output):
            during()
            self.now += 0.5
        self.news += self.profiler.due()

    def told(self) -> m.StepsProfiled:
        """What became of the next trace."""
        while not self.news:
            assert self.woken.wait(60)
            self.woken.clear()
            self.news += self.profiler.due()
        return self.news.pop(0)


def names(path: Path) -> list[str]:
    return [one["name"] for one in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


def test_the_next_steps_are_in_the_file(tmp_path: Path) -> None:
    engine = Engine()
    engine.step()
    path = tmp_path / "trace.json.gz"
    engine.asks(path)
    for num_tokens in (0, 5, 0, 7, 9):
        engine.step(num_tokens)
    assert engine.told() == m.StepsProfiled(call_id=1, num_steps=2, seconds=1.5)
    found = names(path)
    assert [one for one in found if one.startswith("step")] == [
        "step 1: 1 requests, 5 tokens",
        "step 2: 1 requests, 7 tokens",
    ]
    assert found.count("aten::mm") == 3, "torch's operations from the first step to the last"
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_kernels_have_names_while_a_trace_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes calls them, so torch's profiler does not see them by itself."""
    calls: list[int] = []
    kernels = SimpleNamespace(**{f"baton_{name}": calls.append for name in library._COMPUTING})
    monkeypatch.setattr(library, "_opened", [kernels])
    engine = Engine()
    engine.asks(tmp_path / "t.json.gz", num_steps=1)
    engine.step(0)
    assert not engine.profiler.is_on()

    def during() -> None:
        kernels.baton_layers(1)
        calls.append(engine.profiler.is_on())

    engine.step(during=during)
    assert not engine.profiler.is_on()
    engine.told()
    kernels.baton_layers(2)
    assert calls == [1, True, 2]
    assert kernels.baton_layers == calls.append
    assert names(tmp_path / "t.json.gz").count("baton_layers") == 1


def test_an_engine_that_computes_too_little(tmp_path: Path) -> None:
    engine = Engine()
    engine.asks(tmp_path / "none.gz")
    engine.step(0)
    engine.now += 5.0
    engine.step(0)
    nothing = engine.told()
    assert (nothing.call_id, nothing.num_steps, nothing.failure) == (1, 0, "the engine computed nothing in 5 s")
    engine.asks(tmp_path / "some.gz", call_id=2, num_steps=9)
    engine.step(0)
    engine.step()
    engine.now += 5.0
    engine.step(0)
    told = engine.told()
    assert (told.call_id, told.num_steps, told.failure) == (2, 1, "")


def test_another_one_takes_its_place_and_nobody_is_told_of_what_nobody_waits_for(tmp_path: Path) -> None:
    engine = Engine()
    engine.asks(tmp_path / "first.gz")
    engine.step(0)
    engine.step()
    engine.asks(tmp_path / "second.gz", call_id=2, num_steps=1)
    engine.step(0)
    engine.step()
    assert engine.told().call_id == 2
    engine.asks(tmp_path / "third.gz", call_id=3)
    engine.step(0)
    engine.step()
    engine.profiler.end()
    engine.step()
    engine.step()
    assert engine.news == []
    assert [one.name for one in tmp_path.iterdir()] == ["second.gz"]


def test_what_cannot_be_traced_or_written_ends_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.asks(tmp_path / "gone" / "t.gz", num_steps=1)
    engine.step(0)
    engine.step()
    assert "cannot be written" in engine.told().failure

    def fails(_named: object) -> nullcontext[None]:
        raise RuntimeError("no more")

    monkeypatch.setattr(library, "named_calls", fails)
    engine.asks(tmp_path / "t.gz", call_id=2)
    engine.step(0)
    engine.step()
    told = engine.told()
    assert (told.call_id, "no more" in told.failure) == (2, True)
    engine.step()
    assert engine.news == []


@pytest.mark.parametrize(("device", "reason"), [("cpu", "ModuleNotFoundError"), ("simulated", "has no torch")])
def test_without_torch_the_engine_goes_on(
    device: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", None)
    engine = Engine(device)
    engine.asks(tmp_path / "t.gz")
    engine.step(0)
    engine.step(during=lambda: None)
    told = engine.told()
    assert (told.num_steps, reason in told.failure) == (0, True)
    engine.step(during=lambda: None)
    assert engine.news == []
