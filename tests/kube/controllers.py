"""KEDA's and LeaderWorkerSet's own controllers, as processes beside a local cluster's control plane.

They are administrators here, so that nothing of theirs has to be installed but their custom resource definitions, and
they answer on 127.0.0.1 of the cluster's network namespace, where the API server finds them.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kube import certificates
from tests.kube.cluster import Cluster
from tests.kube.control_plane import assets
from tests.kube.node import DNS_ADDRESS
from tests.kube.processes import Process, wait_until

KEDA, LWS = ("keda-operator", "keda-adapter"), ("lws-manager",)
EXTERNAL_METRICS = "v1beta1.external.metrics.k8s.io"
_KEDA_NAMESPACE = "keda"
_ADAPTER_PORT, _METRICS_PORT, _HOOK_PORT = 16443, 19666, 19443


def why_not(binaries: tuple[str, ...]) -> str:
    """Why these controllers cannot run here; empty if they can."""
    missing = [name for name in binaries if not os.access((assets() or Path()) / name, os.X_OK)]
    return f"KUBEBUILDER_ASSETS lacks {', '.join(missing)}" if missing else ""


@contextmanager
def keda(cluster: Cluster, crds: Path) -> Iterator[None]:
    """The operator and its metrics API. Nobody else may serve external metrics meanwhile."""
    establish(cluster, crds / "keda")
    certs = _certificates(cluster, f"DNS:keda-metrics-apiserver.{_KEDA_NAMESPACE}.svc")
    cluster.run("kubectl", "create", "namespace", _KEDA_NAMESPACE)
    admin = cluster.kubeconfig_of("admin")
    environ = {
        "KUBECONFIG": str(admin),
        "POD_NAMESPACE": _KEDA_NAMESPACE,
        "WATCH_NAMESPACE": "",
        "KEDA_CLUSTER_OBJECT_NAMESPACE": _KEDA_NAMESPACE,
    }
    operator = cluster.spawn(
        "keda-operator", *_resolving_services(cluster, "keda-operator"), "--metrics-bind-address=127.0.0.1:18080",
        "--health-probe-bind-address=127.0.0.1:18081", f"--metrics-service-bind-address=127.0.0.1:{_METRICS_PORT}",
        f"--cert-dir={certs}", "--zap-encoder=console", environ=environ,
    )  # fmt: skip
    adapter = cluster.spawn(
        "keda-adapter", "keda-adapter", f"--lister-kubeconfig={admin}", f"--authentication-kubeconfig={admin}",
        f"--authorization-kubeconfig={admin}", "--bind-address=127.0.0.1", f"--secure-port={_ADAPTER_PORT}",
        "--port=18082", f"--metrics-service-address=localhost:{_METRICS_PORT}", f"--cert-dir={certs}",
        f"--tls-cert-file={certs}/tls.crt", f"--tls-private-key-file={certs}/tls.key",
        f"--client-ca-file={certs}/ca.crt", "--zap-encoder=console", environ=environ,
    )  # fmt: skip
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "keda-metrics-apiserver", "namespace": _KEDA_NAMESPACE},
        "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": _ADAPTER_PORT}]},
    }
    api = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": EXTERNAL_METRICS},
        "spec": {
            "group": "external.metrics.k8s.io",
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "caBundle": _base64(certs / "ca.crt"),
            "service": {"name": "keda-metrics-apiserver", "namespace": _KEDA_NAMESPACE, "port": _ADAPTER_PORT},
        },
    }
    try:
        for one in (service, api):
            cluster.apply(json.dumps(one))
        cluster.kubectl_until(
            "KEDA", "wait", "--for=condition=Available", f"apiservice/{EXTERNAL_METRICS}", "--timeout=5s",
            processes=[operator, adapter],
        )  # fmt: skip
        yield
    finally:
        cluster.kubectl("delete", "apiservice", EXTERNAL_METRICS, "--ignore-not-found")
        _stop(cluster, operator, adapter)


@contextmanager
def leader_worker_sets(cluster: Cluster, crds: Path) -> Iterator[None]:
    """The manager with its webhooks, without which the groups' pods do not learn who is who."""
    # First: a manager that finds no definition looks again only after ten seconds.
    establish(cluster, crds / "lws")
    certs = _certificates(cluster, "")
    config = {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": "127.0.0.1:18091"},
        "webhook": {"host": "127.0.0.1", "port": _HOOK_PORT, "certDir": str(certs)},
    }
    path = cluster.folder / "lws.json"
    path.write_text(json.dumps(config))
    environ = {"KUBECONFIG": str(cluster.kubeconfig_of("admin"))}
    manager = cluster.spawn("lws-manager", "lws-manager", f"--config={path}", environ=environ)
    hooks = [_hooks(certs, "Mutating", "mutate"), _hooks(certs, "Validating", "validate")]
    try:
        for hook in hooks:
            cluster.apply(json.dumps(hook))
        wait_until("LeaderWorkerSet's webhooks", lambda: _listens(cluster, _HOOK_PORT), 60, [manager])
        yield
    finally:
        for hook in hooks:
            cluster.kubectl("delete", hook["kind"], hook["metadata"]["name"], "--ignore-not-found")
        _stop(cluster, manager)


def _hooks(certs: Path, kind: str, path: str) -> dict[str, Any]:
    of_groups = {"matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]}

    def hook(name: str, url: str, group: str, resource: str, **more: Any) -> dict[str, Any]:
        rule = {
            "apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": [resource],
        }  # fmt: skip
        client = {"url": f"https://127.0.0.1:{_HOOK_PORT}/{url}", "caBundle": _base64(certs / "ca.crt")}
        return {
            "name": name, "clientConfig": client, "admissionReviewVersions": ["v1"], "sideEffects": "None",
            "failurePolicy": "Fail", "rules": [rule], **more,
        }  # fmt: skip

    group = "leaderworkerset.x-k8s.io"
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": f"{kind}WebhookConfiguration",
        "metadata": {"name": f"lws-{path}"},
        "webhooks": [
            hook("lws.kb.io", f"{path}-leaderworkerset-x-k8s-io-v1-leaderworkerset", group, "leaderworkersets"),
            hook("pod.kb.io", f"{path}--v1-pod", "", "pods", objectSelector=of_groups),
        ],
    }


def establish(cluster: Cluster, folder: Path) -> None:
    """Custom resource definitions, ready for objects."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(folder))
    # Again and again: kubectl does not wait for definitions that have no conditions at all yet.
    wait = ("wait", "--for=condition=Established", "-f", str(folder), "--timeout=10s")
    cluster.kubectl_until("custom resource definitions", *wait)


def _certificates(cluster: Cluster, more_names: str) -> Path:
    """ca.crt, tls.crt and tls.key, named as both projects expect them; good for either end of a connection."""
    folder = cluster.folder / "controllers"
    folder.mkdir(exist_ok=True)
    certificates.make_ca(folder, "ca")
    names = ",".join(part for part in ("DNS:localhost,IP:127.0.0.1", more_names) if part)
    certificates.make_leaf(folder, "tls", "ca", "/CN=localhost", names)
    return folder


def _resolving_services(cluster: Cluster, program: str) -> list[str]:
    """A command line for `program` that resolves names of Services, as it would inside a pod."""
    resolver = cluster.folder / "services.resolv.conf"
    resolver.write_text(f"nameserver {DNS_ADDRESS}\nsearch svc.cluster.local cluster.local\noptions ndots:5\n")
    script = f'mount --bind {resolver} /etc/resolv.conf && exec {assets()}/{program} "$@"'
    return ["unshare", "-m", "--propagation", "private", "sh", "-c", script, program]


def _listens(cluster: Cluster, port: int) -> bool:
    assert cluster.namespaces is not None
    return f":{port} " in cluster.namespaces.shell("ss --no-header --listening --tcp --numeric")


def _stop(cluster: Cluster, *processes: Process) -> None:
    for process in processes:
        process.kill()
        cluster.processes.pop(process.name, None)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
