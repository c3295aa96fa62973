"""How requests come to a router."""

from __future__ import annotations

from dataclasses import replace

from bench.load import loops
from bench.load.clients import Asked, Client, ask
from bench.router.clients import chat
from common.traffic import arrivals


async def closed_loop(client: Client, num_streams: int, max_tokens: int, seconds: float) -> list[Asked]:
    """`num_streams` requests at any time for `seconds`; the last of them are waited for."""
    return await loops.closed_loop(num_streams, seconds, lambda _: ask(client, chat(max_tokens)))


async def open_loop(client: Client, rate: float, max_tokens: int, seconds: float) -> list[Asked]:
    """Requests come at random, `rate` of them a second on average, whatever is still being answered: at least one,
    and the same ones at every call. The last of them are waited for. Times count from when a request was due."""
    due_s = arrivals.until(arrivals.poisson(rate, 1), seconds) or [0.0]
    sent = await loops.open_loop(due_s, lambda _: ask(client, chat(max_tokens)))
    return [replace(one.result, ttft_s=one.result.ttft_s + one.lag_s) for one in sent]
