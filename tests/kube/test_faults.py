"""What a cluster does to pods beyond deleting them, under load: no request fails, and no answer is wrong.

Here with one node: a kubelet that is silent, and pods that do not answer any more while the API server still lists
them. A whole node's loss, with another left, is in test_nodes.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.kube.cluster import Cluster
from tests.kube.load import Load
from tests.kube.processes import wait_until
from tests.kube.release import Release, container_of, is_ready
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMESPACE = "baton-faults"
REPLICAS = {"router": 2, "prefill": 1, "decode": 2}


@pytest.fixture(scope="module")
def release(local_cluster: Cluster) -> Iterator[Release]:
    release = Release(local_cluster, "baton", NAMESPACE)
    replicas: dict[str, Any] = {f"{role}__replicas": number for role, number in REPLICAS.items()}
    release.install("values-laptop.yaml", **offer_tiny_model(local_cluster, NAMESPACE), **replicas)
    yield release
    release.remove()


@pytest.fixture
def load(release: Release, ports: tuple[int, int]) -> Iterator[Load]:
    """Long answers, so that faults meet streams under way. What failed is told when the test is done."""
    _wait_until_complete(release)
    with Load(*ports, num_clients=2, max_tokens=200) as load:
        load.more_answers(4)
        yield load
        _wait_until_complete(release)
        load.more_answers(8)
    assert load.failures == []


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_memory_runs_out(release: Release, load: Load, role: str) -> None:
    """Something fills the container up to its limit, and the kernel kills the largest process in it: the engine."""
    pod = release.pods(role)[0]
    name = pod["metadata"]["name"]
    # Each far smaller than the engine, together more than the limit.
    fill = (
        "import os, time; [os.fork() for _ in range(5)]; hoard = bytearray(os.urandom(1)) * (64 << 20); time.sleep(60)"
    )
    release.cluster.run("kubectl", "-n", NAMESPACE, "exec", name, "--", "python3", "-c", fill)
    wait_until("a restart", lambda: _restarts(release, role, name) > 0, 120)
    state = _container(release, role, name)["lastState"]["terminated"]
    assert state["reason"] == "OOMKilled", state


def test_kubelet_is_silent(release: Release, local_cluster: Cluster, load: Load) -> None:
    """Pods go on, but nobody looks after them."""
    with _no_kubelet(local_cluster):
        load.more_answers(8)
        # Nobody restarts it, and nobody takes it out of the EndpointSlice.
        local_cluster.kill_container(container_of(release.pods("decode")[0]))
        load.more_answers(16)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_pods_of_a_lost_node_do_not_answer(release: Release, local_cluster: Cluster, load: Load, role: str) -> None:
    """As when a node loses its power: no connection is closed, packets just vanish, and the API server lists the pod
    for as long as the node's grace period is."""
    pod = release.pods(role)[0]
    address = pod["status"]["podIP"]
    with _no_kubelet(local_cluster):
        for direction in ("-s", "-d"):
            _on_node(local_cluster, f"iptables -I FORWARD {direction} {address} -j DROP")
        try:
            load.more_answers(16)
        finally:
            for direction in ("-s", "-d"):
                _on_node(local_cluster, f"iptables -D FORWARD {direction} {address} -j DROP")


def test_api_server_restarts_while_a_worker_is_replaced(release: Release, local_cluster: Cluster, load: Load) -> None:
    """Routers go on with the workers that they know; what changed meanwhile they learn when it is back."""
    old = release.pods("decode")[0]
    local_cluster.processes["kube-apiserver"].kill()
    load.more_answers(4)
    local_cluster.kill_container(container_of(old))
    load.more_answers(4)
    local_cluster.start_api_server()
    local_cluster.kubectl("-n", NAMESPACE, "delete", "pod", old["metadata"]["name"], "--wait=true", "--timeout=100s")


@pytest.mark.parametrize("interface", ["rest", "grpc"])
def test_killed_router_breaks_connections_and_nothing_else(
    release: Release, local_cluster: Cluster, ports: tuple[int, int], interface: str
) -> None:
    """A stream ends with the router that wrote it; asked again, the other router answers."""
    _wait_until_complete(release)
    with Load(*ports, num_clients=4, interfaces=(interface,), max_tokens=200, ask_again=True) as load:
        load.more_answers(4)
        assert load.num_broken == 0
        for router in release.pods("router"):
            local_cluster.kill_container(container_of(router))
            load.more_answers(12)
            _wait_until_complete(release)
            load.more_answers(4)
        broken = load.num_broken
        load.more_answers(8)
        assert load.num_broken == broken, "with both routers back, nothing breaks any more"
    assert broken > 0
    assert load.failures == []


# ---------------------------------------------------------------------------------------------------- helpers


@contextmanager
def _no_kubelet(cluster: Cluster) -> Iterator[None]:
    """Shorter than the grace period after which the node counts as lost: here that is every node, with every pod."""
    cluster.node.process("kubelet").kill()
    try:
        yield
    finally:
        cluster.node.start_kubelet()
        cluster.node.wait_until_ready(90)


def _on_node(cluster: Cluster, script: str) -> None:
    assert cluster.namespaces is not None
    cluster.namespaces.shell(script)


def _container(release: Release, role: str, pod: str) -> dict[str, Any]:
    [found] = [one for one in release.pods(role) if one["metadata"]["name"] == pod]
    status: dict[str, Any] = found["status"]["containerStatuses"][0]
    return status


def _restarts(release: Release, role: str, pod: str) -> int:
    return int(_container(release, role, pod)["restartCount"])


def _wait_until_complete(release: Release) -> None:
    def complete() -> bool:
        pods = {role: release.pods(role) for role in REPLICAS}
        return all(len(pods[role]) == REPLICAS[role] and all(map(is_ready, pods[role])) for role in REPLICAS)

    wait_until("all pods", complete, 240)
