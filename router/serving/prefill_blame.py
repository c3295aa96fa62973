"""Which prefill workers a decode worker could not go on with: each is blamed once for one attempt at a request."""

from __future__ import annotations

from collections.abc import Sequence

from protos.baton.v1 import decode_pb2, types_pb2
from router.fleet.endpoint import Endpoint


class PrefillBlame:
    def __init__(self, prefill: Sequence[Endpoint]) -> None:
        """`prefill`: those that the decode worker may ask, in that order."""
        self._prefill = prefill
        self._blamed: set[str] = set()

    def __contains__(self, endpoint: Endpoint) -> bool:
        return endpoint.address in self._blamed

    def told(self, event: decode_pb2.DecodeEvent) -> list[Endpoint]:
        """Those that `event`, which has a report, is the first to blame. A decode worker of the release before names
        none, but counts those that it asked in place of others, and whether one that it asked beside the first one
        won. Counts say nothing beside names: which worker failed depends on who was asked beside whom."""
        named = {*event.blamed_prefill_addresses} or self._counted(event.report)
        found = [one for one in self._prefill if one.address in named and one not in self]
        self._blamed.update(one.address for one in found)
        return found

    def _counted(self, report: types_pb2.RequestReport) -> set[str]:
        num = max(report.num_retries, min(report.num_hedges_won, 1))
        return {endpoint.address for endpoint in self._prefill[:num]}
