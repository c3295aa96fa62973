"""Embeddings: each input goes to the worker with the least to do, as a prompt of which only the hidden state is wanted.

Prefill workers come first, as they have nothing else to do; without any, decode workers compute them. If a worker does
not answer an input, another worker gets it (`retries`): the client gets nothing before all inputs are answered. A
request is one answer of its key, and each input takes its turn in the queue.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import grpc

from common.errors import BatonError, DeadlineError, InvalidArgumentError
from common.tracing import TraceContext, Traced
from protos.baton.v1 import embed_pb2, embed_pb2_grpc
from router.fleet.endpoint import Endpoint
from router.fleet.registry import Registry
from router.fleet.served_model import ServedModel
from router.limits.admission import Admission
from router.limits.clients import NOBODY, ApiClient, Charge
from router.policy.base import RoutingRequest
from router.running.request import Attempt, Progress, Prompt
from router.running.retries import NO_FAULTS, Retries, WorkerLostError, failure_of
from router.running.routes import Route, Routes

MAX_INPUTS = 2048
MAX_AT_ONCE = 16  # inputs of one request that workers have at a time
MAX_VALUES = 2**22  # numbers in all vectors of one answer: 16 MiB here, and some 80 MiB in JSON
MAX_DIMENSIONS = 2**20
VALUE_BYTES = 4
MAX_TOLD_CALLS = 16  # of one request, in its timeline and its trace: it may have thousands
_TOO_OLD = "UNIMPLEMENTED"  # for embeddings


@dataclass(frozen=True, kw_only=True)
class EmbedRequest:
    """Several inputs of one request."""

    request_id: str
    model: ServedModel
    prompts: Sequence[Prompt]
    pooling: embed_pb2.Pooling.ValueType = embed_pb2.POOLING_LAST
    dimensions: int = 0  # 0: all
    normalize: bool = True
    cache_salt: str = ""
    arrived_at: float
    deadline: float  # time.monotonic() at which the client gives up
    client: ApiClient = NOBODY
    traced: Traced | None = None  # None: it is not sampled

    @property
    def operation(self) -> str:
        return "embeddings"

    @cached_property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @cached_property
    def charges(self) -> list[Charge]:
        """One for each prompt."""
        return [Charge(len(prompt.token_ids)) for prompt in self.prompts]


def check_num_inputs(num_inputs: int, field: str) -> None:
    if not 1 <= num_inputs <= MAX_INPUTS:
        raise InvalidArgumentError(field, f"must have 1 to {MAX_INPUTS} entries, not {num_inputs}")


@dataclass(slots=True, frozen=True)
class Embedded:
    values: Sequence[float]
    num_cached_tokens: int


class Embedder:
    """Shared by all requests of a router."""

    def __init__(self, registry: Registry, routes: Routes, retries: Retries, admission: Admission) -> None:
        self._registry = registry
        self._routes = routes
        self._retries = retries
        self._admission = admission

    def charged(self, request: EmbedRequest) -> AbstractContextManager[None]:
        """Use it around `embed`. See `Admission.charged`."""
        num_places = min(len(request.prompts), MAX_AT_ONCE)
        return self._admission.charged(request.client, request.charges, num_answers=1, num_places=num_places)

    async def embed(self, request: EmbedRequest, hold: Callable[[int], None], progress: Progress) -> list[Embedded]:
        """Returns embeddings in the order of the prompts. The first failure ends all of them. `hold` is told of the
        bytes that are kept, and raises if there are too many. `progress` says what was done. Raises `BatonError`."""
        progress.num_inputs = len(request.prompts)
        results: list[Embedded | None] = [None] * len(request.prompts)
        left = iter(range(len(results)))

        async def work() -> None:
            for index in left:
                cost = len(request.prompts[index].token_ids)
                async with self._admission.turn(request.client, cost, request.deadline):
                    if progress.turn_at is None:
                        progress.turn_at = time.monotonic()
                    request.charges[index].worker_was_asked = True
                    one = await self._one(request, index, progress)
                progress.usage.cached_tokens += one.num_cached_tokens
                check_num_values(request, len(one.values))  # the first to come says how long all are
                hold(VALUE_BYTES * len(one.values))
                results[index] = one

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(MAX_AT_ONCE, len(results))):
                    tasks.create_task(work())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return [one for one in results if one is not None]

    async def _one(self, request: EmbedRequest, index: int, progress: Progress) -> Embedded:
        self._retries.budget.request()
        route, num_retries = Route(), 0
        endpoint = await self._pick(request, index, route, None)
        while True:
            attempt = Attempt("retry" if num_retries else "new", endpoint.address, time.monotonic())
            if len(progress.attempts) < MAX_TOLD_CALLS:
                progress.attempts.append(attempt)
                attempt.context = None if request.traced is None else request.traced.own.child()
            try:
                embedded = await self._ask(endpoint, request, index, attempt.context)
                attempt.ended_at = time.monotonic()
                progress.report.decode_worker = endpoint.address
                return embedded
            except WorkerLostError as error:
                attempt.ended_at, attempt.failure = time.monotonic(), str(error)
                self._retries.lost(route, endpoint, error)
                self._retries.allow(num_retries, error)
                num_retries += 1
                progress.report.num_retries += 1
                endpoint = await self._pick(request, index, route, error)

    async def _pick(self, request: EmbedRequest, index: int, route: Route, lost: WorkerLostError | None) -> Endpoint:
        num_tokens = len(request.prompts[index].token_ids)

        def pick() -> Endpoint:
            wanted = RoutingRequest(
                num_prompt_tokens=num_tokens,
                num_tokens=num_tokens,
                fingerprint=request.model.fingerprint,
                tried=frozenset(route.tried),
                refused=frozenset(route.refused),
            )
            return self._routes.pick_for_embedding(wanted)

        return await self._retries.pick(pick, request.deadline, lost)

    async def _ask(
        self, endpoint: Endpoint, request: EmbedRequest, index: int, context: TraceContext | None
    ) -> Embedded:
        """`context`: of the call's span, if it has one."""
        timeout_s = request.deadline - time.monotonic()
        if timeout_s <= 0:
            raise DeadlineError("the request's deadline has passed")
        prompt = request.prompts[index]
        stub = embed_pb2_grpc.EmbedServiceStub(self._registry.channel(endpoint.address))
        request_id = f"{request.request_id}-{index}" if index else request.request_id
        message = embed_pb2.EmbedTokensRequest(
            request_id=request_id,
            fingerprint=request.model.fingerprint,
            prompt_token_ids=prompt.token_ids,
            pooling=request.pooling,
            dimensions=request.dimensions,
            normalize=request.normalize,
            cache_salt=request.cache_salt,
            traceparent="" if context is None else context.traceparent,
            tracestate="" if context is None else context.state,
        )
        track, load = self._registry.track, {endpoint.address: len(prompt.token_ids)}
        with self._registry.sending(load, request_id), track.probing(endpoint.incarnation):
            try:
                answer = await stub.EmbedTokens(message, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                failure = _failure(request, endpoint, prompt, error)
                if isinstance(failure, WorkerLostError) and failure.code not in (*NO_FAULTS, _TOO_OLD):
                    track.failed(endpoint.incarnation, time.monotonic())
                raise failure from error
        if not answer.values or not all(map(math.isfinite, answer.values)):
            track.failed(endpoint.incarnation, time.monotonic())
            raise WorkerLostError("INTERNAL", f"{endpoint.address} sends no finite vector", gone=False)
        track.succeeded(endpoint.incarnation, time.monotonic())
        return Embedded(answer.values, min(answer.cached_tokens, len(prompt.token_ids)))


def _failure(
    request: EmbedRequest, endpoint: Endpoint, prompt: Prompt, error: grpc.aio.AioRpcError
) -> BatonError | WorkerLostError:
    code, details = error.code().name, error.details() or ""
    if code == _TOO_OLD:
        details = "is of a version that makes no embeddings"
    return failure_of(
        code,
        details,
        error.trailing_metadata() or (),
        address=endpoint.address,
        request_id=request.request_id,
        left_s=request.deadline - time.monotonic(),
        client_field=lambda field: prompt.field if field == "prompt_token_ids" else field,
    )


def check_num_values(request: EmbedRequest, num_values: int) -> None:
    """`num_values`: of each vector; 0 if that is not known yet. Raises `InvalidArgumentError`."""
    num_prompts = len(request.prompts)
    if num_prompts * num_values > MAX_VALUES:
        raise InvalidArgumentError(
            request.prompts[0].field,
            f"{num_prompts} entries have vectors of {num_values} numbers: one answer may have {MAX_VALUES} numbers, "
            f"so {max(1, MAX_VALUES // num_values)} entries",
        )
