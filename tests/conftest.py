"""What every test may rely on, and the tier that it belongs to."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

# Before anything is imported: a developer's own settings are no part of a test, and nothing is fetched from a hub.
for _name in [name for name in os.environ if name.startswith("BATON_")]:
    del os.environ[_name]
os.environ["HF_HUB_OFFLINE"] = "1"
# Several test processes share the cores, and threads that share busy cores spend their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Or pydantic reads what every installed package says of itself, in each process that a test starts.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

if importlib.util.find_spec("hypothesis"):  # the bare machine of `make test-gpu` may lack it
    import hypothesis

    from tests.examples import QUICK, THOROUGH

    # No test depends on how fast the machine is. `make test-slow` asks for the second profile.
    hypothesis.settings.register_profile("quick", deadline=None, max_examples=QUICK)
    hypothesis.settings.register_profile("thorough", deadline=None, max_examples=THOROUGH)
    hypothesis.settings.load_profile("quick")

pytest_plugins = ["tests.sample", "tests.first_imports", "tests.forked_processes", "tests.longest_first"]

TIERS = {
    **{folder: (folder,) for folder in ("abuse", "clients", "gpu", "integration", "kube")},
    # Each has a target of its own, since it takes long. What is quick in them runs in `make test` (features) or in
    # `make test-slow` (kernels, models).
    "kernels": ("engine/kernels", "engine/test_sampler.py", "integration/test_kernels.py"),
    "models": (
        "engine/ranks/test_sharded_models.py",
        "engine/ranks/test_staged_models.py",
        "engine/test_embeddings.py",
        "engine/test_model_embedded.py",
        "engine/test_model_engine.py",
        "engine/test_model_families.py",
        "engine/test_model_gguf.py",
        "engine/test_model_quantized.py",
        "engine/test_weights.py",
        "integration/test_model_families.py",
        "integration/test_quantized_models.py",
        "models",
        "router/test_control_tokens.py",
    ),
    "features": (
        "baton/test_beam_search.py",
        "baton/test_tune_confirm.py",
        "bench",
        "engine/test_guided_text.py",
        "engine/test_prompt_scores.py",
        "engine/test_speculation_models.py",
        "engine/test_speculation_sampling.py",
        "integration/test_beam_search.py",
        "integration/test_drafters.py",
        "integration/test_guided.py",
        "integration/test_guided_faults.py",
        "integration/test_hedges.py",
        "integration/test_lost_lenders.py",
        "integration/test_offline.py",
        "integration/test_prompt_logprobs.py",
        "integration/test_rank_pairs.py",
        "integration/test_rolling_update.py",
        "integration/test_second_turn.py",
        "integration/test_speculation.py",
        "kv_store/test_nixl_raw.py",
        "router/processes",
        "router/test_every_parameter.py",
        "simulation",
    ),
}
"""Folders and files whose tests carry the tier's name as a marker.

`tests/faults` is none of them: it marks single cells of its matrix, since a few cells run with `make test-slow`.
"""
TESTS = Path(__file__).parent


@cache
def _is_of(path: Path, tier: str) -> bool:
    return any(path.is_relative_to(TESTS / part) for part in TIERS[tier])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="read the files of this tier alone")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    tier = config.getoption("--tier")
    if tier is None or _is_of(collection_path, tier):
        return None
    is_on_the_way = any((TESTS / part).is_relative_to(collection_path) for part in TIERS[tier])
    return None if is_on_the_way else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for tier in TIERS:
            if _is_of(item.path, tier):
                item.add_marker(tier)


@pytest.fixture(autouse=True)
def restored_logs() -> Iterator[None]:
    """A test may do to its log what a process does: other tests have the log as it was."""
    switches = {
        name: getattr(logging, name) for name in ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing")
    }
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    for name, value in switches.items():
        setattr(logging, name, value)
    root.handlers[:] = before
    root.setLevel(level)
