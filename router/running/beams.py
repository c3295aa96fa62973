"""Beam search on the fleet: checks the request's parameters, and searches.

Each token of each sequence is one request, for the likeliest next tokens. All requests go to one decode worker, whose
prefix cache has the full blocks of the sequence. So the worker only computes the last, partial block, and asks no
prefill worker once it has the prompt's blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence, Sized
from contextlib import aclosing
from dataclasses import replace

from common.beam_search import Beam, BeamSearch, BeamSearchParams
from common.choices import Choices
from common.errors import InternalError, InvalidArgumentError
from common.peers import MAX_BYTES, MAX_COUNT
from common.sampling import MAX_LOGPROBS, FieldName, GivenSampling, SamplingParams, parameters
from common.targets import LatencyTargets
from common.types import SampledToken, TokenLogprob
from router.limits.targets import Slo
from router.running.dispatch import Dispatcher
from router.running.request import GenerationRequest, Progress, SamplingMessages

MAX_BLOCKS = 2**22
"""Blocks of prompts that the requests of all searches in one body may name together. Each beam's next token is a
request with the whole prompt. Naming a block takes about a microsecond in the router, and another in the worker: so
many take some seconds of one core. That is 128 tokens at width 4 after 131,072 tokens in blocks of 16."""
_KEPT = ("max_tokens", "ignore_eos", "temperature", "seed", "speculate", "truncate_prompt_tokens")
_COUNTS = (
    "num_blocks_moved",
    "num_blocks_lent",
    "num_retries",
    "num_migrations",
    "num_handovers",
    "num_preemptions",
    "num_hedges",
    "num_hedges_won",
)


def beam_sampling(given: GivenSampling, name: FieldName) -> GivenSampling:
    """The sampling parameters of a search, which draws nothing. Raises `InvalidArgumentError` for a parameter that a
    beam search would ignore."""
    for parameter, value in given.items():
        is_empty = value is None or (isinstance(value, Sized) and len(value) == 0)
        if parameter not in _KEPT and not is_empty and value != parameters()[parameter].default:
            raise InvalidArgumentError(name(parameter), "is not for beam search")
    if given.get("temperature", 0) != 0:
        reason = f"must be 0, not {given['temperature']}: beam search draws nothing"
        raise InvalidArgumentError(name("temperature"), reason)
    return {**given, "temperature": 0}


def beam_params(
    choices: Choices, params: SamplingParams, eos_token_ids: Collection[int], name: FieldName
) -> BeamSearchParams:
    """Call after `choices.check`. `name` gives the client's names of its fields."""
    num_ends = 0 if params.ignore_eos else len(eos_token_ids)
    if choices.n + num_ends > MAX_LOGPROBS:
        most = f"at most {MAX_LOGPROBS - num_ends}" if num_ends < MAX_LOGPROBS else "without use_beam_search"
        reason = f"must be {most}, not {choices.n}: the model has {num_ends} tokens that end a sequence"
        raise InvalidArgumentError(name("n"), reason)
    return BeamSearchParams(
        beam_width=choices.n,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        length_penalty=choices.length_penalty,
        early_stopping=choices.early_stopping,
    )


def most_tokens(num_beams: int, num_prompt_tokens: int, block_size: int) -> int:
    """How many tokens each beam may have, if one body asks for `num_beams` after such a prompt."""
    return MAX_BLOCKS // (num_beams * -(-num_prompt_tokens // block_size))


async def search(
    dispatcher: Dispatcher,
    request: GenerationRequest,
    progress: Progress,
    count: Callable[[int], None],
) -> list[Beam]:
    """The best sequences of `request.beams`, best first. Fills `progress` as it goes, and tells `count` of the tokens
    that each step had computed. The first failure ends the search, and so does cancelling it."""
    if request.beams is None:
        raise ValueError("the request asks for no beam search")
    found = BeamSearch(request.beams, request.model.eos_token_ids)
    step, next_targets = 0, _next_targets(request.slo.targets)
    while found.running:
        asks = [_ask(request, beam, f"{step}.{number}", found.num_next) for number, beam in enumerate(found.running)]
        if step:
            asks = [replace(ask, slo=Slo(next_targets), arrived_at=time.monotonic()) for ask in asks]
        answers = await _together(dispatcher, asks)
        for number, (_, of_one) in enumerate(answers):
            _add(progress, of_one, is_first=step == number == 0)
        count(len(answers))
        found.advance([tokens for tokens, _ in answers])
        step += 1
    return found.finished


def _next_targets(targets: LatencyTargets | None) -> LatencyTargets | None:
    """Those of the requests for further tokens: each is to give its only token within the time of one."""
    return None if targets is None or targets.tpot_ms is None else LatencyTargets(ttft_ms=targets.tpot_ms)


def _ask(request: GenerationRequest, beam: Beam, number: str, num_next: int) -> GenerationRequest:
    """The request for the likeliest next tokens of `beam`."""
    return replace(
        request,
        request_id=f"{request.request_id}-{number}",
        prompt_token_ids=[*request.prompt_token_ids, *beam.token_ids],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=num_next),
        sampling_messages=SamplingMessages(),
        is_follow_up=bool(beam.token_ids),
        retain=None if beam.token_ids else request.retain,
        traced=None if beam.token_ids else request.traced,
    )


_NextTokens = tuple[Sequence[TokenLogprob], Progress]


async def _together(dispatcher: Dispatcher, asks: Sequence[GenerationRequest]) -> list[_NextTokens]:
    tasks = [asyncio.create_task(_next_tokens(dispatcher, ask)) for ask in asks]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next_tokens(dispatcher: Dispatcher, ask: GenerationRequest) -> _NextTokens:
    progress, tokens = Progress(), list[SampledToken]()
    async with aclosing(dispatcher.run(ask, progress)) as run:
        async for new in run:
            tokens += new.tokens
            if new.finish_reason is not None:
                break
    num_wanted = min(ask.sampling_params.logprobs or 0, ask.model.limits.vocab_size)
    if len(tokens) != 1 or len(tokens[0].top_logprobs) != num_wanted:
        raise InternalError(f"decode worker {progress.report.decode_worker} gave no {num_wanted} likeliest tokens")
    return tokens[0].top_logprobs, progress


def _add(total: Progress, one: Progress, *, is_first: bool) -> None:
    """Adds the report of one request for next tokens to that of the search. Timings and cached tokens are those of the
    first request."""
    report = total.report
    if is_first:
        report.CopyFrom(one.report)
        total.usage.CopyFrom(one.usage)
        total.first_token_at = one.first_token_at
        total.attempts = one.attempts
    else:
        for name in _COUNTS:
            setattr(report, name, min(getattr(report, name) + getattr(one.report, name), MAX_COUNT))
        report.num_bytes_moved = min(report.num_bytes_moved + one.report.num_bytes_moved, MAX_BYTES)
        report.decode_worker = one.report.decode_worker
        report.fallback_reason = report.fallback_reason or one.report.fallback_reason
    total.last_token_at = one.last_token_at
    total.num_output_tokens += one.num_output_tokens
