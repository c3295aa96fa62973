"""One release of the chart in a cluster, driven by helm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kube.control_plane import Kubectl
from tests.kube.processes import wait_until

CHART = Path(__file__).parents[2] / "helm"
LEVEL = "pod-security.kubernetes.io"


class Release:
    """`namespace` is made with the pod security level `restricted` enforced, and goes with `remove`."""

    def __init__(self, cluster: Kubectl, name: str, namespace: str) -> None:
        self.cluster, self.name, self.namespace = cluster, name, namespace
        manifest = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": namespace,
                "labels": {f"{LEVEL}/enforce": "restricted", f"{LEVEL}/enforce-version": "latest"},
            },
        }
        cluster.apply(json.dumps(manifest))
        self._before: set[str] | None = None

    def helm(self, *args: str, timeout_s: float = 400) -> str:
        """Raises RuntimeError with what helm says, and with the pods' state and last words."""
        done = self.cluster.run("helm", "-n", self.namespace, *args, timeout_s=timeout_s)
        if done.returncode != 0:
            kubectl = ("kubectl", "-n", self.namespace)
            pods = self.cluster.run(*kubectl, "get", "pods,events", "-o", "wide").stdout
            ours = ("-l", f"app.kubernetes.io/instance={self.name}", "--all-containers", "--prefix", "--tail=8")
            logs = self.cluster.run(*kubectl, "logs", *ours).stdout
            raise RuntimeError(f"helm {' '.join(args)}: {done.stderr.strip()}\n{done.stdout}\n{pods}\n{logs}")
        return done.stdout

    def install(self, file: str | None = None, *, wait: bool = True, **values: Any) -> None:
        """Installs or upgrades. `values` by dotted path, dots spelled as double underscores."""
        if self._before is None:
            self._before = inventory(self.cluster)
        args = ["-f", str(CHART / file)] if file else []
        for path, value in values.items():
            args += ["--set-json", f"{path.replace('__', '.')}={json.dumps(value)}"]
        if wait:
            args += ["--wait", "--timeout", "5m"]
        self.helm("upgrade", "--install", self.name, str(CHART), *args)

    def uninstall(self) -> None:
        self.helm("uninstall", self.name, "--wait", "--timeout", "5m")

    def left(self) -> list[str]:
        """Objects that were not there before the release was installed."""
        return sorted(inventory(self.cluster) - (self._before or set()))

    def remove(self) -> None:
        """Uninstalls, and deletes the namespace. Raises RuntimeError if helm left anything anywhere."""
        self.uninstall()
        try:
            # helm does not wait for what others made of its objects: pods, replica sets, endpoints.
            wait_until("nothing left", lambda: not self.left(), 200)
        except RuntimeError as error:
            raise RuntimeError(f"left behind: {self.left()}") from error
        self.cluster.kubectl("delete", "namespace", self.namespace, "--timeout=100s")

    def pods(self, component: str, *, going: bool = False) -> list[dict[str, Any]]:
        """Pods of a component; with `going` also those that are being deleted."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        listed = json.loads(self.cluster.kubectl("-n", self.namespace, "get", "pods", "-l", selector, "-o", "json"))[
            "items"
        ]
        return [pod for pod in listed if going or "deletionTimestamp" not in pod["metadata"]]

    def replicas(self, component: str) -> int:
        """What the component's Deployment is told to have."""
        name = f"deployment/{self.name}-{component}"
        return int(self.cluster.kubectl("-n", self.namespace, "get", name, "-o", "jsonpath={.spec.replicas}"))

    def read_by_hpa(self, component: str) -> dict[str, tuple[dict[str, str], str]]:
        """What the component's HPA has read last: selector and value per pod, by metric. What it could not read is
        left out."""
        name = f"hpa/{self.name}-{component}"
        hpa = json.loads(self.cluster.kubectl("-n", self.namespace, "get", name, "-o", "json"))
        found = {}
        for one in hpa["status"].get("currentMetrics") or ():
            if "external" not in one:  # it could not be read, and says nothing
                continue
            metric, value = one["external"]["metric"], one["external"]["current"].get("averageValue", "")
            found[metric["name"]] = metric.get("selector", {}).get("matchLabels", {}), value
        return found


def inventory(cluster: Kubectl) -> set[str]:
    """Every object of the cluster, as `Kind namespace/name`, but for what the cluster makes by itself at any time."""
    kinds = cluster.kubectl("api-resources", "--verbs=list,delete", "-o", "name").split()
    columns = "custom-columns=K:.kind,S:.metadata.namespace,N:.metadata.name"
    listed = cluster.kubectl("get", ",".join(kinds), "-A", "--no-headers", "--ignore-not-found", "-o", columns)
    found = set()
    for line in listed.splitlines():
        kind, namespace, name = line.split()
        if namespace == "kube-node-lease":  # a kubelet makes its node's some seconds after the node is ready
            continue
        if kind not in ("Event", "Endpoints") and name not in ("default", "kube-root-ca.crt"):
            found.add(f"{kind} {namespace}/{name}")
    return found


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def container_of(pod: dict[str, Any]) -> str:
    """Of its only container, by the name that containerd knows it by."""
    container: str = pod["status"]["containerStatuses"][0]["containerID"]
    return container.removeprefix("containerd://")
