"""Workers of several pods: groups made, scaled and made anew by LeaderWorkerSet's own controller.

What a group computes together is looked at in test_hosts.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube import controllers
from tests.kube.cluster import Cluster
from tests.kube.groups import MULTI_NODE, wait_for_groups
from tests.kube.load import Load
from tests.kube.processes import wait_until
from tests.kube.release import Release, container_of
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMESPACE = "baton-groups"


@pytest.fixture(scope="module")
def release(local_cluster: Cluster, crds: Path) -> Iterator[Release]:
    if reason := controllers.why_not(controllers.LWS):
        pytest.skip(reason)
    with controllers.leader_worker_sets(local_cluster, crds):
        release = Release(local_cluster, "baton", NAMESPACE)
        release.install(
            "values-laptop.yaml",
            **offer_tiny_model(local_cluster, NAMESPACE),
            decode__replicas=2,
            decode__multiNode=MULTI_NODE,
        )
        wait_for_groups(release, 2, seconds=300)
        yield release
        release.remove()


def _uids(release: Release) -> set[str]:
    return {pod["metadata"]["uid"] for pod in release.pods("decode")}


def _addresses(release: Release) -> set[str]:
    """Pods that routers see as decode workers."""
    selector = "app.kubernetes.io/component=decode"
    listed = release.cluster.kubectl("-n", NAMESPACE, "get", "endpointslices", "-l", selector, "-o", "json")
    return {
        endpoint["targetRef"]["name"]
        for one in json.loads(listed)["items"]
        for endpoint in one.get("endpoints") or ()
        if endpoint["conditions"]["ready"]
    }


def test_only_leaders_get_requests(release: Release) -> None:
    wait_for_groups(release, 2, seconds=300)
    wait_until("the leaders", lambda: _addresses(release) == {"baton-decode-0", "baton-decode-1"}, 60)
    assert "Phase:          Succeeded" in release.helm("test", release.name, "--timeout", "3m")


def test_members_know_their_group(release: Release) -> None:
    script = "import os, socket; e = os.environ; print(e['LWS_GROUP_SIZE'], e['LWS_WORKER_INDEX']); "
    script += "print(socket.gethostbyname(e['LWS_LEADER_ADDRESS']))"
    seen = release.cluster.kubectl("-n", NAMESPACE, "exec", "baton-decode-1-1", "--", "python3", "-c", script).split()
    [leader] = [pod for pod in release.pods("decode") if pod["metadata"]["name"] == "baton-decode-1"]
    assert seen == ["2", "1", leader["status"]["podIP"]]


def test_members_find_a_leader_that_is_not_ready_yet(release: Release) -> None:
    """By the Service that the controller makes; the chart's is for routers, and knows ready leaders only."""
    service = json.loads(release.cluster.kubectl("-n", NAMESPACE, "get", "service", "baton-decode", "-o", "json"))
    assert service["metadata"]["ownerReferences"][0]["kind"] == "LeaderWorkerSet"
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_groups_are_scaled_whole(release: Release) -> None:
    scale = ("-n", NAMESPACE, "scale", "leaderworkerset", "baton-decode")
    release.cluster.kubectl(*scale, "--replicas=3")
    wait_for_groups(release, 3, seconds=300)
    wait_until("a third leader", lambda: "baton-decode-2" in _addresses(release), 60)
    release.cluster.kubectl(*scale, "--replicas=2")
    wait_until("four pods", lambda: len(release.pods("decode")) == 4, 200)
    assert set(wait_for_groups(release, 2, seconds=300)) == {"0", "1"}


def test_group_of_a_killed_member_is_made_anew_and_no_request_fails(release: Release, local_cluster: Cluster) -> None:
    before = wait_for_groups(release, 2, seconds=300)
    service = f"baton-router.{NAMESPACE}"
    with Load(local_cluster.forward(service, 8000), local_cluster.forward(service, 50051), max_tokens=100) as load:
        load.more_answers(4)
        [member] = [pod for pod in release.pods("decode") if pod["metadata"]["name"] == "baton-decode-1-1"]
        local_cluster.kill_container(container_of(member))
        wait_until("the group to end", lambda: not _uids(release) >= set(before["1"].values()), 120)
        after = wait_for_groups(release, 2, seconds=300)
        load.more_answers(4)
    assert load.failures == []
    assert after["0"] == before["0"], "the other group is left alone"
    assert not set(after["1"].values()) & set(before["1"].values())
