"""Logprobs of text completions: which tokens are told, how they are written, and where they are in the text."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from protos.baton.v1 import decode_pb2
from tests.each_case import each_case
from tests.router.conftest import RunningRouter
from tests.router.test_echo import complete
from tests.router.test_text import metaspace_tokenizer
from tests.router.tiny_tokenizer import byte_ids, eos_id, ids_of, tiny_tokenizer
from tests.support.fake_worker import FakeWorker
from text.text_offsets import TextOffsets

ROCKETS = "a\N{ROCKET}\N{ROCKET}!"
OF_A_ROCKET = [f"bytes:\\x{byte:02x}" for byte in "\N{ROCKET}".encode()]
TOKENS = ["a", *OF_A_ROCKET, *OF_A_ROCKET, "!"]
OFFSETS = [0, 1, 1, 1, 1, 2, 2, 2, 2, 3]


def spell(worker: FakeWorker, text: str) -> None:
    """The worker answers with a token for each byte."""
    worker.answer = [*byte_ids(text), eos_id()]


@each_case("num", [1, 2])
async def test_parts_of_characters(router: RunningRouter, worker: FakeWorker, num: int) -> None:
    spell(worker, ROCKETS)
    whole = await complete(router, prompt="x", logprobs=1, max_tokens=len(TOKENS), n=num)
    assert len(whole["choices"]) == num
    for choice in whole["choices"]:
        assert choice["text"] == ROCKETS
        assert (choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (TOKENS, OFFSETS)
        for token, top in zip(TOKENS, choice["logprobs"]["top_logprobs"], strict=True):
            assert isinstance(top, dict)
            assert top[token] == -0.5


async def test_parts_of_characters_of_the_best(router: RunningRouter, worker: FakeWorker) -> None:
    spell(worker, ROCKETS)
    (choice,) = (await complete(router, prompt="x", logprobs=0, max_tokens=len(TOKENS), best_of=2))["choices"]
    assert (choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (TOKENS, OFFSETS)


async def test_parts_of_characters_in_a_stream(router: RunningRouter, worker: FakeWorker) -> None:
    spell(worker, ROCKETS)
    body = {"prompt": "x", "logprobs": 0, "max_tokens": len(TOKENS), "stream": True}
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/completions", json=body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    pieces: list[dict[str, Any]] = [one["logprobs"] for event in events for one in event["choices"] if one["logprobs"]]
    assert [token for piece in pieces for token in piece["tokens"]] == TOKENS
    assert [offset for piece in pieces for offset in piece["text_offset"]] == OFFSETS


@pytest.mark.parametrize("max_tokens", [0, len(TOKENS)])
async def test_parts_of_characters_of_the_prompt(router: RunningRouter, worker: FakeWorker, max_tokens: int) -> None:
    """The prompt and its answer are one text."""
    spell(worker, ROCKETS)
    body = {"prompt": byte_ids(ROCKETS), "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    (choice,) = (await complete(router, **body))["choices"]
    again = max_tokens > 0
    assert choice["text"] == ROCKETS * (1 + again)
    assert choice["logprobs"]["tokens"] == TOKENS * (1 + again)
    assert choice["logprobs"]["text_offset"] == [*OFFSETS, *(again * [len(ROCKETS) + offset for offset in OFFSETS])]
    assert all(len(top) > 0 for top in choice["logprobs"]["top_logprobs"][1:])


async def test_an_answer_that_completes_the_character_of_its_prompt(router: RunningRouter, worker: FakeWorker) -> None:
    ids = byte_ids(ROCKETS)
    worker.answer = [*ids[3:], eos_id()]
    (choice,) = (await complete(router, prompt=ids[:3], logprobs=0, max_tokens=len(ids) - 3))["choices"]
    assert choice["text"] == ROCKETS[1:]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2]


async def test_tokens_without_text_take_no_room(router: RunningRouter, worker: FakeWorker) -> None:
    first, second = ids_of("a"), ids_of("b")
    worker.answer = [*first, eos_id(), *second, eos_id()]
    body = {"prompt": "x", "logprobs": 0, "max_tokens": 3, "ignore_eos": True}
    (choice,) = (await complete(router, **body))["choices"]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1]


@each_case("num_top", [0, 1, 2])
async def test_the_sampled_token_is_always_told(router: RunningRouter, worker: FakeWorker, num_top: int) -> None:
    """It may be none of the likeliest, and its logprob is its own."""

    def unlikely(event: decode_pb2.DecodeEvent) -> None:
        for token in event.tokens:
            del token.top_logprobs[:]
            for place in range(num_top):
                token.top_logprobs.add(token_id=ids_of("xyz"[place])[0], logprob=-0.1 * (place + 1))
            token.logprob = -7.0

    spell(worker, "ab")
    worker.spoil = unlikely
    (choice,) = (await complete(router, prompt="x", logprobs=num_top, max_tokens=2, temperature=2))["choices"]
    for token, top in zip("ab", choice["logprobs"]["top_logprobs"], strict=True):
        assert isinstance(top, dict)
        assert (top[token], len(top)) == (-7.0, num_top + 1)


def test_tokens_that_are_no_text() -> None:
    """Bytes that begin a character which never comes are one replacement character each time they stop."""
    offsets = TextOffsets()
    tokens = [b"a", b"\xf0\x9f", b"b", b"\xff", b"c"]
    assert offsets.add(tokens) == [0, 1, 2, 3, 4]
    assert b"".join(tokens).decode(errors="replace") == "a\ufffdb\ufffdc"


def test_words_have_the_space_before_them() -> None:
    tokenizer = metaspace_tokenizer()
    assert [tokenizer.token_bytes(token_id) for token_id in (1, 4, 2)] == [b" Hello", b"s", b" world"]


def test_offsets_count_what_tokens_are() -> None:
    tokenizer = tiny_tokenizer()
    text = "na\u00efve \u6771\u4eac"
    ids = ids_of(text)
    offsets = TextOffsets().add(tokenizer.token_bytes(token_id) for token_id in ids)
    for token_id, offset in zip(ids, offsets, strict=True):
        whole = tokenizer.token_bytes(token_id)
        assert whole.decode(errors="ignore") in text[offset:]
