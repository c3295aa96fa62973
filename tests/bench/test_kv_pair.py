"""Real producers and consumers with tiny caches."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from bench.kv.handoff import add_bar, measure
from bench.kv.pair import MEMCPY, RAW_NIXL, TURNS, PairConfig, measure_pair
from bench.kv.results import Results
from bench.kv.settings import BenchSettings
from common.errors import TransferError
from common.types import KVCacheSpec
from kv_store.base import ConnectorConfig
from tests.nixl import needs_nixl

SPEC = KVCacheSpec(model_id="tiny", num_layers=2, num_kv_heads=1, head_dim=16, block_size=16, dtype="bfloat16")

pytestmark = pytest.mark.slow


@pytest.fixture
def no_process_left() -> object:
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("no_process_left")
def test_every_system_takes_its_turns(tmp_path: Path) -> None:
    config = PairConfig(
        spec=SPEC,
        num_blocks=5,
        repeats=2,
        connectors={
            "files": ("shared_storage", ConnectorConfig(section={"kv_dir": str(tmp_path)})),
            "no files": ("shared_storage", ConnectorConfig(section={"kv_dir": ""})),
        },
    )
    turns: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for system, found in measure_pair(config):
        if isinstance(found, str):
            reasons[system] = found
            continue
        turns[system] = turns.get(system, 0) + 1
        assert 0 < found["whole"] < 600
        if system == "files":
            assert 0 < found["fetch"] <= found["whole"]
            assert 0 < found["publish"] <= found["whole"]
    assert "kv_dir" in reasons.pop("no files")
    if RAW_NIXL in reasons:
        assert "NIXL" in reasons.pop(RAW_NIXL)
    else:
        assert turns.pop(RAW_NIXL) == 2 * TURNS
    assert turns == {MEMCPY: 2 * TURNS, "files": 2}
    assert reasons == {}


@pytest.mark.usefixtures("no_process_left")
def test_a_failed_transfer_ends_the_measurement_with_its_reason(tmp_path: Path) -> None:
    """The producer's blocks are there, but not in time."""
    late = ConnectorConfig(section={"kv_dir": str(tmp_path)}, transfer_timeout_s=-1.0)
    config = PairConfig(spec=SPEC, num_blocks=3, repeats=1, connectors={"files": ("shared_storage", late)})
    with pytest.raises(TransferError, match=r"files: .*not (read|done) within"):
        list(measure_pair(config))


@pytest.mark.usefixtures("no_process_left")
def test_whoever_stops_listening_ends_both_processes(tmp_path: Path) -> None:
    files = ("shared_storage", ConnectorConfig(section={"kv_dir": str(tmp_path)}))
    found = measure_pair(PairConfig(spec=SPEC, num_blocks=3, repeats=10_000, connectors={"files": files}))
    next(found)
    found.close()  # type: ignore[attr-defined] # a generator


@needs_nixl
def test_nixl_is_held_against_a_raw_read(tmp_path: Path) -> None:
    results = Results()
    settings = BenchSettings(cache_dir=str(tmp_path), dtype="bfloat16", repeats=1)
    configs = {"nixl": ("nixl", ConnectorConfig())}
    measure(results, SPEC, 4 * SPEC.block_bytes, configs, settings, lambda _: None, shape="tiny")
    add_bar(results)
    (bar,) = results.bars
    assert "raw NIXL" in bar.bound
    assert "memcpy" in bar.bound
    assert bar.where == "at worst: tiny, blocks of 16"
    for system in (MEMCPY, RAW_NIXL, "nixl"):
        speed = results.get("handoff", "GB/s", system=system, shape="tiny", block_size=16)
        assert speed is not None
        assert len(speed.values) == TURNS
