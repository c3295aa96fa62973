"""Guided answers of a real model, prompt and answer on different workers: they parse, and validate."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest

from baton.client.report import Result
from baton.client.sync_client import Client
from common.config import DEFAULT_MODEL
from common.errors import InvalidArgumentError
from common.guided import Guided
from common.types import FinishReason
from tests.chaos.tiny_model import write_tiny_model
from tests.integration.ask import Salt
from tests.integration.schemas import Schema, schemas
from tests.integration.stack import CALL_TIMEOUT_S, Stack, running
from tests.router.tiny_tokenizer import eos_id

pytestmark = pytest.mark.timeout(1200)

NUM_EACH = 5
QUESTION = "Give an example. Answer in JSON that matches this schema: "
FULL_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII)


def validate(value: object, schema: Schema) -> None:
    """Also checks formats. jsonschema has no checker of `time` of its own: it is RFC 3339's `full-time`."""
    formats = jsonschema.FormatChecker(("date", "uuid", "ipv4"))
    formats.checks("time")(lambda text: FULL_TIME.fullmatch(str(text)) is not None)
    unchecked = set(re.findall(r'"format": "([^"]*)"', json.dumps(schema))) - set(formats.checkers)
    assert not unchecked, "a format that nothing checks"
    jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=formats)


def test_wrong_formats_do_not_validate() -> None:
    for format_, right, wrong in (
        ("date", "2024-02-29", "2023-02-29"),
        ("uuid", "2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638"),
        ("time", "23:59:60.5+01:00", "24:00:00Z"),
        ("ipv4", "10.0.0.255", "10.0.0.256"),
    ):
        schema: Schema = {"type": "array", "items": {"type": "string", "format": format_}}
        validate([right], schema)
        with pytest.raises(jsonschema.ValidationError):
            validate([wrong], schema)


def test_answers_validate(two: Stack, salt: Salt) -> None:
    cases = [(schema, seed) for schema in schemas() for seed in range(NUM_EACH)]
    assert len(cases) == 60 * NUM_EACH

    with Client(two.grpc, timeout=CALL_TIMEOUT_S * 4) as client:

        def ask(case: tuple[Schema, int]) -> Result:
            schema, seed = case
            guided = Guided(json_schema=json.dumps(schema))
            question = QUESTION + json.dumps(schema)
            return client.chat(question, guided=guided, max_tokens=256, temperature=0.7, seed=seed).result()

        with ThreadPoolExecutor(64) as pool:
            results = list(pool.map(ask, cases))
    ended = [
        (case, result) for case, result in zip(cases, results, strict=True) if result.finish_reason is FinishReason.STOP
    ]
    assert len(ended) >= 0.95 * len(cases)
    for (schema, _), result in ended:
        validate(json.loads(result.text), schema)
    assert sum(bool(result.report.prefill_worker) for result in results) > len(cases) // 2


def test_the_first_guided_request_waits_for_no_tokenizer(tmp_path: Path) -> None:
    """Workers have read it when they are ready."""
    model = tmp_path / "model"
    write_tiny_model(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_id()}))
    stack = Stack(tmp_path, f"--model={model}")
    with running(stack):
        (model / "tokenizer.json").unlink()
        with stack.client() as client:
            assert client.generate([5, 6, 7], guided=Guided(choice=("cat", "dog"))).result().text in ("cat", "dog")


def test_seeded_answers_are_the_same_alone(two: Stack, salt: Salt) -> None:
    with Client(two.grpc, timeout=CALL_TIMEOUT_S) as client:

        def ask(_: int) -> str:
            guided = Guided(regex="[A-Z][a-z]{2,8} and [A-Z][a-z]{2,8}")
            return client.chat("Two names?", guided=guided, seed=7, cache_salt=salt()).result().text

        alone = ask(0)
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(ask, range(4))) == {alone}


def test_a_worker_refuses_what_its_model_lacks(two: Stack) -> None:
    """The router has parsed it: only the worker's tokenizer knows the special tokens."""
    tag = json.dumps({"type": "structural_tag", "format": {"type": "token", "token": "<|nowhere|>"}})
    with Client(two.grpc, timeout=CALL_TIMEOUT_S) as client, pytest.raises(InvalidArgumentError) as caught:
        client.generate("Hi", guided=Guided(structural_tag=tag)).result()
    assert caught.value.field == "sampling_params.guided"
    assert "unknown special token" in caught.value.reason


def test_openai_parses_into_a_model(two: Stack) -> None:
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=20)
        people: int = Field(ge=0, le=40_000_000)

    with openai.OpenAI(base_url=f"{two.http}/v1", api_key="none", timeout=CALL_TIMEOUT_S, max_retries=0) as client:
        answer = client.chat.completions.parse(
            model=DEFAULT_MODEL,
            messages=[{"role": "user", "content": "Name a city and how many people live there, as JSON."}],
            response_format=City,
            temperature=0,
        )
    assert isinstance(answer.choices[0].message.parsed, City)
