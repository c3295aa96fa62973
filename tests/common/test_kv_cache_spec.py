"""The bytes of a KV block, and the name of their layout, which workers of other releases and stores know."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from common.types import KVCacheSpec

SPEC = KVCacheSpec(model_id="m", num_layers=3, num_kv_heads=12, head_dim=2, block_size=2, dtype="bfloat16")
SHARD = replace(SPEC, num_kv_heads=6, tp_size=2, tp_rank=1)
LATENT = replace(SPEC, num_planes=1)
WIDE = replace(SPEC, dtype="float32")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SPEC, "9d9d6f9710958ab5ce448acee01c2d1a"),
        (SHARD, "9d9d6f9710958ab5ce448acee01c2d1a"),
        (LATENT, "2ff7036ae667a4b13d7e1ebc9c5216c5"),
        (WIDE, "93de7f030e014b5df6475e7f614b62bf"),
    ],
)
def test_fingerprints_stay_as_they_are(spec: KVCacheSpec, expected: str) -> None:
    assert spec.fingerprint() == expected
    assert replace(spec, num_planes=SPEC.num_planes).fingerprint_but_dtype() == "1ae38aa23b2f5a9f040776dcc663b7f7"


def test_a_shard_of_layers_is_one_of_the_same_whole() -> None:
    shard = replace(SPEC, num_layers=1, first_layer=2, num_layers_of_whole=3)
    assert shard.fingerprint() == SPEC.fingerprint()
    assert replace(SPEC, num_layers=1).fingerprint() != SPEC.fingerprint()
    assert (shard.layers, shard.heads) == (range(2, 3), range(12))
    assert SHARD.heads == range(6, 12)


def test_shards_of_one_fingerprint_have_names_of_their_own() -> None:
    """Names of folders and chunks in stores: those of tensor-parallel ranks stay as they are."""
    stage = replace(SPEC, num_layers=2, first_layer=1, num_layers_of_whole=3)
    assert [one.shard_name for one in (SPEC, SHARD, stage)] == ["", "-tp1of2", "-layers1to2of3"]
    assert replace(stage, num_kv_heads=6, tp_size=2, tp_rank=1).shard_name == "-layers1to2of3-tp1of2"


@pytest.mark.parametrize("spec", [SPEC, SHARD, LATENT, WIDE])
def test_bytes_add_up(spec: KVCacheSpec) -> None:
    assert spec.head_bytes == spec.block_size * spec.head_dim * spec.itemsize
    assert spec.block_bytes == math.prod(spec.block_shape) * spec.itemsize
    assert spec.block_bytes == spec.num_layers * spec.layer_bytes
    assert spec.layer_bytes == spec.num_planes * spec.plane_bytes
