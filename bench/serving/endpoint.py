"""What is measured: anything that answers prompts with a stream of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import InternalError

Messages = Sequence[tuple[str, str]]
"""(role, content) pairs."""

REFUSALS = frozenset({"429", "503", "RESOURCE_EXHAUSTED"})


@dataclass(slots=True, frozen=True, kw_only=True)
class Question:
    """A conversation: endpoints that continue text get its contents, one after another."""

    messages: Messages
    max_tokens: int

    @property
    def prompt(self) -> str:
        return "".join(content for _, content in self.messages)


@dataclass(slots=True)
class Answer:
    """What came so far: filled while it comes, so that what came before an error is known."""

    token_times: list[float] = field(default_factory=list)  # `time.perf_counter()` of each event that had new text
    text: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None  # None if the endpoint does not say
    output_tokens: int | None = None
    cached_tokens: int = 0


class RefusedError(InternalError):
    """The endpoint answered with an error. `status` is HTTP's or gRPC's: "429", "RESOURCE_EXHAUSTED"."""

    def __init__(self, status: str, reason: str, *, has_no_room: bool | None = None) -> None:
        super().__init__(f"{status}: {reason}")
        self.has_no_room = status in REFUSALS if has_no_room is None else has_no_room


class Endpoint(Protocol):
    async def ask(self, question: Question, answer: Answer) -> None:
        """Returns when the answer has ended. Raises `RefusedError`, or `InternalError` for one that was cut off."""

    async def model(self) -> str:
        """The name of the model that is served, to be asked for. Raises `InternalError`."""

    async def close(self) -> None: ...


@dataclass(slots=True, frozen=True, kw_only=True)
class Target:
    """Which endpoint is measured, and how it is asked."""

    name: str  # in reports
    backend: str  # a key of `bench.serving.backends.BACKENDS`
    url: str
    api_key: str = ""
    model: str = ""  # empty: the one that is served
    tls_ca: str = ""  # file of the CAs to trust; empty: the public ones
    options: Mapping[str, object] = field(default_factory=dict)  # further fields of a request, such as temperature
