"""Sends a load, and notes what became of it and of the client itself."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.serving.endpoint import Answer, Endpoint, Question, RefusedError
from bench.serving.load import Conversation, Load, Turn
from bench.serving.outcome import Ending, Outcome
from common.errors import InternalError

PROBE_S = 0.005  # between two looks at how late the event loop is

Progress = Callable[[Outcome], None]
"""Called with each request that has ended."""


@dataclass(slots=True, kw_only=True)
class Run:
    outcomes: list[Outcome]  # in the order of sending
    num_not_sent: int  # turns of conversations in which an earlier turn did not complete
    loop_lags_s: list[float] = field(repr=False)  # how late the client's event loop was, looked at all the time
    client_cpu: float  # share of one core that the client's event loop took
    began_at: float  # seconds since the epoch


async def run_load(
    load: Load, endpoint: Endpoint, *, timeout_s: float | None = None, progress: Progress | None = None
) -> Run:
    """Returns when every request has ended. `timeout_s`: a request that takes longer, from when it was sent, has
    failed. Errors of requests are outcomes; others are raised."""
    lags: list[float] = []
    probe = asyncio.create_task(_probe(lags))
    runner = _Runner(load, endpoint, timeout_s, progress)
    began_at, cpu_s, begin = time.time(), time.thread_time(), time.perf_counter()
    try:
        await runner.run()
    finally:
        probe.cancel()
    taken_s = time.perf_counter() - begin
    return Run(
        outcomes=sorted(runner.outcomes, key=lambda one: one.number),
        num_not_sent=runner.num_not_sent,
        loop_lags_s=lags,
        client_cpu=(time.thread_time() - cpu_s) / taken_s if taken_s > 0 else 0.0,
        began_at=began_at,
    )


async def _probe(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + PROBE_S
        await asyncio.sleep(PROBE_S)
        lags.append(time.perf_counter() - due)


class _Runner:
    def __init__(self, load: Load, endpoint: Endpoint, timeout_s: float | None, progress: Progress | None) -> None:
        self._load = load
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._progress = progress
        self._places = None if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
        self._start = 0.0
        self.outcomes: list[Outcome] = []
        self._num_sent = 0
        self.num_not_sent = 0

    async def run(self) -> None:
        self._start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            if not self._load.is_open:
                left = itertools.chain(self._load.conversations, self._load.further or ())
                num_users = self._load.max_concurrency or len(self._load.conversations)
                if self._load.further is None:
                    num_users = min(num_users, len(self._load.conversations))
                for _ in range(num_users):
                    group.create_task(self._one_after_another(left))
                return
            for conversation in self._load.conversations:
                await self._sleep_until(conversation.start_s)
                group.create_task(self._talk(conversation))

    async def _one_after_another(self, left: Iterator[Conversation]) -> None:
        """One user of a closed loop."""
        while self._load.stop_s is None or self._now() < self._load.stop_s:
            if (conversation := next(left, None)) is None:
                return
            await self._talk(conversation)

    async def _talk(self, conversation: Conversation) -> None:
        """The turns of a conversation. What follows a turn that did not complete is not sent: nobody knows what its
        prompt would be."""
        said: list[tuple[str, str]] = []
        due_s = conversation.start_s if self._load.is_open else self._now()
        for number, turn in enumerate(conversation.turns):
            if number:
                due_s = self._now() + turn.wait_s
                await self._sleep_until(due_s)
            said.append(("user", turn.text))
            answer = Answer()
            outcome = await self._send(turn, said, due_s, answer)
            if outcome.ending is not Ending.COMPLETED:
                self.num_not_sent += len(conversation.turns) - number - 1
                return
            said.append(("assistant", "".join(answer.text)))

    async def _send(self, turn: Turn, said: Sequence[tuple[str, str]], due_s: float, answer: Answer) -> Outcome:
        ready_s = self._now()
        if self._places is None or not self._load.is_open:  # in a closed loop, users are the limit
            return await self._ask(turn, said, due_s, ready_s, answer)
        async with self._places:
            return await self._ask(turn, said, due_s, ready_s, answer)

    async def _ask(
        self, turn: Turn, said: Sequence[tuple[str, str]], due_s: float, ready_s: float, answer: Answer
    ) -> Outcome:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        question = Question(messages=tuple(said), max_tokens=turn.max_tokens)
        is_cancelled = turn.cancel_after_s is not None
        ending, reason = Ending.COMPLETED, ""
        sent_s = self._now()
        try:
            async with asyncio.timeout(turn.cancel_after_s if is_cancelled else self._timeout_s):
                await self._endpoint.ask(question, answer)
        except TimeoutError:
            ending = Ending.CANCELLED if is_cancelled else Ending.FAILED
            reason = "" if is_cancelled else f"no end of the answer within {self._timeout_s:g} s"
        except RefusedError as error:
            ending = Ending.REFUSED if error.has_no_room else Ending.FAILED
            reason = error.message
        except InternalError as error:
            ending, reason = Ending.FAILED, error.message
        if ending is Ending.COMPLETED and not answer.token_times:
            ending, reason = Ending.FAILED, "the answer has no text"
        outcome = Outcome(
            number=number,
            due_s=due_s,
            ready_s=ready_s,
            sent_s=sent_s,
            ended_s=self._now(),
            ending=ending,
            reason=reason,
            token_times_s=[at - self._start for at in answer.token_times],
            prompt_tokens=turn.num_tokens if answer.prompt_tokens is None else answer.prompt_tokens,
            output_tokens=len(answer.token_times) if answer.output_tokens is None else answer.output_tokens,
            cached_tokens=answer.cached_tokens,
        )
        self.outcomes.append(outcome)
        if self._progress is not None:
            self._progress(outcome)
        return outcome

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(at_s - self._now(), 0.0))
