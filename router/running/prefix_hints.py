"""Hints about the caches of all workers: which blocks of a prompt to keep for a while, to forget, or to have ready.

Every worker is asked, since the router's knowledge of caches may be out of date. Only a prefetch goes to a single
worker: the one that the prompt would go to. If a worker does not answer, its part of the answer says so; the other
parts stay valid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import grpc

from common.peers import MAX_WORDS
from common.types import WorkerState
from protos.baton.v1 import worker_pb2, worker_pb2_grpc
from router.fleet.endpoint import Endpoint
from router.fleet.registry import Registry
from router.fleet.served_model import ServedModel
from router.limits.admission import Admission
from router.limits.clients import NOBODY, ApiClient, Charge
from router.policy.base import RoutingRequest
from router.running.routes import Routes
from router.running.threads import TextThreads

TIMEOUT_S = 15.0  # of one worker: longer than that waits for its engine


@dataclass(slots=True, frozen=True, kw_only=True)
class PrefixHint:
    """Made by `Preparation.prefix_hint`."""

    model: ServedModel
    token_ids: Sequence[int]  # those whose full blocks are meant
    cache_salt: str
    session: str = ""  # PREFETCH: requests of one session belong together
    seconds: float = 0.0  # RETAIN
    client: ApiClient = NOBODY  # RETAIN: whose share of what may be retained the blocks take


@dataclass(slots=True, frozen=True, kw_only=True)
class PrefixOnWorker:
    """What one worker did. Numbers are of blocks."""

    address: str
    num_device_blocks: int = 0
    num_host_blocks: int = 0
    num_stored_blocks: int = 0
    error: str = ""


@dataclass(slots=True, frozen=True)
class Hinted:
    num_tokens: int  # of the blocks that are meant
    num_blocks: int
    workers: Sequence[PrefixOnWorker]


class PrefixHints:
    """Shared by both interfaces of a router."""

    def __init__(self, registry: Registry, routes: Routes, admission: Admission, threads: TextThreads) -> None:
        self._registry = registry
        self._routes = routes
        self._admission = admission
        self._threads = threads

    async def give(self, hint: PrefixHint, action: worker_pb2.CacheAction.ValueType) -> Hinted:
        """Tells all workers of the model's KV layout; a prefetch, the decode worker that the prompt would go to. Raises
        `UnavailableError` if there is none, `OverloadedError` if the client's token limits, which count it as a prompt,
        do not allow it now. Tokens of a hint that no worker was asked for are given back."""
        charge = Charge(len(hint.token_ids))
        with self._admission.charged(hint.client, [charge], num_answers=0):
            return await self._give(hint, action, charge)

    async def _give(self, hint: PrefixHint, action: worker_pb2.CacheAction.ValueType, charge: Charge) -> Hinted:
        model = hint.model
        name = partial(model.block_names, hint.token_ids, hint.cache_salt)
        names = await self._threads.run(len(hint.token_ids), name, hint.client)
        endpoints = self._endpoints(hint, names, action)
        charge.worker_was_asked = bool(endpoints)
        request = worker_pb2.HintCacheRequest(
            fingerprint=model.fingerprint,
            action=action,
            block_hashes=b"".join(names),
            seconds=hint.seconds,
            tenant=hint.client.owner,
        )
        asked = [self._ask(one, request, len(names)) for one in endpoints]
        return Hinted(len(names) * model.block_size, len(names), await asyncio.gather(*asked))

    def _endpoints(
        self, hint: PrefixHint, names: Sequence[bytes], action: worker_pb2.CacheAction.ValueType
    ) -> Sequence[Endpoint]:
        """The workers that are asked; none if no block is meant."""
        if not names:
            return []
        endpoints = [one for one in self._registry.endpoints() if one.fingerprint == hint.model.fingerprint]
        if action == worker_pb2.CACHE_ACTION_PREFETCH:
            return [self._routes.pick(_routing_request(hint, names)).decode]
        return endpoints

    async def _ask(self, endpoint: Endpoint, request: worker_pb2.HintCacheRequest, most: int) -> PrefixOnWorker:
        if endpoint.state is WorkerState.UNREACHABLE:
            return PrefixOnWorker(address=endpoint.address, error="it cannot be reached")
        try:
            stub = worker_pb2_grpc.WorkerServiceStub(self._registry.channel(endpoint.address))
            answer = await stub.HintCache(request, timeout=TIMEOUT_S)
        except (KeyError, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return PrefixOnWorker(address=endpoint.address, error="it is no worker of this router any more")
        except grpc.aio.AioRpcError as error:
            words = "is of a version that takes no hints"
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                words = f"{error.code().name}: {(error.details() or '')[:MAX_WORDS]}"
            return PrefixOnWorker(address=endpoint.address, error=words)
        return PrefixOnWorker(
            address=endpoint.address,
            num_device_blocks=min(answer.num_device_blocks, most),
            num_host_blocks=min(answer.num_host_blocks, most),
            num_stored_blocks=min(answer.num_stored_blocks, most),
            error=answer.failure[:MAX_WORDS],
        )


def _routing_request(hint: PrefixHint, names: Sequence[bytes]) -> RoutingRequest:
    return RoutingRequest(
        num_prompt_tokens=len(hint.token_ids),
        num_tokens=len(hint.token_ids) + 1,
        fingerprint=hint.model.fingerprint,
        block_names=names,
        session=hint.session,
    )
