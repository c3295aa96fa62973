"""What operators order of workers, by way of any router that has them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from common.errors import BatonError, IncompatibleError, NotFoundError, UnavailableError, error_of
from common.grpc.status import error_of_call
from common.peers import MAX_WORDS
from protos.baton.v1 import worker_pb2_grpc
from router.fleet.registry import Registry

T = TypeVar("T")
Ask = Callable[["worker_pb2_grpc.WorkerServiceAsyncStub"], Awaitable[T]]


@dataclass(slots=True, frozen=True)
class Answer(Generic[T]):
    """Of one worker: what it said, or why it did not."""

    address: str
    said: T | None = None
    error: BatonError | None = None


class WorkerOrders:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def addresses(self) -> list[str]:
        return [endpoint.address for endpoint in self._registry.endpoints()]

    def check(self, address: str, field: str) -> str:
        """Raises `NotFoundError` if that is none of the router's workers."""
        if address not in self.addresses():
            raise NotFoundError(f"{address!r} is no worker of this router (`baton status` lists them)", field=field)
        return address

    async def ask(self, address: str, ask: Ask[T]) -> T:
        """Raises `BatonError` with the worker's own words."""
        try:
            return await ask(worker_pb2_grpc.WorkerServiceStub(self._registry.channel(address)))
        except grpc.aio.AioRpcError as error:
            raise failure(address, error) from error
        except (KeyError, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise UnavailableError(f"{address} is no worker of this router any more") from None

    async def ask_all(self, addresses: Sequence[str], ask: Ask[T]) -> list[Answer[T]]:
        """All at once. One that fails leaves the others alone."""

        async def one(address: str) -> Answer[T]:
            try:
                return Answer(address, await self.ask(address, ask))
            except BatonError as error:
                return Answer(address, error=error.without_stack())

        return await asyncio.gather(*map(one, addresses))


def failure(address: str, error: grpc.aio.AioRpcError) -> BatonError:
    """The error for an order that a worker did not carry out."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return IncompatibleError(f"{address} is of a version that takes no such order")
    found = error_of_call(error.code().name, error.details() or "", error.trailing_metadata())
    return error_of(
        error.code().name,
        f"{address}: {found.reason[:MAX_WORDS]}",
        field=found.field,
        retry_after_s=found.retry_after_s,
    )
