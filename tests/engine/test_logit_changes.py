"""Penalties, bias and bans: right at each token, and a token costs what is new, not what the prompt holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from common.sampling import SamplingParams
from engine.request import Request
from engine.sampling.draws import draw
from engine.sampling.logit_changes import LogitChanges
from engine.sampling.sampler import sample

VOCAB = 12
EOS = frozenset({7})
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=20)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
    min_tokens=st.integers(0, 6),
    max_tokens=st.just(100),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)


def request(params: SamplingParams, prompt: list[int]) -> Request:
    return Request(
        request_id="r", token_ids=prompt, num_prompt_tokens=len(prompt), sampling_params=params, arrival_time=0.0
    )


def by_definition(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    changed = logits.clone()
    for token_id in {*prompt, *output} if params.repetition_penalty != 1 else ():
        by = 1 / params.repetition_penalty if changed[token_id] > 0 else params.repetition_penalty
        changed[token_id] *= by
    for token_id, times in Counter(output).items():
        changed[token_id] -= params.presence_penalty + params.frequency_penalty * times
    for token_id, bias in params.logit_bias.items():
        changed[token_id] += bias
    if len(output) < params.min_tokens:
        for token_id in {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}:
            changed[token_id] = float("-inf")
    return changed


@given(st.lists(st.tuples(PARAMS, TOKENS, TOKENS), min_size=1, max_size=4), st.integers(0, 2**32))
def test_each_token_of_a_batch_is_chosen_by_the_definition(
    rows: list[tuple[SamplingParams, list[int], list[int]]], seed: int
) -> None:
    """Requests of unlike parameters side by side, each asked again after every token of its answer."""
    generator = torch.Generator().manual_seed(seed)
    requests = [request(params, [*prompt]) for params, prompt, _ in rows]
    for index in range(max(len(output) for _, _, output in rows) + 1):
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 3
        inputs = [
            draw(params=one.sampling_params, num_output_tokens=one.num_output_tokens, changes=one.logit_changes(EOS))
            for one in requests
        ]
        tokens = sample(logits, inputs)
        for row, (one, token) in enumerate(zip(requests, tokens, strict=True)):
            output = one.token_ids[one.num_prompt_tokens :]
            expected = by_definition(logits[row], one.sampling_params, one.prompt_token_ids, output)
            assert expected[token.token_id] >= expected.max() - 1e-4
        for one, (_, _, output) in zip(requests, rows, strict=True):
            one.token_ids.extend(output[index : index + 1])


class Watched(list[int]):
    """Counts the elements that are read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        result = super().__getitem__(index)
        self.num_read += len(result) if isinstance(index, slice) else 1
        return result

    def __iter__(self) -> Any:
        self.num_read += len(self)
        return super().__iter__()


def test_a_token_costs_what_is_new() -> None:
    tokens = Watched(range(1000))
    one = request(SamplingParams(repetition_penalty=1.1), tokens)
    one.logit_changes(EOS)
    tokens.num_read = 0
    for token_id in (3, 2000, 3):
        tokens.append(token_id)
        changes = one.logit_changes(EOS)
    assert tokens.num_read == 3
    assert changes is not None
    assert len(changes.seen_ids) == 1001
    assert (changes.counts[3], changes.counts[1000]) == (2, 1)


def test_a_request_that_changes_nothing_keeps_nothing() -> None:
    one = request(SamplingParams(stop_token_ids=(1, 2)), Watched(range(1000)))
    assert one.logit_changes(EOS) is None


def test_penalties_that_do_not_count_the_prompt_do_not_read_it() -> None:
    changes = LogitChanges(SamplingParams(presence_penalty=1.0), [1, 2, 3])
    assert not changes.seen_ids
    changes.follow([1, 2, 3, 9], 3)
    assert list(changes.seen_ids) == [9]
