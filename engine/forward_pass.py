"""One step's forward pass: the rows that the device computes, and the results that each request gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from common.types import SampledToken
from engine import messages as m
from engine.device import Device, Ticket
from engine.pooling import add_pooled
from engine.reports import report_draft
from engine.request import Request, RequestStatus
from engine.sampling.draws import draw
from engine.sampling.guide import Guide, GuideError, make_masks
from engine.sampling.prompt_scores import MAX_EVENT_TOKENS, next_scores
from engine.scheduling.schedule import SchedulerOutput
from engine.speculation.checks import DraftedToken, accepted_tokens, checked_tokens
from engine.step import Drawn, StepInput, StepOutput, StepRow

log = logging.getLogger(__name__)

_BANS = ("bad_words", "bad_words_ids", "min_tokens")  # parameters that ban tokens, those that may ban many first


@dataclass(slots=True, frozen=True)
class Pass:
    """A step that the device computes. Its rows are those of `requests`, then those of their drafts."""

    ticket: Ticket
    requests: list[Request]
    drawing: set[Request]  # whose next token the pass draws
    embeds: bool  # whether one of them asks for an embedding
    strays: dict[Request, GuideError] = field(default_factory=dict)  # their grammar does not allow their tokens
    checks: dict[Request, list[DraftedToken]] = field(default_factory=dict)


class ForwardPass:
    def __init__(
        self,
        device: Device,
        eos_token_ids: frozenset[int],
        stop: Callable[[str], None],
        emit: Callable[[m.Event], None],
    ) -> None:
        """`stop` gets the id of each request that computes no more. `emit` takes failures, and scores of prompts."""
        self._device = device
        self._eos_token_ids = eos_token_ids
        self._stop = stop
        self._emit = emit

    def begin(self, output: SchedulerOutput, before: Pass | None = None) -> Pass:
        """Begins to compute the new tokens of each request of `output.num_tokens`. `before`: the step under way, if
        there is one; each row then begins with the token that its request is given there."""
        if before is not None:
            return self._begin_after(output, before)
        last = {
            request
            for request, num_new in output.num_tokens.items()
            if num_new == request.num_missing_tokens and not request.is_part
        }
        if output.drafts or any(request.guide is not None for request in last):
            return self._begin_checked(output, last)
        rows = [self._row(request, num_new, {}) for request, num_new in output.num_tokens.items()]
        return self._begin(output, rows, last)

    def _begin(self, output: SchedulerOutput, rows: list[StepRow], drawing: set[Request]) -> Pass:
        number = self._device.next_number()
        ticket = self._device.begin(StepInput(number=number, rows=rows, copies=output.host_copies))
        for request in drawing:
            request.num_pending += 1
        requests = list(output.num_tokens)
        return Pass(ticket, requests, drawing, embeds=any(one.embed is not None for one in requests))

    def _begin_checked(self, output: SchedulerOutput, last: set[Request]) -> Pass:
        """As `begin`, if grammars allow some tokens alone, or drafts are to be checked. `last`: requests that get a
        token."""
        guided = [request for request in output.num_tokens if request.guide is not None and request in last]
        strays = self._follow_grammars(guided)
        checks = {
            request: checked_tokens(request, draft, self._eos_token_ids) for request, draft in output.drafts.items()
        }
        drafted = [(request, one) for request, ones in checks.items() for one in ones]
        guides = [
            *(request.guide for request in guided if request.guide),
            *(one.guide for _, one in drafted if one.guide),
        ]
        masks = dict(zip(guides, make_masks(guides), strict=True)) if guides else {}
        rows = [
            *(self._row(request, num_new, masks) for request, num_new in output.num_tokens.items()),
            *(self._drafted_row(request, one, masks) for request, one in drafted),
        ]
        begun = self._begin(output, rows, last)
        for request, ones in checks.items():
            request.num_pending += len(ones)
        return replace(begun, strays=strays, checks=checks)

    def _begin_after(self, output: SchedulerOutput, before: Pass) -> Pass:
        number = before.ticket.number
        drawn = {request: Drawn(number, row) for row, request in enumerate(before.requests)}
        rows = [
            StepRow(
                token_ids=[0],
                num_computed_tokens=output.start(request),
                block_ids=request.block_ids,
                draw=draw(request.sampling_params, request.num_output_tokens + 1),
                first=drawn[request],
            )
            for request in output.num_tokens
        ]
        return self._begin(output, rows, set(output.num_tokens))

    def end(self, begun: Pass, meanwhile: Callable[[], None]) -> list[list[SampledToken]] | None:
        """Waits for the pass: the tokens of each of its requests, in order; None if the device gave it up. A request
        whose row failed fails."""
        output = self._device.end(begun.ticket, meanwhile)
        for request in begun.drawing:
            request.num_pending -= 1 + len(begun.checks.get(request, ()))
        if output.is_given_up:
            return None
        if begun.strays or begun.checks or output.failures or output.pooled or output.scores:
            drawn = iter(range(len(begun.requests), len(output.tokens)))  # the rows of drafts
            of_drafts = {request: list(islice(drawn, len(ones))) for request, ones in begun.checks.items()}
            return [
                self._result(begun, output, row, request, of_drafts.get(request, []))
                for row, request in enumerate(begun.requests)
            ]
        return [
            [token] if token is not None else self._result(begun, output, row, request, [])
            for row, (request, token) in enumerate(zip(begun.requests, output.tokens, strict=True))
        ]

    def _result(
        self, begun: Pass, output: StepOutput, row: int, request: Request, of_drafts: Sequence[int]
    ) -> list[SampledToken]:
        """The tokens of one request, once all else that came of its rows is taken in. `of_drafts`: the rows of its
        drafts."""
        if request.status is not RequestStatus.RUNNING:  # it ended while the step was under way, or before that
            return []
        if any(place in output.failures for place in (row, *of_drafts)):
            # One batch is lost, not the worker: its requests fail with their ids, all others go on.
            self._fail(request, "INTERNAL", "the engine failed to compute this request")
            return []
        if row in output.pooled or row in output.scores:
            self._take(request, row, output)
        token = output.tokens[row]
        if request in begun.strays:
            self._fail_stray(request, begun.strays[request])
        elif token is None and request in begun.drawing and request.embed is None:
            self._end_without_token(request)
        elif token is not None and of_drafts:
            ones = begun.checks[request]
            tokens = accepted_tokens(token, ones, [output.tokens[place] for place in of_drafts])
            request.drafts.count(len(ones), len(tokens) - 1)
            report_draft(len(ones), len(tokens) - 1)
            return tokens
        return [] if token is None else [token]

    def _follow_grammars(self, requests: Iterable[Request]) -> dict[Request, GuideError]:
        """Lets guides take in the tokens that came. Returns the requests whose tokens their grammar does not allow or
        cannot follow, and the reason for each."""
        strays = {}
        for request in requests:
            if request.guide is not None:
                try:
                    request.guide.follow(request.token_ids, request.num_prompt_tokens)
                except GuideError as error:
                    strays[request] = error
        return strays

    def _row(self, request: Request, num_new: int, masks: Mapping[Guide, bytes]) -> StepRow:
        if request.embed is not None:
            return self._pooled_row(request, num_new, request.embed)
        start = request.num_computed_tokens
        is_last = num_new == request.num_missing_tokens and not request.is_part
        changes = request.logit_changes(self._eos_token_ids) if is_last and request.changes_logits else None
        mask = masks[request.guide] if is_last and request.guide else b""
        return StepRow(
            token_ids=request.token_ids[start : start + num_new],
            num_computed_tokens=start,
            block_ids=request.block_ids,
            draw=draw(request.sampling_params, request.num_output_tokens, changes, mask) if is_last else None,
            score=next_scores(request, num_new) if request.num_unscored_tokens else None,
        )

    @staticmethod
    def _pooled_row(request: Request, num_new: int, embed: m.Embed) -> StepRow:
        start = request.num_computed_tokens
        is_last = num_new == request.num_missing_tokens
        return StepRow(
            token_ids=request.token_ids[start : start + num_new],
            num_computed_tokens=start,
            block_ids=request.block_ids,
            num_pooled=num_new if embed.pooling is m.Pooling.MEAN else int(is_last),
        )

    @staticmethod
    def _drafted_row(request: Request, one: DraftedToken, masks: Mapping[Guide, bytes]) -> StepRow:
        mask = masks[one.guide] if one.guide else b""
        num_output_tokens = request.num_output_tokens + one.place + 1
        return StepRow(
            token_ids=[one.token_id],
            num_computed_tokens=request.num_tokens + one.place,
            block_ids=request.block_ids,
            draw=draw(request.sampling_params, num_output_tokens, one.changes, mask),
        )

    def _take(self, request: Request, row: int, output: StepOutput) -> None:
        """Keeps with the request what came beside its token, or reports it."""
        if row in output.pooled:
            add_pooled(request, output.pooled[row])
        if row in output.scores:
            scores = output.scores[row]
            for start in range(0, len(scores), MAX_EVENT_TOKENS):
                self._emit(m.PromptScored(request.request_id, scores[start : start + MAX_EVENT_TOKENS]))
            request.num_unscored_tokens -= len(scores)
            request.needs_every_token = request.num_unscored_tokens > 0

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
        self._stop(request.request_id)  # and not released: blocks of a prefill that were published may be being read
        self._emit(m.RequestFailed(request.request_id, grpc_code, reason, field))
