"""A whole Kubernetes cluster on this machine: a control plane and one real node, in namespaces of its own.

    with Cluster(Path(tmp)) as cluster:
        cluster.load_image(archive)
        cluster.kubectl("create", "deployment", ...)
        port = cluster.forward("router.default", 8000)       # on 127.0.0.1
        with cluster.another_node("spare") as node:          # a second machine, which may be lost
            ...

Nothing of the machine's network is touched, and all of it is gone when the process that started it ends, however it
ends; one that is killed leaves its folder and empty cgroups. It needs root, and of Debian: runc
containernetworking-plugins iptables conntrack iproute2. What it does not have: enforced network policies, load
balancers, a storage provisioner.

`python -m tests.kube.cluster` starts one with Baton installed, says how to reach it, and waits for Ctrl-C.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.kube import certificates, images
from tests.kube.control_plane import BINARIES, NODE_ADDRESS, ControlPlane, assets, tool
from tests.kube.control_plane import why_not as why_no_control_plane
from tests.kube.forward import Forwarder
from tests.kube.node import CNI_PLUGINS, DNS_ADDRESS, FORWARDING, Node
from tests.kube.processes import Namespaces

NODE = "laptop"
NODE_BINARIES = ("kubelet", "kube-proxy", "containerd", "containerd-shim-runc-v2", "ctr", "coredns")
NODE_COMMANDS = ("runc", "iptables", "conntrack", "ip", "nsenter", "unshare")


def why_not() -> str:
    """Why no cluster can be started here; empty if one can."""
    if reason := why_no_control_plane((*BINARIES, *NODE_BINARIES)):
        return reason
    if os.geteuid() != 0:
        return "a node needs root"
    missing = [name for name in NODE_COMMANDS if shutil.which(name) is None]
    if not (CNI_PLUGINS / "bridge").exists():
        missing.append("containernetworking-plugins")
    return f"not installed: {', '.join(missing)}" if missing else ""


class Cluster(ControlPlane):
    """Ready when entered: its node runs pods, and names of Services resolve in them.

    `store` keeps the node's images for the next cluster: to unpack gigabytes and to remove them takes minutes. One
    cluster at a time can use it.
    """

    def __init__(self, folder: Path, store: Path | None = None) -> None:
        if reason := why_not():
            raise RuntimeError(reason)
        folder.mkdir(parents=True, exist_ok=True)
        self._store, self._lock = _locked(store) if store else (None, None)
        namespaces = Namespaces(folder)
        super().__init__(folder, namespaces)
        self.node = Node(self, NODE, 1, namespaces, self._store)
        self._archives: list[Path] = []
        self._forwarder = Forwarder(namespaces.target)
        self._reach = f"https://127.0.0.1:{self._forwarder.forward('127.0.0.1', self.ports['api'])}"
        self.kubeconfig = folder / "outside.kubeconfig"

    @property
    def reach(self) -> str:
        return self._reach

    def __enter__(self) -> Cluster:
        super().__enter__()
        return self

    def start(self) -> None:
        assert self.namespaces is not None
        self.namespaces.shell(
            f"""
            ip link set lo up
            ip link add node0 type veth peer name up0
            ip addr add {NODE_ADDRESS}/24 dev node0
            ip link set node0 up
            ip link set up0 up
            ip route add default via 10.250.0.254 dev node0
            {FORWARDING}
            """
        )
        super().start()
        self.node.start()
        coredns = (self.binaries / "coredns").read_bytes()
        archive = images.tiny_image(self.folder / "coredns.tar", images.COREDNS, coredns, ["/coredns"])
        self.node.load_image(archive)
        self.node.wait_until_ready()
        self.apply(_coredns())
        self.kubectl("-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=60s")

    def close(self) -> None:
        self._forwarder.close()
        super().close()
        assert self.namespaces is not None
        self.namespaces.close()
        self.node.remove()
        if self._lock is not None:
            self._lock.close()

    def make_certificates(self) -> None:
        super().make_certificates()
        certificates.write_kubeconfig(self.kubeconfig, self.reach, self.certs, "admin")

    def forward(self, service: str, port: int) -> int:
        """A port on 127.0.0.1 that leads to a Service (`name.namespace`) by its cluster address."""
        name, _, namespace = service.partition(".")
        address = self.kubectl("-n", namespace, "get", "service", name, "-o", "jsonpath={.spec.clusterIP}")
        return self.forward_to(address, port)

    def forward_to(self, address: str, port: int) -> int:
        """A port on 127.0.0.1 that leads to a pod or whatever else has an address in the cluster."""
        return self._forwarder.forward(address, port)

    # ------------------------------------------------------------------------------------------------ nodes

    def load_image(self, archive: Path) -> None:
        """Into every node, those that come later too."""
        self._archives.append(archive)
        self.node.load_image(archive)

    def kill_container(self, container_id: str) -> None:
        """On the first node: see `Node.kill_container`."""
        self.node.kill_container(container_id)

    @contextmanager
    def another_node(self, name: str) -> Iterator[Node]:
        """A second machine, ready; gone in the end, if the test has not lost it before."""
        assert self.namespaces is not None
        logs = self.folder / name
        logs.mkdir(exist_ok=True)
        namespaces = Namespaces(logs)
        store = self._store.with_name(f"{self._store.name}-{name}") if self._store else None
        node = Node(self, name, 2, namespaces, store)
        try:
            node.connect(self.namespaces)
            node.start()
            for archive in self._archives:
                node.load_image(archive)
            node.wait_until_ready()
            yield node
        finally:
            node.power_off()
            self.kubectl("delete", "node", name, "--ignore-not-found")
            node.remove()


def _locked(store: Path) -> tuple[Path | None, IO[bytes] | None]:
    """The folder and what holds its lock, or nothing if another cluster uses it."""
    store.mkdir(parents=True, exist_ok=True)
    lock = (store.parent / f"{store.name}.lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None, None
    return store, lock


def _coredns() -> str:
    """Objects that resolve names of Services."""
    name = {"name": "coredns", "namespace": "kube-system"}
    labels = {"k8s-app": "kube-dns"}
    corefile = ".:53 {\n errors\n ready\n kubernetes cluster.local in-addr.arpa ip6.arpa\n cache 5\n}\n"
    probe = {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1}
    container = {
        "name": "coredns",
        "image": images.COREDNS,
        "args": ["-conf", "/etc/coredns/Corefile"],
        "readinessProbe": probe,
        "securityContext": {"runAsUser": 0},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
    }
    pod = {
        "serviceAccountName": "coredns",
        "dnsPolicy": "Default",
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }
    rules = [
        {"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    rbac = "rbac.authorization.k8s.io"
    objects: list[dict[str, object]] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": "coredns"}, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "coredns"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "coredns"},
            "subjects": [{"kind": "ServiceAccount", **name}],
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": name, "data": {"Corefile": corefile}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system"},
            "spec": {
                "clusterIP": DNS_ADDRESS,
                "selector": labels,
                "ports": [{"name": protocol.lower(), "port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")],
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": name,
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})


def main() -> int:
    """A cluster with Baton installed, until Ctrl-C."""
    if reason := why_not() or images.why_not():
        print(f"cannot start a cluster: {reason}", file=sys.stderr)
        return 1
    from tests.kube.release import Release

    for number in (signal.SIGTERM, signal.SIGINT):  # a background job of a shell starts with SIGINT ignored
        signal.signal(number, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="baton-kube-") as folder:
        print("building images", file=sys.stderr, flush=True)
        archives = [images.archive(name) for name in ("router", "cpu")]
        print("starting the cluster", file=sys.stderr, flush=True)
        with Cluster(Path(folder), images.FOLDER / "node") as cluster:
            for archive in archives:
                cluster.load_image(archive)
            print("installing Baton", file=sys.stderr, flush=True)
            release = Release(cluster, "baton", "baton")
            release.install("values-laptop.yaml")
            http, grpc = (cluster.forward("baton-router.baton", port) for port in (8000, 50051))
            print(
                f"""ready

  export KUBECONFIG={cluster.kubeconfig} PATH={Path(tool("kubectl")).parent}:{assets()}:$PATH
  kubectl -n baton get pods
  curl http://127.0.0.1:{http}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "What is the capital of Japan?"}}], "temperature": 0}}'
  baton chat --router 127.0.0.1:{grpc} "Hello!"

Ctrl-C here ends the cluster.""",
                flush=True,
            )
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
