"""The chart with TLS on every hop and API keys: all of it works as without, and strangers stay outside."""

from __future__ import annotations

import base64
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.client.sync_client import Client
from common.errors import UnauthenticatedError, UnavailableError
from tests.kube import certificates
from tests.kube.cluster import Cluster
from tests.kube.processes import wait_until
from tests.kube.release import Release
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMESPACE, SECRET, KEY = "baton-secured", "fleet-tls", "sk-0123456789abcdef"
FLEET = f"baton.{NAMESPACE}.svc"  # what every certificate of the fleet holds
PROMPT = [100 + i for i in range(60)]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fleet's CA and certificate, and a stranger's."""
    folder = tmp_path_factory.mktemp("certs")
    names = [FLEET, "baton-router", f"baton-router.{NAMESPACE}.svc", f"baton-autoscaler.{NAMESPACE}.svc", "localhost"]
    certificates.make_ca(folder, "fleet-ca")
    certificates.make_leaf(folder, "fleet", "fleet-ca", "/CN=baton", ",".join(f"DNS:{name}" for name in names))
    certificates.make_ca(folder, "other-ca")
    certificates.make_leaf(folder, "other", "other-ca", "/CN=baton", f"DNS:{FLEET}")
    return folder


@pytest.fixture(scope="module")
def release(local_cluster: Cluster, certs: Path) -> Iterator[Release]:
    release = Release(local_cluster, "baton", NAMESPACE)
    files = {"tls.crt": "fleet.crt", "tls.key": "fleet.key", "ca.crt": "fleet-ca.crt"}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": SECRET, "namespace": NAMESPACE},
        "data": {key: base64.b64encode((certs / file).read_bytes()).decode() for key, file in files.items()},
    }
    local_cluster.apply(json.dumps(secret))
    bounds = {"minReplicas": 1, "maxReplicas": 1}
    release.install(
        "values-laptop.yaml",
        **offer_tiny_model(local_cluster, NAMESPACE),
        tls__enabled=True,
        tls__existingSecret=SECRET,
        apiKeys__keys=[{"key": KEY, "name": "alice"}],
        autoscaling__mode="external-metrics",
        prefill__autoscaling=bounds,
        decode__autoscaling=bounds,
    )
    yield release
    release.remove()


def test_helm_test_passes(release: Release) -> None:
    assert "Phase:          Succeeded" in release.helm("test", release.name, "--timeout", "3m")


def test_kv_moves_and_only_with_a_key(local_cluster: Cluster, release: Release, certs: Path) -> None:
    router = f"127.0.0.1:{local_cluster.forward(f'baton-router.{NAMESPACE}', 50051)}"
    tls: dict[str, Any] = {"tls_ca": str(certs / "fleet-ca.crt"), "tls_server_name": FLEET}
    with Client(router, timeout=120, api_key=KEY, **tls) as client:
        answer = client.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True).result()
    assert answer.report.num_blocks_moved > 0, answer.report
    with Client(router, timeout=30, **tls) as client, pytest.raises(UnauthenticatedError):
        client.generate(PROMPT, max_tokens=1).result()
    with Client(router, timeout=30, api_key=KEY) as plain, pytest.raises(UnavailableError):
        plain.generate(PROMPT, max_tokens=1).result()


def test_rest_speaks_https_and_asks_for_the_key(local_cluster: Cluster, release: Release, certs: Path) -> None:
    url = f"https://localhost:{local_cluster.forward(f'baton-router.{NAMESPACE}', 8000)}/v1/models"
    context = ssl.create_default_context(cafile=str(certs / "fleet-ca.crt"))
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        assert json.load(answer)["data"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=60, context=context)
    with refused.value:  # holds its connection
        assert refused.value.code == 401


@pytest.mark.parametrize("shown", ["nothing", "a stranger's"])
def test_workers_let_in_nobody_but_the_fleet(local_cluster: Cluster, release: Release, certs: Path, shown: str) -> None:
    """Asked by a stranger who trusts them; with the fleet's own certificate the same call is answered."""

    def ask(name: str | None) -> tuple[int, str]:
        own = [] if name is None else ["-cert", str(certs / f"{name}.crt"), "-key", str(certs / f"{name}.key")]
        port = local_cluster.forward_to(release.pods("decode")[0]["status"]["podIP"], 50061)
        done = local_cluster.run(
            "grpcurl", "-cacert", str(certs / "fleet-ca.crt"), "-servername", FLEET, "-connect-timeout", "10", *own,
            f"127.0.0.1:{port}", "list",
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    status, said = ask("fleet")
    assert (status, "baton.v1.DecodeService" in said) == (0, True), said
    status, said = ask(None if shown == "nothing" else "other")
    assert status != 0, said


def test_autoscaler_reads_the_fleet(local_cluster: Cluster, release: Release) -> None:
    path = f"/apis/external.metrics.k8s.io/v1beta1/namespaces/{NAMESPACE}/baton_decode_requests"
    local_cluster.kubectl_until("the metric", "get", "--raw", path)
    status = "--for=condition=ScalingActive"
    local_cluster.kubectl("-n", NAMESPACE, "wait", status, "hpa/baton-decode", "--timeout=120s")

    def ready_workers() -> set[str]:
        port = local_cluster.forward(f"baton-autoscaler.{NAMESPACE}", 8010)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {line for line in lines if 'state="ready"' in line and line.endswith(" 1.0")}

    wait_until("both workers to report", lambda: len(ready_workers()) == 2, 60)
