"""From settings to the commands of a local stack: roles, addresses, cores. `baton.stack.local_stack` runs them.

The router is told worker addresses that do not answer yet, so worker ports are chosen here beforehand.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.settings import (
    UP_SETTINGS,
    WORKER_SETTINGS,
    RouterCommandSettings,
    did_you_mean,
    env_name,
    given_variables,
    load,
    to_flags,
)
from baton.stack import fork_server, lmcache_server
from baton.stack.local_stack import BATON, LMCACHE, Addresses, Forks, Stack
from common.config import (
    BatchSettings,
    LimitSettings,
    ObserveSettings,
    PolicySettings,
    ResponseSettings,
    RouterSettings,
    Settings,
    TlsSettings,
    UpSettings,
    WebSettings,
)
from common.errors import BatonError, ConfigError, StartupError
from common.types import WorkerState
from engine.local.device_choice import SIMULATED
from kv_store import registry

log = logging.getLogger(__name__)

_WORKER_HOST = "127.0.0.1"  # only the router of a local stack is for others
# Below what Linux, macOS and Windows hand out to outgoing connections, so that none of those takes a port between
# our choice and the worker's bind.
_WORKER_PORTS = range(20000, 32000)
_FLEET_TIMEOUT_S = 10.0
_MANY_WORKERS = 11  # simulated ones, from which on each tells only warnings unless --log-level is given
_OF_ROUTER = [
    field
    for settings in (PolicySettings, LimitSettings, WebSettings, BatchSettings, ResponseSettings, ObserveSettings)
    for field in settings.model_fields
]
_SECURED = {env_name(field) for field in ("api_keys_file", *TlsSettings.model_fields)}
"""With these, the router answers nobody that has no key or certificate. All say that they are ready, as ever."""
_SHARED = UP_SETTINGS.model_fields.keys() & WORKER_SETTINGS.model_fields.keys()  # what a worker takes from its stack
_DECIDED = {
    "http_listen": "the stack has --host and --http-port, or --uds",
    "grpc_listen": "the stack has --host and --grpc-port",
    "processes": "the stack has --router-processes",
    "listen": "a stack chooses its workers' addresses",
    "advertise": "a stack chooses its workers' addresses",
    "health_listen": "the processes of a stack cannot share one address",
    "metrics_port": "the workers of a stack cannot share one port; 0 takes a free one for each",
}
"""Settings of a child that the stack itself decides, and why no variable can."""


def check(settings: UpSettings) -> None:
    """Raises ConfigError for what no worker could start with: better said once, and before anything runs."""
    names = registry.connector_names()
    if settings.connector not in names:
        hint = did_you_mean(settings.connector, names)
        raise ConfigError("--connector", f"{settings.connector!r} is not one of {', '.join(names)}{hint}")
    registry.check_store(settings.connector, settings.store, "--store")
    if _starts_lmcache(settings):
        lmcache_server.executable()
    if settings.uds is not None and (not settings.uds or any(sign.isspace() for sign in settings.uds)):
        raise ConfigError("--uds", "should be a path without blanks")
    if settings.uds is not None and settings.router_processes > 1:
        raise ConfigError("--uds", "several processes share ports alone: a unix socket needs --router-processes 1")
    if settings.decode + settings.both == 0:
        raise ConfigError("--decode", "a stack needs at least one decode worker or one with --both roles")


def _starts_lmcache(settings: UpSettings) -> bool:
    is_asked = "lmcache" in (settings.connector, settings.store)
    return is_asked and registry.lmcache_address(settings.model_dump()) is None


def given_kv_dir(settings: UpSettings) -> str | None:
    """`--kv-dir`: where a store's files are kept, or those of the LMCache server that is started."""
    return registry.kv_dir(settings.model_dump())


def child_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(variables that the router of a stack gets, variables that each of its workers gets). The stack has no setting of
    its own for these. A variable of other commands is left alone, as every command does.

    Raises ConfigError for a bad value, and for a variable that cannot be passed on.
    """
    given = {field: value for field, value in given_variables(environ).items() if field not in UP_SETTINGS.model_fields}
    found: list[dict[str, str]] = []
    for settings_class in (RouterCommandSettings, WORKER_SETTINGS):
        own = {field: value for field, value in given.items() if field in settings_class.model_fields}
        for field, value in own.items():
            if field in _DECIDED and (field, value) != ("metrics_port", "0"):
                raise ConfigError(env_name(field), f"cannot be passed on: {_DECIDED[field]}")
        variables = {env_name(field): value for field, value in own.items()}
        load(settings_class, {}, environ=variables)
        found.append(variables)
    if "api_key" in given and "api_keys_file" not in given:
        log.warning("BATON_API_KEY is for clients: this stack asks for no key, as BATON_API_KEYS_FILE would have it do")
    return found[0], found[1]


def plan(settings: UpSettings, kv_dir: Path, environ: Mapping[str, str] = os.environ) -> Stack:
    """The commands of a stack. Worker ports and cores are decided here. Raises ConfigError for variables that belong to
    a child and cannot be passed on."""
    router_variables, worker_variables = child_variables(environ)
    roles = ["prefill"] * settings.prefill + ["decode"] * settings.decode + ["worker"] * settings.both
    is_simulated = settings.device == SIMULATED
    if is_simulated:  # it computes nothing: workers and router run on the same cores, anywhere if none are given
        cores, fronts = [settings.cpu_cores] * len(roles), settings.cpu_cores
    else:
        cores = divide_cores(settings.cpu_cores or usable_cores(), len(roles))
        fronts = front_cores(roles, cores)
    lmcache_address, *addresses = [f"{_WORKER_HOST}:{port}" for port in free_ports(1 + len(roles))]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    shared = {name: value for name, value in settings.model_dump().items() if name in _SHARED}
    shared["kv_dir"] = str(kv_dir)
    if settings.device.startswith("cuda"):  # all workers are on the same device, so each gets its share of it
        shared["memory_utilization"] = settings.memory_utilization / len(roles)
    if is_simulated and len(roles) >= _MANY_WORKERS and "log_level" not in settings.model_fields_set:
        shared["log_level"] = "warning"
    commands: dict[str, list[str]] = {}
    if _starts_lmcache(settings):
        shared["lmcache_address"] = lmcache_address
        files = kv_dir if given_kv_dir(settings) is not None else None
        size_gb = registry.lmcache_size_gb(settings.model_dump())
        commands[LMCACHE] = lmcache_server.wrapper(lmcache_address, size_gb, files)
    numbers: dict[str, int] = {}
    for role, address, own in zip(roles, addresses, cores, strict=True):
        worker = WORKER_SETTINGS.model_validate({**shared, "listen": address, "cpu_cores": own})
        numbers[role] = numbers.get(role, 0) + 1
        commands[f"{role}-{numbers[role]}"] = baton_command(role, worker)
    workers = frozenset(commands) - {LMCACHE}
    router = RouterSettings(
        prefill=tuple(address for role, address in zip(roles, addresses, strict=True) if role != "decode"),
        decode=tuple(address for role, address in zip(roles, addresses, strict=True) if role != "prefill"),
        http_listen=f"{host}:{settings.http_port}" if settings.uds is None else f"unix:{settings.uds}",
        grpc_listen=f"{host}:{settings.grpc_port}",
        **{name: getattr(settings, name) for name in _OF_ROUTER},
        processes=settings.router_processes,
        drain_timeout=settings.drain_timeout,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    commands["router"] = baton_command("router", router)
    forks = Forks(workers, (*fork_server.COMMAND, settings.model, settings.cache_dir))
    return Stack(
        commands,
        settings.drain_timeout,
        settings.start_timeout,
        max_restarts=settings.max_restarts,
        front_cores=fronts,
        variables={name: router_variables if name == "router" else worker_variables for name in commands},
        forks=forks if is_simulated and sys.platform == "linux" else None,
        not_ready=fleet_not_ready if not _SECURED & router_variables.keys() else lambda _: "",
    )


def fleet_not_ready(addresses: Addresses) -> str:
    """Which workers the router cannot use yet; empty when it can use all."""
    from baton.client.sync_client import Client

    try:
        with Client(addresses.grpc, timeout=_FLEET_TIMEOUT_S) as client:
            workers = client.fleet()
    except BatonError as error:
        return error.message
    return ", ".join(f"{one.address} is {one.state}" for one in workers if one.state is not WorkerState.READY)


def baton_command(command: str, settings: Settings) -> list[str]:
    return [*BATON, command, *to_flags(settings)]


def usable_cores() -> tuple[int, ...]:
    """Cores this process may run on; none if the system cannot pin."""
    if sys.platform != "linux":
        return ()
    return tuple(sorted(os.sched_getaffinity(0)))


def divide_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Cores of each worker: neighbouring, as equal as possible; shared one by one if there are too few."""
    if len(cores) < num_workers:
        return [(cores[i % len(cores)],) if cores else () for i in range(num_workers)]
    bounds = [len(cores) * i // num_workers for i in range(num_workers + 1)]
    return [tuple(cores[start:stop]) for start, stop in itertools.pairwise(bounds)]


def front_cores(roles: Sequence[str], cores: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Where the workers' gRPC servers and the router run, given each worker's role and the cores of its engine: beside
    engines that only prefill. Each of a stream's tokens waits for a decode step, of 30 ms perhaps, and a millisecond
    that another process takes of it is felt; in a chunk of a long prompt it is lost. Empty (any core) if
    every core decodes."""
    decoding = {core for role, own in zip(roles, cores, strict=True) if role != "prefill" for core in own}
    return tuple(sorted({core for own in cores for core in own} - decoding))


def free_ports(count: int, among: range = _WORKER_PORTS) -> list[int]:
    """Different loopback ports that nobody listens on now. Raises StartupError if there are not so many."""
    ports: list[int] = []
    for port in random.sample(among, len(among)):
        if len(ports) == count:
            break
        with socket.socket() as probe:
            try:
                probe.bind((_WORKER_HOST, port))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                continue
        ports.append(port)
    if len(ports) < count:
        raise StartupError(f"fewer than {count} free ports from {among.start} to {among.stop - 1}")
    return ports
