"""Every family in a whole engine: chunks, batches, prefix cache, preemption and swapping change no token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from common.batch_time import BatchTime
from common.config import EngineSettings
from common.sampling import SamplingParams
from common.targets import LatencyTargets
from engine import messages as m
from engine.core import EngineCore
from engine.local.device import LocalDevice
from engine.speculation.speculation import Drafter
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from tests.engine.kernels.variants import best_and_slow_others, torch_best_and_slow_others
from tests.engine.test_model_families import VARIATIONS, greedy_of_transformers, model
from tests.engine.tiny_models import BLOCK_SIZE, FAMILIES, VOCAB_SIZE
from tests.support.fake_device import add, assert_idle, run, tokens_of
from tests.support.linear_time import linear_time

_SWAPPED = ("llama", "gemma3")  # what is swapped differs by its layers' windows alone


def _marks(family: str, mode: str) -> list[pytest.MarkDecorator]:
    is_quick = family in _SWAPPED if mode == "swap" else family not in VARIATIONS
    return [] if is_quick else [pytest.mark.slow]


FAMILIES_AND_MODES = [
    pytest.param(family, mode, marks=_marks(family, mode)) for mode in ("recompute", "swap") for family in FAMILIES
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def engine(
    path: Path,
    num_blocks: int,
    *,
    device: LocalDevice | None = None,
    drafter: Drafter | None = None,
    batch_time: BatchTime | None = None,
    **settings: object,
) -> EngineCore:
    """On `device`, or on one that it makes."""
    values = {"dtype": "float32", "block_size": BLOCK_SIZE, "num_blocks": num_blocks, "num_threads": 1, **settings}
    checked = EngineSettings.model_validate(values)
    runner = device or LocalDevice(path, checked)
    runner.kv_cache.fill_(float("nan"))
    ticks = iter(range(10**9))
    connector = MemoryConnector(ConnectorConfig(epoch="e1", worker_id="test"))
    return EngineCore(
        checked,
        runner,
        connector,
        lambda: float(next(ticks)),
        lambda: None,
        drafter=drafter,
        batch_time=lambda: batch_time,
    )


def prompts(family: str) -> list[list[int]]:
    rng = random.Random(family)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (61, 20, 43, 33)]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("kernels", best_and_slow_others)
@pytest.mark.parametrize(("family", "mode"), FAMILIES_AND_MODES)
def test_greedy_tokens_whatever_happens(models: Path, family: str, kernels: str, mode: str) -> None:
    """Four prompts in a cache for one or two of them, then the same ones from the prefix cache."""
    path = model(models, family)
    core = engine(path, 9, max_model_len=128, chunk_size=24, kernels=kernels, preemption_mode=mode, swap_space_gb=0.01)
    wanted = {
        str(number): greedy_of_transformers(path, tuple(prompt), 40) for number, prompt in enumerate(prompts(family))
    }
    for number, prompt in enumerate(prompts(family)):
        add(core, str(number), prompt, params=params(40))
    events = run(core)
    assert tokens_of(events) == wanted
    assert max(event.num_preemptions for event in events if isinstance(event, m.TokensGenerated)) > 0
    assert_idle(core)

    add(core, "warm", prompts(family)[3], params=params(40))
    events = run(core)
    assert tokens_of(events)["warm"] == wanted["3"]
    assert_idle(core)


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [9, 60])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_tokens_by_slack(models: Path, family: str, mode: str, num_blocks: int) -> None:
    """Chunks of any size, decodes that sit out steps, and prompts that others overtake change no token."""
    path = model(models, family)
    core = engine(
        path,
        num_blocks,
        batch_time=linear_time(1.0, 0.05),  # of a clock that goes on by a second at each look
        max_model_len=128,
        chunk_size=24,
        queue_policy="slo",
        preemption_mode=mode,
        swap_space_gb=0.01,
    )
    targets = (None, LatencyTargets(60_000, 5_000), LatencyTargets(20_000, None), LatencyTargets(None, 3_000))
    wanted, events = {}, []
    for number, (prompt, asked) in enumerate(zip(prompts(family), targets, strict=True)):
        wanted[str(number)] = greedy_of_transformers(path, tuple(prompt), 40)
        add(core, str(number), prompt, params=params(40), targets=asked)
        core.step()
        events += core.take_events()
    events += run(core)
    assert tokens_of(events) == wanted
    assert_idle(core)


@pytest.mark.parametrize("kernels", torch_best_and_slow_others)
@pytest.mark.parametrize("family", ["gemma3_all_sliding", "mistral"])
def test_an_answer_keeps_no_more_blocks_than_its_window(models: Path, family: str, kernels: str) -> None:
    path = model(models, family)
    prompt = prompts(family)[0]
    wanted = greedy_of_transformers(path, tuple(prompt), 100)
    core = engine(path, 32, max_model_len=256, chunk_size=24, kernels=kernels, enable_prefix_caching=False)
    window = FAMILIES[family]["sliding_window"]
    assert isinstance(window, int)
    add(core, "a", prompt, params=params(100))
    answer: list[int] = []
    most = 0
    while len(answer) < 100:
        core.step()
        answer += tokens_of(core.take_events()).get("a", [])
        if len(answer) > 1 and core.scheduler.requests:
            most = max(most, core.blocks.num_blocks - core.blocks.num_available_blocks)
    assert answer == wanted
    assert most <= (window - 1) // BLOCK_SIZE + 2
    assert_idle(core)


def test_a_layer_that_sees_everything_keeps_every_block(models: Path) -> None:
    core = engine(model(models, "gemma3"), 32, max_model_len=256, enable_prefix_caching=False)
    add(core, "a", prompts("gemma3")[0], params=params(30))
    for _ in range(10):
        core.step()
    assert core.blocks.num_blocks - core.blocks.num_available_blocks >= 5
