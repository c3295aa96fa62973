"""A Kubernetes control plane as plain processes: etcd, API server, controller manager, scheduler.

    with ControlPlane(Path(tmp)) as cluster:
        cluster.kubectl("get", "namespaces")

Alone it needs no root and listens on 127.0.0.1; pods then stay Pending, which is enough for charts, RBAC, custom
resources, leases and autoscalers. Inside namespaces (see cluster.py) it has a node. Binaries are found by
KUBEBUILDER_ASSETS, as other test tools find them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.kube import audit, certificates
from tests.kube.processes import Namespaces, Process, wait_until

ASSETS_VARIABLE = "KUBEBUILDER_ASSETS"
BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE_ADDRESS = "10.250.0.1"
SERVICE_RANGE = "10.0.0.0/16"
_NAMES = "IP:127.0.0.1,IP:10.250.0.1,IP:10.0.0.1,DNS:localhost,DNS:kubernetes.default.svc"


def assets() -> Path | None:
    folder = os.environ.get(ASSETS_VARIABLE)
    return Path(folder) if folder else None


def why_not(binaries: Sequence[str] = BINARIES) -> str:
    """Why no control plane can be started here; empty if one can."""
    folder = assets()
    if folder is None:
        return f"{ASSETS_VARIABLE} names no folder of Kubernetes binaries"
    missing = [name for name in binaries if not os.access(folder / name, os.X_OK)]
    if missing:
        return f"{ASSETS_VARIABLE}={folder} lacks {', '.join(missing)}"
    missing = [name for name in ("openssl",) if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def tool(name: str) -> str:
    """A command of this Python environment (kubectl, helm), of KUBEBUILDER_ASSETS (grpcurl), or of PATH."""
    folders = [str(Path(sys.executable).parent), str(assets() or ""), os.environ.get("PATH", "")]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        raise RuntimeError(f"{name} is not installed")
    return found


class Kubectl:
    """A cluster as kubectl reaches it."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    def run(self, *argv: str, stdin: str | None = None, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """A command with this cluster as its KUBECONFIG. Does not raise if it fails."""
        command = [tool(argv[0]), *argv[1:]]
        environ = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s, env=environ
        )

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        """kubectl's standard output. Raises RuntimeError with its standard error."""
        done = self.run("kubectl", *args, stdin=stdin)
        if done.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, manifest: str) -> str:
        return self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifest)

    def kubectl_until(self, what: str, *args: str, timeout_s: float = 90, processes: Sequence[Process] = ()) -> None:
        """Repeats a kubectl command until it succeeds."""
        wait_until(what, lambda: self.run("kubectl", *args).returncode == 0, timeout_s, processes)


class ControlPlane(Kubectl):
    """Ready when entered. `kubeconfig` is an administrator's; certificates lie in `certs`, among them front-ca.crt,
    which the aggregator's client certificate (front-proxy-client) is signed by. `audit_log`: see audit.py."""

    def __init__(self, folder: Path, namespaces: Namespaces | None = None) -> None:
        reason = why_not()
        if reason:
            raise RuntimeError(reason)
        self.folder, self.certs, self.logs = folder, folder / "certs", folder / "logs"
        self.audit_log = self.logs / "audit.log"
        self.namespaces = namespaces
        super().__init__(folder / "admin.kubeconfig")
        self.processes: dict[str, Process] = {}
        self.address = NODE_ADDRESS if namespaces else "127.0.0.1"
        self.binaries = assets() or folder
        names = ("etcd", "etcd-peer", "api", "manager", "scheduler")
        fixed = dict(zip(names, (2379, 2380, 6443, 10257, 10259), strict=True))
        self.ports = fixed if namespaces else {name: _free_port() for name in names}

    def __enter__(self) -> ControlPlane:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        self.certs.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        self.make_certificates()
        self.start_etcd()
        self.start_api_server()
        self.start_controllers()
        self.kubectl_until("the default namespace", "get", "serviceaccount", "default")

    def close(self) -> None:
        """Kills everything: an API server takes 20 s to end by itself."""
        for process in reversed(self.processes.values()):
            process.kill()
        self.processes.clear()

    # -------------------------------------------------------------------------------------------- processes

    def spawn(
        self, name: str, *argv: str, environ: dict[str, str] | None = None, namespaces: Namespaces | None = None
    ) -> Process:
        """In `namespaces`; if None, in those of the control plane, if it has any."""
        inside = namespaces or self.namespaces
        binary = self.binaries / argv[0]
        command = [str(binary) if binary.exists() else argv[0], *argv[1:]]
        path = f"{self.binaries}:{os.environ.get('PATH', '')}"
        process = Process(
            name,
            inside.command(*command) if inside else command,
            self.logs / f"{name}.log",
            {**os.environ, "PATH": path, **(environ or {})},
        )
        self.processes[name] = process
        return process

    def make_certificates(self) -> None:
        certs = self.certs
        certificates.make_ca(certs, "ca")
        certificates.make_ca(certs, "front-ca")
        certificates.make_leaf(certs, "apiserver", "ca", "/CN=kube-apiserver", _NAMES)
        certificates.make_leaf(certs, "front-proxy", "front-ca", "/CN=front-proxy-client")
        certificates.make_service_account_keys(certs)
        for name, subject in {
            "admin": "/O=system:masters/CN=admin",
            "manager": "/CN=system:kube-controller-manager",
            "scheduler": "/CN=system:kube-scheduler",
        }.items():
            certificates.make_leaf(certs, name, "ca", subject)
            certificates.write_kubeconfig(self.kubeconfig_of(name), self.server, certs, name)

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.ports['api']}"

    @property
    def reach(self) -> str:
        """The API server's URL as seen from this process."""
        return self.server

    def kubeconfig_of(self, name: str) -> Path:
        return self.folder / f"{name}.kubeconfig"

    def start_etcd(self) -> None:
        clients, peers = (f"http://127.0.0.1:{self.ports[name]}" for name in ("etcd", "etcd-peer"))
        self.spawn(
            "etcd", "etcd", "--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync", "--log-level", "warn",
            "--listen-client-urls", clients, "--advertise-client-urls", clients, "--listen-peer-urls", peers,
            "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}",
        )  # fmt: skip

    def start_api_server(self) -> None:
        """Also restarts one that was killed."""
        certs, in_namespaces = self.certs, self.namespaces is not None
        policy = self.folder / "audit-policy.json"
        policy.write_text(json.dumps(audit.policy()))
        flags = {
            "etcd-servers": f"http://127.0.0.1:{self.ports['etcd']}",
            "bind-address": "0.0.0.0" if in_namespaces else "127.0.0.1",
            "advertise-address": self.address,
            "secure-port": self.ports["api"],
            "endpoint-reconciler-type": "master-count" if in_namespaces else "none",  # slices refuse loopback
            "tls-cert-file": certs / "apiserver.crt",
            "tls-private-key-file": certs / "apiserver.key",
            "client-ca-file": certs / "ca.crt",
            "authorization-mode": "Node,RBAC",
            "allow-privileged": "true",
            "service-cluster-ip-range": SERVICE_RANGE,
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": certs / "sa.pub",
            "service-account-signing-key-file": certs / "sa.key",
            "kubelet-client-certificate": certs / "admin.crt",
            "kubelet-client-key": certs / "admin.key",
            "kubelet-preferred-address-types": "InternalIP",
            "requestheader-client-ca-file": certs / "front-ca.crt",
            "requestheader-allowed-names": "front-proxy-client",
            "requestheader-extra-headers-prefix": "X-Remote-Extra-",
            "requestheader-group-headers": "X-Remote-Group",
            "requestheader-username-headers": "X-Remote-User",
            "proxy-client-cert-file": certs / "front-proxy.crt",
            "proxy-client-key-file": certs / "front-proxy.key",
            "audit-policy-file": policy,
            "audit-log-path": self.audit_log,
        }
        process = self.spawn("kube-apiserver", "kube-apiserver", *_flags(flags))
        wait_until("the API server", self._answers, 90, [process, self.processes["etcd"]])

    def _answers(self) -> bool:
        context = ssl.create_default_context(cafile=str(self.certs / "ca.crt"))
        context.load_cert_chain(self.certs / "admin.crt", self.certs / "admin.key")
        try:
            with urllib.request.urlopen(f"{self.reach}/readyz", timeout=2, context=context) as answer:
                return bool(answer.status == 200)
        except OSError:  # not listening yet, or 500 while its hooks run
            return False

    def start_controllers(self) -> None:
        certs = self.certs
        manager, scheduler = self.kubeconfig_of("manager"), self.kubeconfig_of("scheduler")
        flags: dict[str, object] = {
            "kubeconfig": manager,
            "authentication-kubeconfig": manager,
            "authorization-kubeconfig": manager,
            "use-service-account-credentials": "true",
            "service-account-private-key-file": certs / "sa.key",
            "root-ca-file": certs / "ca.crt",
            "cluster-signing-cert-file": certs / "ca.crt",
            "cluster-signing-key-file": certs / "ca.key",
            "leader-elect": "false",
            "bind-address": "127.0.0.1",
            "secure-port": self.ports["manager"],
            # So that tests see an autoscaler act within seconds.
            "horizontal-pod-autoscaler-sync-period": "1s",
            "horizontal-pod-autoscaler-initial-readiness-delay": "0s",
            "horizontal-pod-autoscaler-downscale-stabilization": "5s",
            # So that a node counts as there while a test has its kubelet stopped, however slow the machine is.
            "node-monitor-grace-period": "5m",
        }
        self.spawn("kube-controller-manager", "kube-controller-manager", *_flags(flags))
        flags = {
            "kubeconfig": scheduler,
            "authentication-kubeconfig": scheduler,
            "authorization-kubeconfig": scheduler,
            "leader-elect": "false",
            "bind-address": "127.0.0.1",
            "secure-port": self.ports["scheduler"],
        }
        self.spawn("kube-scheduler", "kube-scheduler", *_flags(flags))


def _flags(values: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
