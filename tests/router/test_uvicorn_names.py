"""What `router/api/rest/http/` uses of uvicorn beside its public interface (protocol.py, web_server.py). If a name is
gone, look at what uvicorn does in its place, change the file, and raise the bound in pyproject.toml."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.api.rest.http.protocol import Connections

OF_THE_PROTOCOL = (
    *("app", "config", "conn", "cycle", "flow", "loop", "timeout_keep_alive_task", "transport"),
    *("connection_lost", "connection_made", "data_received", "on_response_complete", "send_400_response"),
    *("shutdown", "timeout_keep_alive_handler", "_unset_keepalive_if_required"),
)
OF_A_REQUEST = (
    *("body", "default_headers", "disconnected", "flow", "keep_alive", "message_event", "more_body", "on_response"),
    *("response_complete", "response_started", "scope", "transport", "waiting_for_100_continue"),
)
OF_FLOW_CONTROL = ("drain", "resume_reading", "write_paused")
OF_THE_SERVER = ("capture_signals", "force_exit", "main_loop", "on_tick", "server_state", "should_exit", "shutdown")


class Transport(asyncio.Transport):
    """Takes what is written."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def write(self, data: object) -> None:
        pass


async def test_uvicorn_has_the_names_that_are_used_of_it() -> None:
    async def app(_scope: object, _receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", interface="asgi3")
    connection = Connections(8, 30.0).protocol()(config, ServerState(), {})
    connection.connection_made(Transport())
    connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")
    await asyncio.gather(*connection.tasks)
    cycle = connection.cycle
    server = uvicorn.Server(config)
    for one, names in (
        (connection, OF_THE_PROTOCOL),
        (cycle, OF_A_REQUEST),
        (cycle.flow, OF_FLOW_CONTROL),
        (server, OF_THE_SERVER),
    ):
        missing = [name for name in names if not hasattr(one, name)]
        assert not missing, f"uvicorn's {type(one).__name__} has no {', '.join(missing)} any more"
    assert STATUS_PHRASES[200] == b"OK"
    connection.connection_lost(None)


def test_uvicorn_makes_connections_and_answers_as_protocol_py_expects() -> None:
    """`Connections.protocol` makes the first, `_send` takes the place of the second's `send`."""
    assert [*inspect.signature(H11Protocol).parameters] == ["config", "server_state", "app_state", "_loop"]
    assert [*inspect.signature(RequestResponseCycle.send).parameters] == ["self", "message"]
