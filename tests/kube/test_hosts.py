"""Workers on two pods each: a group computes one model, takes KV over from a prefill worker, and is made anew if it
loses a pod."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client.sync_client import Client
from tests.kube import controllers
from tests.kube.cluster import Cluster
from tests.kube.groups import INDEX, MULTI_NODE, ready_groups, wait_for_groups
from tests.kube.load import Load
from tests.kube.processes import wait_until
from tests.kube.release import Release, container_of
from tests.kube.tiny_model import CLAIM, NAME, offer_tiny_model

pytestmark = pytest.mark.timeout(600)

NAMESPACE = "baton-hosts"
NUM_GROUPS = 2


@pytest.fixture(scope="module")
def release(local_cluster: Cluster, crds: Path) -> Iterator[Release]:
    if reason := controllers.why_not(controllers.LWS):
        pytest.skip(reason)
    with controllers.leader_worker_sets(local_cluster, crds):
        release = Release(local_cluster, "baton", NAMESPACE)
        _install(release)
        yield release
        release.remove()


def _install(release: Release) -> None:
    """Installs, or upgrades."""
    release.install(
        "values-laptop.yaml",
        **offer_tiny_model(release.cluster, release.namespace),  # type: ignore[arg-type]  # it is a local one
        decode__replicas=NUM_GROUPS,
        decode__multiNode=MULTI_NODE,
        router__settings={"min_remote_tokens": 1},
    )
    wait_for_groups(release, NUM_GROUPS, seconds=120)


def _leaders(release: Release) -> set[str]:
    """Addresses of the pods that take requests."""
    pods = release.pods("decode")
    return {f"{pod['status']['podIP']}:50061" for pod in pods if pod["metadata"]["labels"][INDEX] == "0"}


def _secret(release: Release) -> bytes:
    found = release.cluster.kubectl("-n", NAMESPACE, "get", "secret", "baton-decode-ranks", "-o", "json")
    return base64.b64decode(json.loads(found)["data"]["secret"])


def test_a_group_answers_as_one_rank_does(release: Release, local_cluster: Cluster, ports: tuple[int, int]) -> None:
    """The prompt's KV comes from a prefill worker of one pod, and each pod of the group takes its part."""
    from transformers import LlamaForCausalLM  # as in offer_tiny_model

    from tests.chaos.tiny_model import random_prompt, reference_answer

    reference = LlamaForCausalLM.from_pretrained(local_cluster.folder / CLAIM / NAME, dtype="float32")
    rng = random.Random(7)
    used, num_compared = set[str](), 0
    with Client(f"127.0.0.1:{ports[1]}", timeout=120) as client:
        wait_until("the leaders", lambda: _leaders(release) <= {worker.address for worker in client.fleet()}, 60)
        for _ in range(8):
            prompt = random_prompt(rng, 100)
            result = client.generate(prompt, max_tokens=24, temperature=0.0, ignore_eos=True).result()
            expected = reference_answer(reference, prompt, 24, temperature=0.0, seed=0)
            assert list(result.token_ids[: len(expected)]) == expected
            assert result.report.num_blocks_moved >= 100 // 16
            assert not result.report.fallback_reason
            used.add(result.report.decode_worker)
            num_compared += len(expected)
    assert used <= _leaders(release)
    assert num_compared > 50


def test_pods_keep_their_secret_over_an_upgrade(release: Release) -> None:
    before, groups = _secret(release), ready_groups(release)
    _install(release)
    assert _secret(release) == before
    assert len(before) == 48
    assert ready_groups(release) == groups, "an upgrade that changes nothing restarts nobody"


def test_a_group_that_loses_a_pod_is_made_anew_and_its_requests_move_on(
    release: Release, local_cluster: Cluster, ports: tuple[int, int]
) -> None:
    before = wait_for_groups(release, NUM_GROUPS, seconds=120)
    with Load(*ports, max_tokens=100) as load:
        load.more_answers(4)
        [member] = [pod for pod in release.pods("decode") if pod["metadata"]["name"] == "baton-decode-1-1"]
        local_cluster.kill_container(container_of(member))
        gone = set(before["1"].values())
        wait_until(
            "the group to end", lambda: not gone & {pod["metadata"]["uid"] for pod in release.pods("decode")}, 60
        )
        after = wait_for_groups(release, NUM_GROUPS, seconds=120)
        load.more_answers(4)
    assert load.failures == []
    assert after["0"] == before["0"], "the other group is left alone"
