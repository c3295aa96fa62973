"""The router's spans of one request, from the times that were noted while it ran. Names and attributes are those of
OpenTelemetry's conventions for generative AI, and `gen_ai.latency.*` as vLLM's spans have them.

    chat smollm2-135m-instruct                   the whole request, a child of the client's span
    ├── prepare, queue                           before workers may have it
    ├── decode, decode (retry), ...              each call of a decode worker; the worker's spans are its children
    └── stream                                   first to last token
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from common.tracing import RequestSpans, Span, SpanKind, TraceContext, Traced, Value
from router.running.known_requests import Ending
from router.running.request import AnyRequest, Attempt, GenerationRequest, Progress
from router.running.slo import facts_of

PROVIDER = "baton"
MAX_TOLD_TOKENS = 2048  # of a prompt: it is decoded while others wait
MAX_TOLD_CHARS = 16_384  # of an answer


def request_spans(
    traced: Traced, request: GenerationRequest, progress: Progress, ending: Ending, ended_at: float
) -> Sequence[Span]:
    """`ended_at`: seconds of the monotonic clock."""
    spans = _until_its_turn(traced, request, progress, ended_at)
    _add_attempts(spans, progress, ended_at)
    events = []
    if progress.first_token_at is not None:
        events.append(("first token", progress.first_token_at))
        last = progress.first_token_at if progress.last_token_at is None else progress.last_token_at
        spans.add("stream", progress.first_token_at, last, {"baton.output_tokens": progress.num_output_tokens})
    attributes = _attributes(request, progress, ending, ended_at)
    return spans.whole(
        f"{request.operation} {request.model.limits.model}",
        request.arrived_at,
        ended_at,
        attributes,
        events,
        _error(ending),
    )


def embedding_spans(
    traced: Traced, request: AnyRequest, progress: Progress, ending: Ending, ended_at: float
) -> Sequence[Span]:
    """The same of a request for embeddings: each call of a worker is an `embed`, of the first inputs alone."""
    spans = _until_its_turn(traced, request, progress, ended_at)
    for attempt in progress.attempts:
        _add_attempt(spans, "embed", "baton.v1.EmbedService", attempt, ended_at)
    model = request.model.limits.model
    given: dict[str, Value | None] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": progress.usage.cached_tokens,
        "gen_ai.latency.e2e": ended_at - request.arrived_at,
        "gen_ai.latency.time_in_queue": progress.queue_s,
        "error.type": None if ending.status == "ok" else ending.status,
        "baton.client": request.client.name or None,
        "baton.num_inputs": progress.num_inputs,
        "baton.num_retries": progress.report.num_retries or None,
    }
    attributes = {name: value for name, value in given.items() if value is not None}
    return spans.whole(f"{request.operation} {model}", request.arrived_at, ended_at, attributes, error=_error(ending))


def _until_its_turn(traced: Traced, request: AnyRequest, progress: Progress, ended_at: float) -> RequestSpans:
    """The spans before a worker is asked. What had not begun by the end has none."""
    spans = RequestSpans(traced)
    queued_at = ended_at if progress.queued_at is None else progress.queued_at
    spans.add("prepare", request.arrived_at, queued_at)
    if progress.queued_at is not None:
        spans.add("queue", queued_at, ended_at if progress.turn_at is None else progress.turn_at)
    return spans


def _error(ending: Ending) -> str:
    return "" if ending.status == "ok" else ending.reason or ending.status


def _add_attempts(spans: RequestSpans, progress: Progress, ended_at: float) -> None:
    earlier = None
    for attempt in progress.attempts:
        _add_attempt(spans, "decode", "baton.v1.DecodeService", attempt, ended_at, earlier)
        earlier = attempt.context


def _add_attempt(
    spans: RequestSpans,
    name: str,
    service: str,
    attempt: Attempt,
    ended_at: float,
    earlier: TraceContext | None = None,
) -> None:
    attributes: dict[str, Value] = {
        "rpc.system": "grpc",
        "rpc.service": service,
        "server.address": attempt.decode_worker.rpartition(":")[0],
        "baton.decode_worker": attempt.decode_worker,
        "baton.cause": attempt.cause,
    }
    if (port := attempt.decode_worker.rpartition(":")[2]).isdecimal():
        attributes["server.port"] = int(port)
    spans.add(
        name if attempt.cause == "new" else f"{name} ({attempt.cause})",
        attempt.started_at,
        ended_at if attempt.ended_at is None else attempt.ended_at,
        attributes,
        context=attempt.context,
        kind=SpanKind.CLIENT,
        links=() if earlier is None else (earlier,),
        error=attempt.failure,
    )


def _attributes(request: GenerationRequest, progress: Progress, ending: Ending, ended_at: float) -> dict[str, Value]:
    params, report, timings, usage = request.sampling_params, progress.report, progress.report.timings, progress.usage
    model = request.model.limits.model
    given: dict[str, Value | None] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.id": request.request_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [ending.finish_reason] if ending.finish_reason else None,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.output_tokens": usage.completion_tokens or progress.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens or None,
        "error.type": None if ending.status == "ok" else ending.status,
        "baton.client": request.client.name or None,
        "baton.decode_worker": report.decode_worker or None,
        "baton.prefill_worker": report.prefill_worker or None,
        "baton.fallback_reason": report.fallback_reason or None,
        "baton.num_retries": report.num_retries or None,
        "baton.num_migrations": report.num_migrations or None,
        "baton.num_hedges": report.num_hedges or None,
        "baton.num_preemptions": report.num_preemptions or None,
        "baton.num_blocks_moved": report.num_blocks_moved or None,
        "baton.num_bytes_moved": report.num_bytes_moved or None,
        "baton.num_drafted_tokens": report.num_drafted_tokens or None,
        "baton.num_accepted_tokens": report.num_accepted_tokens or None,
    }
    if report.HasField("slo"):
        given |= {f"baton.slo.{name}": value for name, value in facts_of(report.slo).items()}
    given["gen_ai.latency.e2e"] = ended_at - request.arrived_at
    given["gen_ai.latency.time_in_queue"] = progress.queue_s + timings.queue_ms / 1000
    if progress.first_token_at is not None:
        first_s = progress.first_token_at - request.arrived_at
        decode_s = (progress.last_token_at or progress.first_token_at) - progress.first_token_at
        prefill_s = timings.prefill_ms / 1000
        given["gen_ai.response.time_to_first_chunk"] = first_s
        given["gen_ai.latency.time_to_first_token"] = first_s
        given["gen_ai.latency.time_in_model_prefill"] = prefill_s
        given["gen_ai.latency.time_in_model_decode"] = decode_s
        given["gen_ai.latency.time_in_model_inference"] = prefill_s + decode_s
    if progress.texts is not None:
        given |= _content(request, progress.texts, ending)
    return {name: value for name, value in given.items() if value is not None}


def _content(request: GenerationRequest, texts: Sequence[str], ending: Ending) -> dict[str, Value | None]:
    """What was said, which operators have to ask for: the beginning of the prompt as the model read it, and that of the
    answer."""
    told = request.prompt_token_ids[:MAX_TOLD_TOKENS]
    prompt = request.model.tokenizer.decode(told, skip_special_tokens=False)
    message = {
        "role": "assistant",
        "parts": [{"type": "text", "content": "".join(texts)[:MAX_TOLD_CHARS]}],
        "finish_reason": ending.finish_reason or "error",
    }
    return {
        "baton.prompt": prompt,
        "gen_ai.request.stop_sequences": list(request.sampling_params.stop) or None,
        "gen_ai.output.messages": json.dumps([message], ensure_ascii=False),
    }
