"""What a router's gRPC ports speak: its services, health, and reflection, each behind the limits that it needs."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from common.errors import StartupError
from common.grpc.calls import Context, handle_call, send
from common.grpc.health import Health
from common.grpc.reflection import ReflectionPool
from common.grpc.server import add_handlers
from common.grpc.transport import add_port, health_server
from common.process.unix_sockets import let_group_in, make_way, socket_path
from common.tls import TlsFiles
from protos.baton.v1 import admin_pb2, demand_pb2, inference_pb2, router_pb2
from protos.inference import open_inference_pb2
from router.api.access_log import AccessLog
from router.api.admin_service import AdminService
from router.api.audit_log import administration
from router.api.fleet_service import FleetService
from router.api.grpc_handlers import add_service
from router.api.grpc_parser import Parser
from router.api.inference_service import InferenceService
from router.api.oip.grpc_service import OpenInferenceService
from router.api.router_orders import RouterOrders
from router.api.worker_views import WorkerViews
from router.fleet.registry import Registry
from router.limits.demand import DemandService
from router.limits.gate import MESSAGE_BYTES, Gate, GateLimits
from router.serving.gateway import Gateway

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
ROUTER = router_pb2.DESCRIPTOR.services_by_name["RouterService"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
DEMAND = demand_pb2.DESCRIPTOR.services_by_name["DemandService"]
OPEN_INFERENCE = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
SERVICES = (INFERENCE, OPEN_INFERENCE, ROUTER, ADMIN, DEMAND, HEALTH)
REFLECTION = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")  # same messages
MAX_OPEN_CALLS = 256  # at a time, of those that need no key: health, demand, and reflection if there are no keys
MAX_OPEN_READS = 16


def bind(server: grpc.aio.Server, address: str, tls: TlsFiles | None) -> int:
    """Returns the port; for a unix socket, a number that says nothing."""
    path = socket_path(address)
    try:
        if path is not None:
            make_way(path)  # gRPC would take the place of whoever listens there
        port = add_port(server, address, tls)
        if path is not None:
            let_group_in(path)
    except (RuntimeError, OSError) as error:
        raise StartupError(f"cannot listen on {address} for gRPC: {error}") from error
    if port == 0:
        raise StartupError(f"cannot listen on {address} for gRPC")
    return port


def bind_health(address: str | None, health: Health, *, shared: bool) -> grpc.aio.Server | None:
    if address is None:
        return None
    try:
        server = health_server(address, shared_port=shared)
    except RuntimeError as error:
        raise StartupError(f"health_listen: cannot bind {address}: is the port taken?") from error
    add_service(server, HEALTH, health, open_gate(MESSAGE_BYTES), endless=True)
    return server


def add_services(
    server: grpc.aio.Server,
    gateway: Gateway,
    registry: Registry,
    views: WorkerViews,
    health: Health,
    orders: RouterOrders,
    access_log: AccessLog | None = None,
) -> None:
    admission = gateway.admission
    demand, fleet = DemandService(admission.demand), FleetService(registry, views, gateway.latest_requests)
    size = admission.gate.limits.max_message_bytes
    gate = open_gate(size)
    inference, most = InferenceService(gateway), admission.max_request_bytes
    add_service(server, INFERENCE, inference, admission.gate, most, access_log=access_log)
    open_inference = OpenInferenceService(gateway)
    add_service(server, OPEN_INFERENCE, open_inference, admission.gate, most, access_log=access_log)
    add_service(server, ROUTER, fleet, admission.gate, access_log=access_log)
    # A gate of its own: clients that take all places of the other one cannot keep an operator out.
    admin = AdminService(registry, orders)
    add_service(server, ADMIN, admin, open_gate(size), access_log=access_log, guard=administration)
    add_service(server, DEMAND, demand, gate, endless=True)
    add_service(server, HEALTH, health, open_gate(size), endless=True)  # no other calls keep a probe out
    names = (*(service.full_name for service in SERVICES), *REFLECTION)
    reflection = ReflectionServicer(names, pool=ReflectionPool())

    async def answer(requests: object, context: Context) -> None:
        with gate.requests(""):
            await send(context, reflection.ServerReflectionInfo(requests, context))

    async def info(requests: object, context: Context) -> None:
        await handle_call(context, answer(requests, context))

    handler = grpc.stream_stream_rpc_method_handler(
        info,
        Parser(reflection_pb2.ServerReflectionRequest),
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    for name in REFLECTION:
        add_handlers(server, name, methods)


def open_gate(max_message_bytes: int) -> Gate:
    """The gate of calls that need no key. Few at a time have their messages read, as those may be as long as any."""
    return Gate(
        GateLimits(
            max_requests=MAX_OPEN_CALLS,
            max_buffered_bytes=MAX_OPEN_READS * max_message_bytes,
            max_message_bytes=max_message_bytes,
            receive_timeout_s=5.0,
        )
    )
