"""A simulated device waits less for an engine that runs ahead."""

from __future__ import annotations

from pathlib import Path

from bench.run_ahead import simulated
from common.config import EngineSettings
from tests.engine.tiny_models import FAMILIES, make_model


def test_a_device_waits_less_if_the_engine_runs_ahead(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "llama", FAMILIES["llama"])
    settings = EngineSettings(device="simulated", num_blocks=64, enable_prefix_caching=False)
    plain, ahead = (
        simulated(model_dir, 2, settings.model_copy(update={"run_ahead": is_on}), 34) for is_on in (False, True)
    )
    name = "batch 2: idle, us a step"
    assert 0.0 < ahead[name] < plain[name]
