"""Workers of both roles, and no others: the smallest fleet that has a spare."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.client.sync_client import Client
from tests.kube.cluster import Cluster
from tests.kube.load import Load
from tests.kube.processes import wait_until
from tests.kube.release import Release, container_of, is_ready
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMESPACE = "baton-both"


@pytest.fixture(scope="module")
def release(local_cluster: Cluster) -> Iterator[Release]:
    release = Release(local_cluster, "baton", NAMESPACE)
    release.install(
        "values-laptop.yaml",
        **offer_tiny_model(local_cluster, NAMESPACE),
        prefill__replicas=0,
        decode__replicas=0,
        both__replicas=2,
    )
    yield release
    release.remove()


def _addresses(release: Release) -> set[str]:
    return {f"{pod['status']['podIP']}:50061" for pod in release.pods("both") if is_ready(pod)}


def test_helm_test_passes(release: Release) -> None:
    assert "Phase:          Succeeded" in release.helm("test", release.name, "--timeout", "3m")


def test_they_are_the_fleet(release: Release, ports: tuple[int, int]) -> None:
    assert release.pods("prefill") == release.pods("decode") == []
    with Client(f"127.0.0.1:{ports[1]}", timeout=120) as client:
        fleet = client.fleet()
        done = client.generate([100 + i for i in range(40)], max_tokens=8, temperature=0.0, ignore_eos=True).result()
    assert {worker.address for worker in fleet} == _addresses(release)
    assert {worker.role.value for worker in fleet} == {"both"}
    assert done.report.decode_worker in _addresses(release)


def test_killed_worker_fails_no_request(release: Release, local_cluster: Cluster, ports: tuple[int, int]) -> None:
    """Nor does its replacement by an upgrade."""
    with Load(*ports, num_clients=2, max_tokens=200) as load:
        load.more_answers(4)
        local_cluster.kill_container(container_of(release.pods("both")[0]))
        load.more_answers(8)
        wait_until("both workers", lambda: len(_addresses(release)) == 2, 240)
        release.cluster.kubectl("-n", NAMESPACE, "rollout", "restart", "deployment/baton-both")
        release.cluster.kubectl("-n", NAMESPACE, "rollout", "status", "deployment/baton-both", "--timeout=110s")
        load.more_answers(4)
    assert load.failures == []
