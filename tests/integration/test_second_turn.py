"""The second turn of a conversation, between two workers and without a store: the prefill worker reads the first turn's
answer from the decode worker that computed it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from baton.client.report import Result
from tests.chaos.tiny_model import random_prompt, reference_answer
from tests.faults import watch
from tests.integration.ask import Salt
from tests.integration.stack import Fleet, Member, running, wait_for
from tests.integration.tiny import tiny_fleet
from tests.nixl import needs_nixl

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, needs_nixl]

BLOCK_SIZE = 16
NUM_PROMPT, NUM_ANSWER, NUM_NEW = 200, 100, 50  # tokens of the first turn, and of the second one's question
NUM_KNOWN = (NUM_PROMPT + NUM_ANSWER - 1) // BLOCK_SIZE  # full blocks; nobody computed the first answer's last token
NUM_LENT = NUM_KNOWN - NUM_PROMPT // BLOCK_SIZE
NUM_MOVED = -(-(NUM_PROMPT + NUM_ANSWER + NUM_NEW) // BLOCK_SIZE) - NUM_KNOWN

SETTINGS = {
    "from memory": (),
    "with checksums": ("--verify-checksums",),
    "ahead of the device": ("--run-ahead",),
    "through host memory": ("--nixl-staging=always",),
    "not lent": ("--no-lend-blocks",),
}


@dataclass(slots=True, frozen=True)
class Place:
    fleet: Fleet
    model_dir: Path
    num_lent: int  # blocks that a second turn is lent

    @property
    def prefill(self) -> Member:
        return next(member for member in self.fleet.members if member.role == "prefill")


@pytest.fixture(scope="module", params=SETTINGS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("fleet")
    fleet = tiny_fleet(folder, "--connector=nixl", *SETTINGS[request.param], prefill=1, decode=1)
    with running(fleet):
        yield Place(fleet, folder / "model", 0 if request.param == "not lent" else NUM_LENT)


def test_two_turns(place: Place, salt: Salt) -> None:
    draw, one_salt = random.Random(5), salt()
    with place.fleet.client() as client:

        def ask(prompt: list[int], num_tokens: int) -> Result:
            return client.generate(prompt, temperature=0.0, max_tokens=num_tokens, cache_salt=one_salt).result()

        prompt = random_prompt(draw, NUM_PROMPT)
        first = ask(prompt, NUM_ANSWER)
        longer = [*prompt, *first.token_ids, *random_prompt(draw, NUM_NEW)]
        second = ask(longer, NUM_ANSWER)
        third = ask([*longer, *second.token_ids, *random_prompt(draw, NUM_NEW)], 4)
    assert (first.report.num_blocks_lent, first.usage.cached_tokens) == (0, 0)
    assert second.report.prefill_worker == place.prefill.address
    assert second.report.num_blocks_lent == place.num_lent
    assert second.report.num_blocks_moved == NUM_MOVED  # what was lent does not come back
    assert second.usage.cached_tokens == NUM_KNOWN * BLOCK_SIZE
    assert third.report.num_blocks_lent == (place.num_lent and (450 - 1) // BLOCK_SIZE - 350 // BLOCK_SIZE)
    assert {result.report.fallback_reason for result in (first, second, third)} == {""}
    num_lent = second.report.num_blocks_lent + third.report.num_blocks_lent
    assert _count(place, "kv_blocks_lent_total", outcome="read") == num_lent
    assert _count(place, "kv_blocks_lent_total", outcome="failed") == 0
    # The engine tells its front a little later.
    wait_for("all hits are counted", lambda: _count(place, "kv_cache_hits_total", tier="decode") == num_lent)
    model = LlamaForCausalLM.from_pretrained(place.model_dir, dtype=torch.float32).eval()
    for asked, result in ((prompt, first), (longer, second)):
        wanted = reference_answer(model, asked, NUM_ANSWER, temperature=0.0, seed=0)
        assert len(wanted) > NUM_ANSWER // 2  # the rest, if any, follows a tie
        assert list(result.token_ids)[: len(wanted)] == wanted


def _count(place: Place, name: str, **labels: str) -> float:
    return watch.total(watch.worker_metrics(place.prefill), f"baton_worker_{name}", **labels)
