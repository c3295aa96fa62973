"""Beam search of `LLM` finds what transformers' does."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from baton import LLM, BeamSearchParams, SamplingParams
from common.beam_search import BeamSearch
from common.errors import BatonError, InvalidArgumentError
from common.types import FinishReason, TokenLogprob
from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.router.tiny_tokenizer import tiny_tokenizer, vocab_size
from tests.support.fake_router import fake_router

OPTIONS: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "num_threads": 1, "num_blocks": 128, "block_size": 4}
PROMPTS = [random_prompt(random.Random(number), length) for number, length in enumerate((30, 3))]
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many of its tokens are ends of a sequence, so that beams end at all lengths; logits are not far apart."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, max_len=512, initializer_range=0.08)
    ends = list(range(0, vocab_size(), 30))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "pad_token_id": ends[0]}))
    return folder


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(str(model_dir), **OPTIONS) as one:
        yield one


@pytest.fixture(scope="module")
def model(model_dir: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model_dir)


def of_transformers(model: LlamaForCausalLM, prompt: list[int], **options: Any) -> tuple[list[list[int]], list[float]]:
    """(sequences with the prompt, best first; their scores)."""
    width = options["num_beams"]
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    ends = model.generation_config.eos_token_id
    sequences = []
    for sequence in found.sequences.tolist():
        answer = sequence[len(prompt) :]
        stop = next((at + 1 for at, token in enumerate(answer) if token in ends), len(answer))
        sequences.append([*prompt, *answer[:stop]])
    return sequences, found.sequences_scores.tolist()


FEW = [(2, 1.0, True), (5, 0.0, False), (5, 1.0, False), (3, -1.0, True)]
ALL = [(width, penalty, early) for width in (2, 3, 5) for penalty in (0.0, 1.0, 2.5, -1.0) for early in (False, True)]
CASES = [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FEW)]


@pytest.mark.parametrize(("beam_width", "length_penalty", "early_stopping"), CASES)
def test_the_beams_of_transformers(
    llm: LLM, model: LlamaForCausalLM, beam_width: int, length_penalty: float, early_stopping: bool
) -> None:
    params = BeamSearchParams(
        beam_width=beam_width, max_tokens=MAX_TOKENS, length_penalty=length_penalty, early_stopping=early_stopping
    )
    outputs = llm.beam_search(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        wanted, scores = of_transformers(
            model, prompt, num_beams=beam_width, length_penalty=length_penalty, early_stopping=early_stopping
        )
        assert [one.tokens for one in output.sequences] == wanted
        assert [one.text for one in output.sequences] == [tiny_tokenizer().decode(tokens) for tokens in wanted]
        lengths = [len(tokens) - len(prompt) for tokens in wanted]
        got = [one.cum_logprob / length**length_penalty for one, length in zip(output.sequences, lengths, strict=True)]
        assert got == pytest.approx(scores, abs=1e-4)


def test_sequences_end_at_all_lengths_unless_ends_are_ignored(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=5, max_tokens=MAX_TOKENS)
    reasons = {one.finish_reason for output in llm.beam_search(PROMPTS, params) for one in output.sequences}
    assert reasons == {"stop", "length"}  # so that the comparison above sees both
    params = BeamSearchParams(beam_width=5, max_tokens=MAX_TOKENS, ignore_eos=True)
    (output,) = llm.beam_search(PROMPTS[1], params, use_tqdm=False)
    assert {(one.finish_reason, len(one.tokens)) for one in output.sequences} == {("length", 3 + MAX_TOKENS)}


def test_one_beam_is_greedy(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    (beams,) = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=1, max_tokens=MAX_TOKENS), use_tqdm=False)
    assert [one.tokens for one in beams.sequences] == [[*PROMPTS[0], *output.outputs[0].token_ids]]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 500}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_what_is_wrong_is_named(llm: LLM, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        llm.beam_search(PROMPTS[0], BeamSearchParams(**{"beam_width": 2, "max_tokens": 5, **options}), use_tqdm=False)
    assert caught.value.field == field


def test_a_stack_that_runs_elsewhere_has_a_narrower_search() -> None:
    with fake_router() as (router, address), LLM(target=address) as llm:
        with pytest.raises(InvalidArgumentError, match="at most 8"):
            llm.beam_search("hello", BeamSearchParams(beam_width=9, max_tokens=5), use_tqdm=False)
        router.knows_beams = False
        with pytest.raises(BatonError, match="router knows none"):
            llm.beam_search("hello", BeamSearchParams(beam_width=2, max_tokens=5), use_tqdm=False)


def top(*logprobs: float) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, logprob) for token_id, logprob in enumerate(logprobs)]


def test_an_end_counts_only_among_the_best_of_its_length() -> None:
    """Token 0 ends a sequence."""
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=0.0), [0])
    assert search.num_candidates == 4
    search.advance([top(-3.0, -1.0, -2.0)])
    assert (search.finished, [beam.token_ids for beam in search.running]) == ([], [(1,), (2,)])
    search.advance([top(-0.5, -1.0), top(-4.0, -1.0)])
    assert [beam.token_ids for beam in search.finished] == [(1, 0)]
    assert [beam.token_ids for beam in search.running] == [(1, 1), (2, 1)]
    search.advance([top(-0.5, -4.0), top(-2.0, -3.0)])
    assert not search.running
    ended = [(beam.token_ids, beam.logprob, beam.finish_reason) for beam in search.finished]
    assert ended == [((1, 0), -1.5, FinishReason.STOP), ((1, 1, 0), -2.5, FinishReason.STOP)]


def test_the_search_ends_when_no_other_is_likely_to_be_better() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=1, max_tokens=9, length_penalty=1.0), [0])
    search.advance([top(-2.0, -1.0)])
    search.advance([top(-0.5, -0.6)])
    assert not search.running  # -1.6 / 2 is no better than -1.5 / 2
    assert [beam.token_ids for beam in search.finished] == [(1, 0)]
