"""Service accounts use every permission that the chart gives them, and ask for no other: seen in the audit log.

Each is also taken away, and missed: a request of Baton's is refused. What is granted is read from the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.kube import audit, controllers
from tests.kube.cluster import Cluster
from tests.kube.processes import wait_until
from tests.kube.release import CHART, Release
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODES = ("external-metrics", "planner", "keda", "prometheus-adapter")


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def release(mode: str, local_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Release]:
    if mode == "keda":  # nobody acts on them here
        folder: Path = request.getfixturevalue("crds")
        controllers.establish(local_cluster, folder / "keda")
    namespace = f"baton-may-{mode}"
    release = Release(local_cluster, "baton", namespace)
    bounds = {"minReplicas": 1, "maxReplicas": 1}
    release.install(
        "values-laptop.yaml",
        **offer_tiny_model(local_cluster, namespace),
        autoscaling__mode=mode,
        autoscaler__settings={"scale_down_delay": 1},  # what is disarranged is soon put right
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
        _disarrange(release)

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
    """The verbs that the chart's ClusterRole gives to that controller, if Kubernetes does not by itself."""
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


@pytest.mark.parametrize("component", ["router", "autoscaler"])
@pytest.mark.timeout(1800)  # a restart for each permission
def test_each_permission_that_is_taken_away_is_missed(release: Release, local_cluster: Cluster, component: str) -> None:
    """After the test above, since what is refused here stays in the log."""
    user = audit.account(release.namespace, f"baton-{component}")
    for permission in sorted(audit.granted(local_cluster, release.name, user)):
        with audit.taken_away(local_cluster, release.name, user, permission):
            if permission.resource.endswith("/scale"):
                _disarrange(release)
            _wait_for_refusal(release, component, permission)
    _wait_until_rolled_out(release, component)


def test_whom_to_trust_is_missed_if_it_may_not_be_read(release: Release, local_cluster: Cluster, mode: str) -> None:
    """By the RoleBinding to one of Kubernetes' own roles, in kube-system."""
    if mode != "external-metrics":
        pytest.skip("only this mode serves the API server")
    name = f"baton-autoscaler-{release.namespace}"
    binding = json.loads(local_cluster.kubectl("-n", "kube-system", "get", "rolebinding", name, "-o", "json"))
    del binding["metadata"]["resourceVersion"], binding["metadata"]["uid"]
    wanted = audit.Permission("get", "", "configmaps", "extension-apiserver-authentication", "kube-system")
    local_cluster.kubectl("-n", "kube-system", "delete", "rolebinding", name)
    try:
        _wait_for_refusal(release, "autoscaler", wanted)
    finally:
        local_cluster.kubectl("create", "-f", "-", stdin=json.dumps(binding))
    _wait_until_rolled_out(release, "autoscaler")


def _disarrange(release: Release) -> None:
    """Not what the planner wants: it puts them right."""
    for role in ("prefill", "decode"):
        release.cluster.kubectl("-n", release.namespace, "scale", f"deployment/baton-{role}", "--replicas=2")


def _wait_for_refusal(release: Release, component: str, permission: audit.Permission) -> None:
    """Of what the component asks when it starts."""
    cluster = release.cluster
    assert isinstance(cluster, Cluster)
    start, user = audit.position(cluster.audit_log), audit.account(release.namespace, f"baton-{component}")
    selector = f"app.kubernetes.io/component={component}"
    cluster.kubectl("-n", release.namespace, "delete", "pods", "-l", selector, "--wait=false")

    def refused() -> bool:
        asked = audit.requests(cluster.audit_log, start, user=user)
        return any(permission.covers(request) and not request.allowed for request in asked)

    wait_until(f"a refusal of {permission}", refused, 180)


def _wait_until_rolled_out(release: Release, component: str) -> None:
    name = f"deployment/baton-{component}"
    release.cluster.kubectl("-n", release.namespace, "rollout", "status", name, "--timeout=110s")
