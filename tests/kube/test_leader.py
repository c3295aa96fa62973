"""The autoscaler that sets replicas itself: one of two acts, and when it goes the other goes on where it was."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from router.autoscaler.leader import EVERY_S, LEASE_S
from tests.kube.cluster import Cluster
from tests.kube.load import busy
from tests.kube.processes import wait_until
from tests.kube.release import Release, container_of, is_ready
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.kube, pytest.mark.slow, pytest.mark.timeout(900)]

NAMESPACE = "baton-leader"
SLACK_S = 30  # for a machine that is busy with all the rest of the cluster


@pytest.fixture(scope="module")
def release(local_cluster: Cluster) -> Iterator[Release]:
    release = Release(local_cluster, "baton", NAMESPACE)
    bounds = {"minReplicas": 1, "maxReplicas": 2}
    release.install(
        "values-laptop.yaml",
        **offer_tiny_model(local_cluster, NAMESPACE),
        autoscaling__mode="planner",
        autoscaler__settings={"scale_down_delay": 10},
        prefill__autoscaling=bounds,
        decode__autoscaling={**bounds, "requestsPerPod": 6},
    )
    yield release
    release.remove()


@pytest.fixture(scope="module")
def grpc_port(local_cluster: Cluster, release: Release) -> int:
    return local_cluster.forward(f"baton-router.{NAMESPACE}", 50051)


def _leader(release: Release) -> str:
    """Pod and process that hold the lease; empty where nobody does."""
    lease = json.loads(release.cluster.kubectl("-n", NAMESPACE, "get", "lease", "baton-autoscaler", "-o", "json"))
    holder: str = lease.get("spec", {}).get("holderIdentity") or ""
    return holder


@contextmanager
def _replicas_seen(release: Release, role: str) -> Iterator[list[int]]:
    """Replicas of a role, each time that they change, from now on."""
    seen, stop = [release.replicas(role)], threading.Event()

    def watch() -> None:
        while not stop.wait(0.3):
            if (now := release.replicas(role)) != seen[-1]:
                seen.append(now)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("how", ["deleted", "killed"])
def test_another_leads_and_leaves_replicas_alone(
    release: Release, local_cluster: Cluster, grpc_port: int, how: str
) -> None:
    wait_until("one decode worker", lambda: release.replicas("decode") == 1, 240)
    with busy(grpc_port, num_clients=10, num_prompt_tokens=17, num_output_tokens=1000):
        wait_until("a second decode worker", lambda: release.replicas("decode") == 2, 240)
        wait_until("a leader", lambda: bool(_leader(release)), 60)
        before = _leader(release)
        [leader] = [pod for pod in release.pods("autoscaler") if before.startswith(pod["metadata"]["name"])]
        with _replicas_seen(release, "decode") as seen:
            if how == "deleted":  # gives its lease back
                release.cluster.kubectl("-n", NAMESPACE, "delete", "pod", leader["metadata"]["name"], "--wait=false")
            else:  # the lease has to run out
                local_cluster.kill_container(container_of(leader))
            wait_until("another leader", lambda: _leader(release) not in ("", before), LEASE_S + EVERY_S + SLACK_S)
            wait_until("both autoscalers", lambda: _both_ready(release), 120)
        assert seen == [2], "the new leader begins by leaving things as they are"
    wait_until("its decision", lambda: release.replicas("decode") == 1, 240)


def _both_ready(release: Release) -> bool:
    pods = release.pods("autoscaler")
    return len(pods) == 2 and all(map(is_ready, pods))
