"""Two nodes, and one goes, under load: drained, as before a reboot, and lost with all that runs on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kube.cluster import NODE, Cluster
from tests.kube.load import Load
from tests.kube.node import Node
from tests.kube.processes import wait_until
from tests.kube.release import Release, is_ready
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMESPACE, OTHER = "baton-nodes", "spare"
WORKERS = {"prefill": 2, "decode": 2}


@pytest.fixture(scope="module")
def node(local_cluster: Cluster) -> Iterator[Node]:
    with local_cluster.another_node(OTHER) as node:
        yield node


@pytest.fixture(scope="module")
def release(local_cluster: Cluster, node: Node) -> Iterator[Release]:
    release = Release(local_cluster, "baton", NAMESPACE)
    replicas: dict[str, Any] = {f"{role}__replicas": number for role, number in WORKERS.items()}
    release.install(
        "values-laptop.yaml",
        **offer_tiny_model(local_cluster, NAMESPACE),
        **replicas,
        # The connections of a lost router's clients break, which test_faults.py is about.
        router__nodeSelector={"kubernetes.io/hostname": NODE},
    )
    yield release
    release.remove()


@pytest.fixture
def load(local_cluster: Cluster, release: Release) -> Iterator[Load]:
    """Long answers, so that faults meet streams under way. What failed is told when the test is done."""
    service = f"baton-router.{NAMESPACE}"
    _spread(release)
    with Load(
        local_cluster.forward(service, 8000), local_cluster.forward(service, 50051), num_clients=2, max_tokens=200
    ) as load:
        load.more_answers(8)
        yield load
        load.more_answers(8)
    assert load.failures == []


def test_drained_node_fails_no_request(release: Release, load: Load) -> None:
    """Evictions, which the disruption budgets let happen one after another."""
    done = release.cluster.run("kubectl", "drain", OTHER, "--delete-emptydir-data", "--timeout=300s", timeout_s=320)
    assert done.returncode == 0, done.stderr
    wait_until("all workers on one node", lambda: _nodes(release) == _on(NODE, NODE), 240)
    load.more_answers(8)
    release.cluster.kubectl("uncordon", OTHER)


def test_lost_node_fails_no_request(local_cluster: Cluster, release: Release, node: Node, load: Load) -> None:
    """No connection is closed: packets just vanish. Its pods are listed until the cluster believes that they are gone,
    which a cloud's controller tells it by deleting the node; then others take their place."""
    assert local_cluster.namespaces is not None
    with node.unreachable(local_cluster.namespaces):
        node.power_off()
        load.more_answers(16)
        assert _nodes(release) == _on(NODE, OTHER), "as far as the API server knows"
        release.cluster.kubectl("delete", "node", OTHER)
        wait_until("all workers on one node", lambda: _nodes(release) == _on(NODE, NODE), 300)
        load.more_answers(8)


def _nodes(release: Release) -> dict[str, list[str]]:
    """Where the ready workers of each role are."""
    return {role: sorted(pod["spec"]["nodeName"] for pod in release.pods(role) if is_ready(pod)) for role in WORKERS}


def _on(*nodes: str) -> dict[str, list[str]]:
    return {role: list(nodes) for role in WORKERS}


def _spread(release: Release) -> None:
    """A worker of each role on each node, by the chart's own anti-affinity; after a drain one has to go for it."""

    def complete() -> bool:
        return all(len(nodes) == WORKERS[role] for role, nodes in _nodes(release).items())

    wait_until("all workers", complete, 240)
    for role, nodes in _nodes(release).items():
        if len(set(nodes)) == 1:
            name = release.pods(role)[0]["metadata"]["name"]
            release.cluster.kubectl("-n", NAMESPACE, "delete", "pod", name, "--wait=true", "--timeout=100s")
    wait_until("all workers", complete, 240)
    assert _nodes(release) == _on(NODE, OTHER)
