"""Scaling to and from zero by KEDA's own operator, on the ScaledObjects of the chart and Baton's external scaler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client.sync_client import Client
from tests.kube import controllers
from tests.kube.cluster import Cluster
from tests.kube.load import busy
from tests.kube.processes import wait_until
from tests.kube.release import Release
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMESPACE = "baton-keda"
ROLES = ("prefill", "decode")


@pytest.fixture(scope="module")
def release(local_cluster: Cluster, crds: Path) -> Iterator[Release]:
    if reason := controllers.why_not(controllers.KEDA):
        pytest.skip(reason)
    with controllers.keda(local_cluster, crds):
        release = Release(local_cluster, "baton", NAMESPACE)
        bounds = {"minReplicas": 0, "maxReplicas": 2, "scaleDownSeconds": 5}
        release.install(
            "values-laptop.yaml",
            **offer_tiny_model(local_cluster, NAMESPACE),
            autoscaling={"mode": "keda", "keda": {"pollingIntervalSeconds": 1, "cooldownSeconds": 5}},
            autoscaler__settings={"idle_timeout": 15, "scale_down_delay": 5},
            prefill__autoscaling={**bounds, "queuedTokensPerPod": 1000},
            decode__autoscaling={**bounds, "requestsPerPod": 12},
        )
        yield release
        release.remove()


@pytest.fixture(scope="module")
def grpc_port(local_cluster: Cluster, release: Release) -> int:
    return local_cluster.forward(f"baton-router.{NAMESPACE}", 50051)


def _wait_for_zero(release: Release) -> None:
    """Those that drain have gone, too: they would still answer."""

    def none() -> bool:
        return not any(release.replicas(role) or release.pods(role, going=True) for role in ROLES)

    wait_until("no worker", none, 300)


def test_operator_takes_the_objects(release: Release) -> None:
    for role in ROLES:
        name = f"scaledobject/baton-{role}"
        release.cluster.kubectl("-n", NAMESPACE, "wait", "--for=condition=Ready", name, "--timeout=120s")
        shown = json.loads(release.cluster.kubectl("-n", NAMESPACE, "get", name, "-o", "json"))
        assert shown["status"]["scaleTargetKind"] == "apps/v1.Deployment"


def test_first_request_waits_for_the_first_pods(release: Release, grpc_port: int) -> None:
    _wait_for_zero(release)
    (router,) = release.pods("router")
    with Client(f"127.0.0.1:{grpc_port}", timeout=400) as client:
        answer = client.generate([100 + i for i in range(40)], max_tokens=8, temperature=0.0, ignore_eos=True).result()
    assert len(answer.token_ids) == 8
    assert release.replicas("decode") >= 1
    (same,) = release.pods("router")
    assert same["metadata"]["uid"] == router["metadata"]["uid"]
    assert same["status"]["containerStatuses"][0]["restartCount"] == 0, "a router without workers lives on"
    _wait_for_zero(release)


def test_long_prompts_scale_prefill_and_not_decode(release: Release, grpc_port: int) -> None:
    _wait_for_zero(release)
    with busy(grpc_port, num_clients=8, num_prompt_tokens=1900, num_output_tokens=1):
        wait_until("a second prefill worker", lambda: release.replicas("prefill") == 2, 300)
        assert release.replicas("decode") == 1
    _wait_for_zero(release)


def test_many_long_answers_scale_decode_and_not_prefill(release: Release, grpc_port: int) -> None:
    _wait_for_zero(release)
    with busy(grpc_port, num_clients=16, num_prompt_tokens=17, num_output_tokens=1500):
        wait_until("a second decode worker", lambda: release.replicas("decode") == 2, 300)
        assert release.replicas("prefill") == 1
    _wait_for_zero(release)
