"""The port of an endpoint picker: `ext_proc`, and its health under the three names that the protocol has.

Proxies alone should reach it. It asks for no API key, since a proxy has none of its own: keys of its clients come in
the headers of their requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine

import grpc

from common.certificates import self_signed
from common.config import RouterSettings
from common.errors import StartupError
from common.grpc.health import NOT_SERVING, SERVING, Health
from common.grpc.options import client_server_options
from common.grpc.server import make_server, until_ended
from common.process.tasks import VitalTasks
from common.tls import TlsFiles
from router.api.endpoint_picker.picker import EndpointPicker
from router.api.endpoint_picker.service import SERVICE, ExternalProcessorService
from router.api.grpc_handlers import add_service
from router.api.grpc_services import HEALTH, MAX_OPEN_CALLS, bind, open_gate
from router.limits.gate import MESSAGE_BYTES, Gate, GateLimits
from router.processes.router_process import RouterProcess
from router.serving.gateway import Gateway

log = logging.getLogger(__name__)

LIVENESS, READINESS = "liveness", "readiness"
CHECK_HEALTH_S = 1.0


class EndpointPickerServer:
    def __init__(
        self,
        settings: RouterSettings,
        gateway: Gateway,
        process: RouterProcess,
        picker: EndpointPicker,
        address: str,
        tls: TlsFiles | None,
        follow: Callable[[], Coroutine[None, None, None]] | None = None,
    ) -> None:
        """`tls`: the router's own, if this port shows its certificate. `follow`: finds the router's replicas, until it
        is cancelled. Raises `StartupError`."""
        self._follow = follow
        self._tasks: list[asyncio.Task[object]] = []
        self._gateway = gateway
        self._health = Health()
        self._health.renew = self._set_health
        of_door = gateway.admission.gate.limits
        most = settings.max_requests + MAX_OPEN_CALLS
        self._server = make_server(
            client_server_options(
                max_message_bytes=MESSAGE_BYTES,
                max_connections=process.max_connections,
                max_streams=most,  # so that too many are refused, not left to wait
                shared_port=process.is_one_of_several,
            ),
            max_calls=2 * most,  # a call lasts as long as its answer
        )
        is_self_signed = settings.endpoint_picker_tls == "self-signed"
        port = _bind_self_signed(self._server, address) if is_self_signed else bind(self._server, address, tls)
        self.address = f"{address.rpartition(':')[0]}:{port}"
        gate = Gate(
            GateLimits(
                max_requests=of_door.max_requests,
                max_requests_per_key=of_door.max_requests_per_key,
                receive_timeout_s=of_door.receive_timeout_s,
                answer_timeout_s=of_door.answer_timeout_s,
            )
        )
        ExternalProcessorService(picker, gateway.admission, gate).add_to(self._server)
        add_service(self._server, HEALTH, self._health, open_gate(MESSAGE_BYTES), endless=True)

    async def start(self, vital: VitalTasks) -> None:
        self._set_health()
        await self._server.start()
        self._tasks.append(vital.start(until_ended(self._server), name="endpoint picker"))
        vital.start(self._watch_health(), name="health of the endpoint picker")
        if self._follow is not None:
            vital.start(self._follow(), name="replicas of this router")
        log.info("endpoint picker listens", extra={"grpc": self.address})

    def drain(self, timeout_s: float) -> None:
        """Takes no new connections, and tells proxies to take others; calls in progress go on."""
        self._cancel()  # the server ends by itself from here on
        self._tasks.append(asyncio.create_task(self._server.stop(timeout_s)))

    async def stop(self) -> None:
        self._cancel()
        await self._server.stop(grace=0)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def _set_health(self) -> None:
        """A draining router is alive, and takes no requests."""
        ready = NOT_SERVING if self._gateway.not_ready() else SERVING
        self._health.set(LIVENESS, SERVING)
        for service in ("", READINESS, SERVICE.full_name):
            self._health.set(service, ready)

    async def _watch_health(self) -> None:
        while True:
            self._set_health()
            await self._gateway.admission.registry.changed(CHECK_HEALTH_S)


def _bind_self_signed(server: grpc.aio.Server, address: str) -> int:
    instead = "give --endpoint-picker-tls router or none"
    certificate, key = self_signed("baton-endpoint-picker", ["baton-endpoint-picker"], instead)
    port = 0
    with contextlib.suppress(RuntimeError):
        port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
    if port == 0:
        raise StartupError(f"endpoint_picker_listen: cannot listen on {address}")
    return port
