"""Leader election on a store that behaves as the API server does: conflicting writes lose."""

from __future__ import annotations

import pytest

from router.autoscaler.leader import LEASE_S, RENEW_WITHIN_S, Elector
from router.fleet.discovery.kubernetes import KubernetesError
from tests.router.autoscaler.fakes import Clock, FakeCluster


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def electors(cluster: FakeCluster, clock: Clock) -> tuple[Elector, Elector]:
    return Elector(cluster, "lease", "a", clock), Elector(cluster, "lease", "b", clock)


async def test_the_first_leads_and_the_second_waits(cluster: FakeCluster, clock: Clock) -> None:
    a, b = electors(cluster, clock)
    await a.attempt()
    await b.attempt()
    assert (a.leads, b.leads) == (True, False)
    for _ in range(10):
        clock.now += 5
        await a.attempt()
        await b.attempt()
        assert (a.leads, b.leads) == (True, False)
    assert cluster.leases["lease"].transitions == 0


async def test_a_leader_that_vanishes_is_followed_and_never_overlaps(cluster: FakeCluster, clock: Clock) -> None:
    a, b = electors(cluster, clock)
    await a.attempt()
    for _ in range(4 * LEASE_S):
        clock.now += 0.5
        await b.attempt()
        assert not (a.leads and b.leads)
    assert b.leads
    assert cluster.leases["lease"].transitions == 1
    await a.attempt()
    assert not a.leads


async def test_who_cannot_reach_the_cluster_stops_leading_by_itself(cluster: FakeCluster, clock: Clock) -> None:
    a, _ = electors(cluster, clock)
    await a.attempt()
    cluster.away = True
    clock.now += RENEW_WITHIN_S - 1
    with pytest.raises(KubernetesError):
        await a.attempt()
    assert a.leads
    clock.now += 1
    assert not a.leads


async def test_a_lost_race_is_no_lead(cluster: FakeCluster, clock: Clock) -> None:
    a, b = electors(cluster, clock)
    read = cluster.read_lease

    async def slow_read(name: str) -> object:
        lease = await read(name)
        cluster.read_lease = read  # type: ignore[method-assign]
        await b.attempt()  # between a's reading and writing
        return lease

    cluster.read_lease = slow_read  # type: ignore[assignment, method-assign]
    await a.attempt()
    assert (a.leads, b.leads) == (False, True)


async def test_a_lease_that_is_given_back_is_taken_at_once(cluster: FakeCluster, clock: Clock) -> None:
    a, b = electors(cluster, clock)
    await a.attempt()
    await b.attempt()
    await a.resign()
    await b.attempt()
    assert (a.leads, b.leads) == (False, True)


async def test_a_clock_that_is_wrong_elsewhere_does_not_matter(cluster: FakeCluster, clock: Clock) -> None:
    a, _ = electors(cluster, clock)
    other = Clock()
    other.now = 5.0
    b = Elector(cluster, "lease", "b", other)
    await a.attempt()
    await b.attempt()
    other.now += LEASE_S - 1
    await a.attempt()  # renewed, whatever b's clock says
    await b.attempt()
    other.now += 2
    await b.attempt()
    assert not b.leads
