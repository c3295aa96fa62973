"""Work on long texts: off the event loop, in turn, bounded; what is cancelled or refused leaves no place taken."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from common.errors import InvalidArgumentError, OverloadedError, UnavailableError
from common.guided import Guided
from common.sampling import SamplingParams
from common.validation import ModelLimits
from router.fleet.served_model import ServedModel
from router.limits.clients import ApiClient
from router.preparing.preparation import Preparation
from router.running.threads import SHORT, TextThreads
from tests.router.tiny_tokenizer import tiny_tokenizer, vocab_size
from text.conversation import Conversation

LONG = SHORT + 1


class Held:
    """Work that goes on until `go` is set."""

    def __init__(self, begun: list[str], name: str) -> None:
        self.go = threading.Event()
        self._begun, self._name = begun, name

    def __call__(self) -> str:
        self._begun.append(self._name)
        assert self.go.wait(60)
        return self._name


async def until(done: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not done():  # noqa: ASYNC110 (set by a thread)
            await asyncio.sleep(0.002)


@pytest.fixture
async def threads() -> AsyncIterator[TextThreads]:
    made = TextThreads(num_threads=1, max_waiting=2)
    yield made
    made.close()


async def test_the_loop_is_free_meanwhile(threads: TextThreads) -> None:
    begun: list[str] = []
    held = Held(begun, "a")
    running = asyncio.create_task(threads.run(LONG, held))
    await until(lambda: begun)
    assert await threads.run(SHORT, threading.get_ident) == threading.get_ident()  # small work waits for nobody
    held.go.set()  # by the loop, which held work would have stopped
    assert await running == "a"
    assert await threads.run(LONG, threading.get_ident) != threading.get_ident()


async def test_too_much_is_refused_until_there_is_room(threads: TextThreads) -> None:
    begun: list[str] = []
    held = [Held(begun, name) for name in "abc"]
    running = [asyncio.create_task(threads.run(LONG, work)) for work in held]
    await until(lambda: begun)
    with pytest.raises(OverloadedError):
        await threads.run(LONG, lambda: "d")
    for work in held:
        work.go.set()
    assert await asyncio.gather(*running) == ["a", "b", "c"] == begun
    assert await threads.run(LONG, lambda: "e") == "e"


HOSTILE, OTHER = ApiClient("h", tenant="hostile"), ApiClient("o", tenant="other")


async def test_a_tenants_backlog_is_behind_its_own_work_alone(threads: TextThreads) -> None:
    begun: list[str] = []
    held = {name: Held(begun, name) for name in ("h0", "h1", "h2", "o0")}
    running = [asyncio.create_task(threads.run(LONG, held[name], HOSTILE)) for name in ("h0", "h1", "h2")]
    await until(lambda: begun)
    running.append(asyncio.create_task(threads.run(LONG, held["o0"], OTHER)))  # the place of the hostile tenant's last
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await running[2]
    for work in held.values():
        work.go.set()
    assert await asyncio.gather(*running[:2], running[3]) == ["h0", "h1", "o0"]
    assert begun == ["h0", "o0", "h1"]


async def test_what_is_cancelled_while_it_waits_never_begins(threads: TextThreads) -> None:
    begun: list[str] = []
    first, second = Held(begun, "a"), Held(begun, "b")
    running = asyncio.create_task(threads.run(LONG, first))
    await until(lambda: begun)
    for _ in range(5):  # each gives its place back
        waiting = [asyncio.create_task(threads.run(LONG, second)) for _ in range(2)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*waiting, return_exceptions=True)
        )
    first.go.set()
    assert await running == "a"
    assert await threads.run(LONG, lambda: "c") == "c"
    assert begun == ["a"]


async def test_what_is_cancelled_while_it_runs_keeps_its_thread_until_it_ends(threads: TextThreads) -> None:
    begun: list[str] = []
    first, second = Held(begun, "a"), Held(begun, "b")
    running = asyncio.create_task(threads.run(LONG, first))
    await until(lambda: begun)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    waiting = asyncio.create_task(threads.run(LONG, second))
    await asyncio.sleep(0.01)
    assert begun == ["a"]  # one thread, and it is busy
    first.go.set()
    second.go.set()
    assert await waiting == "b"


async def test_failures_give_the_thread_back(threads: TextThreads) -> None:
    def fail() -> None:
        raise InvalidArgumentError("prompt", "is wrong")

    for _ in range(5):
        with pytest.raises(InvalidArgumentError):
            await threads.run(LONG, fail)


async def test_after_its_end_it_says_so() -> None:
    threads = TextThreads(num_threads=1, max_waiting=1)
    threads.close()
    for _ in range(5):  # and goes on saying so: no place is lost
        with pytest.raises(UnavailableError):
            await threads.run(LONG, lambda: None)


def a_model(max_model_len: int) -> ServedModel:
    limits = ModelLimits(model="tiny", max_model_len=max_model_len, vocab_size=vocab_size(), max_token_bytes=8)
    return ServedModel(limits, "f", "", "float32", frozenset(), tiny_tokenizer(), 16)


class Untouched:
    """A tokenizer that must not be asked."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} was asked for before sizes were checked")


async def test_sizes_are_checked_before_anything_is_tokenized(threads: TextThreads) -> None:
    model = replace(a_model(256), tokenizer=Untouched())  # type: ignore[arg-type]
    preparation = Preparation(request_timeout_s=60, control_tokens=False, threads=threads)
    too_long = "x" * (256 * 8 + 1)
    with pytest.raises(InvalidArgumentError):
        await preparation.prompts(model, ["fine", too_long], "prompt")
    with pytest.raises(InvalidArgumentError):
        await preparation.prompts(model, ["fine", [vocab_size()]], "prompt")
    with pytest.raises(InvalidArgumentError):
        await preparation.tokenize(model, too_long, "text", add_special_tokens=True)
    with pytest.raises(InvalidArgumentError):
        await preparation.detokenize(model, [1] * 257, "token_ids", skip_special_tokens=True)
    for messages in ([], [{"role": "user", "content": ""}] * 257, [{"role": "user", "content": too_long}]):
        with pytest.raises(InvalidArgumentError):
            await preparation.chat_prompt(model, Conversation(messages=messages))


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    """The interpreter is let go of: a thread that looks at the clock never waits for as long as it all takes."""
    tokenizer = tiny_tokenizer()
    text = "The capital of France is Paris. " * 20_000
    longest_s, stop = 0.0, threading.Event()

    def look() -> None:
        nonlocal longest_s
        last = time.monotonic()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            longest_s, last = max(longest_s, now - last), now

    thread = threading.Thread(target=look)
    thread.start()
    try:
        share, num_tries = 1.0, 0
        while share >= 0.7 and num_tries < 5:  # a busy machine holds up a thread, too, but not each time
            longest_s, begin = 0.0, time.monotonic()
            assert len(tokenizer.encode(text)) > 20_000
            share, num_tries = longest_s / (time.monotonic() - begin), num_tries + 1
        assert share < 0.7
    finally:
        stop.set()
        thread.join()


async def test_grammars_hold_up_no_texts(threads: TextThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    held, grammar_threads = Held(begun, "grammar"), TextThreads(1, max_waiting=0, what="grammars wait")
    monkeypatch.setattr("common.grammar_process.GrammarProcess.check", lambda *_: held())
    preparation = Preparation(
        request_timeout_s=60, control_tokens=False, threads=threads, grammar_threads=grammar_threads
    )
    params = SamplingParams(guided=Guided(regex="a"))
    checking = [asyncio.create_task(preparation.check_guided(params, str)) for _ in range(3)]
    await until(lambda: begun)
    assert await preparation.tokenize(a_model(10**6), "a" * LONG, "text", add_special_tokens=False)
    held.go.set()
    results = await asyncio.gather(*checking, return_exceptions=True)
    assert any(isinstance(one, OverloadedError) and "too many grammars wait" in one.message for one in results)
    grammar_threads.close()


async def test_one_tenants_grammars_hold_up_no_others(threads: TextThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check of the hostile tenant's takes as long as it may. The other one's goes next, whatever waits."""
    begun: list[str] = []
    go = threading.Event()

    def check(_: object, guided: Guided, *__: object) -> None:
        begun.append(guided.regex)
        assert go.wait(60)

    monkeypatch.setattr("common.grammar_process.GrammarProcess.check", check)
    grammar_threads = TextThreads(1, what="grammars wait")
    preparation = Preparation(
        request_timeout_s=60, control_tokens=False, threads=threads, grammar_threads=grammar_threads
    )

    def asked(regex: str, client: ApiClient) -> asyncio.Task[None]:
        params = SamplingParams(guided=Guided(regex=regex))
        return asyncio.create_task(preparation.check_guided(params, str, client=client))

    checking = [asked(f"h{number}", HOSTILE) for number in range(20)]
    await until(lambda: begun)
    checking.append(asked("o0", OTHER))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*checking)
    assert begun[:2] == ["h0", "o0"]
    grammar_threads.close()
