"""`baton top`: a live look at a running stack."""

from __future__ import annotations

import asyncio

import click

from baton.cli.options import SettingsCommand
from common.config import ClientSettings
from common.errors import ConfigError


def top(settings: ClientSettings, *, interval: float) -> int:
    try:
        from baton.top.screen import Seen, Top
    except ImportError as error:
        raise ConfigError("baton top", f"needs the package textual: pip install textual ({error})") from error
    from baton.client.async_client import AsyncClient
    from baton.top.figures import MAX_REQUESTS

    async def run() -> None:
        async with AsyncClient(
            settings.router,
            timeout=settings.timeout,
            api_key=settings.api_key,
            tls=settings.tls,
            tls_ca=settings.tls_ca,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            tls_server_name=settings.tls_server_name,
        ) as client:

            async def look() -> Seen:
                workers, requests = await asyncio.gather(client.fleet(), client.requests(MAX_REQUESTS))
                return Seen(workers, requests)

            await Top(look, interval).run_async()

    asyncio.run(run())
    return 0


TOP = SettingsCommand(
    "top",
    ClientSettings,
    top,
    about="Shows the fleet and the last requests, kept up to date; q leaves, Enter shows a request's timeline.",
    examples=["baton top", "baton top --router 10.0.0.5:50051 --interval 5"],
    params=[
        click.Option(
            ["--interval"],
            type=click.FloatRange(min=0.2),
            default=1.0,
            show_default=True,
            help="Seconds between two looks; each asks every worker.",
        )
    ],
)
