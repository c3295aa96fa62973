"""Each role scales by its own signal: the real HPA controller on the metrics that Baton's autoscaler serves."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.kube.cluster import Cluster
from tests.kube.load import busy
from tests.kube.processes import wait_until
from tests.kube.release import Release, is_ready
from tests.kube.tiny_model import offer_tiny_model
from tests.kube.user_cluster import UserCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NAMESPACE = "baton-scaling"
API = "/apis/external.metrics.k8s.io/v1beta1"


@pytest.fixture(scope="module")
def release(cluster: Cluster | UserCluster) -> Iterator[Release]:
    release = Release(cluster, "baton", NAMESPACE)
    bounds = {"minReplicas": 1, "maxReplicas": 2, "scaleDownSeconds": 10}
    release.install(
        "values-laptop.yaml",
        **(offer_tiny_model(cluster, NAMESPACE) if isinstance(cluster, Cluster) else {}),
        autoscaling__mode="external-metrics",
        autoscaler__replicas=2,
        prefill__autoscaling={**bounds, "queuedTokensPerPod": 1000},
        decode__autoscaling={**bounds, "kvUsage": 0.9, "requestsPerPod": 12},
    )
    yield release
    release.remove()


@pytest.fixture(scope="module")
def grpc_port(cluster: Cluster | UserCluster, release: Release) -> int:
    return cluster.forward(f"baton-router.{NAMESPACE}", 50051)


def test_api_server_serves_the_metrics(release: Release) -> None:
    release.cluster.kubectl(
        "wait", "--for=condition=Available", "apiservice/v1beta1.external.metrics.k8s.io", "--timeout=60s"
    )
    for metric in ("baton_prefill_queued_tokens", "baton_decode_kv_used_pods", "baton_decode_requests"):
        shown = json.loads(release.cluster.kubectl("get", "--raw", f"{API}/namespaces/{NAMESPACE}/{metric}"))
        assert [item["metricName"] for item in shown["items"]] == [metric]
    for role in ("prefill", "decode"):
        active = "--for=condition=ScalingActive"
        release.cluster.kubectl("-n", NAMESPACE, "wait", active, f"hpa/baton-{role}", "--timeout=60s")


def test_long_prompts_scale_prefill_and_not_decode(release: Release, grpc_port: int) -> None:
    """And when they end, the worker that goes drains: nothing that was asked fails."""
    _wait_for_one_each(release)
    with busy(grpc_port, num_clients=8, num_prompt_tokens=1900, num_output_tokens=1):
        wait_until("a second prefill worker", lambda: _ready(release, "prefill") == 2, 300)
        assert release.replicas("decode") == 1
    with busy(grpc_port, num_clients=1, num_prompt_tokens=40, num_output_tokens=100):
        _wait_for_one_each(release)


def test_many_long_answers_scale_decode_and_not_prefill(release: Release, grpc_port: int) -> None:
    _wait_for_one_each(release)
    with busy(grpc_port, num_clients=16, num_prompt_tokens=17, num_output_tokens=1500):
        wait_until("a second decode worker", lambda: _ready(release, "decode") == 2, 300)
        assert release.replicas("prefill") == 1
    with busy(grpc_port, num_clients=2, num_prompt_tokens=17, num_output_tokens=500):
        _wait_for_one_each(release)


def _ready(release: Release, role: str) -> int:
    return sum(map(is_ready, release.pods(role)))


def _wait_for_one_each(release: Release) -> None:
    """Whatever drains has gone."""
    wait_until(
        "one worker of each role",
        lambda: all(
            _ready(release, role) == len(release.pods(role, going=True)) == 1 for role in ("prefill", "decode")
        ),
        300,
    )
