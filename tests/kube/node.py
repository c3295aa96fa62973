"""A node of a local cluster: containerd, kubelet and kube-proxy as plain processes in one machine's namespaces.

The first node shares its namespaces with the control plane. Another one is a machine of its own, behind a cable:

    control plane, first node                    another node
    cni0 10.244.1.0/24                           cni0 10.244.2.0/24
    10.250.0.1 (NAME-cable) ──────────────────── 10.250.0.2 (node0)

Each has a cgroup of its own, since a kubelet ends what it does not know in its cgroup: a node's beside it, another
cluster's, or the machine's own pods.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.kube import certificates, images
from tests.kube.control_plane import NODE_ADDRESS, ControlPlane
from tests.kube.processes import Namespaces, Process, wait_until

DNS_ADDRESS = "10.0.0.10"
POD_RANGE = "10.244.0.0/16"
CNI_PLUGINS = Path("/usr/lib/cni")
_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = ("cpu", "cpuset", "hugetlb", "memory", "pids")  # that a kubelet asks for, of those that there are
# Where containerd, its shims, CNI plugins and kubelets write whatever their settings are.
_FIXED_FOLDERS = ("/run/containerd", "/run/netns", "/var/lib/cni", "/var/lib/kubelet", "/var/log/containers")


class Node:
    """`number` counts nodes of a cluster from 1. `images_in` keeps images and the record of what is there."""

    def __init__(
        self, plane: ControlPlane, name: str, number: int, namespaces: Namespaces, images_in: Path | None = None
    ) -> None:
        self.plane, self.name, self.number, self.namespaces = plane, name, number, namespaces
        self.folder = plane.folder / name
        self.folder.mkdir(exist_ok=True)
        self.address = f"10.250.0.{number}"
        self.pods = f"10.244.{number}.0/24"
        self._images = images_in or self.folder / "containerd" / "root"
        self._socket = self.folder / "containerd.sock"
        self._cgroup = f"baton-{name}-{uuid.uuid4().hex[:8]}"

    def start(self) -> None:
        """Returns when the API server has heard of it. The network has to be there."""
        self.namespaces.shell(
            "\n".join(f"mkdir -p {folder}; mount -t tmpfs tmpfs {folder}" for folder in _FIXED_FOLDERS)
        )
        for root in _cgroup_roots():
            _make_cgroup(root / self._cgroup)
        certs = self.plane.certs
        certificates.make_leaf(certs, self.name, "ca", f"/O=system:nodes/CN=system:node:{self.name}")
        for user in (self.name, "admin"):
            path = self.folder / f"{user}.kubeconfig"
            certificates.write_kubeconfig(path, f"https://{NODE_ADDRESS}:{self.plane.ports['api']}", certs, user)
        self.start_containerd()
        self.start_kubelet()
        self._spawn(
            "kube-proxy", "--kubeconfig", str(self.folder / "admin.kubeconfig"), "--hostname-override", self.name,
            "--proxy-mode", "iptables", "--cluster-cidr", POD_RANGE, "--conntrack-max-per-core", "0",
            "--healthz-bind-address", "127.0.0.1:20256", "--metrics-bind-address", "127.0.0.1:20249",
        )  # fmt: skip
        pause = self.folder / "pause.tar"
        self.load_image(images.tiny_image(pause, images.PAUSE, images.pause_program(), ["/pause"]))

    def wait_until_ready(self, timeout_s: float = 60) -> None:
        self.plane.kubectl("wait", "--for=condition=Ready", f"node/{self.name}", f"--timeout={timeout_s:g}s")

    # --------------------------------------------------------------------------------------------- containers

    def load_image(self, archive: Path) -> None:
        """Imports a docker archive, unless the node's store has the image already."""
        with tarfile.open(archive) as tar:
            manifest = tar.extractfile("manifest.json")
            assert manifest is not None
            content = manifest.read()
        tags = ",".join(json.loads(content)[0]["RepoTags"])
        loaded = self._images / "loaded" / tags.replace("/", "_")
        if not loaded.exists() or loaded.read_bytes() != content:
            self.ctr(f"images import {archive}")
            loaded.parent.mkdir(exist_ok=True)
            loaded.write_bytes(content)

    def kill_container(self, container_id: str) -> None:
        """SIGKILL to its first process, as the kernel does when memory runs out."""
        self.ctr(f"task kill -s SIGKILL {container_id}")

    def ctr(self, command: str) -> str:
        """containerd's own command line, in the namespace that the kubelet uses."""
        return self.namespaces.shell(f"{self.plane.binaries}/ctr -a {self._socket} -n k8s.io {command}")

    # ---------------------------------------------------------------------------------------------- processes

    def process(self, name: str) -> Process:
        return self.plane.processes[f"{self.name}-{name}"]

    def _spawn(self, name: str, *argv: str) -> Process:
        return self.plane.spawn(f"{self.name}-{name}", name, *argv, namespaces=self.namespaces)

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
                    "ipMasq": False,  # every node knows the way to every pod, and there is nothing outside
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": self.pods}]],
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
root = "{self._images}"
state = "{folder}/containerd/state"
[grpc]
  address = "{self._socket}"
[plugins."io.containerd.nri.v1.nri"]
  disable = true # its socket is the machine's
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
            self.process("containerd").kill()
            self._socket.unlink()
            self._spawn_containerd(config)

    def _spawn_containerd(self, config: Path) -> None:
        process = self._spawn("containerd", "--config", str(config))
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
                "x509": {"clientCAFile": str(self.plane.certs / "ca.crt")},
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
            "cgroupRoot": f"/{self._cgroup}",
            "featureGates": {"KubeletInUserNamespace": True},
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": False,
            "failSwapOn": False,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
        }
        path = folder / "kubelet.json"
        path.write_text(json.dumps(config))
        kubelet = self._spawn(
            "kubelet", "--config", str(path), "--kubeconfig", str(folder / f"{self.name}.kubeconfig"),
            "--hostname-override", self.name, "--node-ip", self.address, "--root-dir", str(folder / "kubelet"),
            "--cert-dir", str(folder / "kubelet" / "pki"),
        )  # fmt: skip
        self.plane.kubectl_until("the node", "get", "node", self.name, processes=[kubelet])

    def power_off(self) -> None:
        """Everything on it ends at once. Not for the first node, which the control plane shares."""
        self.namespaces.close()
        for name in [name for name in self.plane.processes if name.startswith(f"{self.name}-")]:
            self.plane.processes.pop(name).popen.wait()

    def remove(self) -> None:
        """What is left of it when all its processes have ended."""
        # What they had mounted went with their mount namespace.
        shutil.rmtree(self.folder / "containerd", ignore_errors=True)
        for root in _cgroup_roots():
            wait_until("empty cgroups", lambda root=root: _remove_cgroup(root / self._cgroup), 30)  # type: ignore[misc]

    # ---------------------------------------------------------------------------------------- another machine

    @property
    def _cable(self) -> str:
        """The first node's end."""
        return f"{self.name}-cable"

    def connect(self, first: Namespaces) -> None:
        """Lays the cable, and makes what else a machine has of its own."""
        # Not inside a PID namespace: the number of the other end is one of this process's own.
        cable = ("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "node0")
        into = ("netns", str(self.namespaces.target))
        done = subprocess.run(
            ["nsenter", "-t", str(first.target), "-n", *cable, *into], check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(cable)}: {done.stderr.strip()}")
        first.shell(
            f"""
            ip link set {self._cable} up
            ip route add {self.address}/32 dev {self._cable} src {NODE_ADDRESS}
            ip route add {self.pods} via {self.address} dev {self._cable} src {NODE_ADDRESS}
            """
        )
        self.namespaces.shell(
            f"""
            ip link set lo up
            ip addr add {self.address}/24 dev node0
            ip link set node0 up
            ip route add default via {NODE_ADDRESS} dev node0
            {FORWARDING}
            """
        )

    @contextlib.contextmanager
    def unreachable(self, first: Namespaces) -> Iterator[None]:
        """No packet comes from it or gets to it, and nobody is told."""
        rules = [
            f"{chain} {direction} {address} -j DROP"
            for chain, direction in (("FORWARD", "-s"), ("FORWARD", "-d"), ("INPUT", "-s"), ("OUTPUT", "-d"))
            for address in (self.pods, self.address)
        ]
        for rule in rules:
            first.shell(f"iptables -I {rule}")
        try:
            yield
        finally:
            for rule in rules:
                first.shell(f"iptables -D {rule}")


FORWARDING = """
echo 1 > /proc/sys/net/ipv4/ip_forward
bridge=/proc/sys/net/bridge/bridge-nf-call-iptables
[ ! -e $bridge ] || echo 1 > $bridge
"""


def _cgroup_roots() -> list[Path]:
    """Of each hierarchy: one in version 2, one for each controller in version 1."""
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    return [path for path in _CGROUPS.iterdir() if (path / "cgroup.procs").exists()]


def _make_cgroup(path: Path) -> None:
    """Just below a hierarchy's root."""
    if (_CGROUPS / "cgroup.controllers").exists():  # version 2: a group has the controllers that the one above hands on
        there = (path.parent / "cgroup.controllers").read_text().split()
        for controller in set(_CONTROLLERS) & set(there):
            (path.parent / "cgroup.subtree_control").write_text(f"+{controller}")
    path.mkdir(exist_ok=True)
    for file in ("cpuset.cpus", "cpuset.mems"):  # of version 1: without them no process can be in it
        if (path / file).exists() and not (path / file).read_text().strip():
            (path / file).write_text((path.parent / file).read_text())


def _remove_cgroup(path: Path) -> bool:
    """False if processes are still in it."""
    if not path.exists():
        return True
    for below in sorted((one for one in path.rglob("*") if one.is_dir()), reverse=True):
        try:
            below.rmdir()
        except OSError:
            return False
    try:
        path.rmdir()
    except OSError:
        return False
    return True
