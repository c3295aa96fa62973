"""Messages pass in mid-step, after each layer, whoever computes the layers.

How often they pass between calls of the kernels is in kernels/test_model.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from common.config import EngineSettings
from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from engine.local.device import LocalDevice
from engine.models.decoder import Decoder
from engine.models.transformers_model import TransformersModel
from engine.sampling.draws import draw
from engine.step import StepRow
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from tests.engine.kernels.variants import VARIANTS
from tests.engine.tiny_models import FAMILIES, make_model, make_runner
from tests.support.fake_device import run, tokens_of
from tools.small_models import VARIATIONS, build, save, small_config

FAMILY_NAMES = ("llama", "gemma3", "qwen3_moe")
ON_TRANSFORMERS = ("olmo2", "cohere2", "granitemoe", "deepseek_v3")  # the last one keeps latents
NUM_NEW = 8

each_path = pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, "torch") for name in (*FAMILY_NAMES, *ON_TRANSFORMERS)),
        *((name, VARIANTS[-1]) for name in ON_TRANSFORMERS if VARIANTS),
    ],
)
some_paths = pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, "torch") for name in ("llama", "deepseek_v3")),
        *(pytest.param(name, "torch", marks=pytest.mark.slow) for name in ("gemma3", "qwen3_moe")),
        *(pytest.param(name, "torch", marks=pytest.mark.slow) for name in ON_TRANSFORMERS[:-1]),
        *((name, VARIANTS[-1]) for name in ON_TRANSFORMERS[:1] if VARIANTS),
        *(pytest.param(name, VARIANTS[-1], marks=pytest.mark.slow) for name in ON_TRANSFORMERS[1:] if VARIANTS),
    ],
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(models: Path, name: str) -> Path:
    path = models / name
    if path.exists():
        return path
    if name in FAMILY_NAMES:
        return make_model(path, FAMILIES[name])
    save(build(small_config(name, VARIATIONS[1 if name == "deepseek_v3" else 0])), path)
    return path


@each_path
def test_after_each_layer(models: Path, name: str, kernels: str) -> None:
    """The KV of a layer is there when messages pass after it, and that of the next one is not."""
    runner = make_runner(model(models, name), kernels=kernels)
    assert isinstance(runner._model, Decoder if name in FAMILY_NAMES else TransformersModel)
    params = SamplingParams(temperature=0.0)
    step = StepRow(
        token_ids=list(range(3, 19)),
        num_computed_tokens=0,
        block_ids=[5],
        draw=draw(params=params, num_output_tokens=0),
    )
    (expected,) = runner.execute([step])
    runner.kv_cache.fill_(float("nan"))
    num_written: list[int] = []

    def between_layers() -> None:
        written = ~runner.kv_cache[5].flatten(1).isnan().any(-1)
        num_written.append(int(written.sum()))
        assert written[: num_written[-1]].all()

    assert runner.execute([step], between_layers) == [expected]
    assert num_written == list(range(1, runner.info.spec.num_layers + 1))
    assert not torch.isnan(runner.kv_cache[5]).any()


def make_core(path: Path, kernels: str) -> EngineCore:
    settings = EngineSettings.model_validate(
        {"device": "cpu", "dtype": "float32", "num_blocks": 12, "num_threads": 1, "kernels": kernels}
    )
    connector = MemoryConnector(ConnectorConfig(epoch="between", worker_id="between"))
    return EngineCore(settings, LocalDevice(path, settings), connector, time.monotonic, lambda: None)


def ask(core: EngineCore, request_id: str) -> None:
    prompt = [3 + (ord(request_id) * 7 + place * 5) % 90 for place in range(30)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    core.handle(m.AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params))


@some_paths
def test_requests_come_and_go_in_mid_step(models: Path, name: str, kernels: str) -> None:
    path, expected = model(models, name), {}
    for request_id in "ac":
        alone = make_core(path, kernels)
        ask(alone, request_id)
        expected |= tokens_of(run(alone))
    core, num_calls = make_core(path, kernels), 0
    for request_id in "ab":
        ask(core, request_id)

    def between_layers() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:  # in the prompts' step: b has blocks, and K and V in some layers
            core.handle(m.Release("b"))
            ask(core, "c")

    assert core.end(core.begin(core.prepare()), between_layers)
    assert num_calls > 2
    assert tokens_of(run(core)) == expected
    assert core.scheduler.check_integrity() == []
    assert core.blocks.num_available_blocks == core.blocks.num_blocks
