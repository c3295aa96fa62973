from __future__ import annotations

import pytest

from bench.nixl_raw import RawNixlReads
from common.errors import TransferError
from tests.nixl import needs_nixl

pytestmark = needs_nixl


@pytest.mark.slow
def test_blocks_in_any_order() -> None:
    """`RawNixlReads` compares the bytes by itself."""
    with RawNixlReads(6, 4096, remote_ids=[5, 0, 3], local_ids=[1, 2, 0]) as raw:
        assert raw.num_bytes == 3 * 4096
        assert raw.read() > 0


@pytest.mark.slow
def test_a_producer_that_is_gone() -> None:
    with RawNixlReads(4, 4096) as raw:
        raw._producer.kill()
        raw._producer.wait()
        with pytest.raises(TransferError):
            raw.read()
