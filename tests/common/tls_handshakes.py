"""A process that connects many peers at once to a port of its own. `python -m tests.common.tls_handshakes CERT KEY CA`
prints how many connected."""

from __future__ import annotations

import asyncio
import sys

import grpc

from common.grpc.transport import add_port, channel_credentials, name_options
from common.tls import TlsFiles

NUM_AT_ONCE = 40
NUM_ROUNDS = 25


async def connect_all(tls: TlsFiles) -> int:
    server = grpc.aio.server()
    address = f"127.0.0.1:{add_port(server, '127.0.0.1:0', tls)}"
    await server.start()
    options = [*name_options("fleet.test"), ("grpc.use_local_subchannel_pool", 1)]

    async def connect() -> None:
        async with grpc.aio.secure_channel(address, channel_credentials(tls), options) as channel:
            await channel.channel_ready()

    for _ in range(NUM_ROUNDS):
        await asyncio.gather(*(connect() for _ in range(NUM_AT_ONCE)))
    await server.stop(None)
    return NUM_ROUNDS * NUM_AT_ONCE


if __name__ == "__main__":
    print(asyncio.run(connect_all(TlsFiles(*sys.argv[1:]))))
