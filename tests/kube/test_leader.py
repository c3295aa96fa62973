"""The autoscaler that sets replicas itself: one of two acts, and when that one ends the other takes
over. The emptiest worker is removed first."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import pytest

from common.errors import InternalError
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from router.autoscaler.leader import EVERY_S, LEASE_S
from tests.kube.cluster import Cluster
from tests.kube.load import at_once, busy
from tests.kube.processes import wait_until
from tests.kube.release import Release, container_of, is_ready
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMESPACE = "baton-leader"
SLACK_S = 30  # for a machine that is busy with all the rest of the cluster


@pytest.fixture(scope="module")
def release(local_cluster: Cluster) -> Iterator[Release]:
    release = Release(local_cluster, "baton", NAMESPACE)
    bounds = {"minReplicas": 1, "maxReplicas": 2}
    release.install(
        "values-laptop.yaml",
        **offer_tiny_model(local_cluster, NAMESPACE),
        autoscaling__mode="planner",
        autoscaler__settings={"scale_down_delay": 10},
        prefill__autoscaling=bounds,
        decode__autoscaling={**bounds, "requestsPerPod": 6},
    )
    yield release
    release.remove()


@pytest.fixture(scope="module")
def grpc_port(local_cluster: Cluster, release: Release) -> int:
    return local_cluster.forward(f"baton-router.{NAMESPACE}", 50051)


def _leader(release: Release) -> str:
    """Pod and process that hold the lease; empty if nobody does."""
    lease = json.loads(release.cluster.kubectl("-n", NAMESPACE, "get", "lease", "baton-autoscaler", "-o", "json"))
    holder: str = lease.get("spec", {}).get("holderIdentity") or ""
    return holder


@contextmanager
def _replicas_seen(release: Release, role: str) -> Iterator[list[int]]:
    """Replicas of a role, each time that they change, from now on."""
    seen, stop = [release.replicas(role)], threading.Event()

    def watch() -> None:
        while not stop.wait(0.3):
            if (now := release.replicas(role)) != seen[-1]:
                seen.append(now)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("how", ["deleted", "killed"])
def test_another_leads_and_leaves_replicas_alone(
    release: Release, local_cluster: Cluster, grpc_port: int, how: str
) -> None:
    wait_until("one decode worker", lambda: release.replicas("decode") == 1, 240)
    with busy(grpc_port, num_clients=10, num_prompt_tokens=17, num_output_tokens=1000):
        wait_until("a second decode worker", lambda: release.replicas("decode") == 2, 240)
        wait_until("a leader", lambda: bool(_leader(release)), 60)
        before = _leader(release)
        [leader] = [pod for pod in release.pods("autoscaler") if before.startswith(pod["metadata"]["name"])]
        with _replicas_seen(release, "decode") as seen:
            if how == "deleted":  # gives its lease back
                release.cluster.kubectl("-n", NAMESPACE, "delete", "pod", leader["metadata"]["name"], "--wait=false")
            else:  # the lease has to run out
                local_cluster.kill_container(container_of(leader))
            wait_until("another leader", lambda: _leader(release) not in ("", before), LEASE_S + EVERY_S + SLACK_S)
            wait_until("both autoscalers", lambda: _both_ready(release), 120)
        assert seen == [2], "the new leader begins by leaving things as they are"
    wait_until("its decision", lambda: release.replicas("decode") == 1, 240)


@contextmanager
def _streams_at(cluster: Cluster, address: str, number: int) -> Iterator[None]:
    """Long answers of one decode worker, asked of it directly. Raises RuntimeError if any failed."""

    def ask(number: int, stop: threading.Event) -> None:
        params = types_pb2.SamplingParams(temperature=0, max_tokens=1500, seed=1, ignore_eos=True)
        with grpc.insecure_channel(f"127.0.0.1:{cluster.forward_to(address, 50061)}") as channel:
            while not stop.is_set():
                request = decode_pb2.DecodeRequest(
                    request_id=f"direct-{number}-{time.monotonic_ns()}",
                    prompt_token_ids=[100 + number] * 20,
                    sampling_params=params,
                )
                *_, last = decode_pb2_grpc.DecodeServiceStub(channel).Decode(request, timeout=300)
                if last.finish_reason != types_pb2.FINISH_REASON_LENGTH:
                    raise InternalError(f"a stream ended early: {last}")

    with at_once(number, ask):
        yield


def test_emptiest_worker_goes_first(release: Release, local_cluster: Cluster, grpc_port: int) -> None:
    """The newer one has the streams: without deletion costs it is what would go."""

    def workers() -> list[str]:
        return [pod["metadata"]["name"] for pod in release.pods("decode", going=True) if is_ready(pod)]

    wait_until("one decode worker", lambda: len(workers()) == 1 == release.replicas("decode"), 240)
    [old] = workers()
    with ExitStack() as stack:
        stack.enter_context(busy(grpc_port, num_clients=10, num_prompt_tokens=17, num_output_tokens=1000))
        wait_until("a second decode worker", lambda: len(workers()) == 2, 240)
        [new] = [pod for pod in release.pods("decode") if pod["metadata"]["name"] != old]
        with _streams_at(local_cluster, new["status"]["podIP"], 3):
            stack.close()
            wait_until("one to go", lambda: len(workers()) == 1, 240)
            assert workers() == [new["metadata"]["name"]]


def _both_ready(release: Release) -> bool:
    pods = release.pods("autoscaler")
    return len(pods) == 2 and all(map(is_ready, pods))
