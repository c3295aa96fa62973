"""Service accounts use every permission that the chart gives them, and ask for no other: seen in the audit log.

So each permission that is taken away fails a request that Baton makes. What is granted is read from the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.kube import audit
from tests.kube.cluster import Cluster
from tests.kube.processes import wait_until
from tests.kube.release import CHART, Release
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.kube, pytest.mark.slow, pytest.mark.timeout(900)]

MODES = ("external-metrics", "planner")  # what the other modes may do is part of what these may


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def release(mode: str, local_cluster: Cluster) -> Iterator[Release]:
    namespace = f"baton-may-{mode}"
    release = Release(local_cluster, "baton", namespace)
    bounds = {"minReplicas": 1, "maxReplicas": 1}
    release.install(
        "values-laptop.yaml",
        **offer_tiny_model(local_cluster, namespace),
        autoscaling__mode=mode,
        prefill__autoscaling=bounds,
        decode__autoscaling=bounds,
    )
    yield release
    release.remove()


@pytest.mark.parametrize("component", ["router", "autoscaler", "prefill", "decode"])
def test_everything_granted_is_used_and_nothing_is_refused(
    release: Release, local_cluster: Cluster, mode: str, component: str
) -> None:
    user = audit.account(release.namespace, f"baton-{component}")
    granted = audit.granted(local_cluster, release.name, user)
    assert bool(granted) == (component in ("router", "autoscaler"))
    if (mode, component) == ("planner", "autoscaler"):
        for role in ("prefill", "decode"):  # not what the planner wants: it puts them right
            name = f"deployment/baton-{role}"
            local_cluster.kubectl("-n", release.namespace, "scale", name, "--replicas=2")

    def unused() -> list[audit.Permission]:
        asked = audit.requests(local_cluster.audit_log, user=user)
        return sorted(one for one in granted if not any(one.covers(request) for request in asked if request.allowed))

    try:
        wait_until("every permission in use", lambda: not unused(), 180)
    except RuntimeError:
        pytest.fail(f"granted and not used: {unused()}")
    refused = [one for one in audit.requests(local_cluster.audit_log, user=user) if not one.allowed]
    assert refused == []


def test_metrics_are_listed_by_the_hpa_controller(release: Release, local_cluster: Cluster, mode: str) -> None:
    """The verbs that the chart's ClusterRole gives to that controller, where Kubernetes does not by itself."""
    if mode != "external-metrics":
        pytest.skip("no HPA in this mode")
    user = audit.account("kube-system", "horizontal-pod-autoscaler")

    def verbs() -> set[str]:
        return {one.verb for one in audit.requests(local_cluster.audit_log, user=user)}

    wait_until("the controller's requests", lambda: bool(verbs()), 120)
    shown = local_cluster.run("helm", "template", "x", str(CHART), "--kube-version", "1.35.0").stdout
    [rules] = [
        one["rules"]
        for one in yaml.safe_load_all(shown)
        if one and one["metadata"]["name"].endswith("-hpa") and one["kind"] == "ClusterRole"
    ]
    assert verbs() == {verb for rule in rules for verb in rule["verbs"]}
