"""A grpc.aio server that answers calls of methods that it does not have without looking at their names.

grpcio 1.85's decodes the name of such a method as UTF-8 in its main loop. A name that is not UTF-8 ends the server:
one request would take a whole process out of service. Calls of methods that the server has never come there: it asks
gRPC for those by name. This module uses private names of grpcio; `tests/common/test_grpc_server.py` fails if a newer
version differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined] # compiled, without stubs

from common.grpc.options import Options

UNKNOWN = "/unknown/method"  # what interceptors and logs get to see of it


def make_server(
    options: Options, interceptors: Sequence[grpc.aio.ServerInterceptor] = (), max_calls: int | None = None
) -> grpc.aio.Server:
    """Refuses calls beyond `max_calls` at a time. Add services by `add_handlers` or by generated code: both register
    every method by its name."""
    made: Any = grpc.aio.server(options=options)  # its own core is never started
    made._server = _Core(tuple(interceptors), tuple(options), max_calls)
    return cast("grpc.aio.Server", made)


def add_handlers(server: grpc.aio.Server, service: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
    """Adds the service's handlers, by the names of their methods."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_registered_method_handlers(service, handlers)


async def until_ended(server: grpc.aio.Server) -> None:
    """Returns when the server has ended, or raises what ended its main loop. Nothing else reports that, and the port
    would serve nobody. The caller may cancel this at any time; cancelling gRPC's own wait would break its shutdown."""
    await asyncio.shield(server.wait_for_termination())


class _Core(cygrpc.AioServer):  # type: ignore[misc] # as above
    def __init__(self, interceptors: tuple[Any, ...], options: tuple[Any, ...], max_calls: int | None) -> None:
        self._working_loop: asyncio.AbstractEventLoop = cygrpc.get_working_loop()
        super().__init__(self._working_loop, None, (), interceptors, options, max_calls)
        self._seeing_unknown = interceptors
        self._no_methods = cygrpc._MethodResolver([], {})
        self._answering: set[asyncio.Task[None]] = set()

    async def _request_call(self) -> None:
        """Never returns, so the main loop gets no call. Calls of unknown methods are answered here; interceptors see
        them."""
        while True:
            state = await super()._request_call()
            loop, is_one_too_many = self._working_loop, False
            answer = cygrpc._handle_rpc(UNKNOWN, self._no_methods, self._seeing_unknown, state, loop, is_one_too_many)
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, state, loop, UNKNOWN))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
