"""The sampler: exact if it is greedy, the right distribution if it draws, the same in any batch."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from common.sampling import SamplingParams, TokenSequence
from common.types import SampledToken
from engine.sampling import sampler
from engine.sampling.draws import draw
from engine.sampling.logit_changes import LogitChanges
from engine.sampling.sampler import sample, uniform
from engine.step import Draw
from tests.engine.kernels.variants import VARIANTS, kernels, slow_but_the_best

GREEDY = SamplingParams(temperature=0.0)
NUM_DRAWS = 4000


@pytest.fixture(autouse=True, params=["torch", *slow_but_the_best(VARIANTS)])
def _computed_with(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test of this file, with torch and with each variant of the kernels."""
    if request.param != "torch":
        monkeypatch.setattr(sys.modules[__name__], "sample", partial(sampler.sample, kernels=kernels(request.param)))


def ask(
    params: SamplingParams,
    index: int = 0,
    *,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
    banned_token_ids: Sequence[int] = (),
) -> Draw:
    if banned_token_ids:
        params = replace(params, min_tokens=index + 1, stop_token_ids=tuple(banned_token_ids))
    changes = LogitChanges(params, prompt_token_ids)
    changes.follow([*prompt_token_ids, *output_token_ids], len(prompt_token_ids))
    return draw(params=params, num_output_tokens=index, changes=changes)


def ids(tokens: Sequence[SampledToken | None]) -> list[int]:
    return [token.token_id for token in tokens if token is not None]


def draw_many(logits: torch.Tensor, params: SamplingParams, num_draws: int = NUM_DRAWS) -> Counter[int]:
    rows, one = logits.expand(num_draws, -1), ask(params)
    return Counter(ids(sample(rows, [replace(one, seed=seed) for seed in range(num_draws)])))


def assert_distributed(counts: Counter[int], probs: torch.Tensor) -> None:
    """Pearson's chi-square, far enough out (6 sigma) that it fails for a reason; nothing impossible was drawn."""
    expected = {token: NUM_DRAWS * p for token, p in enumerate(probs.tolist()) if p > 0}
    assert set(counts) <= set(expected)
    statistic = sum((counts[token] - e) ** 2 / e for token, e in expected.items())
    freedom = len(expected) - 1
    assert statistic <= freedom + 6 * math.sqrt(2 * freedom)


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5, -0.5, 0.25])


def test_greedy_takes_the_largest() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    assert ids(sample(logits, [ask(GREEDY)] * 5)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature: float) -> None:
    counts = draw_many(LOGITS, SamplingParams(temperature=temperature))
    assert_distributed(counts, (LOGITS / temperature).softmax(-1))


def test_a_tiny_temperature_is_greedy() -> None:
    assert set(draw_many(LOGITS * 1e4, SamplingParams(temperature=1e-6))) == {0}


@pytest.mark.parametrize("temperature", [1e-50, 1e-39])
def test_a_temperature_that_is_no_float32_is_greedy(temperature: float) -> None:
    assert set(draw_many(LOGITS, SamplingParams(temperature=temperature))) == {0}


def test_a_temperature_beyond_float32_draws_all_but_what_is_banned() -> None:
    params = SamplingParams(temperature=1e39)
    rows = LOGITS.repeat(2)[:-1].expand(NUM_DRAWS, -1)
    counts = Counter(
        ids(sample(rows, [ask(replace(params, seed=seed), banned_token_ids=[14]) for seed in range(NUM_DRAWS)]))
    )
    assert_distributed(counts, torch.tensor([1 / 14] * 14 + [0.0]))


def keep(kept: list[int], temperature: float = 1.0) -> torch.Tensor:
    mask = torch.full_like(LOGITS, float("-inf"))
    mask[kept] = 0
    return (LOGITS / temperature + mask).softmax(-1)


@pytest.mark.parametrize(("top_k", "kept"), [(1, [0]), (2, [0, 5]), (3, [0, 1, 5]), (99, list(range(8)))])
def test_top_k(top_k: int, kept: list[int]) -> None:
    assert_distributed(draw_many(LOGITS, SamplingParams(top_k=top_k)), keep(kept))


# Probabilities, likeliest first: 0: .379, 5: .230, 1: .139, 2: .085, 7: .066, 3: .051, ...
@pytest.mark.parametrize(("top_p", "kept"), [(0.37, [0]), (0.39, [0, 5]), (0.6, [0, 5]), (0.62, [0, 1, 5])])
def test_top_p(top_p: float, kept: list[int]) -> None:
    assert_distributed(draw_many(LOGITS, SamplingParams(top_p=top_p)), keep(kept))


def test_top_p_counts_within_top_k() -> None:
    """Of the two likeliest, token 0 alone has 0.62 of the mass."""
    assert_distributed(draw_many(LOGITS, SamplingParams(top_k=2, top_p=0.6)), keep([0]))
    assert_distributed(draw_many(LOGITS, SamplingParams(top_k=2, top_p=0.65)), keep([0, 5]))


def test_min_p() -> None:
    """exp(-1) is 0.37 and exp(-0.5) 0.61: shares of the likeliest one's probability."""
    assert_distributed(draw_many(LOGITS, SamplingParams(min_p=0.5)), keep([0, 5]))
    assert_distributed(draw_many(LOGITS, SamplingParams(min_p=0.3)), keep([0, 1, 5]))


def test_top_p_over_a_flat_vocabulary() -> None:
    """The nucleus is larger than the candidates that are looked at first."""
    logits = -torch.arange(5000) * 1e-6
    num_draws = 1000  # each sorts a large row
    counts = draw_many(logits, SamplingParams(top_p=0.5), num_draws)
    assert max(counts) < 2510
    assert max(counts) > 2300
    assert abs(sum(token * count for token, count in counts.items()) / num_draws - 1250) < 100


def test_ties_are_kept_together() -> None:
    logits = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert set(draw_many(logits, SamplingParams(top_k=2))) == {0, 2, 3}


def test_draws_of_one_seed_differ_from_token_to_token() -> None:
    rows = LOGITS.expand(NUM_DRAWS, -1)
    tokens = sample(rows, [ask(SamplingParams(seed=7), index) for index in range(NUM_DRAWS)])
    assert_distributed(Counter(ids(tokens)), LOGITS.softmax(-1))


def test_uniform_is_fixed() -> None:
    """A seed means the same in every version: a request may move between workers."""
    assert uniform(0, 0) == 0.26969155296310277
    assert uniform(-(2**63), 5) != uniform(2**63 - 1, 5)
    values = [uniform(3, index) for index in range(NUM_DRAWS)]
    assert 0 <= min(values) < 0.01 < 0.99 < max(values) < 1


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 5, 2000]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.3]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=rng.randrange(2**40),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        logit_bias=rng.choice([{}, {3: 4.0}]),
        logprobs=rng.choice([None, None, 0, 3]),
    )


def test_company_changes_nothing() -> None:
    """Each row alone gives what it gives in a batch, in another order, and the second time."""
    rng = random.Random(5)
    logits = torch.randn(24, 3000, generator=torch.Generator().manual_seed(2)).bfloat16() * 3  # many ties
    inputs = [
        ask(random_params(rng), rng.randrange(50), prompt_token_ids=[1, 2, 3], output_token_ids=[4, 4])
        for _ in range(24)
    ]
    alone = [sample(logits[row : row + 1], [inputs[row]])[0] for row in range(24)]
    assert sample(logits, inputs) == alone
    order = rng.sample(range(24), 24)
    assert sample(logits[order], [inputs[row] for row in order]) == [alone[row] for row in order]


def test_logits_are_left_alone() -> None:
    logits = LOGITS[None].clone()
    params = SamplingParams(logit_bias={1: 5.0}, repetition_penalty=2.0, top_k=2)
    sample(logits, [ask(params, prompt_token_ids=[0], banned_token_ids=(2,))])
    assert torch.equal(logits[0], LOGITS)


def test_logit_bias_and_bans_bind_greedy_too() -> None:
    biased = replace(GREEDY, logit_bias={4: 10.0, 1: -1.0})
    rows = LOGITS.expand(3, -1)
    tokens = sample(rows, [ask(biased), ask(biased, banned_token_ids=(4,)), ask(GREEDY, banned_token_ids=(0, 5))])
    assert ids(tokens) == [4, 0, 1]


def test_banned_tokens_are_never_drawn() -> None:
    rows = LOGITS.expand(500, -1)
    params = SamplingParams(temperature=3.0)
    inputs = [ask(replace(params, seed=seed), banned_token_ids=(0, 5)) for seed in range(500)]
    assert set(ids(sample(rows, inputs))) == {1, 2, 3, 4, 6, 7}


def test_repetition_penalty_counts_prompt_and_output() -> None:
    params = replace(GREEDY, repetition_penalty=4.0)
    first = sample(LOGITS[None], [ask(params, prompt_token_ids=[0, 0], output_token_ids=[5])])
    assert ids(first) == [1]  # 2.0 and 1.5 divided by 4 lie below 1.0
    negative = torch.tensor([[-1.0, -1.1, -5.0]])
    assert ids(sample(negative, [ask(params, prompt_token_ids=[0], output_token_ids=[])])) == [1]


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.5]])
    presence = replace(GREEDY, presence_penalty=0.2)
    frequency = replace(GREEDY, frequency_penalty=0.2)

    def choice(params: SamplingParams, output: list[int]) -> int:
        return sample(logits, [ask(params, len(output), prompt_token_ids=[0, 0, 0], output_token_ids=output)])[
            0
        ].token_id

    assert choice(presence, []) == 0
    assert choice(presence, [0]) == 1
    assert choice(presence, [0, 0, 0, 0, 1]) == 0  # 0.8 against 0.7: how often does not count
    assert choice(frequency, [0]) == 1
    assert choice(frequency, [0, 0, 0, 1, 1, 1]) == 2  # 0.4 and 0.3 against 0.5


def test_logprobs_are_of_the_raw_logits() -> None:
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias={4: 10.0})
    (token,) = sample(LOGITS[None], [ask(params)])
    expected = LOGITS.log_softmax(-1)
    assert token.token_id == 4
    assert token.logprob == pytest.approx(float(expected[4]))
    assert [entry.token_id for entry in token.top_logprobs] == [0, 5, 1]
    assert [entry.logprob for entry in token.top_logprobs] == pytest.approx(expected[[0, 5, 1]].tolist())


def test_logprobs_only_if_asked() -> None:
    rows = LOGITS.expand(2, -1)
    plain, zero = sample(rows, [ask(GREEDY), ask(replace(GREEDY, logprobs=0))])
    assert plain == SampledToken(0)
    assert zero.logprob is not None
    assert zero.top_logprobs == ()


def test_only_allowed_tokens_come_in_rows_that_say_so() -> None:
    rows = LOGITS.expand(3, -1)
    params = SamplingParams(temperature=0.0, allowed_token_ids=(4, 7))
    assert ids(sample(rows, [ask(GREEDY), ask(params), ask(GREEDY)])) == [0, 7, 0]
    counts = draw_many(LOGITS, SamplingParams(allowed_token_ids=(4, 5, 7)))
    assert_distributed(counts, keep([4, 5, 7]))


def test_a_row_without_an_allowed_token_has_none() -> None:
    banned = SamplingParams(temperature=0.0, allowed_token_ids=(3,), min_tokens=2, stop_token_ids=(3,))
    assert sample(LOGITS.expand(2, -1), [ask(banned), ask(GREEDY)]) == [None, SampledToken(0)]


def test_stop_tokens_that_ban_a_whole_vocabulary_leave_none() -> None:
    banned = ask(SamplingParams(temperature=0.0), banned_token_ids=range(8))
    drawn = ask(SamplingParams(), banned_token_ids=range(8))
    assert sample(LOGITS.expand(3, -1), [banned, drawn, ask(GREEDY)]) == [None, None, SampledToken(0)]


def test_bad_words_end_where_they_would_be_whole() -> None:
    """Token 0 is banned alone; 5 only after 1, 2; and 1 after the 2 that began nothing."""
    words = (TokenSequence(token_ids=(0,)), TokenSequence(token_ids=(1, 2, 5)), TokenSequence(token_ids=(2, 1)))
    params = SamplingParams(temperature=0.0, bad_words_ids=words)
    order = LOGITS.argsort(descending=True).tolist()
    assert order[:3] == [0, 5, 1]

    def next_after(*output: int) -> int:
        return ids(sample(LOGITS[None], [ask(params, len(output), prompt_token_ids=[1], output_token_ids=output)]))[0]

    assert next_after() == 5
    assert next_after(2) == 5  # the prompt's 1 is no part of the answer
    assert next_after(1, 2) == order[3]  # neither 5, which would complete 1 2 5, nor 1, which would complete 2 1
