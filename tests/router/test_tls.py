"""TLS on both sides of a router: towards clients of both interfaces, and towards workers that want certificates."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client.sync_client import Client
from common.config import RouterSettings, TlsSettings
from common.errors import ConfigError, StartupError, UnavailableError
from common.grpc.transport import Channels, name_options
from common.tls import TlsFiles
from common.types import WorkerRole, WorkerState
from protos.baton.v1 import inference_pb2, inference_pb2_grpc
from router.fleet.registry import Registry
from router.server import serve
from tests.helm.chart import CHART
from tests.kube.certificates import make_ca, make_leaf
from tests.router.conftest import RunningRouter, StartRouter
from tests.support.fake_worker import ANSWER, FakeWorker

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")

NAME = "fleet.test"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CAs `old`, `new` and `third`, with a leaf of each for NAME, and one of `old` for another name."""
    folder = tmp_path_factory.mktemp("certificates")
    for ca in ("old", "new", "third"):
        make_ca(folder, ca)
        make_leaf(folder, f"{ca}-leaf", ca, "/CN=baton", f"DNS:{NAME},IP:127.0.0.1")
    make_leaf(folder, "other-leaf", "old", "/CN=baton", "DNS:elsewhere.test")
    return folder


class Mounted:
    """Three files as a Secret holds them, of a generation that can change."""

    def __init__(self, made: Path, folder: Path, generation: str = "old") -> None:
        self._made, self._folder = made, folder
        self.flags = {"tls_cert": f"{folder}/tls.crt", "tls_key": f"{folder}/tls.key", "tls_ca": f"{folder}/ca.crt"}
        self.rotate(generation)

    def rotate(self, generation: str, leaf: str | None = None) -> None:
        self._folder.mkdir(exist_ok=True)
        for source, target in (
            (f"{leaf or generation}-leaf.crt", "tls.crt"),
            (f"{leaf or generation}-leaf.key", "tls.key"),
            (f"{generation}.crt", "ca.crt"),
        ):
            shutil.copy(self._made / source, self._folder / f"{target}.new")
            (self._folder / f"{target}.new").rename(self._folder / target)

    def files(self) -> TlsFiles:
        return TlsFiles(self.flags["tls_cert"], self.flags["tls_key"], self.flags["tls_ca"])


@pytest.fixture
def secret(made: Path, tmp_path: Path) -> Mounted:
    return Mounted(made, tmp_path / "secret")


@pytest.fixture
async def worker(secret: Mounted) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker()
    await worker.start(tls=secret.files())
    yield worker
    await worker.stop()


def context(made: Path, ca: str, leaf: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(made / f"{ca}.crt"))
    if leaf is not None:
        context.load_cert_chain(made / f"{leaf}.crt", made / f"{leaf}.key")
    return context


def channel(router: RunningRouter, made: Path, ca: str, leaf: str | None = None) -> grpc.aio.Channel:
    pem = [(made / f"{leaf}.{kind}").read_bytes() if leaf else None for kind in ("key", "crt")]
    credentials = grpc.ssl_channel_credentials((made / f"{ca}.crt").read_bytes(), *pem)
    return grpc.aio.secure_channel(
        router.grpc_address, credentials, [*name_options(NAME), ("grpc.use_local_subchannel_pool", 1)]
    )


async def ask_grpc(router: RunningRouter, made: Path, ca: str, leaf: str | None = None) -> str:
    async with channel(router, made, ca, leaf) as secure:
        stub = inference_pb2_grpc.InferenceServiceStub(secure)
        message = inference_pb2.ChatMessage(role="user", content="Hello?")
        call = stub.Chat(inference_pb2.ChatRequest(messages=[message]), timeout=20)
        return "".join([response.text async for response in call])


async def can_connect(address: str, made: Path, ca: str, leaf: str) -> bool:
    """Whether a server of the fleet lets `leaf` in: with TLS 1.3 that is known once it has answered something."""
    key, cert = ((made / f"{leaf}.{kind}").read_bytes() for kind in ("key", "crt"))
    credentials = grpc.ssl_channel_credentials((made / f"{ca}.crt").read_bytes(), key, cert)
    options = [*name_options(NAME), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(address, credentials, options) as secure:
        try:
            await health_pb2_grpc.HealthStub(secure).Check(health_pb2.HealthCheckRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
    return True


async def ask_rest(router: RunningRouter, made: Path, ca: str, leaf: str | None = None) -> str:
    async with (
        openai.DefaultAsyncHttpxClient(verify=context(made, ca, leaf)) as http,
        openai.AsyncOpenAI(
            base_url=f"{router.url}/v1", api_key="none", max_retries=0, http_client=http, timeout=20
        ) as client,
    ):
        answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello?"}])
        return answer.choices[0].message.content or ""


async def is_unavailable(router: RunningRouter, made: Path, ca: str) -> bool:
    try:
        await ask_grpc(router, made, ca)
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def refused(ask: object, *args: object) -> None:
    with pytest.raises((grpc.aio.AioRpcError, openai.APIConnectionError)):
        await ask(*args)  # type: ignore[operator]


async def test_both_interfaces_speak_tls_to_clients_and_mtls_to_workers(
    made: Path, secret: Mounted, worker: FakeWorker, start_router: StartRouter
) -> None:
    router = await start_router(worker, **secret.flags, tls_server_name=NAME)
    assert router.url.startswith("https://")
    assert await ask_grpc(router, made, "old") == ANSWER
    assert await ask_rest(router, made, "old") == ANSWER
    for ask in (ask_grpc, ask_rest):
        await refused(ask, router, made, "new")
    with pytest.raises(grpc.aio.AioRpcError):  # plain text
        await router.inference.ListModels(inference_pb2.ListModelsRequest(), timeout=20)


async def test_clients_need_a_certificate_if_that_is_asked(
    made: Path, secret: Mounted, worker: FakeWorker, start_router: StartRouter
) -> None:
    """One of the clients' own CA, which no worker lets in, or one of the fleet, as the autoscaler has."""
    client_ca = str(made / "new.crt")
    router = await start_router(worker, **secret.flags, tls_server_name=NAME, tls_client_ca=client_ca)
    for ask in (ask_grpc, ask_rest):
        assert await ask(router, made, "old", "new-leaf") == ANSWER
        assert await ask(router, made, "old", "old-leaf") == ANSWER
        await refused(ask, router, made, "old")
        await refused(ask, router, made, "old", "third-leaf")
    for leaf, is_let_in in (("old-leaf", True), ("new-leaf", False)):
        assert await can_connect(worker.address, made, "old", leaf) == is_let_in


async def test_certificates_change_without_a_restart(
    made: Path, secret: Mounted, worker: FakeWorker, start_router: StartRouter
) -> None:
    router = await start_router(worker, **secret.flags, tls_server_name=NAME)
    async with channel(router, made, "old") as kept:
        stub = inference_pb2_grpc.InferenceServiceStub(kept)
        await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=20)
        secret.rotate("new")
        for ask in (ask_grpc, ask_rest):
            assert await ask(router, made, "new") == ANSWER
            await refused(ask, router, made, "old")
        await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=20)  # this connection was there before

    # A worker that comes back knows the new CA alone: the router shows it the new certificate.
    address = worker.address
    await worker.stop()
    await worker.start(address, tls=secret.files())
    async with asyncio.timeout(60):
        while await is_unavailable(router, made, "new"):  # noqa: ASYNC110 (the worker says nothing to us)
            await asyncio.sleep(0.1)
    assert await ask_grpc(router, made, "new") == ANSWER


async def test_a_worker_that_cannot_prove_its_name_is_not_used(made: Path, secret: Mounted, tmp_path: Path) -> None:
    impostor = Mounted(made, tmp_path / "impostor")
    impostor.rotate("old", "other")
    worker = FakeWorker()
    await worker.start(tls=impostor.files())
    registry = Registry([], [worker.address], Channels(TlsSettings(**secret.flags, tls_server_name=NAME)))
    try:
        registry.start()
        async with asyncio.timeout(30):
            while "does not answer" not in registry.not_ready():
                await registry.changed(1.0)
        (endpoint,) = registry.endpoints()
        assert (endpoint.role, endpoint.state) == (WorkerRole.DECODE, WorkerState.UNREACHABLE)
        with pytest.raises(UnavailableError):
            registry.served()
    finally:
        await registry.close()
        await worker.stop()


def rest_address(router: RunningRouter) -> tuple[str, int]:
    host, _, port = router.url.removeprefix("https://").rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x02\x00\x01"])
async def test_slow_handshakes_are_cut_off(
    made: Path, secret: Mounted, worker: FakeWorker, start_router: StartRouter, begun: bytes
) -> None:
    router = await start_router(worker, **secret.flags, tls_server_name=NAME, receive_timeout=0.5)
    reader, writer = await asyncio.open_connection(*rest_address(router))
    writer.write(begun)
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()
    assert await ask_rest(router, made, "old") == ANSWER


async def test_no_tls_is_no_handshake(
    made: Path, secret: Mounted, worker: FakeWorker, start_router: StartRouter
) -> None:
    router = await start_router(worker, **secret.flags, tls_server_name=NAME)
    reader, writer = await asyncio.open_connection(*rest_address(router))
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    with contextlib.suppress(ConnectionResetError):
        assert b" 200 " not in await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert await ask_rest(router, made, "old") == ANSWER


async def test_connections_without_a_handshake_give_way(
    made: Path, secret: Mounted, worker: FakeWorker, start_router: StartRouter
) -> None:
    router = await start_router(worker, **secret.flags, tls_server_name=NAME, max_connections=3)
    silent = [await asyncio.open_connection(*rest_address(router)) for _ in range(8)]
    assert await ask_rest(router, made, "old") == ANSWER
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(silent[0][0].read(), 20) == b""
    for _, writer in silent:
        writer.close()
    assert await ask_rest(router, made, "old") == ANSWER


async def test_health_is_asked_in_plain_text_on_a_port_of_its_own(
    secret: Mounted, worker: FakeWorker, start_router: StartRouter, unused_port: int
) -> None:
    address = f"127.0.0.1:{unused_port}"
    await start_router(worker, **secret.flags, tls_server_name=NAME, health_listen=address)
    async with grpc.aio.insecure_channel(address) as plain:
        health = health_pb2_grpc.HealthStub(plain)
        for service in ("", "baton.v1.RouterService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceServiceStub(plain).ListModels(inference_pb2.ListModelsRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_batons_own_client_says_what_is_wrong(
    made: Path, secret: Mounted, worker: FakeWorker, start_router: StartRouter
) -> None:
    router = await start_router(worker, **secret.flags, tls_server_name=NAME)

    def ask(**options: str) -> str:
        with Client(router.grpc_address, timeout=20, **options) as client:  # type: ignore[arg-type]
            return client.chat("Hello?").result().text

    right, wrong = str(made / "old.crt"), str(made / "new.crt")
    assert await asyncio.to_thread(ask, tls_ca=right) == ANSWER  # 127.0.0.1 is in the certificate
    assert await asyncio.to_thread(ask, tls_ca=right, tls_server_name=NAME) == ANSWER
    with pytest.raises(UnavailableError, match="TLS"):
        await asyncio.to_thread(ask, tls_ca=wrong)
    with pytest.raises(UnavailableError, match="TLS"):
        await asyncio.to_thread(ask, tls_ca=right, tls_server_name="elsewhere.test")
    with pytest.raises(UnavailableError, match="TLS"):
        await asyncio.to_thread(ask)
    with pytest.raises(ConfigError, match=r"^tls_server_name"):
        Client(router.grpc_address, tls_server_name=NAME)
    with pytest.raises(StartupError, match=r"^tls_ca: cannot read"):
        Client(router.grpc_address, tls_ca="missing")


@pytest.mark.parametrize("hashed", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_what_helm_test_asks(
    made: Path, secret: Mounted, worker: FakeWorker, start_router: StartRouter, tmp_path: Path, hashed: bool
) -> None:
    client = Mounted(made, tmp_path / "client", "new")
    keys = tmp_path / "keys"
    digest = hashlib.sha256(b"sk-1").hexdigest()
    keys.write_text(f"# keys\nsha256:{digest}\n" if hashed else f"sha256:{digest}\nsk-2 name=two # a comment\n")
    router = await start_router(
        worker, **secret.flags, tls_server_name=NAME, tls_client_ca=client.flags["tls_ca"], api_keys_file=str(keys)
    )
    environment = {
        "GRPC": router.grpc_address,
        "HTTP": router.url,
        "TLS_DIR": str(Path(secret.flags["tls_ca"]).parent),
        "CLIENT_DIR": str(Path(client.flags["tls_ca"]).parent),
        "KEYS_FILE": str(keys),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(CHART / "files" / "chat.py"), env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert (f"REST: {ANSWER}" in output.decode()) == (not hashed)


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"tls_key": None}, "tls_key"), ({"tls_client_ca": "/missing"}, "tls_client_ca: cannot read")],
)
async def test_a_router_does_not_start_with_wrong_files(
    secret: Mounted, changed: dict[str, str | None], named: str
) -> None:
    with pytest.raises((StartupError, ConfigError), match=rf"^{named}"):
        await serve(RouterSettings.model_validate({**secret.flags, **changed}))
