"""How long blocks in memory are kept for a peer that may still read them."""

from __future__ import annotations

from common.config import WorkerSettings
from common.grpc.options import LOSS_NOTICED_S

LEASE_MARGIN_S = 3.0  # what the other end's event loop and engine may take to act on what they have noticed


def lease_grace_s(settings: WorkerSettings) -> float:
    """How long blocks in memory outlive a stream that the peer which reads them did not end.

    Long enough for the peer to notice, and for each read that it began before that to have been done or given up (with
    the same --transfer-timeout-s as here), even if it hangs and notices nothing.
    """
    return max(LOSS_NOTICED_S, settings.transfer_timeout_s) + LEASE_MARGIN_S
