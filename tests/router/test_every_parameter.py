"""Each sampling parameter through every interface to the engine: what `common.sampling` declares is all that they need.

A parameter of a new kind of type needs an example in `EXAMPLES`; one of the kinds here needs nothing.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import grpc
import httpx
import msgspec
import openai
import pytest

from baton import LLM
from baton import SamplingParams as LLMParams
from baton.cli.main import main
from baton.client.async_client import AsyncClient
from baton.client.sync_client import Client
from common.guided import Guided
from common.sampling import SamplingParams, TokenSequence, TypeForm, parameters
from common.validation import ModelLimits
from engine import messages as m
from protos.baton.v1 import decode_pb2, inference_pb2, types_pb2
from tests.each_case import each_case
from tests.router import nested_parameters
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.tiny_tokenizer import ids_of, vocab_size
from tests.support.fake_worker import MAX_MODEL_LEN, FakeWorker
from text.tokenizer import Tokenizer
from worker import convert

EXAMPLES: tuple[tuple[TypeForm, object, str], ...] = (
    (float, 0.5, "0.5"),
    (int, 7, "7"),
    (int | None, 7, "7"),
    (bool, True, ""),
    (tuple[str, ...], ("zz",), "zz"),
    (tuple[int, ...], (7, 8), "7,8"),
    (dict[int, float], {7: 0.5, 8: -0.5}, "7=0.5,8=-0.5"),
    (tuple[TokenSequence, ...], (TokenSequence(token_ids=(7, 8)),), '[{"token_ids": [7, 8]}]'),
    *nested_parameters.EXAMPLES,
    (Guided | None, Guided(choice=("ab", "c")), '{"choice": ["ab", "c"]}'),
)
"""(type, value, as it is typed on a command line)"""

LIMITS = ModelLimits(model="tiny", max_model_len=MAX_MODEL_LEN, vocab_size=vocab_size(), max_token_bytes=1)


def example(name: str) -> tuple[object, str]:
    kind = parameters()[name].type
    return next((value, typed) for one, value, typed in EXAMPLES if one == kind)


def sent(name: str) -> object:
    """As a client writes it: mappings for dataclasses."""
    return msgspec.to_builtins(example(name)[0])


def for_json(name: str) -> dict[str, object]:
    value = sent(name)
    return {"top_logprobs": value, "logprobs": True} if name == "logprobs" else {name: value}


def in_the_engine(request: decode_pb2.DecodeRequest) -> SamplingParams:
    """What the engine reads of what a router sent."""
    params = convert.sampling_params(request.sampling_params, LIMITS, num_prompt_tokens=len(request.prompt_token_ids))
    sent = m.AddRequest(request_id="r", prompt_token_ids=[1], sampling_params=params)
    (command,) = m.decode_commands(m.encode([sent]))
    assert isinstance(command, m.AddRequest)
    return command.sampling_params


NAMES = [name for name in nested_parameters.VALUES if name in parameters()] or list(parameters())
"""In the process of `test_nested_values`, those that are declared there."""

every_parameter = each_case("name", NAMES)


def test_the_wire_and_the_declaration_have_the_same_fields() -> None:
    assert set(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name) == set(parameters())


@every_parameter
async def test_rest(router: RunningRouter, worker: FakeWorker, name: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    await router.openai.chat.completions.create(model="tiny", messages=messages, extra_body=for_json(name))  # type: ignore[arg-type]
    value = example(name)[0]
    await router.openai.completions.create(model="tiny", prompt="Hi", extra_body={name: sent(name)})
    for request in worker.requests:
        assert getattr(in_the_engine(request), name) == value
    for alias in parameters()[name].rest_aliases:
        await router.openai.completions.create(model="tiny", prompt="Hi", extra_body={alias: sent(name)})
        assert getattr(in_the_engine(worker.requests[-1]), name) == value


@every_parameter
async def test_grpc(router: RunningRouter, worker: FakeWorker, name: str) -> None:
    value = example(name)[0]
    params = types_pb2.SamplingParams(**{name: sent(name)})  # type: ignore[arg-type]
    async for _ in router.inference.Generate(inference_pb2.GenerateRequest(prompt="Hi", sampling_params=params)):
        pass
    assert getattr(in_the_engine(worker.requests[0]), name) == value


@pytest.mark.slow
@every_parameter
async def test_client(router: RunningRouter, worker: FakeWorker, name: str) -> None:
    value = example(name)[0]

    def ask() -> None:
        with Client(router.grpc_address) as client:
            client.generate("Hi", **{name: sent(name)}).result()  # type: ignore[arg-type]
            client.chat("Hi", **{name: value}).result()  # type: ignore[arg-type]

    await asyncio.to_thread(ask)
    assert [getattr(in_the_engine(request), name) for request in worker.requests] == [value, value]


@pytest.mark.slow
@every_parameter
async def test_async_client(router: RunningRouter, worker: FakeWorker, name: str) -> None:
    value = example(name)[0]
    async with AsyncClient(router.grpc_address) as client:
        await client.generate("Hi", **{name: sent(name)}).result()  # type: ignore[arg-type]
        await client.chat("Hi", **{name: value}).result()  # type: ignore[arg-type]
    assert [getattr(in_the_engine(request), name) for request in worker.requests] == [value, value]


@every_parameter
async def test_llm(router: RunningRouter, worker: FakeWorker, name: str) -> None:
    """`tests.baton.test_offline` has the engine in process."""
    value = example(name)[0]

    def ask() -> None:
        with LLM(target=router.grpc_address) as llm:
            llm.generate("Hi", LLMParams(**{name: sent(name)}), use_tqdm=False)  # type: ignore[arg-type]
            llm.chat("Hi", LLMParams(**{name: value}), use_tqdm=False)  # type: ignore[arg-type]

    await asyncio.to_thread(ask)
    assert [getattr(in_the_engine(request), name) for request in worker.requests] == [value, value]


SCHEMA: dict[str, Any] = {"type": "object"}
OF_RESPONSES: dict[str, dict[str, Any] | None] = {
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 7},
    "max_tokens": {"max_output_tokens": 7},
    "guided": {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    "prompt_logprobs": None,
}
"""What /v1/responses calls other names; None: what it refuses."""


@every_parameter
async def test_responses(router: RunningRouter, worker: FakeWorker, name: str) -> None:
    given = OF_RESPONSES.get(name, {name: sent(name)})
    ask = router.openai.responses.create
    if name in OF_RESPONSES:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(model="tiny", input="Hi", extra_body={name: sent(name)})
        assert refused.value.param == name
    if given is not None:
        await ask(model="tiny", input="Hi", extra_body=given)
        value = Guided(json_schema=json.dumps(SCHEMA)) if name == "guided" else example(name)[0]
        assert [getattr(in_the_engine(request), name) for request in worker.requests] == [value]
    for alias in parameters()[name].rest_aliases if name not in OF_RESPONSES else ():
        await ask(model="tiny", input="Hi", extra_body={alias: sent(name)})
        assert getattr(in_the_engine(worker.requests[-1]), name) == example(name)[0]


FORM = {"format": {"type": "json_schema", "schema": SCHEMA}}
OF_MESSAGES: dict[str, dict[str, Any] | None] = {
    "stop": {"stop_sequences": ["zz"]},
    "guided": {"output_config": FORM},
    "logprobs": None,
    "prompt_logprobs": None,
}
"""What /v1/messages calls other names; None: what it refuses."""


@pytest.mark.slow
@every_parameter
async def test_messages(router: RunningRouter, worker: FakeWorker, name: str) -> None:
    given = OF_MESSAGES.get(name, {name: sent(name)})
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    async with httpx.AsyncClient(base_url=router.url) as client:
        if name in OF_MESSAGES:
            refused = await client.post("/v1/messages", json={**asked, name: sent(name)})
            assert refused.json()["error"]["message"].startswith(f"{name}: is not a field of messages")
        if given is not None:
            assert (await client.post("/v1/messages", json={**asked, **given})).status_code == 200
            value = Guided(json_schema=json.dumps(SCHEMA)) if name == "guided" else example(name)[0]
            assert [getattr(in_the_engine(request), name) for request in worker.requests] == [value]


@every_parameter
async def test_command(
    router: RunningRouter,
    worker: FakeWorker,
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value, typed = example(name)
    flag = "--" + name.replace("_", "-")
    flags = [flag, typed] if typed else [flag]
    command = ["generate", "Hi", "--json", "--router", router.grpc_address]
    assert await asyncio.to_thread(main, [*command, *flags]) == 0
    with monkeypatch.context() as environment:
        environment.setenv(f"BATON_{name.upper()}", typed or "true")
        assert await asyncio.to_thread(main, command) == 0
    assert [getattr(in_the_engine(request), name) for request in worker.requests] == [value, value]
    assert json.loads(capsys.readouterr().out.splitlines()[0])["finish_reason"]


async def test_the_page_has_the_help_of_each(router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=router.url) as client:
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    for name, parameter in parameters().items():
        for one in (name, *parameter.rest_aliases):
            assert schemas["CompletionBody"]["properties"][one]["anyOf"][0]["description"] == parameter.help


@pytest.mark.slow
def test_nested_values() -> None:
    """The tests above with parameters that are, or hold, dataclasses: they are declared in a process of their own."""
    selected = "same_fields or help_of_each or test_rest or test_responses or test_messages or test_grpc or test_client"
    selected += " or test_async_client or test_llm or test_command"
    command = [sys.executable, "-m", "pytest", "-v", "-n0", "-p", "tests.router.nested_parameters", __file__]
    result = subprocess.run([*command, "-k", selected], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert " 10 passed, " in result.stdout
    assert f" {len(nested_parameters.VALUES) * 8} subtests passed " in result.stdout


async def test_the_bad_words_of_a_body_are_read_once(router: RunningRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        read.append(text)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    await router.openai.completions.create(model="tiny", prompt=["a", "b"], extra_body={"bad_words": ["once"]})
    assert (read.count("once"), read.count(" once")) == (1, 1)


async def test_bad_words_become_tokens(router: RunningRouter, worker: FakeWorker) -> None:
    """With a space before and without; beside those that the client gave as tokens."""
    given = {"bad_words": ["fox", "a"], "bad_words_ids": [{"token_ids": [7, 8]}]}
    await router.openai.completions.create(model="tiny", prompt="Hi", extra_body=given)
    ids = [one.token_ids for one in in_the_engine(worker.requests[0]).bad_words_ids]
    assert ids == [(7, 8), *(tuple(ids_of(text)) for text in ("fox", " fox", "a", " a"))]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"bad_words": ["x" * 1000] * 256}, "bad_words: is too large"),
        ({"bad_words": ["x" * 1000] * 100, "guided": {"choice": ["€" * 60_000]}}, "guided: is too large"),
        ({"bad_words": ["fox", "fox " * 65]}, "bad_words: 'fox fox .*tokens: 64 are the most"),
        (
            {"bad_words": [str(number) for number in range(256)], "bad_words_ids": [{"token_ids": [7, 7]}]},
            "bad_words: with bad_words_ids these are 513 sequences of tokens: 512 are the most",
        ),
    ],
)
async def test_what_no_worker_takes_is_refused_by_name(
    worker: FakeWorker, start_router: StartRouter, given: dict[str, Any], reason: str
) -> None:
    router = await start_router(worker, max_request_mb=1.0)  # as for a model of a longer context
    params = types_pb2.SamplingParams(**given)
    with pytest.raises(grpc.aio.AioRpcError, match=reason) as failed:
        async for _ in router.inference.Generate(inference_pb2.GenerateRequest(prompt="Hi", sampling_params=params)):
            pass
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert worker.requests == []
