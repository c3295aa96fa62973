"""What every interface does with a request: admit, validate, tokenize, dispatch, turn tokens into text.

gRPC and REST translate to `Prompt` and `GenerationRequest` and from `Output`; nothing else differs between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from common import metrics
from common.errors import BatonError, UnavailableError
from common.types import FinishReason, SampledToken, SamplingParams
from common.validation import (
    FieldName,
    SamplingFields,
    check_cache_salt,
    check_model,
    check_priority,
    check_prompt,
    check_request_id,
    check_text,
    validate_sampling,
)
from router.api.api_keys import current_client
from router.fleet.registry import Registry, ServedModel
from router.serving.chat_template import Message
from router.serving.demand import Demand
from router.serving.detokenizer import Detokenizer
from router.serving.dispatch import Dispatcher, DispatchReport, DispatchRequest, NewTokens
from router.serving.stop_strings import StopStrings

log = logging.getLogger(__name__)

DEADLINE_SLACK_S = 0.05  # clocks of gRPC and of this process may differ by so much


@dataclass(slots=True, frozen=True)
class Prompt:
    """What is to be continued. `field` is the client's name for it."""

    token_ids: list[int]
    field: str


@dataclass(slots=True, frozen=True, kw_only=True)
class GenerationRequest:
    """One answer to be generated; made by `Front.prepare`."""

    request_id: str
    model: ServedModel
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    arrived_at: float
    deadline: float
    client: str = ""  # name of the API key

    def numbered(self, index: int) -> GenerationRequest:
        """The index-th of several answers to one request: another id and seed, the same everything else."""
        if index == 0:
            return self
        seed = (self.sampling_params.seed + index + 2**63) % 2**64 - 2**63
        return replace(
            self,
            request_id=f"{self.request_id}-{index}",
            sampling_params=replace(self.sampling_params, seed=seed),
        )


@dataclass(slots=True, frozen=True, kw_only=True)
class Report:
    """What Baton did for one answer. Times in milliseconds."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    queue_ms: float
    prefill_ms: float
    handoff_ms: float
    transfer_ms: float
    first_decode_ms: float
    ttft_ms: float
    total_ms: float
    tokens_per_second: float
    prefill_worker: str
    decode_worker: str
    num_blocks_moved: int
    num_bytes_moved: int
    fallback_reason: str
    num_retries: int
    num_migrations: int
    num_preemptions: int
    num_handovers: int


@dataclass(slots=True, frozen=True, kw_only=True)
class Output:
    """A piece of an answer; the last one has `finish_reason` and `report`."""

    text: str  # whole characters; may lag behind `tokens`
    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the stop token's id, that ended it
    report: Report | None = None


@dataclass(slots=True)
class Ending:
    """How a client's request ended, as it is counted."""

    outcome: str = "ok"

    def failed(self, error: BatonError) -> None:
        self.outcome = error.grpc_code.lower()


class Front:
    """Shared by both interfaces of a router."""

    def __init__(
        self, registry: Registry, dispatcher: Dispatcher, *, request_timeout_s: float, worker_wait_s: float = 0.0
    ) -> None:
        """`worker_wait_s`: how long a request waits for a worker while there is none (a fleet scaled to zero)."""
        self.registry = registry
        self.demand = Demand()
        self._worker_wait_s = worker_wait_s
        self._dispatcher = dispatcher
        self._request_timeout_s = request_timeout_s
        self._num_running = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    # ------------------------------------------------------------------------------------------ admission

    def not_ready(self) -> str:
        """Why no request is taken now; empty where one is."""
        if self._draining:
            return "the router is shutting down"
        return "" if self._worker_wait_s else self.registry.not_ready()

    def served(self) -> ServedModel:
        """Raises `UnavailableError` while no request can be taken."""
        if self._draining:
            raise UnavailableError("the router is shutting down")
        return self.registry.served()

    async def serving(self) -> ServedModel:
        """`served`, after waiting for a worker where there is none: a first one, or one whose connection broke a moment
        ago. Raises `UnavailableError`."""
        wait_s = self._worker_wait_s or self.registry.reconnect_wait_s()
        give_up_at = time.monotonic() + wait_s
        if wait_s and not self._draining and self.registry.not_ready():
            with self.demand.waiting() if self._worker_wait_s else contextlib.nullcontext():
                while not self._draining and self.registry.not_ready() and (left := give_up_at - time.monotonic()) > 0:
                    await self.registry.changed(min(left, 1.0))
        try:
            return self.served()
        except UnavailableError:
            self.demand.unserved()
            raise

    def drain(self) -> None:
        """No request is taken from now on."""
        self._draining = True

    async def idle(self) -> None:
        """Returns once no request is running."""
        await self._idle.wait()

    @contextlib.contextmanager
    def running(self, interface: str, timeout_s: float | None = None) -> Iterator[Ending]:
        """Around all work for one client request, so that draining waits for it; counts how it ended.

        gRPC cancels a handler whose client's deadline passes. With `timeout_s`, what that client has left, it counts as
        what it is.
        """
        late_at = math.inf if timeout_s is None else time.monotonic() + timeout_s - DEADLINE_SLACK_S
        self._num_running += 1
        self.demand.num_running += 1
        self.demand.arrived()
        self._idle.clear()
        metrics.router_requests_running.set(self._num_running)
        ending = Ending()
        try:
            yield ending
        except BatonError as error:
            ending.failed(error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            ending.outcome = "deadline_exceeded" if time.monotonic() >= late_at else "cancelled"
            raise
        except Exception:
            ending.outcome = "internal"
            raise
        finally:
            self._num_running -= 1
            self.demand.num_running -= 1
            metrics.router_requests_running.set(self._num_running)
            metrics.router_requests.labels(interface, ending.outcome).inc()
            if self._num_running == 0:
                self._idle.set()

    # ------------------------------------------------------------------------------------------ preparing

    async def text_prompt(
        self, model: ServedModel, text: str, field: str, *, add_special_tokens: bool = True
    ) -> Prompt:
        check_text(text, model.limits, field)
        ids = await model.tokenizer.encode(text, field=field, add_special_tokens=add_special_tokens)
        return Prompt(ids, field)

    async def chat_prompt(self, model: ServedModel, messages: Sequence[Message]) -> Prompt:
        """The template writes special tokens out itself, so none are added."""
        total = "".join(message["content"] for message in messages)
        if total:
            check_text(total, model.limits, "messages")
        text = model.tokenizer.render_chat(messages)
        return await self.text_prompt(model, text, "messages", add_special_tokens=False)

    def prepare(
        self,
        model: ServedModel,
        prompt: Prompt,
        fields: SamplingFields,
        *,
        model_name: str = "",
        request_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        arrived_at: float,
        timeout_s: float | None = None,
        default_max_tokens: int | None = None,
        name: FieldName = str,
    ) -> GenerationRequest:
        """Validates all of it. `timeout_s` is the client's own deadline, counted from `arrived_at`."""
        check_model(model_name, model.limits)
        if request_id:
            check_request_id(request_id)
        check_cache_salt(cache_salt)
        check_priority(priority)
        check_prompt(prompt.token_ids, model.limits, prompt.field)
        params = validate_sampling(
            fields,
            model.limits,
            num_prompt_tokens=len(prompt.token_ids),
            draw_seed=lambda: secrets.randbits(63),
            default_max_tokens=default_max_tokens,
            name=name,
        )
        client = current_client.get()
        return GenerationRequest(
            request_id=request_id or new_request_id(),
            model=model,
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            cache_salt=client.cache_salt(cache_salt) if client else cache_salt,
            priority=priority,
            arrived_at=arrived_at,
            deadline=arrived_at + (self._request_timeout_s if timeout_s is None else timeout_s),
            client=client.name if client else "",
        )

    # ----------------------------------------------------------------------------------------- generating

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
        self.demand.prompt(len(request.prompt_token_ids))
        detokenizer = Detokenizer(request.model.tokenizer, request.prompt_token_ids)
        stops = StopStrings(params.stop)
        num_tokens = 0
        dispatched = DispatchRequest(
            request_id=request.request_id,
            model=request.model,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=params,
            cache_salt=request.cache_salt,
            priority=request.priority,
            deadline=request.deadline,
        )
        async with aclosing(self._dispatcher.run(dispatched, report)) as run:
            async for new in run:
                self.demand.num_output_tokens += len(new.tokens)
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


def new_request_id() -> str:
    return uuid.uuid4().hex


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
