"""Endpoints and outcomes that the tests of `bench.serving` make up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.serving.endpoint import Answer, Question
from bench.serving.outcome import Ending, Outcome
from bench.serving.run import Run


def outcome(
    number: int = 0,
    *,
    due_s: float = 0.0,
    lag_s: float = 0.0,
    ttft_s: float = 0.1,
    gap_s: float = 0.01,
    num_tokens: int = 11,
    ending: Ending = Ending.COMPLETED,
    reason: str = "",
) -> Outcome:
    """Answered as regularly as a clock."""
    times = [due_s + ttft_s + gap_s * index for index in range(num_tokens)] if ending is Ending.COMPLETED else []
    return Outcome(
        number=number,
        due_s=due_s,
        ready_s=due_s + lag_s,
        sent_s=due_s + lag_s,
        ended_s=times[-1] if times else due_s + lag_s,
        ending=ending,
        reason=reason,
        token_times_s=times,
        prompt_tokens=20,
        output_tokens=len(times),
    )


def run_of(outcomes: Sequence[Outcome], *, loop_lags_s: Sequence[float] = (0.0,), client_cpu: float = 0.1) -> Run:
    return Run(
        outcomes=[*outcomes], num_not_sent=0, loop_lags_s=[*loop_lags_s], client_cpu=client_cpu, began_at=time.time()
    )


@dataclass
class FakeEndpoint:
    """Gives each answer in two events. Before the first, `behave` may raise, or return seconds or an
    event to wait for."""

    behave: Callable[[Question], object] = lambda _: None
    questions: list[Question] = field(default_factory=list)
    num_now: int = 0
    most: int = 0  # at a time

    async def ask(self, question: Question, answer: Answer) -> None:
        self.questions.append(question)
        self.num_now += 1
        self.most = max(self.most, self.num_now)
        try:
            wait = self.behave(question)
            if isinstance(wait, asyncio.Event):
                await wait.wait()
            else:
                await asyncio.sleep(wait if isinstance(wait, float) else 0)
            for word in (f"<{len(self.questions)}", ">"):
                answer.token_times.append(time.perf_counter())
                answer.text.append(word)
                await asyncio.sleep(0)
            answer.prompt_tokens, answer.output_tokens = len(question.prompt.split()), 3
        finally:
            self.num_now -= 1

    async def model(self) -> str:
        return "fake"

    async def close(self) -> None: ...
