"""What a handler of signals raises while `LLM` computes passes to the caller, and the next call works."""

from __future__ import annotations

import functools
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton import LLM, SamplingParams
from baton.offline.local import LocalEngine
from common.beam_search import BeamSearchParams
from tests.chaos.tiny_model import random_prompt, write_tiny_model

PROMPTS = [random_prompt(random.Random(number), length) for number, length in enumerate((40, 3, 17))]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
OPTIONS: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "num_threads": 1, "num_blocks": 64, "block_size": 16}


class UsersError(Exception):
    pass


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)),
    "chat": lambda llm: tokens(llm.chat([[("user", "hello")], [("user", "what is it?")]], GREEDY, use_tqdm=False)),
    "embed": lambda llm: [largest(one.outputs.embedding) for one in llm.embed(PROMPTS, use_tqdm=False)],
    "beam_search": lambda llm: [
        [one.tokens for one in output.sequences]
        for output in llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=4), use_tqdm=False)
    ],
}


def largest(vector: list[float]) -> int:
    return vector.index(max(vector))


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, max_len=512)
    with LLM(str(folder), **OPTIONS) as one:
        yield one


def core(llm: LLM) -> Any:
    assert isinstance(llm._backend, LocalEngine)
    return llm._backend._core


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    handler = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, handler)
    assert not core(llm).scheduler.requests
    assert core(llm).scheduler.check_integrity() == []


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, kind: type[BaseException], call: int) -> None:
    """The signal comes in that call of the method, after its work."""

    def handle(number: int, frame: object) -> None:
        raise kind("time is up")

    signal.signal(signal.SIGALRM, handle)
    method, calls = getattr(owner, name), iter(range(1, 10**6))

    @functools.wraps(method)
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if next(calls) == call:
            signal.raise_signal(signal.SIGALRM)
        return result

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("kind", [UsersError, TimeoutError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", CALLS)
def test_an_exception_in_the_middle_of_a_step_passes(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, call: str, kind: type[BaseException]
) -> None:
    wanted = CALLS[call](llm)
    interrupt(monkeypatch, core(llm)._device, "_forward", kind, 1)
    with pytest.raises(kind, match="time is up"):
        CALLS[call](llm)
    monkeypatch.undo()
    assert CALLS[call](llm) == wanted


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        ("scheduler", "schedule", 3),
        ("scheduler", "update", 2),
        ("scheduler", "release", 1),
        ("blocks", "allocate", 2),
        ("blocks", "end_writes", 1),
        ("blocks", "free", 1),
    ],
)
def test_whatever_the_engine_was_doing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, owner: str, name: str, number: int
) -> None:
    wanted = CALLS["generate"](llm)
    for _ in range(3):
        interrupt(monkeypatch, getattr(core(llm), owner), name, UsersError, number)
        with pytest.raises(UsersError):
            CALLS["generate"](llm)
        monkeypatch.undo()
        assert CALLS["generate"](llm) == wanted


def test_an_exception_in_the_middle_of_a_draft_passes(
    llm: LLM, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, draft = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("draft")
    write_tiny_model(folder, max_len=512)
    write_tiny_model(draft, max_len=512, num_layers=1, hidden_size=32)
    with LLM(str(folder), speculation=str(draft), **OPTIONS) as drafting:
        wanted = CALLS["generate"](llm)
        assert CALLS["generate"](drafting) == wanted
        backend: Any = drafting._backend
        interrupt(monkeypatch, backend._drafter._device, "_forward", TimeoutError, 1)
        with pytest.raises(TimeoutError, match="time is up"):
            CALLS["generate"](drafting)
        monkeypatch.undo()
        assert CALLS["generate"](drafting) == wanted
        assert core(drafting).scheduler.check_integrity() == []


def test_a_failure_of_the_engine_itself_says_what_it_is(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(core(llm)._device, "_forward", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        CALLS["generate"](llm)
    monkeypatch.undo()
    assert CALLS["generate"](llm)


def test_an_exception_of_the_callers_own_code_passes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps the engine is in order: it keeps its cache."""
    backend: Any = llm._backend
    interrupt(monkeypatch, backend._model.tokenizer.rust, "decode", UsersError, 5)
    engine = core(llm)
    with pytest.raises(UsersError):
        CALLS["generate"](llm)
    monkeypatch.undo()
    assert core(llm) is engine
    assert CALLS["generate"](llm)
