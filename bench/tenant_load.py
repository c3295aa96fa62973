"""A tenant's client: it asks at a steady rate, over REST and gRPC in turn, and says how each request ended.

A process of its own, so that one tenant's requests do not wait for another's client:

    BATON_API_KEY=… python -m bench.tenant_load GRPC_ADDRESS HTTP_URL RATE MAX_TOKENS [NUM]

RATE requests a second are sent, whatever is still being answered: NUM of them, or until its standard input ends. Prints
`ready` once the first is answered or refused, and one line of JSON in the end (`Asked`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import grpc

from bench.processes import ready_client
from common.grpc.status import error_of_call
from protos.baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

PATIENCE_S = 120.0
OK = "OK"


@dataclass(slots=True, frozen=True)
class Ended:
    interface: str  # "rest" or "grpc"
    status: str  # OK, or a status of HTTP or gRPC: "429", "RESOURCE_EXHAUSTED"
    latency_s: float
    retry_after_s: float | None = None  # what a refusal asks for


@dataclass(slots=True, frozen=True)
class Asked:
    elapsed_s: float  # from before the first request until after the last answer
    requests: list[Ended]

    @property
    def answered(self) -> list[Ended]:
        return [one for one in self.requests if one.status == OK]

    @property
    def refused(self) -> list[Ended]:
        return [one for one in self.requests if one.status in ("429", "RESOURCE_EXHAUSTED")]


class TenantClient:
    """Such a process, from when its first request has ended. `ended` once."""

    def __init__(
        self, grpc_address: str, http_url: str, api_key: str, *, rate: float, max_tokens: int, num: int | None = None
    ) -> None:
        numbers = [str(rate), str(max_tokens), *([] if num is None else [str(num)])]
        self._process = ready_client("bench.tenant_load", grpc_address, http_url, *numbers, api_key=api_key)

    def ended(self, *, waits: bool = False) -> Asked:
        """After the answers to all that was asked. `waits`: until it has sent its `num` requests; or else none more."""
        assert self._process.stdout is not None
        output = self._process.stdout.read() if waits else self._process.communicate()[0]
        self.kill()
        if not output:
            raise RuntimeError("a tenant's client failed; its reason is above")
        found = json.loads(output)
        return Asked(found["elapsed_s"], [Ended(**one) for one in found["requests"]])

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Load:
    def __init__(self, grpc_address: str, http_url: str, api_key: str, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._key = f"Bearer {api_key}"
        parts = urlsplit(http_url)
        self._address = (parts.hostname, parts.port)
        self._idle: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = deque()
        self._channel = grpc.aio.insecure_channel(grpc_address, [("grpc.enable_http_proxy", 0)])
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def ask(self, interface: str) -> Ended:
        begin = time.monotonic()
        async with asyncio.timeout(PATIENCE_S):
            status, retry_after_s = await (self._rest() if interface == "rest" else self._grpc())
        return Ended(interface, status, time.monotonic() - begin, retry_after_s)

    async def _rest(self) -> tuple[str, float | None]:
        body = {"prompt": "Hello", "max_tokens": self._max_tokens, "ignore_eos": True, "temperature": 0.0}
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: {self._key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        async with self._connection() as (reader, writer):
            writer.write(head.encode() + content)
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().strip().split("\r\n")
            fields = dict(line.split(": ", 1) for line in lines)
            answer = json.loads(await reader.readexactly(int(fields["content-length"])))
        status = first.split()[1]
        if status == "200" and answer["usage"]["completion_tokens"] == self._max_tokens:
            status = OK
        return status, float(fields["retry-after"]) if "retry-after" in fields else None

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """One that is idle and that the router has not closed, or another one."""
        while self._idle:
            reader, writer = self._idle.popleft()
            if not (reader.at_eof() or writer.is_closing()):
                break
            writer.close()
        else:
            reader, writer = await asyncio.open_connection(*self._address)
        yield reader, writer
        self._idle.append((reader, writer))

    async def _grpc(self) -> tuple[str, float | None]:
        params = types_pb2.SamplingParams(max_tokens=self._max_tokens, ignore_eos=True, temperature=0.0)
        request = inference_pb2.GenerateRequest(prompt="Hello", sampling_params=params)
        num = 0
        try:
            async for response in self._stub.Generate(request, metadata=(("authorization", self._key),)):
                num += len(response.token_ids)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            return code, error_of_call(code, error.details() or "", error.trailing_metadata()).retry_after_s
        return OK if num == self._max_tokens else f"{num} tokens", None

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        await self._channel.close()


async def _run(load: _Load, rate: float, num: int | None) -> Asked:
    begin = time.monotonic()
    asked: list[Ended] = []
    stop = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read) if num is None else None

    async def ask(interface: str) -> None:
        asked.append(await load.ask(interface))

    interfaces = itertools.cycle(("rest", "grpc"))
    await ask(next(interfaces))
    print("ready", flush=True)
    async with asyncio.TaskGroup() as group:
        for number in itertools.count(1):
            if number == num or (stop is not None and stop.done()):
                break
            await asyncio.sleep(max(begin + number / rate - time.monotonic(), 0))
            group.create_task(ask(next(interfaces)))
    return Asked(time.monotonic() - begin, asked)


async def _main(grpc_address: str, http_url: str, rate: str, max_tokens: str, num: str | None = None) -> None:
    load = _Load(grpc_address, http_url, os.environ["BATON_API_KEY"], int(max_tokens))
    try:
        print(json.dumps(asdict(await _run(load, float(rate), None if num is None else int(num)))))
    finally:
        await load.close()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
