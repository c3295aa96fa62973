"""What the leader writes: as little as possible, and deletion costs before replicas."""

from __future__ import annotations

import pytest

from common.types import WorkerRole
from router.autoscaler.actuator import COSTS_EVERY_S, SYNC_S, Actuator, deletion_cost
from router.autoscaler.fleet_load import PodLoad
from router.autoscaler.kubernetes import Workload
from tests.router.autoscaler.fakes import Clock, FakeCluster, decisions

PREFILL, DECODE = Workload("deployment", "p"), Workload("deployment", "d")
WORKLOADS = {WorkerRole.PREFILL: PREFILL, WorkerRole.DECODE: DECODE}


class Scene:
    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.cluster.counts = {PREFILL: 2, DECODE: 2}
        self.clock = Clock()
        self.pods = [PodLoad("busy", 9, 0), PodLoad("idle", 0, 0), PodLoad("cached", 0, 500)]
        self.actuator = Actuator(
            self.cluster,
            WORKLOADS,
            lambda role: self.pods if role is WorkerRole.DECODE else [],
            self.clock,
        )

    async def act(self, prefill: int, decode: int) -> list[str]:
        before = len(self.cluster.calls)
        numbers = {role: self.cluster.counts[WORKLOADS[role]] for role in WORKLOADS}
        await self.actuator.act(decisions(prefill, decode), numbers)
        return self.cluster.calls[before:]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_emptiest_pod_is_the_cheapest() -> None:
    pods = [PodLoad("a", 40, 0), PodLoad("b", 3, 9), PodLoad("c", 0, 9), PodLoad("d", 1, 0), PodLoad("e", 0, 0)]
    assert [pod.pod for pod in sorted(pods, key=deletion_cost)] == ["e", "c", "d", "b", "a"]


async def test_costs_come_before_a_scale_down(scene: Scene) -> None:
    calls = await scene.act(2, 1)
    assert calls[-1] == "scale d 1"
    assert {call.split()[1] for call in calls if call.startswith("cost")} == {"busy", "idle", "cached"}
    costs = scene.cluster.costs
    assert costs["idle"] < costs["cached"] < costs["busy"]


async def test_a_fleet_at_rest_is_not_written_to(scene: Scene) -> None:
    await scene.act(2, 2)
    calls = []
    for _ in range(int(SYNC_S) - 1):
        scene.clock.now += 1
        calls += await scene.act(2, 2)
    assert calls == []


async def test_replicas_that_somebody_else_changed_are_set_again(scene: Scene) -> None:
    await scene.act(2, 2)
    scene.cluster.counts[DECODE] = 7
    scene.clock.now += SYNC_S + 1
    assert "scale d 2" in await scene.act(2, 2)


async def test_only_costs_that_changed_are_written(scene: Scene) -> None:
    await scene.act(2, 2)
    scene.clock.now += COSTS_EVERY_S
    scene.pods = [PodLoad("busy", 10, 0), PodLoad("idle", 4, 0), PodLoad("cached", 0, 500)]
    calls = await scene.act(2, 2)
    assert [call.split()[1] for call in calls] == ["idle"]


async def test_an_outage_is_outlived(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.cluster.away = True
    await scene.act(3, 3)
    assert "the cluster could not be changed" in caplog.text
    scene.cluster.away = False
    await scene.act(3, 3)
    assert scene.cluster.counts == {PREFILL: 3, DECODE: 3}


async def test_a_pod_that_is_gone_stops_nothing(scene: Scene) -> None:
    scene.cluster.gone = {"busy"}
    await scene.act(2, 1)
    assert scene.cluster.counts[DECODE] == 1
    assert set(scene.cluster.costs) == {"idle", "cached"}


async def test_who_steps_down_forgets(scene: Scene) -> None:
    await scene.act(2, 2)
    scene.cluster.counts[DECODE] = 5  # by another leader
    scene.actuator.step_down()
    assert await scene.actuator.current() == {WorkerRole.PREFILL: 2, WorkerRole.DECODE: 5}
    assert "scale d 2" in await scene.act(2, 2)
