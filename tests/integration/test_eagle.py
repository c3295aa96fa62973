"""1P1D whose decode worker has an EAGLE head: no answer changes, and guesses begin with what that worker computes.

The head is fitted to the answers: the prompts' states are on the prefill worker, which loads no head.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from transformers import PreTrainedModel

from baton.client.report import Result
from common.sampling import SamplingOptions
from tests.chaos.tiny_model import random_prompt, reference_answer, write_tiny_model
from tests.engine import eagle_heads
from tests.faults import watch
from tests.integration.ask import Salt
from tests.integration.stack import Fleet, Member, running, wait_for

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

HIDDEN = 64
NUM_TOKENS = 50
PROMPTS = [random_prompt(random.Random(number), length) for number, length in enumerate((90, 35))]
NAME = "baton_worker_draft_tokens_total"


@dataclass(slots=True, frozen=True)
class Place:
    fleet: Fleet
    wanted: list[list[int]]  # greedy answers by transformers, each up to a tie

    def member(self, role: str) -> Member:
        return next(member for member in self.fleet.members if member.role == role)

    def num_accepted(self, role: str) -> float:
        """Guessed tokens that its worker has counted since it started."""
        return watch.total(watch.worker_metrics(self.member(role)), NAME, outcome="accepted")

    def wait_for_counts(self, before: float, answers: Sequence[Result]) -> None:
        """Until the guesses of all these answers are counted: the engine tells its front a little later."""
        wanted = before + sum(one.report.num_accepted_tokens for one in answers)
        wait_for("all guesses are counted", lambda: self.num_accepted("decode") == wanted)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("eagle")
    write_tiny_model(folder / "model", hidden_size=HIDDEN)
    model: PreTrainedModel = eagle_heads.load(folder / "model")
    wanted = [reference_answer(model, prompt, NUM_TOKENS, temperature=0, seed=0) for prompt in PROMPTS]  # type: ignore[arg-type]
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, wanted, strict=True)]
    starts = [len(prompt) for prompt in PROMPTS]
    weights = eagle_heads.right_weights(model, texts, starts)
    config = eagle_heads.head_config(HIDDEN)
    eagle_heads.write(folder / "head", weights, config, file="pytorch_model.bin")
    flags = (f"--model={folder / 'model'}", f"--speculation={folder / 'head'}")
    fleet = Fleet(folder, *flags, prefill=1, decode=1, router_flags=("--min-remote-tokens=1",))
    with running(fleet):
        yield Place(fleet, wanted)


def test_greedy_answers_are_the_model_s_and_the_head_is_followed(place: Place, salt: Salt) -> None:
    options: SamplingOptions = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    before, answers = place.num_accepted("decode"), []
    with place.fleet.client() as client:
        for prompt, wanted in zip(PROMPTS, place.wanted, strict=True):
            guessed, plain = (
                client.generate(prompt, speculate=speculate, cache_salt=salt(), **options).result()
                for speculate in (True, False)
            )
            assert guessed.token_ids == plain.token_ids
            assert list(guessed.token_ids)[: len(wanted)] == wanted
            assert len(wanted) > NUM_TOKENS // 2  # the rest, if any, follows a tie
            assert guessed.report.prefill_worker == place.member("prefill").address
            assert guessed.report.num_blocks_moved
            assert guessed.report.num_drafted_tokens >= guessed.report.num_accepted_tokens > NUM_TOKENS // 3
            assert plain.report.num_drafted_tokens == 0
            answers.append(guessed)
    place.wait_for_counts(before, answers)
    assert place.num_accepted("prefill") == 0


def test_drawn_answers_are_the_same(place: Place, salt: Salt) -> None:
    before = place.num_accepted("decode")
    options: SamplingOptions = {"temperature": 0.8, "top_k": 2, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    with place.fleet.client() as client:
        guessed, plain = (
            client.generate(PROMPTS[0], speculate=speculate, n=2, seed=11, cache_salt=salt(), **options).results()
            for speculate in (True, False)
        )
    assert [one.token_ids for one in guessed] == [one.token_ids for one in plain]
    assert sum(one.report.num_drafted_tokens for one in guessed) > 0
    place.wait_for_counts(before, guessed)
