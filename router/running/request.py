"""What the interfaces, the gateway and the dispatcher pass to each other: a request, pieces of its answer, and
what the fleet has done for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from common.beam_search import BeamSearchParams
from common.cache_hints import Retain
from common.guided import Guided
from common.sampling import FieldName, SamplingParams
from common.tracing import TraceContext, Traced
from common.types import FinishReason, SampledToken
from protos.baton.v1 import types_pb2
from protos.messages import message_of
from router.fleet.served_model import ServedModel
from router.limits.clients import NOBODY, ApiClient, Charge
from router.limits.targets import NO_SLO, Slo
from router.running.room import Room
from text.answer_form import AnswerForm
from text.answer_parts import Part, Reading, ToolCallDelta
from text.conversation import Tools


@dataclass(slots=True, frozen=True)
class Prompt:
    """What is to be continued. `field` is the client's name for it."""

    token_ids: list[int]
    field: str
    answer: AnswerForm | None = None  # of a chat: what the answer may be
    is_cut: bool = False  # whether it lacks its first tokens, as `truncate_prompt_tokens` asked
    notes: tuple[str, ...] = ()  # of its report: what was made of the client's words that it may not expect


@dataclass(slots=True, eq=False)
class Siblings:
    """All answers to one prompt. They go to one decode worker, which has the prompt's blocks once for all of them."""

    decode: tuple[str, str] | None = None  # `Endpoint.incarnation` of where the first one went


OBJECT_BYTES = 112  # a token's logprob, with its numbers
_OWN = ("max_tokens", "seed", "prompt_logprobs")  # sampling parameters in which answers to one body differ


@dataclass(slots=True, eq=False)
class SamplingMessages:
    """Sampling parameters as workers take them, for all answers to a body: what may be long is converted once."""

    _params: SamplingParams | None = None  # those of `_message`
    _message: types_pb2.SamplingParams = field(default_factory=types_pb2.SamplingParams)

    def of(self, params: SamplingParams) -> types_pb2.SamplingParams:
        """Nobody changes what this returns."""
        known = self._params
        if known is None:
            self._params, self._message = params, message_of(params, types_pb2.SamplingParams)
            return self._message
        if replace(params, **{name: getattr(known, name) for name in _OWN}) != known:
            self._params, self._message = params, message_of(params, types_pb2.SamplingParams)
        message = types_pb2.SamplingParams()
        message.CopyFrom(self._message)
        message.max_tokens, message.seed = params.max_tokens, params.seed
        message.ClearField("prompt_logprobs")
        if params.prompt_logprobs is not None:
            message.prompt_logprobs = params.prompt_logprobs
        return message


class AnyRequest(Protocol):
    """What is told of a request, whatever it asks for."""

    @property
    def request_id(self) -> str: ...
    @property
    def model(self) -> ServedModel: ...
    @property
    def operation(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def arrived_at(self) -> float: ...
    @property
    def deadline(self) -> float: ...
    @property
    def client(self) -> ApiClient: ...
    @property
    def traced(self) -> Traced | None: ...


@dataclass(slots=True, frozen=True, kw_only=True)
class GenerationRequest:
    """One answer to be generated: validated, and as workers take it. Made by `Preparation.requests`."""

    request_id: str
    model: ServedModel
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    sampling_messages: SamplingMessages = field(default_factory=SamplingMessages)
    cache_salt: str = ""
    retain: Retain | None = None
    priority: int = 0
    slo: Slo = NO_SLO
    arrived_at: float  # time.monotonic() at which it came
    deadline: float  # time.monotonic() at which the client gives up
    client: ApiClient = NOBODY
    session: str = ""  # requests of one session belong together; empty: it belongs to none
    notes: tuple[str, ...] = ()  # `Prompt.notes`
    explain: bool = False  # whether the client wants to know why the request went where it went
    prompt_field: str = "prompt"  # the client's name for the prompt
    operation: str = "text_completion"  # or "chat"
    reading: Reading | None = None  # None if the answer is nothing but text
    form: Guided | None = None  # the client's own, if the form of the whole answer is another one
    tools: Tools | None = None  # whose schemas are a part of the answer's form
    siblings: Siblings = field(default_factory=Siblings)
    charge: Charge = field(default_factory=Charge)
    beams: BeamSearchParams | None = None  # the answers to the prompt are those of a beam search
    traced: Traced | None = None  # None: it is not sampled
    room: Room | None = None  # which it has to make way in for others, as a request of a batch; None: it stays
    is_follow_up: bool = False  # a further step of a request whose way was told of
    sampling_field: FieldName = str  # from a sampling parameter's name to the client's name for it
    picked: str = ""  # what an endpoint picker chose, signed (`router.running.picks`)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling_params.prompt_logprobs is not None

    def client_field(self, field: str) -> str:
        """The client's name for a field of `DecodeRequest`, as workers name it in errors."""
        if field in ("prompt_token_ids", "output_token_ids"):
            return self.prompt_field
        if field.split(".")[0] == "targets":
            return field.replace("targets", "slo", 1)
        name = field.removeprefix("sampling_params.")
        return field if name == field else self.sampling_field(name)

    def numbered(self, index: int, *, is_first: bool) -> GenerationRequest:
        """The index-th of several answers to one request: another id and seed, the same everything else. Only the first
        answer to a prompt asks for the prompt's logprobs: to score a prompt is to compute all of it."""
        if index == 0:
            return self
        params = self.sampling_params
        return replace(
            self,
            request_id=f"{self.request_id}-{index}",
            sampling_params=replace(
                params,
                seed=(params.seed + index + 2**63) % 2**64 - 2**63,
                prompt_logprobs=params.prompt_logprobs if is_first else None,
            ),
            charge=Charge(self.charge.num_tokens),
            traced=None if self.traced is None else self.traced.sibling(),
            picked="",
        )


@dataclass(slots=True, kw_only=True)
class Output:
    """A piece of an answer; the last one has `finish_reason`, `report` and `usage`. Nobody changes it, but it is not
    frozen: that would triple what it costs to make one for each token."""

    text: str  # whole characters; may lag behind `tokens`
    tokens: list[SampledToken]
    prompt_logprobs: Sequence[SampledToken] = ()  # further tokens, from the second on
    reasoning: str = ""
    num_reasoning_tokens: int = 0  # of `tokens`; 0 without `reasoning`
    tool_calls: Sequence[ToolCallDelta] = ()
    parts: Sequence[Part] = ()  # text, reasoning and calls in their order; empty if there is nothing but text
    logprob: float | None = None  # of all tokens of the answer together; of a beam search
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the stop token's id, that ended it
    is_cut: bool = False  # it ended inside a call of a tool, whatever ended it
    report: types_pb2.RequestReport | None = None
    usage: types_pb2.Usage | None = None

    @property
    def num_kept_bytes(self) -> int:
        """About what it takes to keep this."""
        tokens = [*self.tokens, *self.prompt_logprobs]
        num_objects = 4 + len(tokens) + sum(len(token.top_logprobs) for token in tokens)
        return OBJECT_BYTES * num_objects + len(self.text) + len(self.reasoning)

    @property
    def is_only_text(self) -> bool:
        """Whether it has a text, and nothing that needs telling beside it."""
        return bool(self.text) and not (self.finish_reason or self.reasoning or self.tool_calls or self.prompt_logprobs)


@dataclass(slots=True)
class NewTokens:
    """What came from the fleet; the last one has `finish_reason`. Not frozen, as `Output`."""

    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_logprobs: Sequence[SampledToken] = ()  # all of them come before the first token


@dataclass(slots=True)
class Attempt:
    """One call of a decode worker, or of the worker that makes an embedding. Times are seconds of the monotonic
    clock."""

    cause: str  # "new", "retry", "migration", "handover", or "resumed" after it made way
    decode_worker: str
    started_at: float
    first_token_at: float | None = None
    ended_at: float | None = None  # None for the last one, which ends with the request
    failure: str = ""  # why another one followed
    prefill_worker: str = ""  # that was to compute the prompt; empty: the decode worker itself
    context: TraceContext | None = None  # of its span


@dataclass(slots=True)
class Progress:
    """What happened to one request so far; complete once its last tokens came. Times are seconds of the monotonic
    clock."""

    report: types_pb2.RequestReport = field(default_factory=types_pb2.RequestReport)
    usage: types_pb2.Usage = field(default_factory=types_pb2.Usage)
    num_retries: int = 0  # other decode workers tried before the first token; the report counts prefill workers, too
    queued_at: float | None = None  # it was prepared, and waited for its turn from then on
    turn_at: float | None = None  # workers may have it
    first_token_at: float | None = None
    last_token_at: float | None = None
    attempts: list[Attempt] = field(default_factory=list)
    has_ended: bool = False
    texts: list[str] | None = None  # of the answer, if its span holds them
    num_output_tokens: int = 0
    num_prompt_logprobs: int = 0  # that the caller has
    is_with_reader: bool = False  # a piece of the answer is being read: nothing waits for the next one
    abort_reason: str = ""  # why an operator ends it
    num_pauses: int = 0  # how often it made way for others: its times then say nothing of the fleet
    num_inputs: int = 0  # of a request for embeddings; `attempts` are of the first ones, side by side

    @property
    def queue_s(self) -> float:
        """How long it waited for its turn; 0 if that has not come."""
        return self.turn_at - self.queued_at if self.turn_at is not None and self.queued_at is not None else 0.0

    @property
    def tpot_ms(self) -> float | None:
        """Mean milliseconds from one token of the answer to the next; None if there are not two."""
        first, last, num = (
            self.first_token_at,
            self.last_token_at,
            self.usage.completion_tokens or self.num_output_tokens,
        )
        return None if first is None or last is None or num < 2 else 1000 * (last - first) / (num - 1)

    def lost(self, failure: str, now: float) -> None:
        """Another attempt follows."""
        if self.attempts:
            self.attempts[-1].ended_at, self.attempts[-1].failure = now, failure

    def begins(self, now: float) -> None:
        """The first token of an attempt came."""
        if self.attempts:
            self.attempts[-1].first_token_at = now

    def came(self, num_tokens: int, now: float) -> None:
        """Counts tokens of the answer."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.num_output_tokens += num_tokens


def new_request_id() -> str:
    return os.urandom(16).hex()
