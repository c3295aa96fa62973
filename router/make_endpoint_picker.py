"""What a router needs to choose for a proxy, put together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from common.config import RouterSettings
from common.errors import ConfigError
from common.process.unix_sockets import socket_path
from common.tls import TlsFiles
from router.api.api_keys import ApiKeys
from router.fleet.discovery.sources import discover, is_static
from router.processes.router_process import RouterProcess
from router.running.picks import PickKeys, Picks
from router.serving.gateway import Gateway

if TYPE_CHECKING:
    from router.api.endpoint_picker.server import EndpointPickerServer

ANY_HOST = ("", "0.0.0.0", "[::]", "localhost")


def make_picks(settings: RouterSettings, process: RouterProcess) -> Picks | None:
    """Checks the choices of endpoint pickers; None if nobody makes any. Raises `ConfigError` and `StartupError`."""
    if settings.endpoint_picker_key_file is not None:
        return Picks(PickKeys(settings.endpoint_picker_key_file).current)
    if settings.endpoint_picker_listen is None:
        return None
    if settings.endpoint_picker_replicas:
        raise ConfigError(
            "endpoint_picker_key_file", "is needed with --endpoint-picker-replicas: each checks what others chose"
        )
    own: Sequence[bytes] = (process.pick_key,)
    return Picks(lambda: own)


def make_endpoint_picker(
    settings: RouterSettings,
    gateway: Gateway,
    process: RouterProcess,
    keys: ApiKeys | None,
    tls: TlsFiles | None,
    http_port: int,
) -> EndpointPickerServer | None:
    """None if the settings ask for none. `http_port`: of this router. Raises `ConfigError` and `StartupError`."""
    if process.endpoint_picker_listen is None:
        for field in ("endpoint_picker_address", "endpoint_picker_replicas"):
            if getattr(settings, field):
                raise ConfigError(field, "is for an endpoint picker: --endpoint-picker-listen is missing")
        return None
    # Most routers have none, and need nothing of it.
    from router.api.endpoint_picker.picker import EndpointPicker
    from router.api.endpoint_picker.replicas import Replicas
    from router.api.endpoint_picker.server import EndpointPickerServer

    if settings.endpoint_picker_tls == "router" and tls is None:
        raise ConfigError("endpoint_picker_tls", "router is for a router with --tls-cert and --tls-key")
    picks = gateway.routes.picks
    assert picks is not None  # noqa: S101 - `make_picks` made them of the same settings
    listed = settings.endpoint_picker_replicas
    discovery = discover(listed, key="endpoint_picker_replicas")
    replicas = Replicas(_own_address(settings, http_port), listed if is_static(listed) else ())

    async def follow() -> None:
        async with aclosing(discovery.watch()) as sets:
            async for found in sets:
                replicas.set(one.address for one in found)

    return EndpointPickerServer(
        settings,
        gateway,
        process,
        EndpointPicker(gateway, replicas, picks, keys, settings.root_path),
        process.endpoint_picker_listen,
        tls if settings.endpoint_picker_tls == "router" else None,
        None if is_static(listed) else follow,
    )


def _own_address(settings: RouterSettings, http_port: int) -> str:
    """Raises `ConfigError`."""
    if settings.endpoint_picker_address is not None:
        return settings.endpoint_picker_address
    host = settings.http_listen.rpartition(":")[0]
    if socket_path(settings.http_listen) is not None or host in ANY_HOST:
        raise ConfigError(
            "endpoint_picker_address", f"is needed: a proxy cannot reach {settings.http_listen} (--http-listen)"
        )
    return f"{host}:{http_port}"
