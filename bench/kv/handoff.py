"""Part 1: how fast each connector hands a prompt's blocks over, against memcpy and a raw NIXL read of as many bytes.

No model computes: two processes hold caches of a model's shape, one publishes, the other fetches (`bench.kv.pair`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from baton.stack import lmcache_server
from baton.stack.stack_plan import free_ports
from bench.kv.pair import MEMCPY, RAW_NIXL, PairConfig, measure_pair
from bench.kv.results import Bar, Results
from bench.kv.settings import BenchSettings, Progress
from bench.processes import running
from common.errors import StartupError
from common.types import KVCacheSpec
from kv_store.base import ConnectorConfig
from kv_store.shared_storage.settings import SharedStorageSettings

PART = "handoff"
P2P_BAR = 10.0  # percent that a fetch takes longer than a raw NIXL read of the same blocks
FETCH_OVER_RAW, WHOLE_OVER_RAW = "fetch, % over raw", "whole, % over raw"
LMCACHE_GB = 2.0
_SHM = Path("/dev/shm")

SHAPES = {
    # name: layers, KV heads, dimensions of a head
    "SmolLM2-135M": (30, 3, 64),  # 23,040 bytes a token in bfloat16
    "Llama-3-8B": (32, 8, 128),  # 131,072 bytes a token
}


def run(settings: BenchSettings, results: Results, progress: Progress) -> None:
    num_bytes = (16 if settings.quick else 64) << 20
    block_sizes = (16, 64) if settings.quick else (16, 32, 64, 128)
    with connectors(settings, results) as configs:
        for shape in SHAPES:
            for block_size in block_sizes:
                spec = make_spec(shape, block_size, settings.dtype)
                measure(results, spec, num_bytes, configs, settings, progress, shape=shape)
                _empty_stores(configs)
    add_bar(results)


def measure(
    results: Results,
    spec: KVCacheSpec,
    num_bytes: int,
    configs: Mapping[str, tuple[str, ConnectorConfig]],
    settings: BenchSettings,
    progress: Progress,
    *,
    shape: str,
) -> None:
    num_blocks = max(num_bytes // spec.block_bytes, 2)
    progress(f"{PART}: {shape}, blocks of {spec.block_size} tokens, {num_blocks} of {spec.block_bytes} bytes")
    pair = PairConfig(
        spec=spec, num_blocks=num_blocks, repeats=settings.repeats, connectors=configs, seed=settings.seed
    )
    figures: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    moved = num_blocks * spec.block_bytes
    for system, found in measure_pair(pair):
        if isinstance(found, str):
            results.skipped[f"{PART}: {system}"] = found
            continue
        figures[system]["GB/s"].append(moved / found["whole"] / 1e9)
        for name, seconds in found.items():
            figures[system][f"{name} ms"].append(seconds * 1000)
    for system, one in figures.items():
        results.add(
            PART,
            one,
            system=system,
            shape=shape,
            block_size=spec.block_size,
            block_bytes=spec.block_bytes,
            num_blocks=num_blocks,
        )
    raw = figures.get(RAW_NIXL)
    if raw is not None and "nixl" in figures:  # repeat by repeat: both had the same machine at that moment
        for quantity, own in ((FETCH_OVER_RAW, "fetch ms"), (WHOLE_OVER_RAW, "whole ms")):
            pairs = zip(figures["nixl"][own], raw["whole ms"], strict=True)
            longer = [(own_ms / raw_ms - 1) * 100 for own_ms, raw_ms in pairs]
            results.add(PART, {quantity: longer}, system="nixl", shape=shape, block_size=spec.block_size)


def make_spec(shape: str, block_size: int, dtype: str) -> KVCacheSpec:
    num_layers, num_kv_heads, head_dim = SHAPES[shape]
    return KVCacheSpec(
        model_id=f"bench-{shape}",
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )


def add_bar(results: Results) -> None:
    """The worst shape and block size counts."""
    found = list(results.find(PART, FETCH_OVER_RAW))
    if not found:
        return
    worst = max(found, key=lambda record: record.samples.median)
    shape, block_size = worst.labels["shape"], worst.labels["block_size"]
    raw, copy = (
        results.get(PART, "GB/s", system=system, shape=shape, block_size=block_size) for system in (RAW_NIXL, MEMCPY)
    )
    bound = f"raw NIXL {raw.median:.1f} GB/s, memcpy {copy.median:.1f} GB/s" if raw and copy else ""
    results.bars.append(
        Bar(
            part=PART,
            name="nixl, a fetch longer than a raw NIXL read of the same blocks",
            value=max(worst.samples.median, 0.0),
            limit=P2P_BAR,
            unit="%",
            where=f"at worst: {shape}, blocks of {block_size}",
            bound=bound,
        )
    )


# ---------------------------------------------------------------------------------------------- connectors


def _empty_stores(configs: Mapping[str, tuple[str, ConnectorConfig]]) -> None:
    """What one shape left is of no use to the next."""
    for _, config in configs.values():
        if kv_dir := config.own(SharedStorageSettings).kv_dir:
            for path in Path(kv_dir).iterdir():
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def connectors(settings: BenchSettings, results: Results) -> Iterator[dict[str, tuple[str, ConnectorConfig]]]:
    """What to measure, by the name that figures have; notes what cannot be, and why."""
    configs: dict[str, tuple[str, ConnectorConfig]] = {}
    with contextlib.ExitStack() as stack:
        if "nixl" in settings.connectors:
            configs["nixl"] = ("nixl", ConnectorConfig(transfer_timeout_s=60.0))
        if "shared_storage" in settings.connectors:
            for label, parent in (
                ("shared_storage, tmpfs", _SHM),
                ("shared_storage, disk", Path(tempfile.gettempdir())),
            ):
                if not (parent.is_dir() and os.access(parent, os.W_OK)):
                    results.skipped[f"{PART}: {label}"] = f"cannot write to {parent}"
                    continue
                kv_dir = tempfile.mkdtemp(prefix="baton-bench-", dir=parent)
                stack.callback(shutil.rmtree, kv_dir, ignore_errors=True)
                configs[label] = (
                    "shared_storage",
                    ConnectorConfig(section={"kv_dir": kv_dir}, transfer_timeout_s=60.0),
                )
        if "lmcache" in settings.connectors:
            try:
                address = stack.enter_context(lmcache())
            except StartupError as error:
                results.skipped[f"{PART}: lmcache"] = error.message
            else:
                configs["lmcache"] = (
                    "lmcache",
                    ConnectorConfig(section={"lmcache_address": address}, transfer_timeout_s=60.0),
                )
        yield configs


@contextlib.contextmanager
def lmcache() -> Iterator[str]:
    """A server; gives its address. Raises `StartupError`."""
    lmcache_server.executable()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with running(lmcache_server.wrapper(address, LMCACHE_GB, None), "lmcache"):
        yield address
