"""What `LLM` needs of whatever computes: an engine in this process, or a stack that runs somewhere."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.client.messages import Message, Tool
from baton.client.report import Result
from baton.offline.params import SamplingParams
from common.beam_search import Beam, BeamSearchParams
from common.targets import LatencyTargets


@dataclass(slots=True, frozen=True, kw_only=True)
class Chat:
    """One conversation, and what the model may call in it."""

    messages: Sequence[tuple[str, str] | Message]
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    allowed_tools: Sequence[str] = ()
    template_options: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class Ask:
    """One prompt: text, token ids or a conversation. `name` is what errors call it."""

    name: str
    prompt: str | list[int] | Chat
    params: SamplingParams
    priority: int = 0
    slo: LatencyTargets | None = None
    slo_class: str = ""  # of a router


@dataclass(slots=True, frozen=True)
class Answer:
    """The answer to candidate number `candidate` of prompt number `index`."""

    index: int
    candidate: int
    prompt_token_ids: list[int] | None
    result: Result


@dataclass(slots=True, frozen=True)
class Vector:
    index: int
    prompt_token_ids: list[int]
    values: list[float]


@dataclass(slots=True, frozen=True)
class Beams:
    """The best sequences for prompt number `index`, best first."""

    index: int
    prompt_token_ids: list[int]
    beams: Sequence[Beam]


class Backend(Protocol):
    """Answers come as they are done. Closing the iterator ends what is still under way. Errors are `BatonError`s; what
    is wrong with a prompt in this process is said before anything is computed."""

    def answers(self, asks: Sequence[Ask]) -> Generator[Answer, None, None]: ...

    def vectors(
        self, prompts: Sequence[str | list[int]], *, pooling: str, dimensions: int, normalize: bool
    ) -> Generator[Vector, None, None]: ...

    def beams(self, prompts: Sequence[str | list[int]], params: BeamSearchParams) -> Generator[Beams, None, None]: ...

    def chat_token_ids(self, chat: Chat) -> list[int]:
        """Of the prompt that a conversation becomes."""
        ...

    def text(self, token_ids: Sequence[int]) -> str: ...

    def token_text(self, token_id: int) -> str | None:
        """None if asking for it would take a call for each token."""
        ...

    def close(self) -> None: ...
