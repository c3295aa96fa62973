"""The sampler on the kernels and on torch: each row of a batch of unlike requests gets what the definition says."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from common.guided import Guided
from common.sampling import SamplingParams, TokenSequence
from engine.sampling.draws import draw
from engine.sampling.grammars import GrammarCompiler
from engine.sampling.guide import make_masks
from engine.sampling.logit_changes import LogitChanges
from engine.sampling.sampler import sample, uniform
from tests.engine.kernels.variants import VARIANTS, best_and_slow_other_variants, best_and_slow_others, kernels
from tests.router.tiny_tokenizer import eos_id, tokenizer_files, vocab_size

NUM_ROWS = 96
EOS = 2


def random_params(rng: random.Random, size: int) -> SamplingParams:
    def some(share: float) -> tuple[int, ...]:
        return tuple(rng.sample(range(size), min(size, 9))) if rng.random() < share else ()

    return SamplingParams(
        temperature=rng.choice([0.0, 0.2, 1.0, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 40, 2000]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.5]),
        seed=rng.randrange(-(2**63), 2**63),
        repetition_penalty=rng.choice([1.0, 1.0, 1.4, 0.7]),
        presence_penalty=rng.choice([0.0, 0.0, 1.1]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        logit_bias={one: rng.uniform(-4, 4) for one in some(0.3)},
        allowed_token_ids=some(0.15),
        bad_words_ids=tuple(TokenSequence(token_ids=(one,)) for one in some(0.2)[: size - 1]),
        min_tokens=rng.choice([0, 0, 100]),
        stop_token_ids=some(0.2)[: size - 1],
        logprobs=rng.choice([None, None, 0, 3, 20]),
    )


def random_logits(rng: random.Random, size: int) -> torch.Tensor:
    """Flat, ordinary or peaked; every third with many equal ones."""
    rows = torch.randn(NUM_ROWS, size, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    rows *= torch.tensor([rng.choice([0.01, 2.0, 9.0]) for _ in range(NUM_ROWS)])[:, None]
    rows[::3] = rows[::3].bfloat16().float()
    return rows


def changed(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    values = logits.double()
    for one in {*prompt, *output} if params.repetition_penalty != 1 else ():
        values[one] *= 1 / params.repetition_penalty if values[one] > 0 else params.repetition_penalty
    for one, times in Counter(output).items():
        values[one] -= params.presence_penalty + params.frequency_penalty * times
    for one, bias in params.logit_bias.items():
        values[one] += bias
    if params.allowed_token_ids:
        others = [one for one in range(len(values)) if one not in params.allowed_token_ids]
        values[others] = float("-inf")
    banned = [word.token_ids[0] for word in params.bad_words_ids]
    values[[*banned, *((*params.stop_token_ids, EOS) if len(output) < params.min_tokens else ())]] = float("-inf")
    return values


def by_definition(values: torch.Tensor, params: SamplingParams, index: int) -> int | None:
    """The token that these logits give, drawn as engine/sampling/sampler.py says it."""
    if values.max() == float("-inf"):
        return None
    if params.is_greedy:
        return int(values.argmax())
    probs = ((values - values.max()) / params.temperature).softmax(-1)
    ordered = probs.sort(descending=True).values
    if params.top_k:
        ordered = ordered[: params.top_k]
    if params.top_p < 1:
        reached = (ordered.cumsum(-1) >= params.top_p * ordered.sum()).nonzero()[0]
        ordered = ordered[: int(reached) + 1]
    floor = max(float(ordered[-1]), params.min_p * float(probs.max()))
    probs[probs < floor * (1 - 1e-9)] = 0
    cumulative = probs.cumsum(-1)
    target = uniform(params.seed, index) * cumulative[-1]
    return int((cumulative > target).nonzero()[0])


@pytest.mark.parametrize("variant", best_and_slow_others)
@pytest.mark.parametrize("size", [3, 40, 5003])
def test_each_row_of_a_batch_is_sampled_by_the_definition(variant: str, size: int) -> None:
    rng = random.Random(size)
    logits = random_logits(rng, size)
    inputs, expected = [], []
    for row in range(NUM_ROWS):
        params = random_params(rng, size)
        prompt, output = rng.choices(range(size), k=8), rng.choices(range(size), k=rng.choice([0, 1, 12]))
        changes = LogitChanges(params, prompt, [EOS])
        changes.follow([*prompt, *output], len(prompt))
        inputs.append(draw(params, len(output), changes))
        expected.append(by_definition(changed(logits[row], params, prompt, output), params, len(output)))
    tokens = sample(logits, inputs, None if variant == "torch" else kernels(variant))
    found = [None if token is None else token.token_id for token in tokens]
    assert found == expected
    assert len(set(expected)) > 1
    for row, token in enumerate(tokens):
        asked = inputs[row].num_top
        if token is None:
            continue
        logprobs = logits[row].double().log_softmax(-1)
        assert (token.logprob is None) == (asked is None)
        assert token.logprob is None or token.logprob == pytest.approx(float(logprobs[token.token_id]), abs=1e-5)
        assert len(token.top_logprobs) == min(asked or 0, size)
        likeliest = logprobs.sort(descending=True, stable=True).indices.tolist()
        if variant != "torch":  # which of equal ones come is not said there
            assert [one.token_id for one in token.top_logprobs] == likeliest[: asked or 0]
        for one, token_id in zip(token.top_logprobs, likeliest, strict=False):
            assert one.logprob == pytest.approx(float(logprobs[token_id]), abs=1e-5)


@best_and_slow_other_variants
def test_masks_of_grammars(variant: str, tmp_path: Path) -> None:
    """Guided rows between others, greedy and drawn; one whose grammar leaves only what is banned."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes(tokenizer_files()["tokenizer.json"])
    compiler = GrammarCompiler(file, vocab_size(), [eos_id()])
    guide, wide = (compiler(Guided(regex=regex)) for regex in ("[0-9]", "[^0-9]+"))
    logits = torch.randn(60, vocab_size(), generator=torch.Generator().manual_seed(1))
    inputs = []
    for row in range(60):
        params = SamplingParams(temperature=float(row % 2), seed=row, logprobs=2 if row % 5 == 4 else None)
        own = (b"", *make_masks([guide, wide]))[row % 3]  # the last one leaves the likeliest token, mostly
        inputs.append(draw(params, 0, mask=own))
    tokens = sample(logits, inputs)
    sampled = sample(logits, inputs, kernels(variant))
    assert [token and token.token_id for token in sampled] == [token and token.token_id for token in tokens]
    digits = {token.token_id for token in tokens[1::3] if token}
    assert {token.token_id for token in tokens[2::3] if token}.isdisjoint(digits)
    params = SamplingParams(bad_words_ids=tuple(TokenSequence(token_ids=(one,)) for one in range(vocab_size())))
    banned = draw(params, 0, LogitChanges(params), *make_masks([guide]))
    assert sample(logits[:1], [banned], kernels(variant)) == [None]
    assert len(digits) > 5


@best_and_slow_other_variants
def test_neither_company_nor_threads_change_a_row(variant: str) -> None:
    rng = random.Random(1)
    logits = random_logits(rng, 3000)
    inputs = [draw(params=random_params(rng, 3000), num_output_tokens=row) for row in range(NUM_ROWS)]
    whole = sample(logits, inputs, kernels(variant))
    assert sample(logits, inputs, kernels(variant, 1)) == whole
    for row in range(0, NUM_ROWS, 5):
        assert sample(logits[row : row + 1], [inputs[row]], kernels(variant)) == [whole[row]]


@best_and_slow_other_variants
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_counts_as_the_largest(variant: str, value: float) -> None:
    """A broken model gives a token, as greedily."""
    logits = torch.randn(2, 700)
    logits[:, 300] = value
    params = SamplingParams(top_k=3, top_p=0.5, logprobs=2)
    inputs = [draw(params=one, num_output_tokens=0) for one in (params, SamplingParams(temperature=0.0))]
    drawn, likeliest = sample(logits, inputs, kernels(variant))
    assert drawn is not None
    assert likeliest is not None
    assert drawn.token_id == likeliest.token_id == 300
    assert len(drawn.top_logprobs) == 2


@pytest.mark.skipif(not VARIANTS, reason="no kernels were built")
def test_tokens_outside_of_the_vocabulary_are_none() -> None:
    """A model's end token may have no logit."""
    params = SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=(900,), logit_bias={-3: 9.0, 2000: 9.0})
    item = draw(params=params, num_output_tokens=0, changes=LogitChanges(params))
    logits = torch.arange(800.0)[None]
    assert [token and token.token_id for token in sample(logits, [item], kernels(VARIANTS[-1]))] == [799]
