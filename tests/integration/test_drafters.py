"""1P1D whose decode worker has a draft model, or an EAGLE head: no answer changes, and what was guessed is counted.

The draft model guesses for one with further layers that change nothing: it costs more, and draws the same tokens. The
head is fitted to the answers: the prompts' states are on the prefill worker, which loads no head.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from baton.client.report import Result
from baton.client.sync_client import Answer
from common.sampling import SamplingOptions
from tests.chaos.tiny_model import random_prompt, reference_answer, write_tiny_model
from tests.engine import eagle_heads
from tests.faults import watch
from tests.integration.ask import Salt
from tests.integration.stack import Fleet, Member, running, wait_for

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

NUM_LAYERS = 4  # of the draft model
HIDDEN = 128  # of the model that the head is for: more than half as many as all answers have tokens
NUM_TOKENS = 60
PROMPTS = [random_prompt(random.Random(number), length) for number, length in enumerate((90, 35, 200))]
NAME = "baton_worker_draft_tokens_total"


@dataclass(slots=True, frozen=True)
class Place:
    fleet: Fleet
    wanted: list[list[int]]  # greedy answers by transformers, each up to a tie
    guesses_draws: bool  # the head is fitted to the greedy answers alone

    def member(self, role: str) -> Member:
        return next(member for member in self.fleet.members if member.role == role)

    def num_counted(self, outcome: str, role: str = "decode") -> float:
        return watch.total(watch.worker_metrics(self.member(role)), NAME, outcome=outcome)

    def counts(self) -> dict[str, float]:
        return {outcome: self.num_counted(outcome) for outcome in ("accepted", "refused")}

    def wait_for_counts(self, before: dict[str, float], answers: Sequence[Result]) -> None:
        """Until the guesses of all these answers are counted: the engine tells its front a little later."""
        num_accepted = sum(one.report.num_accepted_tokens for one in answers)
        num_drafted = sum(one.report.num_drafted_tokens for one in answers)
        wanted = {
            "accepted": before["accepted"] + num_accepted,
            "refused": before["refused"] + num_drafted - num_accepted,
        }
        wait_for("all guesses are counted", lambda: self.counts() == wanted)


@pytest.fixture(scope="module", params=["draft model", "EAGLE head"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder, has_model = tmp_path_factory.mktemp("drafter"), request.param == "draft model"
    if has_model:
        model = write_draft_model(folder)
    else:
        write_tiny_model(folder / "model", hidden_size=HIDDEN)
        model = eagle_heads.load(folder / "model")
    wanted = [reference_answer(model, prompt, NUM_TOKENS, temperature=0, seed=0) for prompt in PROMPTS]
    if not has_model:
        texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, wanted, strict=True)]
        weights = eagle_heads.right_weights(model, texts, [len(prompt) for prompt in PROMPTS])
        eagle_heads.write(folder / "drafter", weights, eagle_heads.head_config(HIDDEN), file="pytorch_model.bin")
    flags = (f"--model={folder / 'model'}", f"--speculation={folder / 'drafter'}")
    fleet = Fleet(folder, *flags, prefill=1, decode=1, router_flags=("--min-remote-tokens=1",))
    with running(fleet):
        yield Place(fleet, wanted, guesses_draws=has_model)


def write_draft_model(folder: Path) -> LlamaForCausalLM:
    """Writes a draft model and a model of its weights, with zeros where the further layers write. Returns the model."""
    write_tiny_model(folder / "drafter", num_layers=NUM_LAYERS)
    write_tiny_model(folder / "model", num_layers=4 * NUM_LAYERS)
    draft = LlamaForCausalLM.from_pretrained(folder / "drafter", dtype=torch.float32)
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    model.load_state_dict(draft.state_dict(), strict=False)
    for layer in model.model.layers[NUM_LAYERS:]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    model.save_pretrained(folder / "model")
    return model


def test_greedy_answers_are_the_model_s_and_guesses_are_counted(place: Place, salt: Salt) -> None:
    before = place.counts()
    options: SamplingOptions = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    answers = []
    with place.fleet.client() as client:
        for prompt, wanted in zip(PROMPTS, place.wanted, strict=True):
            guessed, plain = (
                client.generate(prompt, cache_salt=salt(), **(options | {"speculate": speculate})).result()
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
    assert place.num_counted("accepted", "prefill") == 0


def test_drawn_answers_are_the_same_side_by_side(place: Place, salt: Salt) -> None:
    before = place.counts()
    options: SamplingOptions = {"temperature": 0.8, "top_k": 2, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    with place.fleet.client() as client:

        def ask(speculate: bool) -> Answer:
            asked = options | {"speculate": speculate, "seed": 11}
            return client.generate(PROMPTS[0], n=2, cache_salt=salt(), **asked)

        # Two in a step draft from the start. Of four none may: whether they do depends on which ends first.
        guessed = ask(True).results()
        streams = [ask(True), ask(False)]
        guessed_too, plain = (stream.results() for stream in streams)
    wanted = [one.token_ids for one in plain]
    assert [one.token_ids for one in guessed] == wanted
    assert [one.token_ids for one in guessed_too] == wanted
    assert sum(one.report.num_drafted_tokens for one in guessed) > 0
    assert not place.guesses_draws or sum(one.report.num_accepted_tokens for one in guessed) > 0
    assert sum(one.report.num_drafted_tokens for one in plain) == 0
    place.wait_for_counts(before, [*guessed, *guessed_too])
