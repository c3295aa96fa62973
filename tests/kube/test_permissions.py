"""Service accounts use every permission that the chart gives them, and ask for no other: seen in the audit log.

So each permission that is taken away fails a request that Baton makes. What is granted is read from the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kube import audit
from tests.kube.cluster import Cluster
from tests.kube.processes import wait_until
from tests.kube.release import Release, is_ready
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.kube, pytest.mark.slow, pytest.mark.timeout(900)]

MODES = ("external-metrics", "planner")  # what the other modes may do is part of what these may


@pytest.fixture(scope="module", params=MODES)
def release(request: pytest.FixtureRequest, local_cluster: Cluster) -> Iterator[Release]:
    namespace = f"baton-may-{request.param}"
    release = Release(local_cluster, "baton", namespace)
    bounds = {"minReplicas": 1, "maxReplicas": 1}
    release.install(
        "values-laptop.yaml",
        **offer_tiny_model(local_cluster, namespace),
        autoscaling__mode=request.param,
        prefill__autoscaling=bounds,
        decode__autoscaling=bounds,
    )
    yield release
    release.remove()


@pytest.mark.parametrize("component", ["router", "autoscaler", "prefill", "decode"])
def test_everything_granted_is_used_and_nothing_is_refused(
    release: Release, local_cluster: Cluster, component: str
) -> None:
    user = audit.account(release.namespace, f"baton-{component}")
    granted = audit.granted(local_cluster, release.name, user)
    assert bool(granted) == (component in ("router", "autoscaler"))
    _disturb(release)

    def unused() -> list[audit.Permission]:
        asked = audit.requests(local_cluster.audit_log, user=user)
        return sorted(one for one in granted if not any(one.covers(request) for request in asked if request.allowed))

    try:
        wait_until("every permission in use", lambda: not unused(), 180)
    except RuntimeError:
        pytest.fail(f"granted and not used: {unused()}")
    refused = [one for one in audit.requests(local_cluster.audit_log, user=user) if not one.allowed]
    assert refused == []


def _disturb(release: Release) -> None:
    """Replicas that the planner does not want: it puts them right where it may set them."""
    if "planner" in release.namespace:
        for role in ("prefill", "decode"):
            name = f"deployment/baton-{role}"
            release.cluster.kubectl("-n", release.namespace, "scale", name, "--replicas=2")


def test_metrics_are_listed_by_the_hpa_controller(release: Release, local_cluster: Cluster) -> None:
    """What the chart's ClusterRole gives that controller where Kubernetes does not: the verbs that it uses."""
    if "external-metrics" not in release.namespace:
        pytest.skip("no HPA in this mode")
    user = audit.account("kube-system", "horizontal-pod-autoscaler")

    def verbs() -> set[str]:
        return {one.verb for one in audit.requests(local_cluster.audit_log, user=user)}

    wait_until("the controller's requests", lambda: bool(verbs()), 120)
    assert verbs() == {"list"}


def test_pods_are_ready_with_what_they_may(release: Release) -> None:
    for component in ("router", "autoscaler", "prefill", "decode"):
        assert all(map(is_ready, release.pods(component)))
