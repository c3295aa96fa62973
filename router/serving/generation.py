"""The answer to one request: tokens from the fleet become text, and what was done for it is reported."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from common import metrics
from common.errors import BatonError
from common.types import FinishReason, SampledToken
from router.serving.admission import DEADLINE_SLACK_S
from router.serving.demand import Demand
from router.serving.detokenizer import Detokenizer
from router.serving.dispatch import Dispatcher, DispatchReport, NewTokens
from router.serving.request import GenerationRequest, Output, Report
from router.serving.stop_strings import StopStrings

log = logging.getLogger(__name__)


class Generation:
    """Shared by both interfaces of a router."""

    def __init__(self, dispatcher: Dispatcher, demand: Demand) -> None:
        self._dispatcher = dispatcher
        self._demand = demand

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        """Closing the iterator, or cancelling its task, ends the request on every worker."""
        report = DispatchReport()
        try:
            async with aclosing(self._generate(request, report)) as outputs:
                async for output in outputs:
                    yield output
        except BatonError as error:
            _log_unfinished("failed", request, report, f"{error.grpc_code}: {error.message}")
            raise
        except (asyncio.CancelledError, GeneratorExit):
            is_late = time.monotonic() >= request.deadline - DEADLINE_SLACK_S  # gRPC tells a deadline like a cancel
            _log_unfinished("cancelled", request, report, "its deadline has passed" if is_late else "by its client")
            raise

    async def _generate(self, request: GenerationRequest, report: DispatchReport) -> AsyncGenerator[Output, None]:
        params = request.sampling_params
        self._demand.prompt(len(request.prompt_token_ids))
        detokenizer = Detokenizer(request.model.tokenizer, request.prompt_token_ids)
        stops = StopStrings(params.stop)
        num_tokens = 0
        async with aclosing(self._dispatcher.run(request, report)) as run:
            async for new in run:
                self._demand.num_output_tokens += len(new.tokens)
                texts: list[str] = []
                for index, token in enumerate(new.tokens):
                    num_tokens += 1
                    result = stops.add(detokenizer.add(token.token_id), armed=num_tokens > params.min_tokens)
                    texts.append(result.text)
                    if result.matched is not None:
                        kept = new.tokens[: index + 1]
                        yield _last(
                            "".join(texts), kept, FinishReason.STOP, result.matched, request, report, num_tokens
                        )
                        return
                if new.finish_reason is None:
                    yield Output(text="".join(texts), tokens=new.tokens)
                    continue
                # What was held back is text after all, unless its last characters complete a stop string.
                result = stops.add(detokenizer.flush(), armed=num_tokens > params.min_tokens)
                texts.append(result.text)
                reason = new.finish_reason
                stop_reason: str | int | None = _stop_reason(new, request)
                if result.matched is not None:
                    reason, stop_reason = FinishReason.STOP, result.matched
                else:
                    texts.append(stops.flush())
                yield _last("".join(texts), new.tokens, reason, stop_reason, request, report, num_tokens)
                return


def _stop_reason(new: NewTokens, request: GenerationRequest) -> int | None:
    """A token that the client asked to stop at; the model's own end needs no mention."""
    return new.stop_token_id if new.stop_token_id in request.sampling_params.stop_token_ids else None


def _log_unfinished(how: str, request: GenerationRequest, report: DispatchReport, reason: str) -> None:
    extra = {
        "request_id": request.request_id,
        "reason": reason,
        "decode_worker": report.decode_worker,
        "output_tokens": report.num_output_tokens,
    }
    log.info(how, extra=extra)


def _last(
    text: str,
    tokens: list[SampledToken],
    finish_reason: FinishReason,
    stop_reason: str | int | None,
    request: GenerationRequest,
    report: DispatchReport,
    num_tokens: int,
) -> Output:
    final = _report(request, report, num_tokens)
    _observe(request, final)
    return Output(text=text, tokens=tokens, finish_reason=finish_reason, stop_reason=stop_reason, report=final)


def _report(request: GenerationRequest, dispatch: DispatchReport, num_tokens: int) -> Report:
    summary = dispatch.summary
    now = time.monotonic()
    first = now if dispatch.first_token_at is None else dispatch.first_token_at
    last = now if dispatch.last_token_at is None else dispatch.last_token_at
    rest_s = last - first
    return Report(
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=num_tokens,
        num_cached_tokens=summary.num_cached_tokens,
        queue_ms=summary.queue_ms,
        prefill_ms=summary.prefill_ms,
        handoff_ms=summary.handoff_ms,
        transfer_ms=summary.transfer_ms,
        first_decode_ms=summary.first_decode_ms,
        ttft_ms=1000 * (first - request.arrived_at),
        total_ms=1000 * (last - request.arrived_at),
        tokens_per_second=(num_tokens - 1) / rest_s if num_tokens > 1 and rest_s > 0 else 0.0,
        prefill_worker=summary.prefill_worker,
        decode_worker=dispatch.decode_worker,
        num_blocks_moved=summary.num_blocks_moved,
        num_bytes_moved=summary.num_bytes_moved,
        fallback_reason=summary.fallback_reason,
        num_retries=dispatch.num_retries + summary.num_prefill_retries,
        num_migrations=dispatch.num_migrations,
        num_preemptions=summary.num_preemptions,
        num_handovers=dispatch.num_handovers,
    )


def _observe(request: GenerationRequest, report: Report) -> None:
    metrics.router_prompt_tokens.observe(report.num_prompt_tokens)
    metrics.router_output_tokens.observe(report.num_output_tokens)
    metrics.router_cached_tokens.inc(report.num_cached_tokens)
    metrics.router_ttft.observe(report.ttft_ms / 1000)
    metrics.router_e2e.observe(report.total_ms / 1000)
    if report.num_output_tokens > 1:
        metrics.router_tpot.observe((report.total_ms - report.ttft_ms) / 1000 / (report.num_output_tokens - 1))
    if report.fallback_reason:
        metrics.router_fallbacks.inc()
    extra: dict[str, object] = {
        "request_id": request.request_id,
        "decode_worker": report.decode_worker,
        "prefill_worker": report.prefill_worker,
        "prompt_tokens": report.num_prompt_tokens,
        "output_tokens": report.num_output_tokens,
        "ttft_ms": round(report.ttft_ms, 1),
        "total_ms": round(report.total_ms, 1),
    }
    if request.client:
        extra["client"] = request.client
    if report.fallback_reason:
        extra["fallback_reason"] = report.fallback_reason
    log.info("answered", extra=extra)
