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
from dataclasses import asdict, dataclass

from bench.load.clients import GrpcClient, RefusedError, Request, RestClient
from bench.processes import ready_client

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
        options = {"ignore_eos": True, "temperature": 0.0}
        self._request = Request(prompt="Hello", max_tokens=max_tokens, is_streamed=False, options=options)
        self._rest, self._grpc = RestClient(http_url, api_key), GrpcClient(grpc_address, api_key)

    async def ask(self, interface: str) -> Ended:
        begin = time.monotonic()
        status, retry_after_s = OK, None
        try:
            async with asyncio.timeout(PATIENCE_S):
                num = await (self._num_by_rest() if interface == "rest" else self._num_by_grpc())
        except RefusedError as refused:
            status, retry_after_s = refused.status, refused.retry_after_s
        else:
            status = OK if num == self._max_tokens else f"{num} tokens"
        return Ended(interface, status, time.monotonic() - begin, retry_after_s)

    async def _num_by_rest(self) -> int:
        return sum([num async for num in self._rest.events(self._request)])

    async def _num_by_grpc(self) -> int:
        return sum([len(one.token_ids) async for one in self._grpc.responses(self._request)])

    async def close(self) -> None:
        await self._rest.close()
        await self._grpc.close()


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
