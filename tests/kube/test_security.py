"""Certificates and API keys in the chart, with real pods: probes, every hop, and who is let in."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client.sync_client import Client
from common.errors import UnauthenticatedError, UnavailableError
from tests.kube.certificates import make_ca, make_leaf
from tests.kube.cluster import Cluster
from tests.kube.processes import wait_until
from tests.kube.release import Release
from tests.kube.user_cluster import UserCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMESPACE, KEY = "baton-secure", "sk-of-the-tests"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    names = [f"baton.{NAMESPACE}.svc", "baton-router", f"baton-router.{NAMESPACE}.svc"]
    make_ca(folder, "ca")
    make_ca(folder, "client-ca")
    make_leaf(folder, "client", "client-ca", "/CN=a client")
    for leaf in ("tls", "renewed"):
        make_leaf(folder, leaf, "ca", "/CN=baton", ",".join(f"DNS:{name}" for name in names))
    return folder


def secret(certificates: Path, leaf: str, name: str = "certificates", ca: str = "ca") -> str:
    """A Secret, as a manifest."""
    sources = {"tls.crt": f"{leaf}.crt", "tls.key": f"{leaf}.key", "ca.crt": f"{ca}.crt"}
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "data": {name: base64.b64encode((certificates / file).read_bytes()).decode() for name, file in sources.items()},
    }
    return json.dumps(manifest)


@pytest.fixture(scope="module")
def release(cluster: Cluster | UserCluster, certificates: Path) -> Iterator[Release]:
    release = Release(cluster, "baton", NAMESPACE)
    cluster.apply(secret(certificates, "tls"))
    cluster.apply(secret(certificates, "client", "clients", ca="client-ca"))
    release.install(
        "values-laptop.yaml",
        tls={
            "enabled": True,
            "existingSecret": "certificates",
            "clientCertificates": True,
            "clientCa": {"existingSecret": "clients", "clientSecret": "clients"},
        },
        apiKeys__keys=[{"key": KEY, "name": "tests", "tenant": "ci"}],
    )
    yield release
    release.remove()


def test_helm_test_passes(release: Release) -> None:
    """It asks over gRPC and REST with a certificate and a key; that pods are ready says that probes work."""
    assert "Phase:          Succeeded" in release.helm("test", release.name, "--timeout", "3m")


def test_clients_need_a_certificate_and_a_key(
    cluster: Cluster | UserCluster, release: Release, certificates: Path
) -> None:
    router = f"127.0.0.1:{cluster.forward(f'baton-router.{NAMESPACE}', 50051)}"
    name = f"baton.{NAMESPACE}.svc"
    ca, cert, key = (str(certificates / file) for file in ("ca.crt", "client.crt", "client.key"))
    with Client(
        router, timeout=120, api_key=KEY, tls_ca=ca, tls_cert=cert, tls_key=key, tls_server_name=name
    ) as client:
        result = client.chat("Name a river, and a city at it.", temperature=0.0, max_tokens=8).result()
        assert {worker.state.value for worker in client.fleet()} == {"ready"}
    assert result.report.prefill_worker, "the prompt was computed on the other side of a channel of its own"
    nobody = Client(router, timeout=60, tls_ca=ca, tls_cert=cert, tls_key=key, tls_server_name=name)
    with nobody, pytest.raises(UnauthenticatedError):
        nobody.models()
    uncertified = Client(router, timeout=60, api_key=KEY, tls_ca=ca, tls_server_name=name)
    with uncertified, pytest.raises(UnavailableError):
        uncertified.models()
    # A client's certificate is none of the fleet's.
    worker = f"127.0.0.1:{cluster.forward(f'baton-decode.{NAMESPACE}', 50061)}"
    intruder = Client(worker, timeout=60, tls_ca=ca, tls_cert=cert, tls_key=key, tls_server_name=name)
    with intruder, pytest.raises(UnavailableError):
        intruder.models()


def test_a_renewed_certificate_is_shown_without_a_restart(
    cluster: Cluster | UserCluster, release: Release, certificates: Path
) -> None:
    port = cluster.forward(f"baton-router.{NAMESPACE}", 8000)

    def shown() -> bytes:
        return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port), timeout=30))

    def in_file(leaf: str) -> bytes:
        return ssl.PEM_cert_to_DER_cert((certificates / f"{leaf}.crt").read_text())

    assert shown() == in_file("tls")
    cluster.apply(secret(certificates, "renewed"))
    wait_until("the router shows it", lambda: shown() == in_file("renewed"), 240)  # the kubelet takes its minute or two
    assert "Phase:          Succeeded" in release.helm("test", release.name, "--timeout", "3m")
    for component in ("router", "prefill", "decode"):
        for pod in release.pods(component):
            assert [one["restartCount"] for one in pod["status"]["containerStatuses"]] == [0]
