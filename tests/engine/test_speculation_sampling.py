"""With whatever parameters, speculation draws the tokens and logprobs that the request would get without it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import EngineSettings
from common.guided import Guided
from common.sampling import SamplingParams, TokenSequence
from common.types import SampledToken
from engine import messages as m
from engine.core import EngineCore
from engine.request import Request
from engine.sampling.grammars import GrammarCompiler
from engine.sampling.sampler import sample
from engine.speculation.speculation import Drafter
from engine.step import StepRow
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from tests.engine.test_guided_text import GUIDED, Engine, RandomDevice
from tests.router.tiny_tokenizer import eos_id, tokenizer_files, vocab_size
from tests.support.fake_device import BLOCK_SIZE, FakeDevice, assert_idle, run
from text.thought import Thought, after_thought

PROMPT = list(range(5, 26))


class Recorded:
    """Drafts what an answer was, with an error at every `errs_at`-th token."""

    cost = 0.0

    def __init__(self, answer: Sequence[int], errs_at: int) -> None:
        self.answer = answer
        self.errs_at = errs_at
        self.num_drafted = 0

    def draft(self, lengths: Mapping[Request, int]) -> dict[Request, list[int]]:
        drafts = {}
        for request, length in lengths.items():
            places = range(request.num_output_tokens, request.num_output_tokens + length)
            drafts[request] = [self.token(place) for place in places]
            self.num_drafted += length
        return drafts

    def token(self, place: int) -> int:
        return (self.answer[place % len(self.answer)] + (place % self.errs_at == self.errs_at - 1)) % 40


class FewTokens(RandomDevice):
    """Of 40 tokens, so that penalties, bans and top-k all change the answers."""

    vocab_size = 40
    eos_token_ids = [39]  # noqa: RUF012


def answer(drafter: Drafter | None, params: SamplingParams) -> list[SampledToken]:
    core = EngineCore(
        EngineSettings(block_size=BLOCK_SIZE),
        FewTokens(64),
        MemoryConnector(ConnectorConfig(epoch="e", worker_id="w")),
        clock=lambda: 0.0,
        wake=lambda: None,
        drafter=drafter,
    )
    core.handle(m.AddRequest(request_id="a", prompt_token_ids=PROMPT, sampling_params=params))
    events = run(core)
    assert_idle(core)
    return [token for event in events if isinstance(event, m.TokensGenerated) for token in event.tokens]


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {"seed": 7},
        {"seed": -3, "temperature": 1.7, "logprobs": 3},
        {"seed": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0, "logprobs": 0, "repetition_penalty": 1.8},
        {"seed": 2, "presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"seed": 3, "logit_bias": {4: 3.0, 39: -100.0}},
        {"seed": 4, "allowed_token_ids": (3, 9, 11, 39)},
        {"seed": 5, "min_tokens": 25, "stop_token_ids": tuple(range(0, 40, 2))},
        {"seed": 6, "allowed_token_ids": (3, 9), "bad_words_ids": (TokenSequence(token_ids=(3, 3)),)},
    ],
    ids=str,
)
def test_each_parameter(given: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=30, **given)
    plain = answer(None, params)
    drafter = Recorded([token.token_id for token in plain], errs_at=4)
    assert answer(drafter, params) == plain
    assert drafter.num_drafted > 0


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    file: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_bytes(tokenizer_files()["tokenizer.json"])
    return GrammarCompiler(file, vocab_size(), [eos_id()])


class ChosenWords:
    """Drafts an answer rightly, and goes on with a token that no grammar of these tests allows."""

    cost = 0.0

    def __init__(self, answer: Sequence[int]) -> None:
        self.answer = answer

    def draft(self, lengths: Mapping[Request, int]) -> dict[Request, list[int]]:
        return {
            request: [
                *self.answer[request.num_output_tokens : request.num_output_tokens + length][: max(1, length // 2)],
                *[0] * (length // 2),
            ][:length]
            for request, length in lengths.items()
        }


REASONED = Guided(
    structural_tag=json.dumps(
        {"format": after_thought(Thought("", "e"), {"type": "regex", "pattern": "(ab|cd){3,9}"}, {})}
    )
)


@pytest.mark.parametrize(
    "guided", [GUIDED, Guided(regex="(ab|cd){3,9}"), Guided(choice=("ab", "abcde")), REASONED], ids=str
)
def test_a_draft_stops_where_the_grammar_refuses(compiler: GrammarCompiler, guided: Guided) -> None:
    answers = []
    for drafter in (None, "recorded"):
        engine = Engine(compiler, drafter=drafter and ChosenWords(answers[0]))
        engine.add("a", guided=guided, params={"seed": 11})
        events = engine.run()
        answers.append([t.token_id for e in events if isinstance(e, m.TokensGenerated) for t in e.tokens])
        assert_idle(engine.core)
        if drafter:
            last = events[-1]
            assert isinstance(last, m.TokensGenerated)
            assert last.num_accepted_tokens > 0
            assert last.num_drafted_tokens - last.num_accepted_tokens < len(answers[0]), "refused ones cost no row"
    assert answers[0] == answers[1]


class FixedOdds(FakeDevice):
    """The next token's odds depend on the last token alone."""

    vocab_size = 6
    eos_token_id = 5
    odds = torch.randn(6, 6, generator=torch.Generator().manual_seed(5))

    def _draw(self, row: StepRow) -> SampledToken | None:
        if row.draw is None:
            return None
        last = int(self._slot(row, row.num_computed_tokens + len(row.token_ids) - 1)[0])
        return sample(self.odds[last][None], [row.draw])[0]


class Likeliest:
    cost = 0.0

    def draft(self, lengths: Mapping[Request, int]) -> dict[Request, list[int]]:
        drafts = {}
        for request, length in lengths.items():
            known = [request.token_ids[-1]]
            for _ in range(length):
                known.append(int(FixedOdds.odds[known[-1]].argmax()))
            drafts[request] = known[1:]
        return drafts


@pytest.mark.slow
def test_the_distribution_is_the_models() -> None:
    """Chi-squared of 20,000 drawn tokens, each counted by the token before it."""
    core = EngineCore(
        EngineSettings(block_size=BLOCK_SIZE, enable_prefix_caching=False, max_num_seqs=1),
        FixedOdds(64),
        MemoryConnector(ConnectorConfig(epoch="e", worker_id="w")),
        clock=lambda: 0.0,
        wake=lambda: None,
        drafter=Likeliest(),
    )
    for seed in range(800):
        given = SamplingParams(seed=seed, max_tokens=26, ignore_eos=True)
        core.handle(m.AddRequest(request_id=str(seed), prompt_token_ids=[0], sampling_params=given))
    pairs = torch.zeros(6, 6, dtype=torch.float64)
    last: dict[str, int] = {}
    num_accepted = 0
    events = []
    while core.step():
        events += core.take_events()
    for event in events:
        if isinstance(event, m.TokensGenerated):
            for token in event.tokens:
                if event.request_id in last:
                    pairs[last[event.request_id], token.token_id] += 1
                last[event.request_id] = token.token_id
            num_accepted += event.num_accepted_tokens if event.finish_reason else 0
    assert pairs.sum() == 20_000
    assert num_accepted > 1_000
    wanted = FixedOdds.odds.double().softmax(-1) * pairs.sum(-1, keepdim=True)
    statistic = float(((pairs - wanted) ** 2 / wanted).sum())
    assert statistic < 59.7, "one in a thousand, with 30 degrees of freedom"
