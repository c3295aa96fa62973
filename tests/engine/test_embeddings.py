"""Embeddings equal transformers' hidden states, however the prompt is cut, cached, batched or preempted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from tests.engine.kernels.variants import torch_best_and_slow_others
from tests.engine.test_model_engine import engine, params, prompts
from tests.engine.test_model_families import greedy_of_transformers, model
from tests.support.fake_device import add, assert_idle, make_core, run, tokens_of

FAMILIES = ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("gemma3", "mistral", "qwen3_moe"))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@functools.cache
def hidden_states(path: Path, token_ids: tuple[int, ...]) -> torch.Tensor:
    """`[num_tokens, hidden_size]`: what transformers calls the last hidden state."""
    from transformers import AutoModel

    base = AutoModel.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        states: torch.Tensor = base(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    return states


def embed(core: EngineCore, request_id: str, prompt: Sequence[int], pooling: m.Pooling, **fields: object) -> None:
    core.handle(m.Embed(request_id=request_id, prompt_token_ids=list(prompt), pooling=pooling, **fields))  # type: ignore[arg-type]


def embedded(events: Sequence[m.Event]) -> dict[str, m.Embedded]:
    return {event.request_id: event for event in events if isinstance(event, m.Embedded)}


@pytest.mark.parametrize("kernels", torch_best_and_slow_others)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_transformers_hidden_states(models: Path, family: str, kernels: str) -> None:
    """Among requests that generate, in chunks, with what is cached: last and mean, normalised or not."""
    path = model(models, family)
    core = engine(path, 64, max_model_len=128, chunk_size=24, kernels=kernels)
    for _ in range(2):  # the second time, all is cached that may be
        for number, prompt in enumerate(prompts(family)):
            add(core, f"g{number}", prompt, params=params(5))
            embed(core, f"last{number}", prompt, m.Pooling.LAST, normalize=False)
            embed(core, f"mean{number}", prompt, m.Pooling.MEAN, normalize=False)
            embed(core, f"unit{number}", prompt, m.Pooling.LAST, dimensions=7)
        events = run(core)
        got = embedded(events)
        for number, prompt in enumerate(prompts(family)):
            states = hidden_states(path, tuple(prompt))
            unit = states[-1][:7] / states[-1][:7].norm()
            for name, wanted in (("last", states[-1]), ("mean", states.mean(dim=0)), ("unit", unit)):
                torch.testing.assert_close(torch.tensor(got[f"{name}{number}"].values), wanted, atol=2e-4, rtol=2e-4)
            assert tokens_of(events)[f"g{number}"] == greedy_of_transformers(path, tuple(prompt), 40)[:5]
            assert got[f"mean{number}"].num_cached_tokens == 0
        assert_idle(core)
    assert got["last0"].num_cached_tokens > 0


@pytest.mark.parametrize("kernels", torch_best_and_slow_others)
def test_a_prompt_may_fill_the_context(models: Path, kernels: str) -> None:
    path, prompt = model(models, "llama"), prompts("llama")[0]
    core = engine(path, 64, max_model_len=len(prompt), kernels=kernels)
    embed(core, "e", prompt, m.Pooling.LAST, normalize=False)
    wanted = hidden_states(path, tuple(prompt))[-1]
    torch.testing.assert_close(torch.tensor(embedded(run(core))["e"].values), wanted, atol=2e-4, rtol=2e-4)
    assert_idle(core)


def test_a_preempted_mean_begins_anew(models: Path) -> None:
    path = model(models, "llama")
    core = engine(path, 9, max_model_len=128, chunk_size=8)
    long = prompts("llama")[0]
    states = hidden_states(path, tuple(long))
    for number, prompt in enumerate(prompts("llama")[1:]):
        add(core, str(number), prompt, params=params(40))
    embed(core, "e", long, m.Pooling.MEAN, normalize=False)
    events = run(core)
    torch.testing.assert_close(torch.tensor(embedded(events)["e"].values), states.mean(dim=0), atol=2e-4, rtol=2e-4)
    assert_idle(core)


def test_too_many_dimensions_and_an_end_in_between() -> None:
    core, _ = make_core(chunk_size=4)
    embed(core, "a", [5] * 10, m.Pooling.MEAN, dimensions=3)
    (failed,) = [event for event in core.take_events() if isinstance(event, m.RequestFailed)]
    assert (failed.grpc_code, failed.field) == ("INVALID_ARGUMENT", "dimensions")
    embed(core, "b", [5] * 10, m.Pooling.MEAN)
    core.step()
    core.handle(m.Release("b"))
    assert not embedded(run(core))
    assert_idle(core)


def test_sums_of_chunks() -> None:
    core, runner = make_core(chunk_size=4)
    embed(core, "mean", [5, 6, 7, 8, 9, 10], m.Pooling.MEAN, normalize=False)
    embed(core, "last", [5, 6, 7, 8, 9, 10], m.Pooling.LAST, normalize=True)
    got = embedded(run(core))
    assert got["mean"].values == [7.5, 1.0]
    assert got["last"].values == pytest.approx([10 / 101**0.5, 1 / 101**0.5])
    runner.fail_next = True
    embed(core, "x", [5], m.Pooling.LAST)
    events = run(core)
    assert not embedded(events)
    assert any(isinstance(event, m.RequestFailed) for event in events)
    add(core, "g", [1, 2], params=SamplingParams(temperature=0.0, max_tokens=2))
    assert len(tokens_of(run(core))["g"]) == 2
    assert_idle(core)
