"""`strict` tools that the model calls by itself: free text, in which calls are held to the tools' schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as RustTokenizer

from common.errors import InvalidArgumentError
from common.guided import Guided, check_grammar, grammar_of
from tests.common.test_guided import matches, tokenizer
from tests.each_case import each_case
from tests.router import chat_templates
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.router.tiny_tokenizer import eos_id, tokenizer_files, vocab_size
from tests.router.tool_calls import ASK, TOOL, TWO_TOOLS, worker
from tests.support.fake_worker import FakeWorker
from text.answer_parser import ModelAnswers
from text.conversation import Tool, Tools
from text.response_templates import response_template

__all__ = ["tokenizer", "worker"]

X: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
STRICT = Tool(name="f", parameters=X | {"additionalProperties": False}, strict=True)
LOOSE = Tool(name="g", parameters=X)
STRICT_TOOL: Any = {"type": "function", "function": TOOL["function"] | {"strict": True}}
MARKS = ["[TOOL_CALLS]", "[ARGS]"]


def guide_of(chat_template: str, rust: RustTokenizer, tools: Tools) -> Guided:
    template = response_template(None, chat_template)
    assert template is not None
    form = ModelAnswers(template, rust).strict.format(tools)
    assert form is not None
    return Guided(structural_tag=json.dumps({"format": form}))


def with_marks(*marks: str) -> RustTokenizer:
    rust = RustTokenizer.from_str(tokenizer_files()["tokenizer.json"].decode())
    rust.add_special_tokens(list(marks))
    return rust


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ("No call at all.", True),
        ('Text with {"x": "y"} and <tool alike.', True),
        ("<think>hm</think>First: " + hermes("f", '{"x": 1}'), True),
        (hermes("f", '{"x": 1}') + "\n" + hermes("g", '{"any": ["thing"]}') + " Done.", True),
        (hermes("f", '{"x": "one"}'), False),
        (hermes("f", "{}"), False),
        (hermes("f", '{"x": 1, "y": 2}'), False),
        (hermes("h", '{"x": 1}'), False),
        ("Now <tool_call> without a call", False),
        (hermes("f", '{"x": 1}') + hermes("f", '{"x": null}'), False),
    ],
)
def test_hermes(tokenizer: LLTokenizer, text: str, is_good: bool) -> None:
    guide = guide_of(chat_templates.HERMES, with_marks(), Tools(tools=(STRICT, LOOSE)))
    assert matches(tokenizer, guide, text) is is_good


def test_one_call_is_the_end_if_calls_are_not_parallel(tokenizer: LLTokenizer) -> None:
    guide = guide_of(chat_templates.HERMES, with_marks(), Tools(tools=(STRICT,), parallel=False))
    call = hermes("f", '{"x": 1}')
    assert matches(tokenizer, guide, f"So: {call}")
    assert not matches(tokenizer, guide, call + call)


@pytest.mark.parametrize(
    ("chat_template", "text", "is_good"),
    [
        (chat_templates.MISTRAL, "Nothing to call.", True),
        (chat_templates.MISTRAL, 'So:[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{"a": 2}', True),
        (chat_templates.MISTRAL, 'So:[TOOL_CALLS]f[ARGS]{"x": "one"}', False),
        (chat_templates.MISTRAL, "So:[TOOL_CALLS]h[ARGS]{}", False),
        (chat_templates.MISTRAL_LIST, "Nothing to call.", True),
        (chat_templates.MISTRAL_LIST, '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', True),
        (
            chat_templates.MISTRAL_LIST,
            '[TOOL_CALLS][{"name": "g", "arguments": {"a": 1}}, {"name": "f", "arguments": {"x": 1}}]',
            True,
        ),
        (chat_templates.MISTRAL_LIST, '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1.5}}]', False),
        (chat_templates.MISTRAL_LIST, "[TOOL_CALLS] []", False),
    ],
)
def test_calls_behind_special_tokens(tmp_path: Path, chat_template: str, text: str, is_good: bool) -> None:
    rust = with_marks(*MARKS)
    file = tmp_path / "tokenizer.json"
    file.write_text(rust.to_str())
    own = LLTokenizer(str(file), n_vocab=rust.get_vocab_size(), eos_token=eos_id())
    guide = guide_of(chat_template, rust, Tools(tools=(STRICT, LOOSE)))
    tokens = rust.encode(text, add_special_tokens=False).ids
    assert consumes(own, guide, tokens) is is_good
    assert rust.get_vocab_size() == vocab_size() + 2


def consumes(own: LLTokenizer, guide: Guided, tokens: list[int]) -> bool:
    check_grammar(guide)
    matcher = LLMatcher(own, grammar_of(guide), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("chat_template", "marks", "words"),
    [
        (chat_templates.LLAMA, (), "no mark tells"),
        (chat_templates.TAGGED, (), "no mark tells"),
        (chat_templates.MISTRAL, (), "is no special token"),
    ],
)
def test_shapes_that_cannot_be_held(chat_template: str, marks: tuple[str, ...], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        guide_of(chat_template, with_marks(*marks), Tools(tools=(STRICT,)))


async def test_a_request(router: RunningRouter, worker: FakeWorker) -> None:
    """What the worker is asked for, and that its answer is read as that of any model with tools."""
    answer = await router.openai.chat.completions.create(
        model="tiny", messages=ASK, tools=[STRICT_TOOL], max_tokens=200
    )
    (request,) = worker.requests
    tag = json.loads(request.sampling_params.guided.structural_tag)
    assert tag["format"]["elements"][-1]["tags"][0]["content"]["elements"][1]["json_schema"]["properties"] == {
        "x": {"type": "integer"}
    }
    assert (answer.choices[0].message.content, len(answer.choices[0].message.tool_calls or [])) == ("Yes.", 2)
    await router.openai.chat.completions.create(
        model="tiny", messages=ASK, tools=[STRICT_TOOL], tool_choice="none", max_tokens=5
    )
    assert not worker.requests[-1].sampling_params.HasField("guided")  # the model is told of none


async def test_what_is_refused(start_worker: StartWorker, start_router: StartRouter) -> None:
    worker = await start_worker()
    worker.chat_template = chat_templates.LLAMA
    router = await start_router(worker)
    with pytest.raises(openai.BadRequestError) as caught:
        await router.openai.chat.completions.create(model="tiny", messages=ASK, tools=TWO_TOOLS)
    assert caught.value.param == "tools[1].function.strict"


@each_case(
    ("more", "field"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"use_beam_search": True, "n": 2}, "tools"),
        ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
    ],
)
async def test_what_does_not_go_together(router: RunningRouter, more: dict[str, Any], field: str) -> None:
    body = {"messages": ASK, "tools": [STRICT_TOOL], "max_tokens": 5, **more}
    async with httpx.AsyncClient(base_url=router.url) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
