"""The router's process: gRPC and REST on one event loop, from the first connection to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator

import grpc
import uvicorn
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from common.config import RouterSettings
from common.errors import StartupError
from common.grpc_options import CLIENT_SERVER_OPTIONS
from common.grpc_transport import Channels, add_port, health_server
from common.logs import setup_logging
from common.reflection import ReflectionPool
from common.tasks import VitalTasks
from common.tls import TlsFiles, serving_files
from protos.baton.v1 import demand_pb2, inference_pb2, router_pb2
from router.api.api_keys import ApiKeys
from router.api.fleet_service import FleetService
from router.api.grpc_auth import KeyInterceptor
from router.api.grpc_handlers import add_service
from router.api.inference_service import InferenceService
from router.api.rest.app import make_app
from router.api.rest.auth import KeyMiddleware
from router.api.rest.listener import listen
from router.fleet.discovery.follow import fixed, follow
from router.fleet.registry import Registry
from router.policy.registry import create_policy
from router.serving.admission import Admission
from router.serving.demand import Demand, DemandService
from router.serving.dispatch import Dispatcher, DispatchLimits
from router.serving.front import Front
from router.serving.generation import Generation
from router.serving.preparation import Preparation
from router.serving.threads import TextThreads
from router.stop_signals import stop_signals

log = logging.getLogger(__name__)

Ready = Callable[[str, str], None]
"""Called once with the REST URL and the gRPC address, when the first request can be served."""

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    router_pb2.DESCRIPTOR.services_by_name["RouterService"],
    demand_pb2.DESCRIPTOR.services_by_name["DemandService"],
)
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"  # same messages as v1alpha, another name
CHECK_HEALTH_S = 1.0


async def serve(
    settings: RouterSettings,
    ready: Ready | None = None,
    stop: asyncio.Event | None = None,
    limits: DispatchLimits | None = None,
) -> None:
    """Runs until SIGTERM, SIGINT or `stop`, then drains: no new requests, running ones get `drain_timeout` seconds.

    Raises `StartupError` with one line where it cannot listen, or cannot use certificates or keys.
    """
    stop = stop or asyncio.Event()
    tls = serving_files(settings, settings.tls_client_ca, ca_field="tls_client_ca")
    keys = ApiKeys(settings.api_keys_file) if settings.api_keys_file is not None else None
    vital = VitalTasks()
    registry = Registry(fixed(settings.prefill), fixed(settings.decode), Channels(settings), vital)
    policy = create_policy(settings.policy, min_remote_tokens=settings.min_remote_tokens or 0)
    dispatcher = Dispatcher(registry, policy, limits=limits)
    demand = Demand()
    threads = TextThreads()
    front = Front(
        Admission(registry, demand, worker_wait_s=settings.worker_wait),
        Preparation(
            request_timeout_s=settings.request_timeout, control_tokens=settings.control_tokens, threads=threads
        ),
        Generation(dispatcher, demand),
    )
    health = HealthServicer()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(threads.close)
        http_socket = stack.enter_context(contextlib.closing(listen(settings.http_listen)))
        interceptors = [] if keys is None else [KeyInterceptor(keys)]
        grpc_server = grpc.aio.server(options=CLIENT_SERVER_OPTIONS, interceptors=interceptors)
        grpc_port = _bind(grpc_server, settings.grpc_listen, tls)
        _add_services(grpc_server, front, registry, health)
        probed = _bind_health(settings.health_listen, health)
        stack.push_async_callback(registry.close)
        registry.start()

        app = make_app(front)
        web = _WebServer(
            uvicorn.Config(
                app if keys is None else KeyMiddleware(app, keys),
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                ssl_context_factory=None if tls is None else lambda _config, _default: tls.server_context(),
            )
        )
        with stop_signals(stop):
            await _set_health(health, front)
            await grpc_server.start()
            if probed is not None:
                await probed.start()
                stack.push_async_callback(probed.stop, None)
            web_task = vital.start(web.serve([http_socket]), name="rest")
            scheme = "http" if tls is None else "https"
            http_url = f"{scheme}://{_host(settings.http_listen)}:{http_socket.getsockname()[1]}"
            grpc_address = f"{_host(settings.grpc_listen)}:{grpc_port}"
            log.info("router listens", extra={"http": http_url, "grpc": grpc_address})
            on_ready = functools.partial(ready, http_url, grpc_address) if ready else lambda: None
            vital.start(_watch_health(health, front, on_ready), name="health")
            vital.start(_discover(settings, registry), name="discovery")
            try:
                await vital.failed_or(stop)
                await _drain(front, health, grpc_server, settings.drain_timeout)
            finally:
                vital.let_end()
                web.should_exit = web.force_exit = True
                await grpc_server.stop(grace=0)
                await asyncio.gather(web_task, return_exceptions=True)
                await vital.close()
        vital.raise_failure()
        log.info("router ended")


async def _discover(settings: RouterSettings, registry: Registry) -> None:
    """Keeps the registry's workers what discovery finds, until cancelled. Raises `StartupError`."""
    try:
        await follow(settings.prefill, settings.decode, registry.set_addresses)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # both roles fail for the same reason: one line says it
    await asyncio.Event().wait()  # every worker is fixed


def run(settings: RouterSettings, ready: Ready | None = None) -> None:
    """`serve`, on the fastest event loop there is."""
    try:
        import uvloop
    except ImportError:  # not available on Windows
        asyncio.run(serve(settings, ready))
    else:
        uvloop.run(serve(settings, ready))


class _WebServer(uvicorn.Server):
    """uvicorn, leaving signals to the router."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _host(address: str) -> str:
    return address.rpartition(":")[0] or "127.0.0.1"


def _bind(server: grpc.aio.Server, address: str, tls: TlsFiles | None) -> int:
    try:
        port = add_port(server, address, tls)
    except RuntimeError as error:
        raise StartupError(f"cannot listen on {address} for gRPC: {error}") from error
    if port == 0:
        raise StartupError(f"cannot listen on {address} for gRPC")
    return port


def _bind_health(address: str | None, health: HealthServicer) -> grpc.aio.Server | None:
    if address is None:
        return None
    try:
        server = health_server(address)
    except RuntimeError as error:
        raise StartupError(f"health_listen: cannot bind {address}: is the port taken?") from error
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server


def _add_services(server: grpc.aio.Server, front: Front, registry: Registry, health: HealthServicer) -> None:
    servicers = (InferenceService(front), FleetService(registry), DemandService(front.admission.demand))
    for service, servicer in zip(SERVICES, servicers, strict=True):
        add_service(server, service, servicer)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    names = (*(service.full_name for service in SERVICES), health_name, reflection.SERVICE_NAME, REFLECTION_V1)
    reflection.enable_server_reflection(names, server, pool=ReflectionPool())
    handler = grpc.stream_stream_rpc_method_handler(
        ReflectionServicer(names, pool=ReflectionPool()).ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": handler}),)
    )


async def _set_health(health: HealthServicer, front: Front) -> None:
    status = health_pb2.HealthCheckResponse
    inference = status.NOT_SERVING if front.admission.not_ready() else status.SERVING
    await health.set("", inference)
    await health.set(SERVICES[0].full_name, inference)
    for service in SERVICES[1:]:
        await health.set(service.full_name, status.SERVING)


async def _watch_health(health: HealthServicer, front: Front, on_ready: Callable[[], None]) -> None:
    """Keeps the health service true, and says once that the first request can be served."""
    was_ready = False
    while True:
        await _set_health(health, front)
        if not was_ready and not front.admission.not_ready():
            was_ready = True
            on_ready()
        await front.admission.registry.changed(CHECK_HEALTH_S)


async def _drain(front: Front, health: HealthServicer, grpc_server: grpc.aio.Server, timeout_s: float) -> None:
    """Finishes what runs. gRPC clients are told first (GOAWAY), so that those with a connection of long standing take
    their next request to another router by themselves rather than having it refused here."""
    log.info("router drains", extra={"timeout_s": timeout_s})
    await health.enter_graceful_shutdown()
    closing = asyncio.create_task(grpc_server.stop(timeout_s))
    await asyncio.sleep(0)  # it has begun
    front.admission.drain()
    try:
        await asyncio.wait_for(front.admission.idle(), timeout_s)
    except TimeoutError:
        log.warning("answers were cut off: they took longer than the drain timeout")
    closing.cancel()  # streams that never end by themselves, as of load or health, are not waited for
    # The last answers' bytes are still on their way out of this process.
    await asyncio.sleep(0.05)


def main(settings: RouterSettings) -> int:
    """The `baton router` process: prints `ready http=URL grpc=ADDRESS` once the first request can be served."""
    setup_logging("router", level=settings.log_level, log_format=settings.log_format)

    def print_ready(http_url: str, grpc_address: str) -> None:
        print(f"ready http={http_url} grpc={grpc_address}", flush=True)  # noqa: T201 (for who started this process)

    run(settings, print_ready)
    return 0
