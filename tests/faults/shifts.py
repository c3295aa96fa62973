"""Which worker takes work of which role, and orders that change it.

With `FAULTS_ROLE_SHIFTS=1` all workers of the fleet have both roles. Two take prompts and two take requests, others in
each try. Once the moment is there, the two workers that have the request change places:

    PPDD ──next try──> DPPD        request on (P1, D1) ──moment──> P1 takes requests, D1 takes prompts ──> the fault

So whatever is struck is struck in mid-shift: its leases and streams are of a role that it takes no work of any more.
"""

from __future__ import annotations

import itertools

import grpc

from common.types import WorkerRole
from protos.baton.v1 import worker_pb2, worker_pb2_grpc
from protos.convert import role_to_proto
from tests.integration.stack import Fleet, Member, wait_for

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
ORDER_TIMEOUT_S = 5.0
NEWS_TIMEOUT_S = 30.0  # until every router knows; it is told at once, by a machine that may be busy

Roles = dict[str, WorkerRole]  # by address


def roles_now(fleet: Fleet) -> Roles:
    """What each worker takes at present, as the asked router knows."""
    return _seen_by(fleet, fleet.grpc)


class Shifts:
    """Of a fleet whose workers all have both roles."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._firsts = itertools.cycle(range(len(fleet.members)))

    def rearrange(self) -> None:
        """Half of the workers take prompts and half take requests, the next ones at each call. Returns once all routers
        know."""
        first, members = next(self._firsts), self._fleet.members
        half = len(members) // 2
        wanted = {m.address: PREFILL if (n + first) % len(members) < half else DECODE for n, m in enumerate(members)}
        # Those that are to take requests come first, so that some worker does at any time.
        for member in sorted(members, key=lambda one: wanted[one.address] is PREFILL):
            _order(member, wanted[member.address])
        for router in self._fleet.every_router:
            wait_for(
                f"{router.name} knows who takes what",
                lambda router=router: _seen_by(self._fleet, router.grpc) == wanted,  # type: ignore[misc]
                NEWS_TIMEOUT_S,
            )

    def swap(self, prefill: Member, decode: Member) -> None:
        """The two change places; a third one takes requests meanwhile. Returns once both have taken the order, whether
        routers have heard of it or not: a router asks engines for what it shows, and these may stand still."""
        _order(prefill, DECODE)
        _order(decode, PREFILL)


def _order(member: Member, role: WorkerRole) -> None:
    order = worker_pb2.SetWorkerRoleRequest(role=role_to_proto(role), reason="fault matrix")
    with grpc.insecure_channel(member.admin, options=(("grpc.enable_http_proxy", 0),)) as channel:
        worker_pb2_grpc.WorkerServiceStub(channel).SetRole(order, timeout=ORDER_TIMEOUT_S)


def _seen_by(fleet: Fleet, router: str) -> Roles:
    return {worker.address: worker.takes or worker.role for worker in fleet.seen_by(router)}
