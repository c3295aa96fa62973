"""Every object that the chart can render, custom ones too, taken by a real API server; a control plane is enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm.chart import CHART, MODES, arguments
from tests.helm.test_chart import CUSTOM, VARIANTS
from tests.helm.test_gateway import INFERENCE_POOLS
from tests.kube.control_plane import ControlPlane
from tests.kube.release import Release


@pytest.fixture(scope="module")
def with_crds(control_plane: ControlPlane, crds: Path) -> ControlPlane:
    control_plane.kubectl("apply", "--server-side", "-R", "-f", str(crds))
    if "inferencepools.inference.networking.k8s.io" not in control_plane.kubectl("get", "crd", "-o", "name"):
        control_plane.kubectl("apply", "--server-side", "-f", str(INFERENCE_POOLS))
    established = ("wait", "--for=condition=Established", "crd", "--all", "--timeout=10s")
    control_plane.kubectl_until("custom resource definitions", *established)
    control_plane.run("kubectl", "create", "namespace", "prod")
    return control_plane


@pytest.mark.parametrize("variant", VARIANTS)
def test_api_server_takes_every_object(with_crds: ControlPlane, variant: str) -> None:
    args = ["-n", "prod", *arguments(VARIANTS[variant])]
    done = with_crds.run("helm", "template", "demo", str(CHART), "--kube-version", "1.36.0", *args)
    assert done.returncode == 0, done.stderr
    taken = with_crds.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-o", "name", "-f", "-", stdin=done.stdout
    )
    assert len(taken.splitlines()) == done.stdout.count("\nkind: ")


def test_the_variants_render_every_custom_kind() -> None:
    from tests.helm.chart import render

    kinds = {one["kind"] for values in VARIANTS.values() for one in render(values)}
    assert kinds >= CUSTOM


@pytest.mark.parametrize("mode", MODES)
def test_uninstall_leaves_nothing(with_crds: ControlPlane, mode: str) -> None:
    """Upgrades from one mode to the next and back, too."""
    release = Release(with_crds, f"in-{mode}", f"in-{mode}")
    release.install(wait=False, autoscaling__mode=mode, kv__connector="shared_storage")
    assert release.left()
    other = MODES[MODES.index(mode) - 1]
    release.install(wait=False, autoscaling__mode=other, kv__connector="shared_storage")
    release.helm("rollback", release.name, "1")
    release.remove()


def test_restricted_namespace_takes_the_pods(control_plane: ControlPlane) -> None:
    """The level is enforced when pods are made, which needs no node."""
    release = Release(control_plane, "level", "level")
    release.install(wait=False, autoscaling__mode="planner")
    for component in ("router", "prefill", "decode", "autoscaler"):
        control_plane.kubectl_until(
            f"a pod of {component}", "-n", "level", "wait", "--for=create", "--timeout=20s", "pod",
            "-l", f"app.kubernetes.io/component={component}",
        )  # fmt: skip
    release.remove()


def test_restricted_namespace_refuses_what_is_not_restricted(control_plane: ControlPlane) -> None:
    """So the test above can fail."""
    release = Release(control_plane, "loose", "loose")
    release.install(wait=False, autoscaling__mode="none", decode__rdma={"ipcLock": True, "devices": 0})
    refused = "--for=jsonpath={.status.conditions[?(@.type=='ReplicaFailure')].status}=True"
    control_plane.kubectl("-n", "loose", "wait", refused, "--timeout=20s", "deployment/loose-baton-decode")
    release.remove()


ALLOWED = {
    "router": {"list endpointslices.discovery.k8s.io", "watch endpointslices.discovery.k8s.io"},
    "autoscaler": {
        "list endpointslices.discovery.k8s.io",
        "watch endpointslices.discovery.k8s.io",
        "get leases.coordination.k8s.io/rbac-baton-autoscaler",
        "patch leases.coordination.k8s.io/rbac-baton-autoscaler",
        "patch pods",
        "get deployments.apps/rbac-baton-prefill --subresource=scale",
        "patch deployments.apps/rbac-baton-decode --subresource=scale",
    },
    "prefill": set[str](),
    "decode": set[str](),
}
QUESTIONS = set.union(
    *ALLOWED.values(),
    {
        "get secrets", "list secrets", "list pods", "delete pods", "create pods", "get configmaps",
        "update deployments.apps",
        "patch deployments.apps/rbac-baton-decode", "patch deployments.apps/other --subresource=scale",
        "create leases.coordination.k8s.io", "patch leases.coordination.k8s.io/other",
        "update leases.coordination.k8s.io/rbac-baton-autoscaler",
        "delete leases.coordination.k8s.io/rbac-baton-autoscaler",
        "patch endpointslices.discovery.k8s.io", "list nodes", "impersonate users", "create serviceaccounts/token",
    },
)  # fmt: skip


@pytest.mark.parametrize("component", ALLOWED)
def test_service_accounts_may_do_what_is_listed_and_nothing_else(control_plane: ControlPlane, component: str) -> None:
    release = Release(control_plane, "rbac", "rbac")
    release.install(wait=False, autoscaling__mode="planner")
    user = f"--as=system:serviceaccount:rbac:rbac-baton-{component}"
    group = "--as-group=system:serviceaccounts:rbac"
    answers = {
        question: control_plane.run("kubectl", "-n", "rbac", "auth", "can-i", *question.split(), user, group).stdout
        for question in QUESTIONS
    }
    assert {question for question, answer in answers.items() if answer.strip() == "yes"} == ALLOWED[component]
    elsewhere = control_plane.run("kubectl", "-n", "default", "auth", "can-i", "list", "endpointslices", user, group)
    assert elsewhere.stdout.strip() == "no"
    release.remove()
