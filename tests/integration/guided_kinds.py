"""A form of each kind of guided text, for the tiny random model: what it may write is long, and ends."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]

from common.guided import Guided
from common.sampling import SamplingOptions
from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.integration.schemas import AGE, FLAG, array, record, text
from tests.router.tiny_tokenizer import eos_id, ids_of
from text.thought import Thought, after_thought

NUM_PROMPT_TOKENS = 75  # no whole number of blocks or chunks

WORDS = text(minLength=6, maxLength=9, pattern="^[a-z]+$")
SCHEMA = record(names=array(WORDS, 9, 9), rows=array(record(age=AGE, is_good=FLAG), 4, 4))
CHOICES = tuple(f"{name} " + "quick brown fox jumps over the lazy dog " * 11 for name in ("Paris", "Tokyo", "Rome"))
REGEX = "([a-z]{3,8} ){40}[0-9]{4}"
EBNF = (
    "root ::= " + "line " * 14 + '\nline ::= word " = " number "\\n"\n'
    "word ::= [a-z] [a-z] [a-z]? [a-z]?\nnumber ::= [0-9] | [1-9] [0-9] [0-9]"
)
ENDS = dict.fromkeys(ids_of('"}'), 2.0)  # makes its objects shorter
CALL = record(name=WORDS, ages=array(AGE, 6, 6))
FIRST, BETWEEN, LAST = "<call>", "</call>\nthen ", ".\n<f>"
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": FIRST, "content": {"type": "json_schema", "json_schema": CALL}, "end": BETWEEN},
            {"type": "regex", "pattern": "([a-z]{3,6} ){9}[a-z]{3}"},
            {"type": "const_string", "value": LAST},
            {
                "type": "triggered_tags",
                "triggers": ["<g"],
                "tags": [{"begin": "<g>", "content": {"type": "regex", "pattern": "[0-9]{9,12}"}, "end": "</g>"}],
                "at_least_one": True,
                "stop_after_first": True,
            },
        ],
    },
}

REASONED = after_thought(Thought("", "e"), {"type": "json_schema", "json_schema": SCHEMA}, {})


@dataclass(slots=True, frozen=True)
class Kind:
    guided: Guided
    is_valid: Callable[[str], object]  # raises, or is false, if a text has not the form
    options: SamplingOptions

    @property
    def prompt(self) -> list[int]:
        return random_prompt(random.Random(str(self.guided)), NUM_PROMPT_TOKENS)


def _of_schema(answer: str) -> bool:
    jsonschema.validate(json.loads(answer), SCHEMA, jsonschema.Draft202012Validator)
    return True


def _of_tag(answer: str) -> bool:
    call, _, rest = answer.removeprefix(FIRST).partition(BETWEEN)
    jsonschema.validate(json.loads(call), CALL, jsonschema.Draft202012Validator)
    found = re.fullmatch(r"(?:[a-z]{3,6} ){9}[a-z]{3}\.\n<f><g>[0-9]{9,12}</g>", rest)
    return answer.startswith(FIRST) and found is not None


def _drawn(seed: int, **more: object) -> SamplingOptions:
    """Of many likely tokens some are nearly ties, so there are two."""
    return {"temperature": 0.8, "top_k": 2, "seed": seed, "max_tokens": 600, **more}  # type: ignore[typeddict-item]


KINDS: dict[str, Kind] = {
    "json_schema": Kind(Guided(json_schema=json.dumps(SCHEMA)), _of_schema, _drawn(1)),
    "json_object": Kind(
        Guided(json_object=True), lambda answer: isinstance(json.loads(answer), dict), _drawn(5, logit_bias=ENDS)
    ),
    "regex": Kind(Guided(regex=REGEX), lambda answer: re.fullmatch(REGEX, answer), _drawn(3)),
    "choice": Kind(Guided(choice=CHOICES), lambda answer: answer in CHOICES, _drawn(4)),
    "grammar": Kind(
        Guided(grammar=EBNF),
        lambda answer: re.fullmatch(r"([a-z]{2,4} = ([0-9]|[1-9][0-9]{2})\n){14}", answer),
        _drawn(5),
    ),
    "structural_tag": Kind(Guided(structural_tag=json.dumps(TAG)), _of_tag, _drawn(6)),
    "reasoning": Kind(
        Guided(structural_tag=json.dumps({"format": REASONED})),
        lambda answer: _of_schema(answer.partition("e")[2]),
        _drawn(8),
    ),
}


def write_model(folder: Path) -> None:
    """Whose answers end by a token: guided text does."""
    write_tiny_model(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_id()}))
