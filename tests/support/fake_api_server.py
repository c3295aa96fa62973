"""A small API server over real HTTP that plays list and watch of one collection, and fails when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]


def endpoint(host: str, pod: str, *, serving: bool | None = True, ready: bool | None = True) -> Json:
    conditions = {key: value for key, value in (("serving", serving), ("ready", ready)) if value is not None}
    return {"addresses": [host], "conditions": conditions, "targetRef": {"kind": "Pod", "name": pod}}


def endpoint_slice(name: str, *endpoints: Json, port: int = 50061, address_type: str = "IPv4") -> Json:
    return {
        "metadata": {"name": name},
        "addressType": address_type,
        "ports": [{"name": "grpc", "port": port}],
        "endpoints": list(endpoints),
    }


class FakeApiServer:
    """Events since `oldest` can be watched; an earlier resourceVersion is 410 Gone."""

    def __init__(self) -> None:
        self.version = 10
        self.oldest = 0
        self.items: dict[str, Json] = {}
        self.history: list[tuple[int, Json]] = []
        self.requests: list[str] = []
        self.fail_with: int | None = None
        self.ends = 0
        self._news = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As if the process died: every connection ends."""
        assert self._server is not None
        self._server.close()
        self.drop()
        await self._server.wait_closed()

    def drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def set(self, item: Json) -> None:
        name = item["metadata"]["name"]
        self._event("MODIFIED" if name in self.items else "ADDED", item)
        self.items[name] = item

    def delete(self, name: str) -> None:
        self._event("DELETED", self.items.pop(name))

    def bookmark(self) -> None:
        self._event("BOOKMARK", {"metadata": {}})

    def error(self, code: int) -> None:
        """An error inside of the stream, as the server sends it when a watch has fallen behind."""
        self._event("ERROR", {"metadata": {}, "kind": "Status", "code": code, "message": "too old"})

    def end_watches(self) -> None:
        """In good order, as the API server does every now and then."""
        self.ends += 1
        self._news.set()
        self._news.clear()

    def forget(self) -> None:
        self.version += 1
        self.oldest = self.version

    def _event(self, kind: str, item: Json) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, {"type": kind, "object": json.loads(json.dumps(item))}))
        self._news.set()
        self._news.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                url = urlsplit(head.split()[1])
                query = {key: values[0] for key, values in parse_qs(url.query).items()}
                kind = "watch" if query.get("watch") else "list"
                self.requests.append(kind)
                if self.fail_with is not None:
                    await self._answer(writer, self.fail_with, {"message": "not now"})
                elif kind == "list":
                    await self._answer(
                        writer,
                        200,
                        {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.items.values())},
                    )
                elif int(query["resourceVersion"]) < self.oldest:
                    await self._answer(writer, 410, {"message": "too old"})
                else:
                    await self._stream(writer, int(query["resourceVersion"]))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, status: int, body: Json) -> None:
        text = json.dumps(body).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n".encode()
            + text
        )
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, version: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        ends = self.ends
        while True:
            for number, event in self.history:
                if number > version:
                    line = json.dumps(event).encode() + b"\n"
                    writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                    version = number
            await writer.drain()
            if self.ends > ends:
                writer.write(b"0\r\n\r\n")
                return
            await self._news.wait()


@contextlib.asynccontextmanager
async def fake_api_server(folder: Path) -> AsyncIterator[tuple[FakeApiServer, Path]]:
    """The server and a kubeconfig for it."""
    server = FakeApiServer()
    await server.start()
    kubeconfig = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    kubeconfig.write_text(json.dumps(config))
    try:
        yield server, kubeconfig
    finally:
        await server.stop()
