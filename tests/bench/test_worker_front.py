"""What the load on a worker's front counts."""

from __future__ import annotations

import sys

import pytest

from bench.processes import running
from bench.worker_front import Load

NUM_STREAMS = 3


@pytest.mark.slow
async def test_every_token_of_every_request_is_counted() -> None:
    with running([sys.executable, "-m", "bench.worker_front", "--serve", "--step-ms=1"], "the worker") as fields:
        for max_tokens in (1, 20):
            load = Load(NUM_STREAMS, max_tokens, 0.1)
            await load.run(fields["grpc"])
            assert load.num_requests >= NUM_STREAMS
            assert load.num_tokens == load.num_requests * max_tokens
            assert load.num_messages > 0
