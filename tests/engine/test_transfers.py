"""Leases and quarantine: which blocks a connector may still read or write, and who hears of the end of it."""

from __future__ import annotations

from collections.abc import Sequence

from common.block_hash import root_hash
from common.sampling import SamplingParams
from engine import messages as m
from engine.blocks.block_manager import BlockManager
from engine.core import EngineCore
from engine.remote_kv.transfers import EndedTransfer, Transfers
from engine.request import Request
from kv_store.base import BlockRef, ConnectorConfig, FetchBlock, LocalBlock
from kv_store.memory import MemoryConnector
from kv_store.no_store import NoStore
from kv_store.results import fetched
from tests.support.fake_device import BLOCK_SIZE, add, assert_idle, make_core, run


class Recorder(MemoryConnector):
    """Writes down what it is told, and leaves fetches to the test."""

    def __init__(self) -> None:
        super().__init__(ConnectorConfig(epoch="e1", worker_id="test-recorder"))
        self.published: list[int] = []
        self.released: list[int] = []
        self.fetching: list[tuple[int, FetchBlock]] = []

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        self.published.append(job_id)
        super().publish(job_id, blocks)

    def release(self, job_id: int) -> None:
        self.released.append(job_id)
        super().release(job_id)

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        self.fetching += [(job_id, block) for block in blocks]


def a_prefill_of_three_chunks() -> tuple[EngineCore, Recorder]:
    connector = Recorder()
    core, _ = make_core(connector=connector, chunk_size=2 * BLOCK_SIZE)
    add(core, "a", list(range(5 * BLOCK_SIZE)), mode=m.RequestMode.PREFILL)
    return core, connector


def test_the_end_of_a_lease_releases_all_that_was_published_once() -> None:
    core, connector = a_prefill_of_three_chunks()
    run(core)
    assert len(connector.published) == 3
    assert connector.released == []
    core.handle(m.Release("a"))
    assert connector.released == connector.published
    core.handle(m.Release("a"))
    assert connector.released == connector.published
    assert_idle(core)


def test_a_prefill_that_is_stopped_keeps_its_lease_until_its_end() -> None:
    core, connector = a_prefill_of_three_chunks()
    core.step()
    core.handle(m.StopPrefill("a"))
    run(core)
    assert len(connector.published) == 1
    assert connector.released == []
    core.handle(m.Release("a"))
    assert connector.released == connector.published
    assert_idle(core)


def test_a_step_that_fails_keeps_the_lease_too() -> None:
    core, connector = a_prefill_of_three_chunks()
    core.step()
    core._device.fail_next = True  # type: ignore[attr-defined] # FakeDevice's
    core.step()
    assert connector.released == []
    core.handle(m.Release("a"))
    assert connector.released == connector.published
    assert_idle(core)


def test_blocks_are_nobody_elses_until_the_last_byte_can_have_landed() -> None:
    blocks, connector = BlockManager(4, BLOCK_SIZE, root_hash("test")), Recorder()
    transfers = Transfers(connector, NoStore(), blocks, lambda: 0.0)
    connector._results = _Results()  # type: ignore[assignment] # nothing else of it is used
    request = Request(
        request_id="r", token_ids=[1] * 8, num_prompt_tokens=8, sampling_params=SamplingParams(), arrival_time=0.0
    )
    assert blocks.allocate(request, 8)
    refs = [BlockRef(index=index, block_hash=bytes([index])) for index in range(2)]
    transfers.fetch("r", [FetchBlock(ref, request.block_ids[ref.index]) for ref in refs])
    blocks.free(request)
    assert blocks.num_available_blocks == 2
    (job_id, first), (_, second) = connector.fetching
    connector._results.add([fetched(job_id, second, error="cut off")])
    assert [(one.request_id, one.result.index) for one in transfers.poll() if isinstance(one, EndedTransfer)] == [
        ("r", 1)
    ]
    assert blocks.num_available_blocks == 3
    other = Request(
        request_id="o", token_ids=[2] * 16, num_prompt_tokens=16, sampling_params=SamplingParams(), arrival_time=0.0
    )
    assert blocks.allocate(other, 12)
    assert first.block_id not in other.block_ids
    assert not blocks.append(other, 16)
    connector._results.add([fetched(job_id, first, error=None)])
    assert len(list(transfers.poll())) == 1
    assert blocks.append(other, 16)
    assert other.block_ids[-1] == first.block_id
    assert transfers.num_in_flight == 0


class _Results:
    """A result queue that wakes nobody."""

    def __init__(self) -> None:
        self._results: list[object] = []

    def add(self, results: Sequence[object]) -> None:
        self._results += results

    def drain(self) -> list[object]:
        drained, self._results = self._results, []
        return drained
