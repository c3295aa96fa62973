"""A whole Kubernetes cluster on this machine: a control plane and one real node, in namespaces of its own.

    with Cluster(Path(tmp)) as cluster:
        cluster.load_image(archive)
        cluster.kubectl("create", "deployment", ...)
        port = cluster.forward("router.default", 8000)       # on 127.0.0.1

Nothing of the machine's network is touched, and all of it is gone when the process that started it ends, however it
ends. It needs root, and of Debian: runc containernetworking-plugins iptables conntrack iproute2. What it does not have:
enforced network policies, load balancers, a storage provisioner.

`python -m tests.kube.cluster` starts one with Baton installed, says how to reach it, and waits for Ctrl-C.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from tests.kube import certificates, images
from tests.kube.control_plane import BINARIES, NODE_ADDRESS, ControlPlane, assets, tool
from tests.kube.control_plane import why_not as why_no_control_plane
from tests.kube.forward import Forwarder
from tests.kube.processes import Namespaces, wait_until

NODE = "laptop"
DNS_ADDRESS = "10.0.0.10"
POD_RANGE = "10.244.0.0/16"
CNI_PLUGINS = Path("/usr/lib/cni")
NODE_BINARIES = ("kubelet", "kube-proxy", "containerd", "containerd-shim-runc-v2", "ctr", "coredns")
NODE_COMMANDS = ("runc", "iptables", "conntrack", "ip", "nsenter", "unshare")


def why_not() -> str:
    """Why no cluster can be started here; empty where one can."""
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
        self._make_network()
        super().start()
        self.start_containerd()
        self.start_kubelet()
        self._start_kube_proxy()
        for tag, program, entrypoint in (
            (images.PAUSE, images.pause_program(), ["/pause"]),
            (images.COREDNS, (self._binaries / "coredns").read_bytes(), ["/coredns"]),
        ):
            name = tag.split("/")[1].split(":")[0]
            self.load_image(images.tiny_image(self.folder / f"{name}.tar", tag, program, entrypoint))
        self.kubectl("wait", "--for=condition=Ready", f"node/{NODE}", "--timeout=60s")
        self.apply(_coredns())
        self.kubectl("-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=60s")

    def close(self) -> None:
        self._forwarder.close()
        super().close()
        assert self.namespaces is not None
        self.namespaces.close()
        # What the node's processes had mounted went with their mount namespace.
        shutil.rmtree(self.folder / "containerd", ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def make_certificates(self) -> None:
        super().make_certificates()
        certificates.make_leaf(self.certs, "node", "ca", f"/O=system:nodes/CN=system:node:{NODE}")
        certificates.write_kubeconfig(self.kubeconfig_of("node"), self.server, self.certs, "node")
        certificates.write_kubeconfig(self.kubeconfig, self.reach, self.certs, "admin")

    def forward(self, service: str, port: int) -> int:
        """A port on 127.0.0.1 that leads to a Service (`name.namespace`) by its cluster address."""
        name, _, namespace = service.partition(".")
        address = self.kubectl("-n", namespace, "get", "service", name, "-o", "jsonpath={.spec.clusterIP}")
        return self.forward_to(address, port)

    def forward_to(self, address: str, port: int) -> int:
        """A port on 127.0.0.1 that leads to a pod or whatever else has an address in the cluster."""
        return self._forwarder.forward(address, port)

    # ------------------------------------------------------------------------------------------------- node

    def load_image(self, archive: Path) -> None:
        """Imports a docker archive into the node, unless its store has the image already."""
        with tarfile.open(archive) as tar:
            manifest = tar.extractfile("manifest.json")
            assert manifest is not None
            content = manifest.read()
        tags = ",".join(json.loads(content)[0]["RepoTags"])
        loaded = self._root / "loaded" / tags.replace("/", "_")
        if not loaded.exists() or loaded.read_bytes() != content:
            self.ctr(f"images import {archive}")
            loaded.parent.mkdir(exist_ok=True)
            loaded.write_bytes(content)

    def kill_container(self, container_id: str) -> None:
        """SIGKILL to its first process, as the kernel does when memory runs out."""
        self.ctr(f"task kill -s SIGKILL {container_id}")

    def ctr(self, command: str) -> str:
        """containerd's own command line, in the namespace that the kubelet uses."""
        assert self.namespaces is not None
        return self.namespaces.shell(f"{self._binaries}/ctr -a {self._socket} -n k8s.io {command}")

    @property
    def _root(self) -> Path:
        return self._store or self.folder / "containerd" / "root"

    @property
    def _socket(self) -> Path:
        return self.folder / "containerd.sock"

    def _make_network(self) -> None:
        assert self.namespaces is not None
        self.namespaces.shell(
            f"""
            ip link set lo up
            ip link add node0 type veth peer name up0
            ip addr add {NODE_ADDRESS}/24 dev node0
            ip link set node0 up
            ip link set up0 up
            ip route add default via 10.250.0.254 dev node0
            echo 1 > /proc/sys/net/ipv4/ip_forward
            bridge=/proc/sys/net/bridge/bridge-nf-call-iptables
            [ ! -e $bridge ] || echo 1 > $bridge
            """
        )

    def start_containerd(self) -> None:
        folder = self.folder
        network = {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": True,
                    "ipMasq": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": "10.244.0.0/24"}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                        "dataDir": str(folder / "cni-addresses"),
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }
        (folder / "cni").mkdir(exist_ok=True)
        (folder / "cni" / "10-bridge.conflist").write_text(json.dumps(network))
        config = folder / "containerd.toml"
        config.write_text(
            f"""
version = 3
root = "{self._root}"
state = "{folder}/containerd/state"
[grpc]
  address = "{self._socket}"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{images.PAUSE}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{CNI_PLUGINS}"]
  conf_dir = "{folder}/cni"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  SystemdCgroup = false
"""
        )
        self._spawn_containerd(config)
        if self._forget_containers():
            # It has read of them, and would tell the kubelet.
            self.processes["containerd"].kill()
            self._socket.unlink()
            self._spawn_containerd(config)

    def _spawn_containerd(self, config: Path) -> None:
        process = self.spawn("containerd", "containerd", "--config", str(config))
        wait_until("containerd", self._socket.exists, 60, [process])

    def _forget_containers(self) -> bool:
        """Removes what an earlier cluster has left in the store. Its processes ended with it."""
        found = False
        for kind in ("containers", "sandboxes"):
            _, *rows = self.ctr(f"{kind} list").splitlines()
            if old := [row.split()[0] for row in rows if row.strip()]:
                self.ctr(f"{kind} rm {' '.join(old)}")
                found = True
        return found

    def start_kubelet(self) -> None:
        """Also restarts one that was killed."""
        folder = self.folder
        (folder / "resolv.conf").write_text("")
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.certs / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "clusterDNS": [DNS_ADDRESS],
            "clusterDomain": "cluster.local",
            "volumePluginDir": str(folder / "volume-plugins"),
            "podLogsDir": str(folder / "pod-logs"),
            "resolvConf": str(folder / "resolv.conf"),
            # Inside a container, on either version of cgroups.
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "featureGates": {"KubeletInUserNamespace": True},
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": False,
            "failSwapOn": False,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
        }
        path = folder / "kubelet.json"
        path.write_text(json.dumps(config))
        self.spawn(
            "kubelet", "kubelet", "--config", str(path), "--kubeconfig", str(self.kubeconfig_of("node")),
            "--hostname-override", NODE, "--node-ip", NODE_ADDRESS, "--root-dir", str(folder / "kubelet"),
            "--cert-dir", str(folder / "kubelet" / "pki"),
        )  # fmt: skip
        self.kubectl_until("the node", "get", "node", NODE, processes=[self.processes["kubelet"]])

    def _start_kube_proxy(self) -> None:
        self.spawn(
            "kube-proxy", "kube-proxy", "--kubeconfig", str(self.kubeconfig_of("admin")), "--hostname-override", NODE,
            "--proxy-mode", "iptables", "--cluster-cidr", POD_RANGE, "--conntrack-max-per-core", "0",
            "--healthz-bind-address", "127.0.0.1:20256", "--metrics-bind-address", "127.0.0.1:20249",
        )  # fmt: skip


def _locked(store: Path) -> tuple[Path | None, IO[bytes] | None]:
    """The folder and what holds its lock, or nothing where another cluster uses it."""
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
    -d '{{"messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
  baton chat --router 127.0.0.1:{grpc} "Hello!"

Ctrl-C here ends the cluster.""",
                flush=True,
            )
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
