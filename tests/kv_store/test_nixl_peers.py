"""What a peer says over NIXL is checked before anything is computed with it. Needs no NIXL."""

from __future__ import annotations

import msgspec
import pytest

from common.errors import TransferError
from kv_store.nixl.agent import ServedMemory
from kv_store.nixl.publish import ReadReport, decode_report
from tests.kv_store.conformance import WIDE_SPEC

MEMORY = ServedMemory(
    agent="a", metadata=b"", kind="DRAM", device_id=0, address=4096, num_blocks=8, block_bytes=WIDE_SPEC.block_bytes
)
NUM_HEADS = WIDE_SPEC.num_kv_heads


def test_the_memory_of_a_worker() -> None:
    MEMORY.check(8, WIDE_SPEC.block_bytes)
    msgspec.structs.replace(MEMORY, num_blocks=3, is_staging=True).check(8, WIDE_SPEC.block_bytes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 0},
        {"num_blocks": 0, "is_staging": True},
        {"num_blocks": -8},
        {"num_blocks": 9},
        {"num_blocks": 2**60},
        {"num_blocks": 2**60, "is_staging": True},
        {"block_bytes": 1},
        {"block_bytes": -WIDE_SPEC.block_bytes},
        {"address": 0},
        {"address": -4096},
        {"address": 2**64 - 1},
        {"address": 2**80},
        {"device_id": -1},
        {"device_id": 2**70},
        {"kind": "FILE"},
    ],
)
def test_memory_that_no_worker_has(changes: dict[str, object]) -> None:
    with pytest.raises(TransferError):
        msgspec.structs.replace(MEMORY, **changes).check(8, WIDE_SPEC.block_bytes)


def test_a_report() -> None:
    report = ReadReport(NUM_HEADS, NUM_HEADS - 1, [1, 2])
    assert decode_report(msgspec.msgpack.encode(report), WIDE_SPEC) == report


@pytest.mark.parametrize(
    "report",
    [
        b"\xc1",
        b"",
        msgspec.msgpack.encode([1, 0, ["x"]]),
        *(
            msgspec.msgpack.encode(ReadReport(tp_size, tp_rank, [1]))
            for tp_size, tp_rank in [(0, 0), (-1, 0), (NUM_HEADS + 1, 0), (2**40, 0), (1, 1), (2, -1), (2, 2)]
        ),
    ],
)
def test_a_report_of_nobody(report: bytes) -> None:
    with pytest.raises(TransferError):
        decode_report(report, WIDE_SPEC)
