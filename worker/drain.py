"""How a worker ends without losing anything.

    SIGTERM          three quarters of --drain-timeout                 --drain-timeout
       │ takes no new work │ offers its decode streams, each second,     │ cuts what is left
       │ streams finish    │ to their routers, which take them elsewhere │

A router takes an offer only if another decode worker is ready, so a stream that no other worker could go on with has
the whole timeout. Prefill streams are not offered: they end soon, and a decode worker whose prefill is cut goes on by
itself or with another prefill worker.
"""

from __future__ import annotations

import asyncio
import logging
import time

from common import metrics
from common.errors import UnavailableError
from engine import messages as m
from worker.shell import Worker

log = logging.getLogger(__name__)

HANDOVER_AT = 0.75  # of the timeout. The rest is for routers that have no other worker yet
OFFER_INTERVAL_S = 1.0
MIN_STORE_WAIT_S = 1.0  # for one answer of the engine


async def drain(worker: Worker) -> int:
    """Waits for streams and leases to end, for at most `worker.drain_timeout` seconds, and returns how many had to be
    cut. Uses the time that is left to write computed blocks to the store.

    The worker takes no new work before this is called.
    """
    deadline = time.monotonic() + worker.drain_timeout
    log.info("draining", extra={"timeout_s": worker.drain_timeout, "num_streams": len(worker.active)})
    is_idle = await worker.wait_idle(worker.drain_timeout * HANDOVER_AT)
    while not is_idle and (left_s := deadline - time.monotonic()) > 0:
        worker.offer_handover()
        is_idle = await worker.wait_idle(min(OFFER_INTERVAL_S, left_s))
    num_cut = _cut(worker)
    await _wait_stored(worker, deadline)
    return num_cut


async def _wait_stored(worker: Worker, deadline: float) -> None:
    """Waits for computed blocks to reach the store. A failure only loses work, so it does not change the exit code."""
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), MIN_STORE_WAIT_S)):
            num_unstored = await worker.wait_stored(deadline)
    except (TimeoutError, UnavailableError) as error:
        log.warning("the engine does not say whether computed KV is stored", extra={"reason": str(error)})
        return
    if num_unstored:
        log.warning("drain timeout: computed KV is not stored", extra={"num_blocks": num_unstored})


def _cut(worker: Worker) -> int:
    """Ends the streams that are left with UNAVAILABLE, so that their callers try elsewhere."""
    for work in worker.active:
        metrics.worker_streams_cut.labels(work.service).inc()
        log.warning("drain timeout: stream cut", extra={"request_id": work.request_id, "service": work.service})
        if work.stream is not None:
            reason = f"worker {worker.worker_id} was told to end, and {worker.drain_timeout:g} s to drain are over"
            work.stream.put(m.RequestFailed(work.stream.engine_id, "UNAVAILABLE", reason))
    return len(worker.active)
