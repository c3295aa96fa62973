"""1P1D with speculation: no answer changes, and its report says what was guessed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.guided import Guided
from common.sampling import SamplingOptions
from tests.integration.ask import Salt
from tests.integration.stack import Fleet, Stack, kill, running
from text.thought import Thought, after_thought

pytestmark = pytest.mark.timeout(600)

LIST = "".join(f"- parcel {number}: paid, sent to depot {number % 4}\n" for number in range(8))
DRAWN: list[SamplingOptions] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.6, "seed": 5},
    {"temperature": 0.0, "stop": ["parcel 5"]},
    {"temperature": 0.0, "guided": {"regex": "(- parcel [0-9]: paid, sent to depot [0-9]\n)+"}},
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("speculation"), "--speculation=ngram", "--min-remote-tokens=1")
    with running(stack):
        yield stack


@pytest.mark.parametrize("options", DRAWN, ids=str)
def test_no_answer_changes(stack: Stack, salt: Salt, options: SamplingOptions) -> None:
    prompt = LIST * 2
    with stack.client() as client:
        results = [
            client.generate(
                prompt, cache_salt=salt(), **(options | {"max_tokens": 60, "speculate": speculate})
            ).result()
            for speculate in (True, False)
        ]
    guessed, plain = results
    assert guessed.token_ids == plain.token_ids
    assert (guessed.text, guessed.finish_reason) == (plain.text, plain.finish_reason)
    assert guessed.usage.completion_tokens == plain.usage.completion_tokens
    assert [token.token_id for token in guessed.logprobs] == [token.token_id for token in plain.logprobs]
    assert guessed.report.prefill_worker
    assert guessed.report.num_drafted_tokens >= guessed.report.num_accepted_tokens > 0
    assert plain.report.num_drafted_tokens == 0


def test_reasoning_before_a_form_does_not_change(stack: Stack, salt: Salt) -> None:
    """The text of both is guessed, and so is what ends the reasoning."""
    turn = '<think>\nThe parcel is paid.\n</think>\n{"number": %d, "is_paid": true}\n'
    schema = {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "is_paid": {"type": "boolean"}},
        "required": ["number", "is_paid"],
        "additionalProperties": False,
    }
    form = after_thought(Thought("", "</think>"), {"type": "json_schema", "json_schema": schema}, {})
    guided = Guided(structural_tag=json.dumps({"type": "structural_tag", "format": form}))
    prompt = "".join(turn % number for number in range(1, 7)) + "<think>\n"
    with stack.client() as client:
        guessed, plain = (
            client.generate(
                prompt, guided=guided, temperature=0.0, max_tokens=60, speculate=speculate, cache_salt=salt()
            ).result()
            for speculate in (True, False)
        )
    assert (guessed.text, guessed.token_ids) == (plain.text, plain.token_ids)
    reasoning, _, answer = plain.text.partition("</think>")
    assert reasoning.strip()
    assert json.loads(answer).keys() == {"number", "is_paid"}
    assert guessed.report.num_drafted_tokens >= guessed.report.num_accepted_tokens > 0
    assert plain.report.num_drafted_tokens == 0


@pytest.mark.slow
def test_a_seeded_answer_is_the_same_alone_in_a_batch_and_migrated(tmp_path: Path, salt: Salt) -> None:
    """Without speculation, with it, beside seven others, and on a second decode worker after the first was killed."""
    options: SamplingOptions = {"temperature": 0.6, "seed": 5, "max_tokens": 60, "ignore_eos": True}
    routing = ("--min-remote-tokens=1",)
    fleet = Fleet(tmp_path, "--speculation=ngram", prefill=1, decode=2, router_flags=routing)
    with running(fleet), fleet.client() as client:
        plain = client.generate(LIST * 2, cache_salt=salt(), **(options | {"speculate": False})).result()
        alone = client.generate(LIST * 2, cache_salt=salt(), **options).result()
        batch = client.generate(LIST * 2, n=8, cache_salt=salt(), **options).results()
        answer = client.generate(LIST * 2, cache_salt=salt(), **options)
        num_tokens = 0
        for chunk in answer:
            num_tokens += len(chunk.token_ids)
            if num_tokens >= 8:
                break
        victim = fleet.busy("decode")
        kill(victim.process)
        migrated = answer.result()
        fleet.replace(victim)
    assert plain.report.num_drafted_tokens == 0
    assert len({one.token_ids for one in batch}) > 1  # each has a seed of its own
    for one in (alone, batch[0], migrated):
        assert one.token_ids == plain.token_ids
        assert one.report.num_accepted_tokens > 0
    assert migrated.report.num_migrations == 1
    assert migrated.report.decode_worker != victim.address
