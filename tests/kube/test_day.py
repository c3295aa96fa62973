"""A day whose load rises and falls, on HPAs that follow the planner: pods come and go, roles move, no request is lost.

    clients ──> router ──> workers (simulated devices)         the hours' needs, in workers:
                  └─ load ─┴──> planner ──> baton_desired_replicas ──> HPA ──> Deployment ──> pods
                                   └──────> roles

What is judged is what happened and in which order, as the autoscaler's log, the HPAs' events and the metrics say.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.client.sync_client import Client
from common.types import WorkerState
from tests.faults.watch import scrape, total
from tests.integration.stack import baton
from tests.kube.cluster import Cluster
from tests.kube.day import PROMPTS, Day, Hour, day
from tests.kube.processes import wait_until
from tests.kube.release import Release, is_ready

pytestmark = pytest.mark.timeout(1200)

NAMESPACE = "baton-day"
WAIT_S = 300.0
LOOK_S = 0.4  # between two looks, which cost a process each
DESIRED = "baton_desired_replicas"

# Of one worker. So two clients with prompts need a prefill worker, and four that read answers a decode worker.
PROMPT_RATE = 2 * PROMPTS.num_prompt_tokens
NUM_REQUESTS = 4
WORKER = {
    "settings__device": "simulated",
    "settings__simulated_time": "4xh100-70b",  # slow enough that a few streams last, and fast enough for these prompts
    "preStopSeconds": 1,
    "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
}
FLEET: dict[str, Any] = {
    **{f"{role}__{key}": value for role in ("prefill", "decode", "both") for key, value in WORKER.items()},
    "prefill__autoscaling__queuedTokensPerPod": None,
    "prefill__autoscaling__arrivalTokensPerSecond": PROMPT_RATE,
    "decode__autoscaling__kvUsage": None,
    "decode__autoscaling__requestsPerPod": NUM_REQUESTS,
    "autoscaling__mode": "external-metrics",
    "autoscaler__replicas": 1,
    "autoscaler__settings": {
        "arrival_window": 5,
        "scale_up_delay": 1,
        "scale_down_delay": 5,
        "tolerance": 0,
        "role_interval": 5,
        "role_gain": 0.32,  # less is not worth a shift at noon, when a pod is on its way
    },
}
BOUNDS = {"minReplicas": 1, "maxReplicas": 2, "scaleDownSeconds": 1}
EACH_ROLE = {
    **FLEET,
    "autoscaling__followPlanner": True,
    **{f"{role}__autoscaling__{key}": value for role in ("prefill", "decode") for key, value in BOUNDS.items()},
}
MOVING = {
    **FLEET,
    "autoscaling__moveRoles": True,
    "prefill__autoscaling__enabled": False,
    "decode__autoscaling__enabled": False,
    "decode__replicas": 0,
    "both__replicas": 2,
    "both__settings__start_role": "decode",
    "both__autoscaling": {"enabled": True, "minReplicas": 2, "maxReplicas": 3, "scaleDownSeconds": 1},
}
MOST = Hour(prompts=6, answers=12)


class Scene:
    """One release, as everybody sees it who may want to know what the planner decided."""

    def __init__(self, cluster: Cluster, release: Release) -> None:
        self.release, self._cluster = release, cluster
        self.router = cluster.forward(f"{release.name}-router.{NAMESPACE}", 50051)
        self._pages = {
            "router": cluster.forward(f"{release.name}-router.{NAMESPACE}", 8000),
            "autoscaler": cluster.forward(f"{release.name}-autoscaler.{NAMESPACE}", 8010),
        }
        self._num_lines, self._num_rescaled = 0, dict.fromkeys(("prefill", "decode", "both"), 0)

    def begin(self) -> None:
        """What happened until now was not the day's."""
        self._num_lines += len(self._log())
        for component in self._num_rescaled:
            self._num_rescaled[component] += len(self.rescaled(component))

    # ------------------------------------------------------------------------------------------- what happened

    def _log(self) -> list[dict[str, Any]]:
        [pod] = self.release.pods("autoscaler")
        name = pod["metadata"]["name"]
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0, "the log has what is asked for"
        lines = self._cluster.kubectl("-n", NAMESPACE, "logs", name).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")][self._num_lines :]

    def decided(self, *roles: str) -> list[tuple[str, str]]:
        """Who should have how many replicas, and which worker's role was changed, in the order of the autoscaler's log
        since the day began. Of replicas, those of `roles`."""
        return [
            ("shift" if one["message"] == "role changed" else one["role"], one.get("replicas") or one["role"])
            for one in self._log()
            if one["message"] == "role changed" or (one["message"] == "decided" and one["role"] in roles)
        ]

    def rescaled(self, component: str) -> list[tuple[int, str]]:
        """By the component's HPA since the day began: to how many, and why."""
        fields = f"involvedObject.name={self.release.name}-{component},reason=SuccessfulRescale"
        listed = self._cluster.kubectl("-n", NAMESPACE, "get", "events", "--field-selector", fields, "-o", "json")
        found = []
        for event in sorted(json.loads(listed)["items"], key=lambda one: str(one["firstTimestamp"])):
            told = re.fullmatch(r"New size: (\d+); reason: (.*)", event["message"])
            assert told, event["message"]
            found.append((int(told[1]), told[2]))
        return found[self._num_rescaled[component] :]

    # ------------------------------------------------------------------------------------------ what is so now

    def metric(self, page: str, name: str, **labels: str) -> float:
        """Of `router`, `autoscaler`, or all pods of `both`."""
        if page in self._pages:
            ports = [self._pages[page]]
        else:
            ports = [self._cluster.forward_to(pod["status"]["podIP"], 9400) for pod in self.release.pods(page)]
        return sum(total(scrape(f"http://127.0.0.1:{port}/metrics"), name, **labels) for port in ports)

    def fleet(self) -> Counter[str]:
        """What the ready workers do, in the words of `baton status`."""
        with Client(f"127.0.0.1:{self.router}", timeout=60) as client:
            return Counter(worker.role_words for worker in client.fleet() if worker.state is WorkerState.READY)

    def status(self) -> Counter[str]:
        """The same as `baton status` prints it."""
        command = baton("status", f"--router=127.0.0.1:{self.router}")
        printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        return Counter(re.findall(r"^(\w+(?: of both)?) +[\d.]+:50061 +ready ", printed, re.MULTILINE))

    def pods(self, component: str) -> tuple[int, int]:
        """How many there should be, and how many are there, those included that drain."""
        pods = self.release.pods(component, going=True)
        return self.release.replicas(component), len(pods) if all(map(is_ready, pods)) else -1

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        def look() -> bool:
            time.sleep(LOOK_S)
            return holds()

        wait_until(what, look, WAIT_S)

    def until_fleet(self, **numbers: int) -> None:
        """Until routers know just these ready workers. Keywords are words of `baton status`, with underscores."""
        wanted = Counter({words.replace("_", " "): number for words, number in numbers.items() if number})
        self.until(f"the fleet is {dict(wanted)}", lambda: self.fleet() == wanted)

    def until_hpa_reads(self, role: str) -> None:
        """A replica per pod, as it is while all is as the planner wants it."""
        self.until("the HPA reads the planner's wish", lambda: self.release.read_by_hpa(role).get(DESIRED) == (
            {"role": role}, "1"
        ))  # fmt: skip

    def check_no_request_was_lost(self, seen: Day) -> None:
        """The clients have failed already if one of theirs was: here, that the router says the same."""
        assert seen.num_right == seen.num_asked > 0
        ended, good = (
            self.metric("router", "baton_router_requests_total", **labels) for labels in ({}, {"outcome": "ok"})
        )
        assert good == ended >= seen.num_asked


@pytest.fixture(scope="module")
def release(local_cluster: Cluster) -> Iterator[Release]:
    """Not installed: each test installs its kind of fleet, in place of what was there."""
    release = Release(local_cluster, "baton", NAMESPACE)
    yield release
    release.remove()


def test_replicas_of_each_role_follow_the_day(local_cluster: Cluster, release: Release) -> None:
    """Prompts come in the morning, long answers in the evening."""
    release.install("values-laptop.yaml", **EACH_ROLE)
    scene = Scene(local_cluster, release)
    scene.until_fleet(prefill=1, decode=1)
    for role in ("prefill", "decode"):
        scene.until_hpa_reads(role)
    scene.begin()

    with day(scene.router, most=MOST) as seen:
        seen.hour = Hour(prompts=1, answers=0)  # the night: half a prefill worker
        seen.more_answers(5)
        assert scene.fleet() == Counter(prefill=1, decode=1)

        seen.hour = Hour(prompts=4, answers=0)  # the morning: 2 and nearly none
        scene.until_fleet(prefill=2, decode=1)
        assert release.replicas("decode") == 1
        assert scene.metric("autoscaler", DESIRED, role="prefill") == 2
        assert scene.metric("autoscaler", DESIRED, role="decode") == 1

        seen.hour = Hour(prompts=1, answers=6)  # the evening: 0.5 and 1.5
        scene.until_fleet(prefill=1, decode=2)
        scene.until("the second prefill pod has gone", lambda: scene.pods("prefill") == (1, 1))
        assert scene.metric("autoscaler", DESIRED, role="prefill") == 1
        assert scene.metric("autoscaler", DESIRED, role="decode") == 2
        assert scene.status() == Counter(prefill=1, decode=2)

        seen.hour = Hour(prompts=1, answers=3)  # the night again: 0.5 and 0.75
        scene.until_fleet(prefill=1, decode=1)
        scene.until("the second decode pod has gone", lambda: scene.pods("decode") == (1, 1))
        seen.more_answers(5)
    scene.check_no_request_was_lost(seen)

    decided = scene.decided("prefill", "decode")
    assert decided[0] == ("prefill", "1 -> 2")
    assert sorted(decided[1:-1]) == [("decode", "1 -> 2"), ("prefill", "2 -> 1")]  # both belong to the evening
    assert decided[-1] == ("decode", "2 -> 1")
    for role in ("prefill", "decode"):
        (up, why), (down, _) = scene.rescaled(role)
        assert (up, down) == (2, 1)
        assert why.startswith("external metric baton_"), why  # the planner's, or the one that the planner goes by


def test_roles_move_before_pods_come(local_cluster: Cluster, release: Release) -> None:
    """One prefill worker, and two or three of both roles that take requests at their start."""
    release.install("values-laptop.yaml", **MOVING)
    scene = Scene(local_cluster, release)
    scene.until_fleet(prefill=1, decode_of_both=2)
    scene.until_hpa_reads("both")
    scene.begin()

    with day(scene.router, most=MOST) as seen:
        seen.hour = Hour(prompts=1, answers=0)  # the night: half a prefill worker
        seen.more_answers(5)
        assert scene.decided("both") == []

        seen.hour = Hour(
            prompts=3, answers=1
        )  # the morning: 1.5 and 0.25, less than the fleet has, but not of each role
        scene.until_fleet(prefill=1, prefill_of_both=1, decode_of_both=1)
        assert release.replicas("both") == 2
        assert scene.status() == Counter({"prefill": 1, "prefill of both": 1, "decode of both": 1})
        for page, name, labels in (
            ("autoscaler", "baton_autoscaler_role_shifts_total", {"role": "prefill"}),
            ("both", "baton_worker_role_shifts_total", {"role": "prefill", "by": "planner"}),
        ):
            assert scene.metric(page, name, **labels) == 1
        assert scene.metric("router", "baton_router_endpoints", role="prefill", state="ready") == 2

        seen.hour = Hour(prompts=6, answers=5)  # noon: 3 and 1.25, and the fleet is short as a whole
        scene.until_fleet(prefill=1, prefill_of_both=1, decode_of_both=2)
        assert scene.metric("autoscaler", DESIRED, role="both") == 3

        seen.hour = Hour(prompts=1, answers=12)  # the evening: 0.5 and 3, as many as there are
        scene.until("no worker of both takes prompts alone", lambda: not scene.fleet()["prefill of both"])
        assert release.replicas("both") == 3
        assert scene.metric("autoscaler", "baton_autoscaler_role_shifts_total") == 2

        seen.hour = Hour(prompts=1, answers=3)  # the night again: 0.5 and 0.75
        scene.until("the third pod has gone", lambda: scene.pods("both") == (2, 2))
        assert scene.metric("autoscaler", DESIRED, role="both") == 2
        seen.more_answers(5)
    scene.check_no_request_was_lost(seen)

    (morning, to_prefill), noon, (evening, back), night = scene.decided("both")
    assert (morning, to_prefill) == ("shift", "decode -> prefill")
    assert noon == ("both", "2 -> 3")
    assert evening == "shift"
    assert back in ("prefill -> decode", "prefill -> both")
    assert night == ("both", "3 -> 2")
    (up, why), (down, _) = scene.rescaled("both")
    assert (up, down) == (3, 2)
    assert f"external metric {DESIRED}" in why, why
