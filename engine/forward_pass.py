"""One step's forward pass: the rows that the model computes, and the results that each request gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

import torch

from common.types import KVCacheSpec, SampledToken
from engine import messages as m
from engine.batch import SampleInput, Scored, SequenceInput, StepOutput
from engine.guide_state import GuideError
from engine.pooling import take_pooled
from engine.prompt_scores import MAX_EVENT_TOKENS, next_scores
from engine.request import Request, RequestStatus
from engine.schedule import SchedulerOutput
from engine.speculation.checks import accepted_tokens, check_rows
from engine.speculation.speculation import count_draft

log = logging.getLogger(__name__)

_BANS = ("bad_words", "bad_words_ids", "min_tokens")  # parameters that ban tokens, those that may ban many first


class Runner(Protocol):
    """The model on its device. `engine.model_runner.ModelRunner`, or a fake in tests."""

    spec: KVCacheSpec
    kv_cache: torch.Tensor  # [num_blocks, *spec.block_shape]
    num_blocks: int
    max_model_len: int
    vocab_size: int
    hidden_size: int
    window: int  # tokens that the layer which sees the most sees; 0: all
    eos_token_ids: list[int]
    dtype_reason: str
    device: torch.device
    device_reason: str
    free_rows: float  # that a step multiplies while it reads the weights: engine/speculation/step_cost.py

    def execute(
        self, sequences: Sequence[SequenceInput], between_layers: Callable[[], None] = ...
    ) -> list[StepOutput]: ...


class ForwardPass:
    def __init__(
        self,
        runner: Runner,
        eos_token_ids: frozenset[int],
        stop: Callable[[str], None],
        emit: Callable[[m.Event], None],
    ) -> None:
        """`stop` gets the id of each request that computes no more. `emit` takes failures, and scores of prompts."""
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._stop = stop
        self._emit = emit

    def compute(self, output: SchedulerOutput, between_layers: Callable[[], None]) -> list[list[SampledToken]]:
        """Computes the new tokens of each request of `output.num_tokens`, in order. If the pass fails, all these
        requests fail."""
        strays = self._follow_grammars(output)
        sequences = [self._sequence(request, num_new) for request, num_new in output.num_tokens.items()]
        checks = {request: check_rows(request, draft, self._eos_token_ids) for request, draft in output.drafts.items()}
        rows = [*sequences, *(row for each in checks.values() for row in each)]
        try:
            results = self._runner.execute(rows, between_layers=between_layers)
        except Exception:
            # One batch is lost, not the worker: its requests fail with their ids, all others go on.
            log.exception("a step failed", extra={"num_requests": len(sequences)})
            for request in list(output.num_tokens):
                self._fail(request, "INTERNAL", "the engine failed to compute this request")
            return [[] for _ in sequences]
        drawn = iter(results[len(sequences) :])
        further = {request: list(islice(drawn, len(each))) for request, each in checks.items()}
        tokens = []
        for request, sequence, result in zip(output.num_tokens, sequences, results, strict=False):
            token = self._take(request, result)
            tokens.append([] if token is None else [token])
            if request in strays:
                self._fail_stray(request, strays[request])
            elif token is None and sequence.sample is not None:
                self._end_without_token(request)
            elif token is not None and checks.get(request):
                tokens[-1] = accepted_tokens(token, checks[request], further[request])
                count_draft(request, len(checks[request]), len(tokens[-1]) - 1)
        return tokens

    def _follow_grammars(self, output: SchedulerOutput) -> dict[Request, GuideError]:
        """Lets guides take in the tokens that came. Returns the requests whose tokens their grammar does not allow or
        cannot follow, and the reason for each."""
        strays = {}
        for request, num_new in output.num_tokens.items():
            if request.guide is not None and num_new == request.num_missing_tokens:
                try:
                    request.guide.follow(request.token_ids, request.num_prompt_tokens)
                except GuideError as error:
                    strays[request] = error
        return strays

    def _sequence(self, request: Request, num_new: int) -> SequenceInput:
        start = request.num_computed_tokens
        token_ids = request.token_ids[start : start + num_new]
        is_last = num_new == request.num_missing_tokens
        if request.embed is not None:
            return SequenceInput(
                token_ids=token_ids,
                num_computed_tokens=start,
                block_ids=request.block_ids,
                num_pooled=num_new if request.embed.pooling is m.Pooling.MEAN else int(is_last),
            )
        return SequenceInput(
            token_ids=token_ids,
            num_computed_tokens=start,
            block_ids=request.block_ids,
            sample=self._sample(request) if is_last else None,
            score=next_scores(request, num_new),
        )

    def _sample(self, request: Request) -> SampleInput:
        return SampleInput(
            params=request.sampling_params,
            num_output_tokens=request.num_output_tokens,
            changes=request.logit_changes(self._eos_token_ids),
            guide=request.guide,
        )

    def _take(self, request: Request, result: StepOutput) -> SampledToken | None:
        """Returns the token if there is one. Keeps other results with the request, or reports them."""
        if not isinstance(result, Scored):
            return take_pooled(request, result)
        if request.status is RequestStatus.RUNNING:  # else it was aborted in mid-step
            for start in range(0, len(result.scores), MAX_EVENT_TOKENS):
                self._emit(m.PromptScored(request.request_id, result.scores[start : start + MAX_EVENT_TOKENS]))
            request.num_unscored_tokens -= len(result.scores)
            request.needs_every_token = request.num_unscored_tokens > 0
        return result.token

    def _fail_stray(self, request: Request, error: GuideError) -> None:
        """Fails the request as its own fault, so that no other worker is asked: the request would fail there, too."""
        log.warning("an answer left its grammar", extra={"request_id": request.request_id, "reason": str(error)})
        self._fail(request, "INVALID_ARGUMENT", str(error), "sampling_params.guided")

    def _end_without_token(self, request: Request) -> None:
        """Fails the request because its parameters allow no token."""
        guide, params = request.guide, request.sampling_params
        if guide is not None or params.allowed_token_ids:
            name = "allowed_token_ids" if guide is None else "guided"
            reason = (guide and guide.failure) or "what it allows next is banned by other parameters"
        else:
            name = next((name for name in _BANS if getattr(params, name)), "")
            reason = "every token is banned"
        field = f"sampling_params.{name}" if name else "sampling_params"
        self._fail(request, "INVALID_ARGUMENT", f"the answer cannot go on: {reason}", field)

    def _fail(self, request: Request, grpc_code: str, reason: str, field: str = "") -> None:
        self._stop(request.request_id)  # and not released: blocks of a prefill that were announced may be being read
        self._emit(m.RequestFailed(request.request_id, grpc_code, reason, field))
