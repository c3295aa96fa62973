"""What strangers can make the autoscaler's HTTP ports hold."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.autoscaler import http, tls
from router.autoscaler.board import Board

PATIENCE_S = 60.0
SCHEMES = pytest.mark.parametrize("scheme", ["http", "https"])


def context_of(folder: Path) -> ssl.SSLContext:
    pytest.importorskip("cryptography", reason="the extra `kubernetes` is not installed")
    certificate, key = tls.make_certificate("svc", "prod")
    (folder / "pem").write_bytes(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "pem")
    return context


@contextlib.asynccontextmanager
async def serving(scheme: str, folder: Path, **bounds: Any) -> AsyncIterator[http.Server]:
    context = context_of(folder) if scheme == "https" else None
    server = http.Server("127.0.0.1:0", http.StatusPage(Board()), context=context, **bounds)
    task = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.close()


async def connect(
    server: http.Server, context: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.rpartition(":")
    return await asyncio.open_connection(host, int(port), ssl=context)


async def health(server: http.Server, scheme: str) -> bytes:
    context = None
    if scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await connect(server, context)
    try:
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@SCHEMES
async def test_silent_connections_keep_nobody_out(scheme: str, tmp_path: Path) -> None:
    bounds = {"max_connections": 3, "head_timeout_s": 3600.0}
    async with asyncio.timeout(PATIENCE_S), serving(scheme, tmp_path, **bounds) as server:
        silent = [await connect(server) for _ in range(6)]
        for reader, _ in silent[:3]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b"", "the longest idle one gives way"
        assert b"200" in await health(server, scheme)
        for _, writer in silent:
            writer.close()


@SCHEMES
async def test_a_silent_connection_ends(scheme: str, tmp_path: Path) -> None:
    async with asyncio.timeout(PATIENCE_S), serving(scheme, tmp_path, head_timeout_s=0.1) as server:
        reader, writer = await connect(server)
        with contextlib.suppress(ConnectionError):
            assert b"200" not in await reader.read()
        writer.close()
