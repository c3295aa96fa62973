"""Embeddings: each input goes to the worker with the least to do, as a prompt of which only the hidden state is wanted.

Prefill workers come first, as they have nothing else to do; without any, decode workers compute them. If a worker does
not answer an input, another worker gets it: the client gets nothing before all inputs are answered. A request is one
answer of its key, and each input takes its turn in the queue.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from common.errors import (
    BatonError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    OverloadedError,
    UnavailableError,
)
from common.grpc.status import error_of_call
from common.retry_budget import RetryBudget
from common.types import WorkerRole
from protos.baton.v1 import embed_pb2, embed_pb2_grpc
from router.fleet.endpoint import Endpoint
from router.fleet.registry import Registry
from router.fleet.served_model import ServedModel
from router.limits.demand import Demand
from router.limits.fair_queue import FairQueue, Places, name_of
from router.limits.quotas import Quotas
from router.policy.base import RoutingRequest
from router.policy.least_load import load_score
from router.policy.routing import unusable
from router.running.request import Prompt

MAX_INPUTS = 2048
MAX_AT_ONCE = 16  # inputs of one request that workers have at a time
MAX_VALUES = 2**22  # numbers in all vectors of one answer: 16 MiB here, and some 80 MiB in JSON
MAX_DIMENSIONS = 2**20
VALUE_BYTES = 4
NUM_RETRIES = 3
_FAULTS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)  # of a worker


@dataclass(slots=True, frozen=True, kw_only=True)
class EmbedRequest:
    """Several inputs of one request."""

    request_id: str
    model: ServedModel
    prompts: Sequence[Prompt]
    pooling: embed_pb2.Pooling.ValueType = embed_pb2.POOLING_LAST
    dimensions: int = 0  # 0: all
    normalize: bool = True
    cache_salt: str = ""
    deadline: float  # time.monotonic() at which the client gives up
    client: str = ""  # name of the API key
    tenant: str = ""  # of the API key


def check_num_inputs(num_inputs: int, field: str) -> None:
    if not 1 <= num_inputs <= MAX_INPUTS:
        raise InvalidArgumentError(field, f"must have 1 to {MAX_INPUTS} entries, not {num_inputs}")


@dataclass(slots=True, frozen=True)
class Embedded:
    values: Sequence[float]
    num_cached_tokens: int


class Embedder:
    """Shared by all requests of a router."""

    def __init__(
        self,
        registry: Registry,
        demand: Demand,
        quotas: Quotas | None = None,
        queue: Places | None = None,
        budget: RetryBudget | None = None,
    ) -> None:
        self._registry = registry
        self._demand = demand
        self._quotas = quotas or Quotas()
        self._queue = queue or FairQueue(None)
        self._budget = budget or RetryBudget()

    async def embed(self, request: EmbedRequest, hold: Callable[[int], None]) -> list[Embedded]:
        """Returns embeddings in the order of the prompts. The first failure ends all of them. `hold` is told of the
        bytes that are kept, and raises if there are too many. Raises `BatonError`."""
        _check_num_values(request, request.dimensions)
        key, tenant, asked = request.client, request.tenant, set[int]()
        with self._quotas.streams(key, tenant):
            num_tokens = sum(len(prompt.token_ids) for prompt in request.prompts)
            self._quotas.prompt(key, tenant, num_tokens)
            self._demand.prompt(num_tokens)
            try:
                return await self._embed(request, asked, hold)
            finally:
                unasked = (prompt for index, prompt in enumerate(request.prompts) if index not in asked)
                self._quotas.give_back(key, tenant, sum(len(prompt.token_ids) for prompt in unasked))

    async def _embed(self, request: EmbedRequest, asked: set[int], hold: Callable[[int], None]) -> list[Embedded]:
        """Notes in `asked` which inputs workers were asked for."""
        results: list[Embedded | None] = [None] * len(request.prompts)
        left = iter(range(len(results)))
        limits = self._quotas.tenant(request.tenant)

        async def work() -> None:
            for index in left:
                async with self._queue.place(
                    name_of(request.client, request.tenant),
                    len(request.prompts[index].token_ids),
                    request.deadline - time.monotonic(),
                    priority=limits.priority,
                    weight=limits.weight,
                ):
                    asked.add(index)
                    one = await self._one(request, index)
                _check_num_values(request, len(one.values))  # the first to come says how long all are
                hold(VALUE_BYTES * len(one.values))
                results[index] = one

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(MAX_AT_ONCE, len(results))):
                    tasks.create_task(work())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return [one for one in results if one is not None]

    async def _one(self, request: EmbedRequest, index: int) -> Embedded:
        self._budget.request()
        tried: set[tuple[str, str]] = set()
        while True:
            endpoint = self._pick(request, index, tried)
            try:
                return await self._ask(endpoint, request, index)
            except (UnavailableError, OverloadedError) as error:
                tried.add(endpoint.incarnation)
                if len(tried) > NUM_RETRIES or not self._budget.spend(time.monotonic()):
                    raise
                try:
                    self._pick(request, index, tried)
                except UnavailableError:
                    raise error from None

    def _pick(self, request: EmbedRequest, index: int, tried: set[tuple[str, str]]) -> Endpoint:
        num_tokens = len(request.prompts[index].token_ids)
        routing = RoutingRequest(
            num_prompt_tokens=num_tokens, num_tokens=num_tokens, fingerprint=request.model.fingerprint
        )
        endpoints = self._registry.endpoints()
        usable = [
            one
            for one in endpoints
            if not unusable(one, routing)
            and (one.max_model_len is None or routing.num_tokens <= one.max_model_len)
            and one.incarnation not in tried
        ]
        if not usable:
            reasons = [
                f"{one.address}: {unusable(one, routing) or 'too short a context, or failed already'}"
                for one in endpoints
            ]
            raise UnavailableError(f"no worker can take the request ({'; '.join(reasons) or 'none is configured'})")
        return min(usable, key=_load)

    async def _ask(self, endpoint: Endpoint, request: EmbedRequest, index: int) -> Embedded:
        timeout_s = request.deadline - time.monotonic()
        if timeout_s <= 0:
            raise DeadlineError("the request's deadline has passed")
        prompt = request.prompts[index]
        stub = embed_pb2_grpc.EmbedServiceStub(self._registry.channel(endpoint.address))
        message = embed_pb2.EmbedTokensRequest(
            request_id=f"{request.request_id}-{index}" if index else request.request_id,
            fingerprint=request.model.fingerprint,
            prompt_token_ids=prompt.token_ids,
            pooling=request.pooling,
            dimensions=request.dimensions,
            normalize=request.normalize,
            cache_salt=request.cache_salt,
        )
        track = self._registry.track
        with self._registry.sending({endpoint.address: len(prompt.token_ids)}), track.probing(endpoint.incarnation):
            try:
                answer = await stub.EmbedTokens(message, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                failure = self._failure(request, endpoint, prompt, error)
                if error.code() in _FAULTS and not isinstance(failure, DeadlineError):
                    track.failed(endpoint.incarnation, time.monotonic())
                raise failure from error
        if not answer.values or not all(map(math.isfinite, answer.values)):
            track.failed(endpoint.incarnation, time.monotonic())
            raise InternalError(f"{endpoint.address} sends no finite vector")
        track.succeeded(endpoint.incarnation, time.monotonic())
        return Embedded(answer.values, min(answer.cached_tokens, len(prompt.token_ids)))

    def _failure(
        self, request: EmbedRequest, endpoint: Endpoint, prompt: Prompt, error: grpc.aio.AioRpcError
    ) -> BatonError:
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and time.monotonic() >= request.deadline - 0.05:
            return DeadlineError("the request's deadline passed before it was finished")
        if code is grpc.StatusCode.UNAVAILABLE:
            self._registry.suspect(*endpoint.incarnation, details)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return UnavailableError(f"{endpoint.address} is of a version that makes no embeddings")
        fault = error_of_call(code.name, details, error.trailing_metadata())
        if isinstance(fault, InvalidArgumentError) and fault.field == "prompt_token_ids":
            return InvalidArgumentError(prompt.field, fault.reason)
        return fault


def _check_num_values(request: EmbedRequest, num_values: int) -> None:
    """`num_values`: of each vector. Raises `InvalidArgumentError`."""
    num_prompts = len(request.prompts)
    if num_prompts * num_values > MAX_VALUES:
        raise InvalidArgumentError(
            request.prompts[0].field,
            f"{num_prompts} entries have vectors of {num_values} numbers: one answer may have {MAX_VALUES} numbers, "
            f"so {max(1, MAX_VALUES // num_values)} entries",
        )


def _load(endpoint: Endpoint) -> tuple[bool, bool, float]:
    """The worker's load, least first. A worker that is left alone because it failed is taken if there is no other."""
    return bool(endpoint.suspended), endpoint.role is not WorkerRole.PREFILL, load_score(endpoint)
