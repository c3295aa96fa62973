"""HPAs that also go by what the planner wants (`autoscaling.followPlanner`), picked by its label `role`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.kube.cluster import Cluster
from tests.kube.load import busy
from tests.kube.processes import wait_until
from tests.kube.release import Release
from tests.kube.tiny_model import offer_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMESPACE = "baton-follow"
PLANNER_WAITS_S = 40.0  # before it wants less; the HPA's own window is far shorter


@pytest.fixture(scope="module")
def release(local_cluster: Cluster) -> Iterator[Release]:
    release = Release(local_cluster, "baton", NAMESPACE)
    bounds = {"minReplicas": 1, "maxReplicas": 2, "scaleDownSeconds": 1}
    release.install(
        "values-laptop.yaml",
        **offer_tiny_model(local_cluster, NAMESPACE),
        autoscaling={"mode": "external-metrics", "followPlanner": True},
        autoscaler__replicas=1,
        autoscaler__settings={"scale_down_delay": PLANNER_WAITS_S},
        prefill__autoscaling=bounds,
        decode__autoscaling={**bounds, "requestsPerPod": 6},
    )
    yield release
    release.remove()


def test_replicas_stay_while_the_planner_wants_them(release: Release, local_cluster: Cluster) -> None:
    for role in ("prefill", "decode"):
        one = {"role": role}, "1"
        wait_until(
            "the planner's wish",
            lambda role=role, one=one: release.read_by_hpa(role).get("baton_desired_replicas") == one,  # type: ignore[misc]
            120,
        )
    with busy(
        local_cluster.forward(f"baton-router.{NAMESPACE}", 50051),
        num_clients=10, num_prompt_tokens=17, num_output_tokens=1000,
    ):  # fmt: skip
        wait_until("a second decode worker", lambda: release.replicas("decode") == 2, 240)
        assert release.replicas("prefill") == 1
    ended = time.monotonic()
    wait_until(
        "no requests", lambda: release.read_by_hpa("decode").get("baton_decode_requests", ({}, ""))[1] == "0", 60
    )
    assert release.replicas("decode") == 2, "its own signals want one; the planner still wants two"
    wait_until("one decode worker", lambda: release.replicas("decode") == 1, 240)
    assert time.monotonic() - ended > PLANNER_WAITS_S / 2
