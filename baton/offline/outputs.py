"""What `LLM` gives back: plain values, of the same shape as those of vLLM, which many programs read."""

from __future__ import annotations

from dataclasses import dataclass

from baton.client.messages import ToolCall


@dataclass(slots=True, frozen=True)
class Logprob:
    logprob: float  # natural logarithm
    rank: int | None  # 1 is the likeliest; None for a token that is not among the likeliest that were asked for
    decoded_token: str | None  # None from a stack that runs elsewhere


Logprobs = dict[int, Logprob]
"""By token id: the token itself, and the likeliest ones in its place."""


@dataclass(slots=True, frozen=True, kw_only=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # None if logprobs were not asked for
    logprobs: list[Logprobs] | None
    finish_reason: str  # stop, length or tool_calls
    stop_reason: int | str | None  # the stop string, or the stop token's id, that ended it
    reasoning: str = ""  # chat: of models that think before they answer
    tool_calls: tuple[ToolCall, ...] = ()  # chat


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestOutput:
    """All answers to one prompt."""

    request_id: str
    prompt: str | None  # None for one that was given as token ids, or as a conversation
    prompt_token_ids: list[int] | None  # None for a conversation that another machine made a prompt of
    prompt_logprobs: list[Logprobs | None] | None  # None for the first token, before which there is nothing
    outputs: list[CompletionOutput]
    num_cached_tokens: int  # prompt tokens whose KV was found in a prefix cache, of the first answer
    finished: bool = True


@dataclass(slots=True, frozen=True)
class Embedding:
    embedding: list[float]


@dataclass(slots=True, frozen=True, kw_only=True)
class EmbeddingRequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: Embedding
    finished: bool = True


@dataclass(slots=True, frozen=True, kw_only=True)
class BeamSearchSequence:
    tokens: list[int]  # of the prompt, then of the answer
    cum_logprob: float  # of the answer's tokens
    text: str  # of all tokens
    finish_reason: str  # stop or length


@dataclass(slots=True, frozen=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]  # best first
