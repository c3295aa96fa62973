"""The routers that are measured, and the workers without an engine behind them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.stack.processes import Child
from bench.load.clients import ask
from bench.processes import running, started
from bench.router.clients import Endpoint, chat
from common.errors import BatonError, ConfigError, InternalError, StartupError

BATON = "baton"
PEERS = {"vllm-router": ("--log-level=error",), "sglang-router": ("launch", "--log-level=error")}
"""Other flags keep their defaults, but for the policy: round robin reads no prompt."""
_START_S = 60.0
_STDERR = 2


@dataclass(slots=True, frozen=True)
class Spec:
    """One router to measure."""

    name: str  # BATON, or one of PEERS
    interface: str  # "rest" or "grpc"
    processes: int = 1

    def labels(self) -> dict[str, str | int]:
        return {"system": self.name, "interface": self.interface, "processes": self.processes}


@dataclass(slots=True, frozen=True)
class System:
    """A router that runs."""

    spec: Spec
    pid: int
    endpoint: Endpoint
    worker: Endpoint  # one of those behind it


def find_peers(names: Sequence[str]) -> dict[str, str]:
    """`NAME` or `NAME=PATH` each, to name and command. Raises `ConfigError` for what is unknown or not there."""
    found = {}
    for text in names:
        name, _, path = text.partition("=")
        if name not in PEERS:
            raise ConfigError("--peers", f"{name!r} is not one of {', '.join(PEERS)}")
        command = shutil.which(path or name)
        if command is None:
            advice = f"pip install {name} into an environment of its own, and say --peers {name}=PATH"
            raise ConfigError("--peers", f"there is no command {path or name!r}; {advice}")
        found[name] = command
    return found


@contextlib.contextmanager
def workers(name: str, tokenizer_dir: Path, step_ms: float, num: int) -> Iterator[list[Endpoint]]:
    """Workers for the router `name`."""
    python = [sys.executable, "-m"]
    with contextlib.ExitStack() as stack:
        if name == BATON:
            command = [*python, "bench.instant_worker", str(tokenizer_dir), str(step_ms)]
            kind, field = "decode", "grpc"
        else:
            command = [*python, "bench.instant_http_worker", str(step_ms)]
            kind, field = "rest", "http"
        yield [Endpoint(kind, stack.enter_context(running(command, "a worker"))[field]) for _ in range(num)]


@contextlib.contextmanager
def router(spec: Spec, behind: Sequence[Endpoint], peers: Mapping[str, str], max_streams: int) -> Iterator[System]:
    """Raises `StartupError` if it does not answer."""
    addresses = [worker.address for worker in behind]
    if spec.name == BATON:
        command = [sys.executable, "-m", "baton", "router", f"--decode={','.join(addresses)}"]
        command += ["--http-listen=127.0.0.1:0", "--grpc-listen=127.0.0.1:0", "--log-level=warning"]
        command += [f"--max-requests={2 * max_streams}", f"--max-connections={max_streams + 1000}"]
        with running([*command, f"--processes={spec.processes}"], "the router") as fields:
            address = fields["http" if spec.interface == "rest" else "grpc"]
            yield System(spec, int(fields["pid"]), Endpoint(spec.interface, address), behind[0])
        return
    port, metrics_port = _free_ports()
    command = [peers[spec.name], *PEERS[spec.name], "--policy=round_robin", "--host=127.0.0.1", f"--port={port}"]
    command += [f"--prometheus-port={metrics_port}", "--worker-urls", *addresses]
    with started(command, spec.name, stdout=_STDERR) as child:
        endpoint = Endpoint("rest", f"http://127.0.0.1:{port}")
        _wait_for_an_answer(child, endpoint)
        yield System(spec, child.process.pid, endpoint, behind[0])


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def _wait_for_an_answer(child: Child, endpoint: Endpoint, start_s: float = _START_S) -> None:
    async def answer() -> None:
        client = endpoint.connect()
        try:
            async with asyncio.timeout(give_up_at - time.monotonic()):
                await ask(client, chat(1))
        except TimeoutError:
            raise InternalError("it took a request and said nothing") from None
        finally:
            await client.close()

    give_up_at = time.monotonic() + start_s
    while True:
        if (code := child.process.poll()) is not None:
            child.code = code  # it is reaped: its pid may be another one's
            raise StartupError(f"{child.name} ended with exit code {code}; its reason is above")
        try:
            asyncio.run(answer())
        except (BatonError, OSError) as error:
            if time.monotonic() >= give_up_at:
                raise StartupError(f"{child.name} does not answer in {start_s:.0f} s: {error}") from error
            time.sleep(0.2)
        else:
            return
