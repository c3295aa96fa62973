"""The router's process: gRPC and REST on one event loop, from the first connection to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable

import grpc
from starlette.types import ASGIApp

from common.config import RouterSettings
from common.grpc.health import NOT_SERVING, SERVING, Health
from common.grpc.options import client_server_options
from common.grpc.server import make_server, until_ended
from common.grpc.transport import Channels
from common.process.allocator import keep_few_arenas
from common.process.open_files import allow_open_files
from common.process.tasks import VitalTasks, count_tasks
from common.process.unix_sockets import remove, socket_path
from common.process.watched_files import FilesInUse
from common.tls import serving_files
from common.trace_settings import make_trace_export
from router.api.access_log import AccessLog, AccessLogMiddleware
from router.api.api_keys import ApiKeys
from router.api.grpc_auth import KeyInterceptor
from router.api.grpc_services import ADMIN, DEMAND, INFERENCE, MAX_OPEN_CALLS, ROUTER, add_services, bind, bind_health
from router.api.rest.app import make_app
from router.api.rest.entrance import EchoMiddleware, LimitMiddleware
from router.api.rest.http.auth import KeyMiddleware
from router.api.rest.http.cors import CorsMiddleware
from router.api.rest.http.listener import listen
from router.api.rest.http.protocol import Connections
from router.api.rest.http.root_path import RootPathMiddleware
from router.api.rest.http.web_server import WebServer
from router.api.router_orders import RouterOrders
from router.api.ui.live import Live
from router.api.ui.pages import PageFiles
from router.api.worker_views import WorkerViews
from router.fleet.discovery.follow import fixed, follow
from router.fleet.patience import PATIENCE, Patience
from router.fleet.registry import Registry
from router.limits.quotas import Quotas
from router.limits.targets import GivenTargets
from router.make_batches import make_batches
from router.make_endpoint_picker import make_endpoint_picker, make_picks
from router.make_gateway import make_gateway
from router.make_responses import make_responses
from router.processes.router_process import RouterProcess
from router.reload import Reload, SettingsFile
from router.running.retries import DispatchLimits
from router.running.threads import TextThreads
from router.serving.gateway import Gateway
from router.stop_signals import hang_up_signal, level_signal, stop_signals

log = logging.getLogger(__name__)

Ready = Callable[[str, str], None]
"""Called once with the REST URL and the gRPC address, when the first request can be served."""

CHECK_HEALTH_S = 1.0
CHECK_SETTINGS_S = 1.0
JOIN_WAIT_S = 5.0  # for the first worker, before a process takes the place of another one
OTHER_OPEN_FILES = 1024  # workers' connections, and connections that are about to be refused


async def serve(
    settings: RouterSettings,
    ready: Ready | None = None,
    stop: asyncio.Event | None = None,
    limits: DispatchLimits | None = None,
    file: SettingsFile | None = None,
    process: RouterProcess | None = None,
    patience: Patience = PATIENCE,
) -> None:
    """Runs until SIGTERM, SIGINT or `stop`, then drains: no new requests, running ones get `drain_timeout` seconds.
    Settings that may change are read again when `file` changes, at once with SIGHUP; so are limits and keys. `process`
    has what this one shares with other processes of its router.

    Raises `StartupError` with one line if it cannot listen, or cannot use certificates or keys.
    """
    stop = stop or asyncio.Event()
    tls = serving_files(settings, settings.tls_client_ca, ca_field="tls_client_ca")
    keys = ApiKeys(settings.api_keys_file) if settings.api_keys_file is not None else None
    vital = VitalTasks()
    registry = Registry(fixed(settings.prefill), fixed(settings.decode), Channels(settings), vital, patience)
    process = process or RouterProcess(settings)
    targets = GivenTargets(ttft_ms=settings.slo_ttft_ms, tpot_ms=settings.slo_tpot_ms)
    quotas = Quotas(settings.limits_file, ledger=process.ledger, targets=targets)
    threads, grammar_threads = TextThreads(), TextThreads(1, what="grammars wait to be parsed")
    template_threads = TextThreads(1, what="chat templates wait to be rendered")
    traces = make_trace_export(settings, "baton-router", sample=settings.trace_sample)
    gateway = make_gateway(
        settings,
        registry,
        process,
        quotas,
        threads,
        grammar_threads,
        limits,
        template_threads=template_threads,
        traces=traces,
        picks=make_picks(settings, process),
    )
    await process.start(vital)
    reload = None if file is None else Reload(settings, file, gateway.routes, process.queue)
    gate = gateway.admission.gate
    health = Health()
    async with contextlib.AsyncExitStack() as stack:
        if traces is not None:
            stack.push_async_callback(asyncio.to_thread, traces.close)
        stack.callback(threads.close)
        stack.callback(grammar_threads.close)
        stack.callback(template_threads.close)
        if process.is_replacement:
            await _join(settings, registry, vital, stack)
        shared = process.is_one_of_several
        stack.callback(remove, process.http_listen)
        stack.callback(remove, process.grpc_listen)
        http_socket = stack.enter_context(contextlib.closing(listen(process.http_listen, shared=shared)))
        interceptors = [] if keys is None else [KeyInterceptor(keys)]
        grpc_server = make_server(
            client_server_options(
                max_message_bytes=gate.limits.max_message_bytes,
                max_connections=process.max_connections,
                max_streams=settings.max_requests + MAX_OPEN_CALLS,  # so that too many are refused, not left to wait
                shared_port=shared,
            ),
            interceptors,
            max_calls=2 * (settings.max_requests + MAX_OPEN_CALLS),  # with those about to be refused
        )
        grpc_port = bind(grpc_server, process.grpc_listen, tls)
        http_port = 0 if socket_path(process.http_listen) else http_socket.getsockname()[1]
        picker = make_endpoint_picker(settings, gateway, process, keys, tls, http_port)
        views = WorkerViews(registry, process)
        access_log = AccessLog(settings.access_log) if settings.access_log else None
        orders = RouterOrders(
            process, gateway.admission, functools.partial(_files, reload, quotas, keys), settings.processes
        )
        add_services(grpc_server, gateway, registry, views, health, orders, access_log)
        probed = bind_health(process.health_listen, health, shared=shared)
        if not process.is_replacement:
            stack.push_async_callback(registry.close)
            registry.start()

        live = Live(gateway, registry, views, settings.processes) if settings.ui else None
        batches = await make_batches(settings, gateway, stack)
        handlers = None if batches is None else batches.handlers
        stored = await make_responses(settings, gateway, stack)
        limited = LimitMiddleware(make_app(gateway, settings.root_path, live, handlers, stored), gate)
        app = _around(limited, settings, keys, access_log)
        connections = Connections(process.max_connections, settings.receive_timeout)
        web = WebServer(http_socket, app, connections, None if tls is None else tls.server_context())
        look = functools.partial(_look_at_files, reload, quotas, keys)
        with stop_signals(stop), hang_up_signal(look), level_signal(process.flip_debug):
            process.takes_signals()
            health.renew = functools.partial(_set_health, health, gateway)
            health.renew()
            await grpc_server.start()
            serving = [vital.start(until_ended(grpc_server), name="grpc")]
            if probed is not None:
                await probed.start()
                stack.push_async_callback(probed.stop, None)
                serving.append(vital.start(until_ended(probed), name="health probes"))
            web_task = vital.start(web.run(), name="rest")
            scheme = "http" if tls is None else "https"
            http_url = f"{scheme}://{_host(settings.http_listen)}:{http_port}"
            if socket_path(process.http_listen) is not None:
                http_url = settings.http_listen
            grpc_address = f"{_host(settings.grpc_listen)}:{grpc_port}"
            if socket_path(settings.grpc_listen) is not None:
                grpc_address = settings.grpc_listen
            log.info("router listens", extra={"http": http_url, "grpc": grpc_address})
            on_ready = functools.partial(ready, http_url, grpc_address) if ready else lambda: None
            vital.start(_watch_health(health, gateway, on_ready), name="health")
            vital.start(count_tasks(), name="count of tasks")
            if live is not None:
                vital.start(live.run(), name="live page")
            if batches is not None:
                batches.answers.app = limited
                serving.append(vital.start(batches.runner.run(), name="batches"))
            if reload is not None:
                vital.start(_watch_settings(reload), name="settings")
            if not process.is_replacement:
                vital.start(_discover(settings, registry), name="discovery")
            if picker is not None:
                await picker.start(vital)
                stack.push_async_callback(picker.stop)
            try:
                await vital.failed_or(stop)
                for task in serving:  # gRPC servers end by themselves from here on; batches go on another time
                    task.cancel()
                if picker is not None:
                    picker.drain(settings.drain_timeout)
                await _drain(gateway, health, grpc_server, settings.drain_timeout)
            finally:
                vital.let_end()
                web.stop()
                await grpc_server.stop(grace=0)
                await asyncio.gather(web_task, return_exceptions=True)
                await vital.close()
        vital.raise_failure()
        log.info("router ended")


def _around(app: ASGIApp, settings: RouterSettings, keys: ApiKeys | None, access_log: AccessLog | None) -> ASGIApp:
    """`app` behind what each request passes first. Raises `ConfigError`."""
    if keys is not None:
        app = KeyMiddleware(app, keys)
    if settings.ui:
        app = PageFiles(app, settings.root_path)
    if settings.cors_origins or settings.cors_credentials:
        app = CorsMiddleware(app, settings.cors_origins, credentials=settings.cors_credentials)
    if settings.root_path:
        app = RootPathMiddleware(app, settings.root_path)
    app = EchoMiddleware(app)
    return app if access_log is None else AccessLogMiddleware(app, access_log)


async def _join(
    settings: RouterSettings, registry: Registry, vital: VitalTasks, stack: contextlib.AsyncExitStack
) -> None:
    """Starts the registry and waits for a first worker, but not for ever. A process that replaces another one calls
    this before it listens, while the others serve."""
    stack.push_async_callback(registry.close)
    registry.start()
    vital.start(_discover(settings, registry), name="discovery")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(JOIN_WAIT_S):
            while registry.not_ready():
                await registry.changed(JOIN_WAIT_S)


async def _discover(settings: RouterSettings, registry: Registry) -> None:
    """Gives the registry the workers that discovery finds, until cancelled. Raises `StartupError`."""
    try:
        await follow(settings.prefill, settings.decode, registry.set_addresses)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # both roles fail for the same reason: one line says it
    await asyncio.Event().wait()  # every worker is fixed


def run(
    settings: RouterSettings, ready: Ready, file: SettingsFile | None = None, process: RouterProcess | None = None
) -> None:
    """`serve` in this process, on the fastest event loop there is."""
    keep_few_arenas()
    allow_open_files(2 * settings.max_connections + OTHER_OPEN_FILES)
    try:
        import uvloop
    except ImportError:  # not available on Windows
        asyncio.run(serve(settings, ready, file=file, process=process))
    else:
        uvloop.run(serve(settings, ready, file=file, process=process))


def _host(address: str) -> str:
    return address.rpartition(":")[0] or "127.0.0.1"


def _set_health(health: Health, gateway: Gateway) -> None:
    inference = NOT_SERVING if gateway.not_ready() else SERVING
    health.set("", inference)
    health.set(INFERENCE.full_name, inference)
    for service in (ROUTER, ADMIN, DEMAND):
        health.set(service.full_name, SERVING)


async def _watch_health(health: Health, gateway: Gateway, on_ready: Callable[[], None]) -> None:
    """Keeps the health service true, and says once that the first request can be served."""
    was_ready = False
    while True:
        _set_health(health, gateway)
        if not was_ready and not gateway.admission.not_ready():
            was_ready = True
            on_ready()
        await gateway.admission.registry.changed(CHECK_HEALTH_S)


def _look_at_files(reload: Reload | None, quotas: Quotas, keys: ApiKeys | None) -> None:
    """SIGHUP: reads the files that have changed."""
    if reload is None:
        log.info("SIGHUP: there is no settings file (--config) to read again")
    else:
        reload.look()
    quotas.look()
    if keys is not None:
        keys.look()


def _files(reload: Reload | None, quotas: Quotas, keys: ApiKeys | None) -> list[FilesInUse]:
    """An operator's order to read files again: what is in use then."""
    found = [None if reload is None else reload.in_use(), quotas.in_use(), None if keys is None else keys.in_use()]
    return [one for one in found if one is not None]


async def _watch_settings(reload: Reload) -> None:
    """Looks at the settings file once a second, until cancelled."""
    while True:
        await asyncio.sleep(CHECK_SETTINGS_S)
        reload.look()


async def _drain(gateway: Gateway, health: Health, grpc_server: grpc.aio.Server, timeout_s: float) -> None:
    """Finishes what runs. gRPC clients are told first (GOAWAY), so that those with a connection of long standing take
    their next request to another router by themselves rather than having it refused here."""
    log.info("router drains", extra={"timeout_s": timeout_s})
    health.end()
    closing = asyncio.create_task(grpc_server.stop(timeout_s))
    await asyncio.sleep(0)  # it has begun
    gateway.admission.drain()
    try:
        async with asyncio.timeout(timeout_s):
            await gateway.admission.idle()
    except TimeoutError:
        log.warning("answers were cut off: they took longer than the drain timeout")
    closing.cancel()  # streams that never end by themselves, as of load or health, are not waited for
    # The last answers' bytes are still on their way out of this process.
    await asyncio.sleep(0.05)
