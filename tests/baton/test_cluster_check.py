"""What `baton doctor` says of the cluster, from an API server that answers as told."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from baton.doctor import cluster_check
from baton.doctor.checks import Level, _cluster
from baton.doctor.cluster_check import INSTALL, ROUTER

pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.forbidden: set[tuple[str, str]] = set()  # verb, resource
        self.asked: set[tuple[str, str, str, str]] = set()  # namespace, verb, group, resource
        self.status = 200


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        assert self.path == "/version"
        self.answer({"gitVersion": "v1.36.0", "message": "not you"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, body["kind"]) == (
            "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
            "SelfSubjectAccessReview",
        )
        asked = body["spec"]["resourceAttributes"]
        self.server.asked.add((asked["namespace"], asked["verb"], asked["group"], asked["resource"]))
        self.answer({"status": {"allowed": (asked["verb"], asked["resource"]) not in self.server.forbidden}})


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def kubeconfig(path: Path, port: int, user: Mapping[str, object] | None = None, **context: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": user or {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", **context}}],
        "current-context": "x",
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", one.server_port, namespace="prod")))
        yield one
        one.shutdown()
        thread.join()


def test_no_cluster_is_fine() -> None:
    found = _cluster()
    assert found.level is Level.OK
    assert "KUBECONFIG is unset" in found.text


def test_one_in_which_all_is_allowed(server: Server) -> None:
    found = _cluster()
    assert found.level is Level.OK, found
    assert "Kubernetes v1.36.0" in found.text
    assert "namespace prod" in found.text
    assert found.facts["missing"] == []
    assert server.asked == {("prod", right.verb, right.group, right.resource) for right in INSTALL}


def test_what_may_not_be_done_is_named(server: Server) -> None:
    server.forbidden = {("create", "roles"), ("watch", "endpointslices")}
    found = _cluster()
    assert found.level is Level.HINT
    assert found.facts["missing"] == ["create roles", "watch endpointslices"]
    assert "may not create roles, watch endpointslices" in found.text
    assert "in prod" in found.advice


def test_the_kubeconfig_of_the_home_folder(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG")
    kubeconfig(tmp_path / ".kube" / "config", server.server_port)
    found = _cluster()
    assert found.level is Level.OK
    assert "by ~/.kube/config, namespace default" in found.text


def test_a_pod_needs_what_a_router_does(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_check, "find_access", lambda: cluster_check.POD)
    monkeypatch.setattr(cluster_check, "own_namespace", lambda: "here")
    assert _cluster().level is Level.OK
    assert server.asked == {("here", right.verb, right.group, right.resource) for right in ROUTER}


def test_a_server_that_refuses(server: Server) -> None:
    server.status = 403
    found = _cluster()
    assert found.level is Level.HINT
    assert "403 not you" in found.text
    assert "KUBECONFIG" in found.advice


def test_a_server_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", port)))
    found = _cluster()
    assert found.level is Level.HINT
    assert "GET /version" in found.text


def test_a_server_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", port)))
        found = _cluster(0.2)
    assert found.level is Level.HINT
    assert "did not answer within 0.2 s" in found.text


def test_a_plugin_for_credentials_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"echo $$ > {tmp_path}/pid; exec sleep 60"
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", script]}
    config = kubeconfig(tmp_path / "kubeconfig", 1, user={"exec": {**plugin, "interactiveMode": "Never"}})
    monkeypatch.setenv("KUBECONFIG", str(config))
    found = _cluster(2.0)
    assert found.level is Level.HINT
    assert "did not answer within 2 s" in found.text
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z", "it has ended, too"


def test_a_kubeconfig_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    found = _cluster()
    assert found.level is Level.HINT
    assert "no access to Kubernetes" in found.text


@pytest.mark.parametrize("text", ["[1]", "{", "clusters: 3"])
def test_a_kubeconfig_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    assert _cluster().level is Level.HINT
