"""uvicorn on one listening socket: of TCP, with TLS or without, or a unix socket. It leaves signals to its process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from router.api.rest.http.protocol import MAX_HEAD_BYTES, Connections, LimitedProtocol
from router.api.rest.http.tls_listener import accept_tls

DATE_S = 1.0  # for so long answers have the same date in their head


class _Uvicorn(uvicorn.Server):
    """Ends as soon as it is told to, if there are no connections. uvicorn itself looks ten times a second whether it
    has to end, and then waits for a tenth of a second whatever there is."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        self.should_exit = self.force_exit = True
        self._ending.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # which sets the date, too
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for server in self.servers:
            await server.wait_closed()


class WebServer:
    """Answers what comes to `listener` while `run` runs."""

    def __init__(
        self,
        listener: socket.socket,
        app: ASGIApp,
        connections: Connections,
        context: ssl.SSLContext | None = None,
        *,
        protocol: type[LimitedProtocol] | None = None,
        shutdown_s: int | None = None,
    ) -> None:
        """`context`: for TLS. `protocol`: what else connections do. `shutdown_s`: for answers that run at the end."""
        self._listener = listener
        self._connections = connections
        self._context = context
        made = connections.protocol(protocol)
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            http=made,
            ws="none",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_graceful_shutdown=shutdown_s,
        )
        self._server = _Uvicorn(config)
        self._make = functools.partial(made, config, self._server.server_state, {})

    async def run(self) -> None:
        """Returns after `stop`. Raises what ends it otherwise."""
        is_plain, is_unix = self._context is None, self._listener.family == socket.AF_UNIX
        with contextlib.ExitStack() as stack:
            if is_plain and is_unix:
                unix = await asyncio.get_running_loop().create_unix_server(self._make, sock=self._listener)
                stack.enter_context(contextlib.closing(unix))
            listeners = [self._listener] if is_plain and not is_unix else []
            tasks = [asyncio.ensure_future(self._server.serve(listeners))]
            if self._context is not None:
                accepting = accept_tls(self._listener, self._connections, self._context, self._make)
                tasks.append(asyncio.ensure_future(accepting))
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                self.stop()
                for task in tasks[1:]:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """Cuts off what runs."""
        self._server.end()
