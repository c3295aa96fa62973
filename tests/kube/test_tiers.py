"""Where computed KV is kept beside the workers: on a claim that all mount; in an LMCache server in each worker's pod,
with Redis behind them. It outlives containers and pods."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest

from baton.client.sync_client import Client
from tests.kube import images
from tests.kube.cluster import Cluster
from tests.kube.control_plane import NODE_ADDRESS
from tests.kube.processes import wait_until
from tests.kube.release import Release, container_of, is_ready
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REDIS_PORT = 6379
ROLES = ("prefill", "decode")
PROMPT = [100 + (i * i) % 250 for i in range(513)]  # 32 blocks, and one token that is always computed


@pytest.fixture(scope="module", params=["shared-storage", "lmcache"])
def tier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def release(tier: str, local_cluster: Cluster) -> Iterator[Release]:
    if tier == "lmcache" and ((reason := images.why_no_lmcache()) or shutil.which("redis-server") is None):
        pytest.skip(reason or "redis-server is not installed")
    with ExitStack() as stack:
        if tier == "lmcache":
            local_cluster.load_image(images.lmcache())
            stack.enter_context(redis(local_cluster))
            values = LMCACHE
        else:
            values = offer_volume(local_cluster)
        release = Release(local_cluster, "baton", f"baton-{tier}")
        release.install("values-laptop.yaml", **offer_tiny_model(local_cluster, release.namespace), **values)
        yield release
        release.remove()


LMCACHE: dict[str, Any] = {
    "kv__store": "lmcache",
    "lmcache": {
        "enabled": True,
        "image": images.LMCACHE,
        "sizeGiB": 1,
        "redis": {"url": f"redis://{NODE_ADDRESS}:{REDIS_PORT}"},
        "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}},
    },
}


@contextmanager
def redis(cluster: Cluster) -> Iterator[None]:
    process = cluster.spawn(
        "redis", "redis-server", "--bind", NODE_ADDRESS, "--port", str(REDIS_PORT), "--protected-mode", "no",
        "--save", "", "--dir", str(cluster.folder),
    )  # fmt: skip
    try:
        yield
    finally:
        process.kill()
        cluster.processes.pop("redis")


def offer_volume(cluster: Cluster) -> dict[str, Any]:
    """A volume for the claim that the chart makes: a folder of this machine."""
    folder = cluster.folder / "kv"
    folder.mkdir()
    folder.chmod(0o777)  # pods are somebody else
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "kv"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "1Gi"},
            "storageClassName": "",
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }
    cluster.apply(json.dumps(volume))
    storage = {"storageClassName": "-", "volumeName": "kv", "accessMode": "ReadWriteMany", "size": "1Gi"}
    return {"kv": {"connector": "shared_storage", "sharedStorage": storage}}


@pytest.fixture(scope="module")
def answer(local_cluster: Cluster, release: Release) -> list[int]:
    """Of the prompt, when nobody had seen it: its KV went from one worker to the other."""
    tokens, num_cached, num_moved = ask(local_cluster, release)
    assert num_cached == 0
    assert num_moved >= len(PROMPT) // 16
    return tokens


def ask(cluster: Cluster, release: Release) -> tuple[list[int], int, int]:
    """The answer, how many prompt tokens were not computed for it, and how many blocks were moved."""
    router = f"127.0.0.1:{cluster.forward(f'baton-router.{release.namespace}', 50051)}"
    with grpc.insecure_channel(router) as channel:  # the Service has nobody until the router sees its workers again
        grpc.channel_ready_future(channel).result(60)
    with Client(router, timeout=120) as client:
        done = client.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True).result()
    return list(done.token_ids), done.usage.cached_tokens, done.report.num_blocks_moved


def _containers(release: Release, kind: str = "containerStatuses") -> list[dict[str, Any]]:
    """Of the workers' pods, one of each: itself, or with `initContainerStatuses` the server beside it."""
    found = []
    for role in ROLES:
        [pod] = release.pods(role)
        [one] = pod["status"][kind]
        found.append(one)
    return found


def _complete(release: Release) -> bool:
    return all(sum(map(is_ready, release.pods(role))) == len(release.pods(role)) == 1 for role in ROLES)


def test_workers_wait_for_their_servers(release: Release, tier: str) -> None:
    if tier != "lmcache":
        pytest.skip("no server")
    for worker, server in zip(_containers(release), _containers(release, "initContainerStatuses"), strict=True):
        assert (server["name"], server["ready"]) == ("lmcache", True)
        assert worker["restartCount"] == 0
        assert server["state"]["running"]["startedAt"] <= worker["state"]["running"]["startedAt"]


def test_kv_outlives_the_worker(release: Release, local_cluster: Cluster, answer: list[int]) -> None:
    for role in ROLES:
        # It ends by itself, and is started again in its pod.
        local_cluster.node.ctr(f"task kill -s SIGTERM {container_of(release.pods(role)[0])}")
    wait_until("both to end", lambda: all(one["restartCount"] == 1 for one in _containers(release)), 120)
    wait_until("both workers", lambda: _complete(release), 300)
    tokens, num_cached, _ = ask(local_cluster, release)
    assert (tokens, num_cached) == (answer, len(PROMPT) - 1)


def test_kv_outlives_the_pods(release: Release, local_cluster: Cluster, tier: str, answer: list[int]) -> None:
    """With LMCache in Redis: the new servers' memory is empty."""
    if tier == "lmcache":
        assert [one["restartCount"] for one in _containers(release, "initContainerStatuses")] == [0, 0]
    before = {pod["metadata"]["uid"] for role in ROLES for pod in release.pods(role)}
    release.cluster.kubectl(
        "-n", release.namespace, "rollout", "restart", *(f"deployment/baton-{role}" for role in ROLES)
    )
    for role in ROLES:
        status = ("rollout", "status", f"deployment/baton-{role}", "--timeout=110s")
        release.cluster.kubectl("-n", release.namespace, *status)
    wait_until("both workers", lambda: _complete(release), 300)
    assert not before & {pod["metadata"]["uid"] for role in ROLES for pod in release.pods(role)}
    tokens, num_cached, _ = ask(local_cluster, release)
    assert (tokens, num_cached) == (answer, len(PROMPT) - 1)
