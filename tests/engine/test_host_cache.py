"""How large the host's pool of KV blocks is, and what happens if it does not fit."""

from __future__ import annotations

import pytest
import torch

from common.config import EngineSettings
from common.errors import StartupError
from engine.local.host_cache import allocate_host_cache
from tests.support.fake_device import SPEC

CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({}, 0),  # swap_space_gb has a default, and says nothing without swapping
        ({"host_cache_gb": 10 * SPEC.block_bytes / GIB}, 10),
        ({"preemption_mode": "swap", "swap_space_gb": 4.5 * SPEC.block_bytes / GIB}, 4),
        (
            {
                "preemption_mode": "swap",
                "swap_space_gb": 4 * SPEC.block_bytes / GIB,
                "host_cache_gb": 3 * SPEC.block_bytes / GIB,
            },
            7,
        ),
    ],
)
def test_one_pool_for_both_uses(settings: dict[str, object], num_blocks: int) -> None:
    cache = allocate_host_cache(EngineSettings.model_validate(settings), SPEC, CPU)
    assert cache.shape == (num_blocks, *SPEC.block_shape)
    assert cache.dtype == torch.float32


def test_caches_of_ranks_have_to_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.local.host_cache.available_bytes", lambda: 30 * SPEC.block_bytes)
    settings = EngineSettings(host_cache_gb=10 * SPEC.block_bytes / GIB)
    assert len(allocate_host_cache(settings, SPEC, CPU, 3)) == 10
    with pytest.raises(StartupError, match=r"GiB of host memory"):
        allocate_host_cache(settings, SPEC, CPU, 4)


def test_more_than_there_is_is_said_in_one_line() -> None:
    with pytest.raises(StartupError, match=r"^1000000\.00 GiB of host memory .* lower --host-cache-gb"):
        allocate_host_cache(EngineSettings(host_cache_gb=1e6), SPEC, CPU)
