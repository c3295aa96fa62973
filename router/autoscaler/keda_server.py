"""The gRPC server that KEDA's operator calls."""

from __future__ import annotations

from grpc_health.v1 import health_pb2

from common.errors import StartupError
from common.grpc.health import SERVING, Health
from common.grpc.options import client_server_options
from common.grpc.server import make_server, until_ended
from common.grpc.transport import add_port
from common.tls import TlsFiles
from router.api.grpc_handlers import add_service
from router.autoscaler.board import Board
from router.autoscaler.keda import SERVICE, ExternalScaler
from router.autoscaler.rules import Targets
from router.limits.gate import Gate, GateLimits

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
MAX_MESSAGE_BYTES = 64 * 2**10
MAX_CALLS = 256


class KedaServer:
    """Takes its port when made, answers while `run` runs."""

    def __init__(self, address: str, board: Board, targets: Targets, tls: TlsFiles | None = None) -> None:
        """Raises `StartupError` if it cannot listen."""
        options = client_server_options(max_message_bytes=MAX_MESSAGE_BYTES, max_connections=256, max_streams=MAX_CALLS)
        self._server = make_server(options)
        gate = Gate(GateLimits(max_requests=MAX_CALLS, max_message_bytes=MAX_MESSAGE_BYTES))
        add_service(self._server, SERVICE, ExternalScaler(board, targets), gate, endless=True)
        self._health = Health()
        add_service(self._server, HEALTH, self._health, gate, endless=True)
        try:
            port = add_port(self._server, address, tls)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {address} for KEDA: {error}") from error
        self.address = f"{address.rpartition(':')[0]}:{port}"

    async def run(self) -> None:
        self._health.set("", SERVING)
        await self._server.start()
        await until_ended(self._server)

    async def close(self) -> None:
        await self._server.stop(grace=0.5)
