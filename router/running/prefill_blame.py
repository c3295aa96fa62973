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
        """The prefill workers that `event` blames and no event before it did; it has a report. A decode worker of the
        release before blames nobody by name: its report counts the workers that it asked in place of others, and says
        whether one that it asked beside the first one won. If there are names, the counts are not read: which worker
        failed depends on who was asked beside whom."""
        named = {*event.blamed_prefill_addresses} or self._counted(event.report)
        found = [one for one in self._prefill if one.address in named and one not in self]
        self._blamed.update(one.address for one in found)
        return found

    def _counted(self, report: types_pb2.RequestReport) -> set[str]:
        num = max(report.num_retries, min(report.num_hedges_won, 1))
        return {endpoint.address for endpoint in self._prefill[:num]}
