"""gRPC servers of this process whose main loop ends by an error, when a test says so."""

from __future__ import annotations

import asyncio

import pytest

from common.grpc import server as grpc_server


def breaks_when(broken: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """For servers that are made from now on."""

    async def request_call(_: object) -> None:
        await broken.wait()
        raise RuntimeError("the main loop is broken")

    monkeypatch.setattr(grpc_server._Core, "_request_call", request_call)
