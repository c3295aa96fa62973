from __future__ import annotations

import pytest

from kv_store.base import BlockRef
from protos.baton.v1 import types_pb2
from worker import convert


@pytest.mark.parametrize(
    "ref",
    [
        BlockRef(index=0, block_hash=bytes(16)),
        BlockRef(
            index=7,
            block_hash=bytes(range(16)),
            peer="w",
            epoch="e",
            block_id=1 << 40,
            checksums=(0, 1, (1 << 64) - 1),
            staged_slots=(5, 0),
        ),
    ],
    ids=["least", "all"],
)
def test_a_reference_survives_the_wire(ref: BlockRef) -> None:
    sent = convert.block_ref_message(ref).SerializeToString()
    assert convert.block_ref(types_pb2.BlockRef.FromString(sent)) == ref
