"""Rows of a head that are no tokens are never drawn, however likely the model finds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton import LLM, SamplingParams
from baton.offline.local import LocalEngine
from common.beam_search import BeamSearchParams
from common.errors import InvalidArgumentError
from tests.chaos.tiny_model import write_tiny_model
from tests.engine.tiny_models import edit_config
from tests.router.tiny_tokenizer import eos_id, ids_of, tiny_tokenizer, vocab_size

NUM_PADDING = 7
PROMPT = ids_of("The capital of France")


def write_padded_model(folder: Path) -> None:
    """The rows beyond the tokens are longer than any other: a greedy answer would be of them."""
    write_tiny_model(folder, max_len=256)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(3)
    rows = torch.randn(NUM_PADDING, tensors["lm_head.weight"].shape[1])
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = torch.cat([tensors[name], rows * 30])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, vocab_size=vocab_size() + NUM_PADDING, eos_token_id=eos_id())


@pytest.fixture(scope="module", params=["auto", "torch"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("padded")
    write_padded_model(folder)
    with LLM(str(folder), dtype="float32", kernels=request.param, num_threads=1, num_blocks=64, block_size=16) as one:
        yield one


def is_raw_choice_padding(llm: LLM) -> bool:
    """Whether the model itself finds such a row the likeliest after the prompt."""
    assert isinstance(llm._backend, LocalEngine)
    device: Any = llm._backend._device
    padding, device._padding = device._padding, type(device._padding)((), 0, device.device)
    try:
        (token,) = draw(llm, temperature=0, max_tokens=1)
    finally:
        device._padding = padding
    return token >= vocab_size()


def draw(llm: LLM, **params: Any) -> list[int]:
    (output,) = llm.generate(PROMPT, SamplingParams(ignore_eos=True, **params), use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 5},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"temperature": 1e6, "seed": 1},
        {"temperature": 1, "top_p": 0.9, "seed": 2},
    ],
)
def test_only_tokens_are_drawn(llm: LLM, params: dict[str, Any]) -> None:
    assert is_raw_choice_padding(llm)
    drawn = draw(llm, max_tokens=20, **params)
    assert len(drawn) == 20
    assert max(drawn) < vocab_size()


def test_the_first_token_is_the_likeliest_of_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1, logprobs=3), use_tqdm=False)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert next(iter(answer.logprobs[0])) == answer.token_ids[0]
    assert max(answer.logprobs[0]) < vocab_size()
    assert draw(llm, temperature=0, max_tokens=1) == answer.token_ids


def test_guided_text_and_beams_have_tokens_alone(llm: LLM) -> None:
    guided = SamplingParams(temperature=0, max_tokens=40, guided={"regex": "[a-z]{5}"})
    (output,) = llm.generate(PROMPT, guided, use_tqdm=False)
    assert len(output.outputs[0].text) == 5
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    (beams,) = llm.beam_search(PROMPT, params, use_tqdm=False)
    assert max(max(one.tokens) for one in beams.sequences) < vocab_size()


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {5: 1.0, vocab_size(): 100.0}}, f"logit_bias.{vocab_size()}"),
        ({"allowed_token_ids": [5, vocab_size() + 2]}, "allowed_token_ids[1]"),
        ({"logit_bias": {vocab_size() + NUM_PADDING: 1.0}}, "logit_bias"),  # no row of the head
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(llm: LLM, params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        draw(llm, **params)
    assert caught.value.field == field


def test_ids_that_are_only_read_or_kept_out_are_taken(llm: LLM) -> None:
    assert not tiny_tokenizer().is_token(vocab_size())
    stop = {"stop_token_ids": [vocab_size()], "bad_words_ids": [{"token_ids": [vocab_size() + 1]}]}
    assert len(draw(llm, temperature=0, max_tokens=3, **stop)) == 3
    (output,) = llm.generate([[vocab_size(), *PROMPT]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
