"""Certificates and keys between real processes: every hop, probes, the command line, and a rotation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client.sync_client import Client
from baton.stack.stack_plan import free_ports
from common.errors import BatonError
from common.grpc.transport import name_options
from tests.integration.ask import Salt
from tests.integration.stack import CALL_TIMEOUT_S, ClientOptions, Fleet, baton, kill, ready_fields, running, wait_for
from tests.kube.certificates import make_ca, make_leaf
from tests.kube.processes import Process

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]

NAME = "baton.prod.svc"
KEY = "sk-integration"


class Secret:
    """One mounted Secret, which all processes of a fleet share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "mounted"
        self._folder = folder
        self.folder.mkdir()
        for ca in ("old", "new"):
            make_ca(folder, ca)
            make_leaf(folder, f"{ca}-leaf", ca, "/CN=baton", f"DNS:{NAME}")
        self.rotate("old")

    def rotate(self, generation: str) -> None:
        names = {
            f"{generation}-leaf.crt": "tls.crt",
            f"{generation}-leaf.key": "tls.key",
            f"{generation}.crt": "ca.crt",
        }
        for source, target in names.items():
            shutil.copy(self._folder / source, self.folder / f"{target}.new")
            (self.folder / f"{target}.new").rename(self.folder / target)

    @property
    def flags(self) -> list[str]:
        files = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
        return [
            *(f"--tls-{flag}={self.folder / file}" for flag, file in files.items()),
            f"--tls-server-name={NAME}",
        ]


class Guarded(Fleet):
    """A fleet whose workers are probed at addresses of their own."""

    probes: ClassVar[dict[str, str]] = {}

    def flags_of(self, address: str) -> Sequence[str]:
        if address not in self.probes:
            (port,) = free_ports(1)
            self.probes[address] = f"127.0.0.1:{port}"
        return [f"--health-listen={self.probes[address]}"]


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Secret:
    return Secret(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def fleet(model_dir: object, secret: Secret, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "keys").write_text(f"{KEY} name=tests tenant=ci\n")
    router_flags = [*secret.flags, f"--api-keys-file={folder / 'keys'}"]
    Guarded.client_options = ClientOptions(tls_ca=str(secret.folder / "ca.crt"), tls_server_name=NAME, api_key=KEY)
    fleet = Guarded(folder, *secret.flags, prefill=1, decode=1, router_flags=router_flags)
    with running(fleet):
        yield fleet


def moved_blocks(fleet: Fleet, salt: str) -> int:
    """Asks something nobody has cached; how many blocks came from the prefill worker."""
    with fleet.client() as client:
        result = client.generate(
            "Tell me of the sea, at some length, and of those who sail it. " * 6,
            temperature=0.0, max_tokens=4, cache_salt=salt,
        ).result()  # fmt: skip
    assert result.report.fallback_reason == ""
    assert result.report.prefill_worker == next(m.address for m in fleet.members if m.role == "prefill")
    return result.report.num_blocks_moved


def test_blocks_move_between_workers_that_prove_who_they_are(fleet: Fleet, salt: Salt) -> None:
    assert moved_blocks(fleet, salt()) > 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_let_nobody_in_without_a_certificate(fleet: Fleet, secret: Secret, role: str) -> None:
    address = next(member.address for member in fleet.members if member.role == role)
    ca = (secret.folder / "ca.crt").read_bytes()
    cert, key = ((secret.folder / f"tls.{kind}").read_bytes() for kind in ("crt", "key"))
    options = [*name_options(NAME), ("grpc.use_local_subchannel_pool", 1)]

    def serves(channel: grpc.Channel) -> bool:
        with channel:
            try:
                health = health_pb2_grpc.HealthStub(channel)
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=20)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    assert serves(grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options))
    assert not serves(grpc.secure_channel(address, grpc.ssl_channel_credentials(ca), options))
    assert not serves(grpc.insecure_channel(address, options))


def test_the_command_line(fleet: Fleet, secret: Secret) -> None:
    flags = [f"--router={fleet.grpc}", f"--tls-ca={secret.folder / 'ca.crt'}", f"--tls-server-name={NAME}"]

    def run(*arguments: str, key: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            baton(*arguments), capture_output=True, text=True, timeout=CALL_TIMEOUT_S, check=False,
            env={**os.environ, "BATON_API_KEY": key},
        )  # fmt: skip

    done = run("models", *flags, key=KEY)
    assert (done.returncode, "smollm2" in done.stdout) == (0, True), done.stderr
    wrong = run("models", *flags, key="sk-wrong")
    assert wrong.returncode == 1
    assert "the API key is not known here" in wrong.stderr
    assert "sk-wrong" not in wrong.stderr
    plain = run("models", flags[0], key=KEY)
    assert plain.returncode == 1
    assert "--tls-ca" in plain.stderr


def test_workers_are_probed_in_plain_text(fleet: Guarded) -> None:
    assert set(fleet.probes) == {member.address for member in fleet.members}
    for address in fleet.probes.values():
        with grpc.insecure_channel(address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_the_autoscaler_reads_workers_and_routers(fleet: Fleet, secret: Secret, tmp_path: Path) -> None:
    by_role = {member.role: member.address for member in fleet.members}
    flags = [f"--prefill={by_role['prefill']}", f"--decode={by_role['decode']}", f"--routers={fleet.grpc}"]
    command = baton("autoscaler", *flags, *secret.flags, "--http-listen=127.0.0.1:0")
    process = Process("autoscaler", command, tmp_path / "autoscaler.log")
    try:
        url = ready_fields(process)["http"]

        def reads_all() -> bool:
            with urllib.request.urlopen(f"{url}/metrics", timeout=20) as reply:
                text = reply.read().decode()
            ready = all(f'baton_autoscaler_workers{{role="{role}",state="ready"}} 1.0' in text for role in by_role)
            with urllib.request.urlopen(f"{url}/decisions", timeout=20) as reply:
                return ready and "baton_prefill_arrival_tokens_per_second" in json.load(reply)["signals"]

        wait_for("the autoscaler reads all", reads_all, CALL_TIMEOUT_S)
    finally:
        process.popen.terminate()
        process.popen.wait(60)


def test_certificates_of_a_new_ca_while_everything_runs(fleet: Fleet, secret: Secret, salt: Salt) -> None:
    with fleet.client() as client:  # of the old CA
        answer = client.chat("Count from one to twenty.", temperature=0.0, max_tokens=48, cache_salt=salt())
        next(iter(answer))
        secret.rotate("new")
        assert answer.result().usage.completion_tokens > 1
    assert moved_blocks(fleet, salt()) > 0, "connections of before go on"
    for role in ("prefill", "decode"):
        (member,) = [member for member in fleet.members if member.role == role]
        kill(member.process)
        fleet.replace(member)  # it comes back with the new CA alone
        assert moved_blocks(fleet, salt()) > 0
    with (
        pytest.raises(BatonError, match="TLS"),
        Client(fleet.grpc, timeout=30, tls_ca=str(secret.folder.parent / "old.crt"), tls_server_name=NAME) as client,
    ):
        client.models()
