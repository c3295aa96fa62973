"""Quantised weights and bfloat16 say the same first token, on the packaged model and 200 prompts.

The packaged weights were once rounded to four bits in groups of 32, as int4 rounds: it loses less here than elsewhere.
"""

from __future__ import annotations

import codecs
import contextlib
import io
from pathlib import Path

import pytest

from common.config import DEFAULT_MODEL, EngineSettings, default_cache_dir
from common.sampling import SamplingParams
from engine.loading.embedded_model import ensure_model, package_is_installed
from engine.local.device import LocalDevice
from engine.sampling.draws import draw
from engine.step import StepRow
from tests.engine.kernels.variants import VARIANTS


def _prompts() -> list[str]:
    """200 pieces of a text that every Python carries."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    words = codecs.decode(this.s, "rot13").split()  # type: ignore[attr-defined]
    return [" ".join(words[start : start + length]) for length in (9, 20) for start in range(100)]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    if not package_is_installed():
        pytest.skip("the embedded model's package is not installed")
    return ensure_model(DEFAULT_MODEL, default_cache_dir(), print)


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return [tokenizer(prompt).input_ids for prompt in _prompts()]


def first_tokens(model_dir: Path, prompts: list[list[int]], variant: str, quantization: str) -> list[int]:
    settings = EngineSettings.model_validate(
        {
            "device": "cpu",
            "dtype": "bfloat16",
            "kernels": variant,
            "quantization": quantization,
            "num_blocks": 64,
            "max_model_len": 256,
        }
    )
    runner = LocalDevice(model_dir, settings)
    greedy = draw(params=SamplingParams(temperature=0.0), num_output_tokens=0)
    tokens = []
    for prompt in prompts:
        step = StepRow(token_ids=prompt, num_computed_tokens=0, block_ids=[0, 1, 2, 3], draw=greedy)
        (token,) = runner.execute([step])
        assert token is not None
        tokens.append(token.token_id)
    return tokens


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VARIANTS, reason="no kernels were built")
def test_first_tokens_agree(model_dir: Path, prompts: list[list[int]]) -> None:
    assert len(prompts) == 200
    exact = first_tokens(model_dir, prompts, VARIANTS[-1], "none")
    assert len(set(exact)) > 50  # prompts that all go on alike would show nothing
    for quantization, share in (("int8", 0.95), ("int4", 0.80)):
        others = first_tokens(model_dir, prompts, VARIANTS[-1], quantization)
        agreed = sum(one == other for one, other in zip(exact, others, strict=True)) / len(prompts)
        print(f"{quantization}: {agreed:.3f} of {len(prompts)} first tokens")
        assert agreed >= share, quantization
