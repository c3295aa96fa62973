"""The chart, installed: real images on a real node, asked by the clients that users have, while pods come and go."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helm.chart import render
from tests.kube.cluster import Cluster
from tests.kube.load import Load, ask_rest
from tests.kube.processes import wait_until
from tests.kube.release import Release, container_of, is_ready
from tests.kube.user_cluster import UserCluster

pytestmark = pytest.mark.timeout(900)

CAPITAL = "What is the capital of Japan?"
# Equal answers whatever the batch: float32 throughout. Two decode workers, so that one is left when one goes.
VALUES: dict[str, Any] = {
    "router__replicas": 2,
    "decode__replicas": 2,
    "model__dtype": "float32",
}


@pytest.fixture(scope="module")
def release(cluster: Cluster | UserCluster) -> Iterator[Release]:
    release = Release(cluster, "baton", "baton-tests")
    release.install("values-laptop.yaml", **VALUES)
    yield release
    release.remove()


def test_helm_test_passes(release: Release) -> None:
    assert "Phase:          Succeeded" in release.helm("test", release.name, "--timeout", "3m")


def test_notes_say_how_to_ask(release: Release) -> None:
    """Its commands, as they stand there but for the ports here, which others may have taken."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    notes = release.helm("get", "notes", release.name).replace("\\\n", "")
    commands = [line.strip() for line in notes.splitlines() if line.startswith("  ")]
    [forward] = [one for one in commands if one.startswith("kubectl") and "port-forward" in one]
    asking = [one for one in commands if one.startswith(("curl", "baton"))]
    assert [one.split()[0] for one in asking] == ["curl", "baton"]
    script = f"""
        export PATH={Path(sys.executable).parent}:$PATH
        {forward} > /dev/null &
        trap "kill $!" EXIT
        until {asking[0]}; do sleep 0.2; done
        {asking[1]}
        """
    for port in (8000, 50051):
        with socket.create_server(("127.0.0.1", 0)) as free:
            script = script.replace(f" {port}:", f" {free.getsockname()[1]}:")
            script = script.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free.getsockname()[1]}")
    done = release.cluster.run("bash", "-euc", script)
    assert done.returncode == 0, done.stderr
    answer, end = json.JSONDecoder().raw_decode(done.stdout.strip())
    assert "Tokyo" in answer["choices"][0]["message"]["content"]
    assert done.stdout.strip()[end:].strip(), "what was said to Hello"


def test_openai_client(ports: tuple[int, int]) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{ports[0]}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": CAPITAL}], temperature=0, max_tokens=16, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert "Tokyo" in text


def test_grpcurl(release: Release, ports: tuple[int, int]) -> None:
    question = f"Please answer: {CAPITAL}"  # asked here only, so that nothing of it is cached
    request = {
        "messages": [{"role": "user", "content": question}],
        "sampling_params": {"temperature": 0, "max_tokens": 16},
    }
    done = release.cluster.run(
        "grpcurl", "-plaintext", "-d", json.dumps(request), f"127.0.0.1:{ports[1]}", "baton.v1.InferenceService/Chat"
    )
    assert done.returncode == 0, done.stderr
    decoder, rest, messages = json.JSONDecoder(), done.stdout.strip(), []
    while rest:
        message, end = decoder.raw_decode(rest)
        messages.append(message)
        rest = rest[end:].lstrip()
    assert "Tokyo" in "".join(message.get("text", "") for message in messages)
    report = messages[-1]["report"]
    assert report.get("prefill_worker") in workers(release, "prefill"), report
    assert report["decode_worker"] in workers(release, "decode"), report
    assert int(report["num_blocks_moved"]) > 0, report


def workers(release: Release, component: str) -> set[str]:
    """Addresses by which routers know the workers of a role."""
    return {f"{pod['status']['podIP']}:50061" for pod in release.pods(component)}


def test_pods_run_as_promised(release: Release) -> None:
    """Seen from inside: no root, no writable root filesystem, no token, no build tools."""
    for component in ("router", "prefill", "decode"):
        pod = release.pods(component)[0]["metadata"]["name"]
        script = (
            "import os, shutil; "
            "print(os.getuid(), os.access('/opt/baton', os.W_OK), os.access('/', os.W_OK), "
            "os.path.exists('/var/run/secrets/kubernetes.io'), "
            "[tool for tool in ('pip', 'gcc', 'cc', 'make') if shutil.which(tool)])"
        )
        seen = release.cluster.kubectl("-n", release.namespace, "exec", pod, "--", "python3", "-c", script).strip()
        assert seen == f"65532 False False {component == 'router'} []"


def test_workers_compute_with_kernels(release: Release) -> None:
    """Those that this image carries, and the best of them for the node: the log says which."""
    for component in ("prefill", "decode"):
        pod = release.pods(component)[0]["metadata"]["name"]
        script = "from engine.kernels.choice import choose; print(choose().instruction_set)"
        best = release.cluster.kubectl("-n", release.namespace, "exec", pod, "--", "python3", "-c", script).strip()
        assert best != "torch", "the image carries no kernels that run here"
        log = release.cluster.kubectl("-n", release.namespace, "logs", pod)
        assert set(re.findall(r"""\bkernels"?[=:] ?"?(\w+)"?,? "?reason""", log)) == {best}


def test_metrics_are_where_the_monitors_look(release: Release, local_cluster: Cluster) -> None:
    """What the chart's monitors select is scraped, by hand."""
    values: dict[str, object] = {"metrics.serviceMonitor.enabled": True, "metrics.podMonitor.enabled": True}
    wanted = {"router": "baton_router_requests", "prefill": "baton_worker_requests", "decode": "baton_worker_requests"}
    for monitor in render(values, file="values-laptop.yaml", release=release.name):
        if monitor["kind"] in ("ServiceMonitor", "PodMonitor"):
            [endpoint] = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
            component = monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
            pod = release.pods(component)[0]
            [container] = pod["spec"]["containers"]
            [port] = [one["containerPort"] for one in container["ports"] if one["name"] == endpoint["port"]]
            url = f"http://127.0.0.1:{local_cluster.forward_to(pod['status']['podIP'], port)}{endpoint['path']}"
            with urllib.request.urlopen(url, timeout=30) as answer:
                assert f"\n{wanted.pop(component)}" in answer.read().decode()
    assert not wanted


# ------------------------------------------------------------------------------------- while pods come and go


@pytest.fixture(params=["rest", "grpc"])
def interface(request: pytest.FixtureRequest) -> str:
    """Clients when routers are replaced. Those of gRPC keep one connection."""
    name: str = request.param
    return name


@pytest.mark.slow
def test_upgrade_and_rollback_fail_no_request(release: Release, ports: tuple[int, int], interface: str) -> None:
    with Load(*ports, interfaces=(interface,)) as load:
        load.more_answers(2)
        before = {pod["metadata"]["name"] for role in ("prefill", "decode", "router") for pod in release.pods(role)}
        release.install("values-laptop.yaml", **VALUES, logging__level="debug")
        after = {pod["metadata"]["name"] for role in ("prefill", "decode", "router") for pod in release.pods(role)}
        assert not before & after, "the upgrade replaces every pod"
        load.more_answers(2)
        release.helm("rollback", release.name, "--wait", "--timeout", "5m")
        load.more_answers(2)
    assert load.failures == []


@pytest.mark.slow
@pytest.mark.parametrize("component", ["decode", "prefill"])
def test_deleted_worker_fails_no_request(release: Release, ports: tuple[int, int], component: str) -> None:
    _delete_under_load(release, component, Load(*ports))


@pytest.mark.slow
def test_deleted_router_fails_no_request(release: Release, ports: tuple[int, int], interface: str) -> None:
    _delete_under_load(release, "router", Load(*ports, interfaces=(interface,)))


def _delete_under_load(release: Release, component: str, load: Load) -> None:
    """Every pod of the component, one after another."""
    with load:
        load.more_answers(2)
        for pod in release.pods(component):
            release.cluster.kubectl("-n", release.namespace, "delete", "pod", pod["metadata"]["name"], "--wait=true")
            _wait_until_complete(release)
            load.more_answers(2)
    assert load.failures == []


@pytest.mark.parametrize("component", ["decode", "prefill"])
def test_killed_worker_fails_no_request(
    release: Release, local_cluster: Cluster, ports: tuple[int, int], component: str
) -> None:
    with Load(*ports) as load:
        load.more_answers(4)
        (pod, *_) = release.pods(component)
        local_cluster.kill_container(container_of(pod))
        load.more_answers(4)
        _wait_until_complete(release)
        load.more_answers(4)
    assert load.failures == []


@pytest.mark.slow
def test_api_server_restart_fails_no_request(release: Release, local_cluster: Cluster, ports: tuple[int, int]) -> None:
    """Routers go on with the workers that they know, and then notice a new one."""
    with Load(*ports) as load:
        load.more_answers(2)
        local_cluster.processes["kube-apiserver"].kill()
        load.more_answers(4)
        local_cluster.start_api_server()
        name = release.pods("decode")[0]["metadata"]["name"]
        release.cluster.kubectl("-n", release.namespace, "delete", "pod", name, "--wait=true")
        _wait_until_complete(release)
        load.more_answers(4)
    assert load.failures == []
    assert "Tokyo" in ask_rest(ports[0], CAPITAL)


def _wait_until_complete(release: Release) -> None:
    def complete() -> bool:
        pods = [pod for role in ("prefill", "decode", "router") for pod in release.pods(role)]
        return len(pods) == 5 and all(map(is_ready, pods))

    wait_until("all pods", complete, 240)
