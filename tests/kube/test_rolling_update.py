"""Pods of the release before, whose workers know only `Decode` and whose routers ask by nothing else, replaced by
today's under load."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import release_before
from tests.kube.cluster import Cluster
from tests.kube.load import Load
from tests.kube.processes import wait_until
from tests.kube.release import Release, is_ready
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMESPACE = "baton-rolling"
COMPONENTS = ("decode", "router")
NAME, PLACE = "release-before", "/opt/release-before"
NUM_MORE = 12


@pytest.fixture(scope="module")
def release(local_cluster: Cluster) -> Iterator[Release]:
    """Today's router, and two decode workers of the release before."""
    release = Release(local_cluster, "baton", NAMESPACE)
    code = {one: (release_before.folder(one) / release_before.MODULE).read_text() for one in COMPONENTS}
    names = {"name": NAME, "namespace": NAMESPACE}
    local_cluster.apply(json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": names, "data": code}))
    values = offer_tiny_model(local_cluster, NAMESPACE)
    release.install("values-laptop.yaml", **values, decode__replicas=0, wait=False)
    make_older(release, "decode")
    kubectl(release, "scale", "deployment/baton-decode", "--replicas=2")
    for component in ("prefill", *COMPONENTS):
        rolled_out(release, component)
    yield release
    release.remove()


def kubectl(release: Release, *args: str) -> str:
    return release.cluster.kubectl("-n", release.namespace, *args)


def make_older(release: Release, component: str) -> None:
    items = [{"key": component, "path": release_before.MODULE}]
    container = {
        "name": component,
        "env": [{"name": release_before.VARIABLE, "value": PLACE}],
        "volumeMounts": [{"name": NAME, "mountPath": PLACE, "readOnly": True}],
    }
    volume = {"name": NAME, "configMap": {"name": NAME, "items": items}}
    patch = {"spec": {"template": {"spec": {"containers": [container], "volumes": [volume]}}}}
    kubectl(release, "patch", f"deployment/baton-{component}", "--patch", json.dumps(patch))


def make_today_s(release: Release, component: str) -> None:
    kubectl(release, "rollout", "undo", f"deployment/baton-{component}")


def rolled_out(release: Release, component: str) -> None:
    """Returns when all pods are new and ready, and the others have ended."""

    def is_complete() -> bool:
        pods = release.pods(component, going=True)
        return len(pods) == release.replicas(component) and all(map(is_ready, pods))

    kubectl(release, "rollout", "status", f"deployment/baton-{component}", "--timeout=110s")
    wait_until(f"{component} pods", is_complete, 100)


def calls(cluster: Cluster, release: Release) -> dict[str, float]:
    """That brought requests to the decode workers which are there, by method."""
    found = {"Decode": 0.0, "DecodeMany": 0.0}
    for pod in release.pods("decode"):
        [container] = pod["spec"]["containers"]
        [port] = [one["containerPort"] for one in container["ports"] if one["name"] == "metrics"]
        url = f"http://127.0.0.1:{cluster.forward_to(pod['status']['podIP'], port)}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            page = answer.read().decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "baton_worker_decode_calls_total":
                    found[sample.labels["method"]] += sample.value
    return found


def test_each_release_works_with_the_other(release: Release, local_cluster: Cluster, ports: tuple[int, int]) -> None:
    with Load(*ports, num_clients=2, max_tokens=64) as load:
        load.more_answers(NUM_MORE)
        by_method = calls(local_cluster, release)
        assert by_method["Decode"] > 0 == by_method["DecodeMany"]
        before = {pod["metadata"]["name"] for pod in release.pods("decode")}

        make_today_s(release, "decode")
        rolled_out(release, "decode")
        assert not before & {pod["metadata"]["name"] for pod in release.pods("decode")}
        load.more_answers(NUM_MORE)
        by_method = calls(local_cluster, release)
        assert by_method["DecodeMany"] > 0 == by_method["Decode"], "the router has found out what they can do"

        make_older(release, "router")
        rolled_out(release, "router")
        load.more_answers(NUM_MORE)
        earlier = calls(local_cluster, release)
        load.more_answers(NUM_MORE)
        by_method = calls(local_cluster, release)
        assert by_method["Decode"] > earlier["Decode"]
        assert by_method["DecodeMany"] == earlier["DecodeMany"]

        make_today_s(release, "router")
        rolled_out(release, "router")
        load.more_answers(NUM_MORE)
        earlier = calls(local_cluster, release)
        load.more_answers(NUM_MORE)
        by_method = calls(local_cluster, release)
        assert by_method["DecodeMany"] > earlier["DecodeMany"]
        assert by_method["Decode"] == earlier["Decode"]
    assert load.failures == []
