"""The form of a whole answer: reasoning, then calls or text of the client's form; and what reads it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from common.errors import InvalidArgumentError
from common.guided import MAX_GRAMMAR_CHARS, Guided, check_grammar, grammar_of
from tests.router import chat_templates
from tests.router.published_templates import published
from tests.router.tiny_tokenizer import eos_id, tokenizer_files
from text.answer_form import AnswerForm
from text.answer_parser import ModelAnswers
from text.answer_parts import Pieces, Reading
from text.conversation import Tool, Tools
from text.response_templates import response_template

ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MARKS = ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]")
X: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = Tools(
    tools=(Tool(name="f", parameters=X | {"additionalProperties": False}, strict=True), Tool(name="g", parameters=X))
)
LOOSE = Tools(tools=(Tool(name="f", parameters=X), Tool(name="g", parameters=X)))
ASKED = "<|im_start|>user\nDo<|im_end|>\n<|im_start|>assistant\n"
SCHEMA = Guided(json_schema=json.dumps(X | {"additionalProperties": False}))
FORMS = {
    "json_schema": (SCHEMA, '{"x": 1}', '{"x": "1"}'),
    "json_object": (Guided(json_object=True), '{"<think>": ["<tool_call>"]}', "[]"),
    "regex": (Guided(regex="[a-z]+ [0-9]"), "ab 1", "ab"),
    "any": (Guided(regex="[^0-9]*"), "{a", "a1"),
    "choice": (Guided(choice=("yes", "yes no")), "yes no", "yes no "),
    "grammar": (Guided(grammar='start: "a" b\nb: /[0-9]+/'), "a12", "ab"),
    "structural_tag": (
        Guided(structural_tag='{"format":{"type":"tag","begin":"<a>","content":{"type":"any_text"},"end":"<b>"}}'),
        "<a>x<b>",
        "<a>x",
    ),
    "older structural_tag": (
        Guided(structural_tag='{"structures": [{"begin": "<a>", "schema": {}, "end": "<b>"}], "triggers": ["<a>"]}'),
        "x<a>1<b>y",
        "x<a>a<b>",
    ),
}  # fmt: skip


@cache
def rust(*, has_added: bool = False, is_special: bool = False) -> RustTokenizer:
    """`has_added`: marks in angle brackets are tokens of their own."""
    made = RustTokenizer.from_str(tokenizer_files()["tokenizer.json"].decode())
    made.add_special_tokens(list(MARKS))
    if has_added:
        made.add_tokens([AddedToken(mark, special=is_special, normalized=False) for mark in ADDED])
    return made


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_text(rust().to_str())
    return LLTokenizer(str(file), n_vocab=rust().get_vocab_size(), eos_token=eos_id())


def answer_to(
    prompt: str,
    chat_template: str = chat_templates.HERMES,
    tools: Tools | None = None,
    tokenizer: RustTokenizer | None = None,
) -> AnswerForm:
    template = response_template(None, chat_template)
    assert template is not None
    reader, tools = ModelAnswers(template, tokenizer or rust()), tools or Tools()
    return AnswerForm(
        tools=tools,
        reading=reader.reading(prompt, tools),
        thought=reader.thought(prompt),
        calls=reader.strict if tools.shown else None,
        free=reader.strict.format(tools) if tools.shown and not tools.is_forced else None,
        tokens=reader.tokens,
    )


def composed(answer: AnswerForm, form: Guided | None) -> tuple[Guided, Reading]:
    guided, reading = answer.with_form(form, str)
    assert guided is not None
    assert reading is not None
    return guided, reading


@cache
def matcher_of(tokenizer: LLTokenizer, guided: Guided) -> LLMatcher:
    check_grammar(guided)
    matcher = LLMatcher(tokenizer, grammar_of(guided), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(tokenizer: LLTokenizer, guided: Guided, text: str) -> bool:
    matcher = matcher_of(tokenizer, guided).deep_copy()
    tokens = rust().encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def read(reading: Reading, text: str, size: int = 1) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, calls) of a text that comes in pieces."""
    parser, pieces = reading.parser(), Pieces()
    for start in range(0, len(text), size):
        pieces.extend(parser.add(text[start : start + size]))
    pieces.extend(parser.end())
    assert parser.num_calls == len({one.index for one in pieces.calls})
    calls: dict[int, tuple[str, str]] = {}
    for one in pieces.calls:
        name, arguments = calls.get(one.index, ("", ""))
        calls[one.index] = (name + one.name, arguments + one.arguments)
    return pieces.reasoning, pieces.content, list(calls.values())


@pytest.mark.parametrize("name", FORMS)
def test_a_form_holds_from_the_end_of_the_reasoning_on(tokenizer: LLTokenizer, name: str) -> None:
    form, good, bad = FORMS[name]
    for prompt, opening in ((ASKED, "<think>"), (ASKED + "<think>\n", "")):
        guided, reading = composed(answer_to(prompt), form)
        for thought in ("hm 1 {", "", "</thin> <tool_call>\n"):
            for gap in ("", "\n", "\n\n"):
                before = f"{opening}{thought}</think>{gap}"
                assert accepts(tokenizer, guided, before + good), before
                assert not accepts(tokenizer, guided, before + bad), before
                for size in (1, 3, 1000):
                    assert read(reading, before + good, size) == (thought.strip(), good, [])
        assert accepts(tokenizer, guided, good) is (opening != "")  # the model may leave its reasoning out
        assert not accepts(tokenizer, guided, f"{opening}hm")
        assert read(reading, f"{opening}hm</th") == ("hm</th", "", [])  # cut off
    for prompt in (ASKED + "<think>\n\n</think>\n\n", ASKED + "<think>hm</think>", ASKED + "Already "):
        assert answer_to(prompt).with_form(form, str)[0] == form  # at once


def test_line_breaks_after_the_reasoning_are_no_part_of_the_form(tokenizer: LLTokenizer) -> None:
    guided, reading = composed(answer_to(ASKED), Guided(choice=("\nx",)))
    for num, is_good in ((1, False), (2, False), (3, True), (4, False)):
        assert accepts(tokenizer, guided, "<think></think>" + "\n" * num + "x") is is_good
    assert read(reading, "<think></think>\n\n\nx") == ("", "\nx", [])
    assert read(reading, "\nx") == ("", "\nx", [])


@pytest.mark.parametrize("name", FORMS)
def test_special_tokens_around_the_reasoning(tokenizer: LLTokenizer, name: str) -> None:
    form, good, bad = FORMS[name]
    guided, reading = composed(answer_to("[INST]Do[/INST]", chat_templates.MISTRAL + "{# [THINK] #}"), form)
    assert len(reading.shown_token_ids & {rust().token_to_id(mark) for mark in MARKS}) == 2
    for text, is_good in (
        (f"[THINK]hm [/THIN K][/THINK]{good}", True),
        (f"[THINK][/THINK]\n{good}", True),
        (good, True),
        (f"[THINK]hm[/THINK]{bad}", False),
        ("[THINK]hm", False),
    ):
        assert accepts(tokenizer, guided, text) is is_good, text
    assert read(reading, f"[THINK]hm[/THINK]{good}") == ("hm", good, [])


SHAPES = {
    "hermes": (
        chat_templates.HERMES.replace("<think>", ""),
        TOOLS,
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n</tool_call>',
        "\n",
    ),
    "mistral": (chat_templates.MISTRAL, TOOLS, '[TOOL_CALLS]f[ARGS]{"x": 1}', "[TOOL_CALLS]f[ARGS]{}", ""),
    "mistral list": (
        chat_templates.MISTRAL_LIST,
        TOOLS,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]',
        '[TOOL_CALLS] [{"name": "f", "arguments": {"y": 1}}]',
        None,
    ),
    "tagged": (
        chat_templates.TAGGED,
        LOOSE,
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=h>\n</function>\n</tool_call>",
        "\n",
    ),
    "llama": (
        chat_templates.LLAMA,
        LOOSE,
        '{"name": "f", "parameters": {"x": 1}}',
        '{"name": "h", "parameters": {}}',
        None,
    ),
}  # fmt: skip
CLOSED: dict[str, Any] = {"type": "object", "properties": {"name": {"const": "Jo"}}, "required": ["name"]}
JSON_FORMS = (
    (SCHEMA, '{"x": 1}'),
    (Guided(json_schema=json.dumps(CLOSED | {"additionalProperties": False})), '{"name": "Jo"}'),
    (Guided(json_schema='{"enum": ["<tool_call>", "[TOOL_CALLS]"]}'), '"<tool_call>"'),
    (Guided(choice=("yes", "no")), "no"),
    (Guided(regex="[0-9]+"), "12"),
    (Guided(regex="<[^0-9]*"), "<tool <tool_call>"),
    (Guided(regex="<[a-z_ <>]*"), "<tool_call"),
)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_call_or_text_of_the_form(tokenizer: LLTokenizer, shape: str) -> None:
    chat_template, tools, call, bad_call, separator = SHAPES[shape]
    for form, good in JSON_FORMS:
        guided, reading = composed(answer_to("", chat_template, tools), form)
        for text, is_good in ((call, True), (good, True), (bad_call, False), (f"So: {call}", False), ("So", False)):
            assert accepts(tokenizer, guided, text) is is_good, (form, text)
        assert not accepts(tokenizer, guided, good + call)
        assert not accepts(tokenizer, guided, call + good)
        for size in (1, 4, 1000):
            assert read(reading, good, size) == ("", good, [])
            ((name, arguments),) = read(reading, call, size)[2]
            assert (name, json.loads(arguments)) == ("f", {"x": 1})
        if separator is not None:
            two = call + separator + call
            assert accepts(tokenizer, guided, two)
            assert len(read(reading, two)[2]) == 2


def test_reasoning_before_a_call_or_text_of_the_form(tokenizer: LLTokenizer) -> None:
    call = SHAPES["hermes"][2]
    guided, reading = composed(answer_to(ASKED, tools=TOOLS), SCHEMA)
    for after, content, num_calls in (('{"x": 1}', '{"x": 1}', 0), (call, "", 1)):
        for before, reasoning in ((f"<think>I could {call}</think>\n\n", f"I could {call}"), ("", "")):
            assert accepts(tokenizer, guided, before + after)
            reasoned, text, calls = read(reading, before + after)
            assert (reasoned, text, len(calls)) == (reasoning, content, num_calls)
    assert not accepts(tokenizer, guided, "<think>hm</think>text")


def test_one_call_if_calls_are_not_parallel(tokenizer: LLTokenizer) -> None:
    call = SHAPES["hermes"][2]
    answer = answer_to(ASKED, tools=Tools(tools=TOOLS.tools, parallel=False))
    guided, _ = composed(answer, SCHEMA)
    assert accepts(tokenizer, guided, call)
    assert not accepts(tokenizer, guided, f"{call}\n{call}")


@pytest.mark.parametrize(
    ("changes", "text", "calls"),
    [
        ({"choice": "required", "named": "f"}, '{"x": 1}', [("f", '{"x": 1}')]),
        ({"choice": "required"}, '[{"name": "f", "parameters": {"x": 1}}]', [("f", '{"x": 1}')]),
    ],
)
def test_a_forced_call_is_the_whole_answer_after_the_reasoning(
    tokenizer: LLTokenizer, changes: dict[str, Any], text: str, calls: list[tuple[str, str]]
) -> None:
    for form in (None, Guided(regex="[0-9]+")):
        guided, reading = composed(answer_to(ASKED, tools=Tools(tools=TOOLS.tools, **changes)), form)
        for before, reasoning in (("<think>\nhm\n</think>\n\n", "hm"), ("", "")):
            assert accepts(tokenizer, guided, before + text)
            assert not accepts(tokenizer, guided, before + "12")
            assert read(reading, before + text) == (reasoning, "", calls)


def test_strict_tools_have_no_say_in_the_reasoning(tokenizer: LLTokenizer) -> None:
    call, bad_call = SHAPES["hermes"][2:4]
    for prompt, opening in ((ASKED, "<think>"), (ASKED + "<think>\n", "")):
        guided, reading = composed(answer_to(prompt, tools=TOOLS), None)
        text = f"{opening}or {bad_call}?</think>\n\nSo:\n{call}"
        assert accepts(tokenizer, guided, text)
        assert not accepts(tokenizer, guided, f"{opening}hm</think>{bad_call}")
        reasoning, content, calls = read(reading, text)
        assert (reasoning, content, calls) == (f"or {bad_call}?", "So:", [("f", '{"x": 1}')])


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("is_spelled", [False, True])
def test_marks_that_are_tokens_of_their_own(tmp_path: Path, is_special: bool, is_spelled: bool) -> None:
    """As Qwen3's. The model may write one, or spell it; neither gets around the form."""
    own, file = rust(has_added=True, is_special=is_special), tmp_path / "tokenizer.json"
    file.write_text(own.to_str())
    tokenizer = LLTokenizer(str(file), n_vocab=own.get_vocab_size(), eos_token=eos_id())
    encode = rust() if is_spelled else own
    call, bad_call = SHAPES["hermes"][2:4]
    tagged, bad_tagged = SHAPES["tagged"][2:4]
    thoughts = (("<think>", "<think>hm</think>\n"), ("", "hm</think>\n"))
    for opening, thought in thoughts:
        prompt = ASKED if opening else ASKED + "<think>\n"
        for template, tools, form, good, bad in (
            (chat_templates.HERMES, Tools(), SCHEMA, '{"x": 1}', call),
            (chat_templates.HERMES, TOOLS, SCHEMA, call, bad_call),
            (chat_templates.HERMES, TOOLS, Guided(regex="[^0-9]*"), call, bad_call),
            (chat_templates.TAGGED, LOOSE, SCHEMA, tagged, bad_tagged),
            (chat_templates.HERMES, TOOLS, None, f"So:{call}\n{call}.", f"So:{bad_call}"),
        ):
            guided, reading = composed(answer_to(prompt, template, tools, own), form)
            check_grammar(guided)
            for text, is_good in ((good, True), (bad, False)):
                matcher = LLMatcher(tokenizer, grammar_of(guided), log_level=0)
                tokens = encode.encode(thought + text, add_special_tokens=False).ids
                assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) is is_good, text
            assert reading.shown_token_ids >= ({own.token_to_id("</think>")} if is_special else set())
            reasoning, _, calls = read(reading, thought + good)
            assert (reasoning, len(calls)) == ("hm", good.count("<tool_call>"))


def test_tools_that_may_not_be_called_leave_the_form_alone() -> None:
    tools = Tools(tools=TOOLS.tools, choice="none")
    assert answer_to("", chat_templates.LLAMA, tools).with_form(SCHEMA, str) == (SCHEMA, None)


def test_a_shape_of_calls_that_is_not_known() -> None:
    template = {"start_anchor": "A:", "fields": {"tool_calls": {"open": "<c>", "close": "</c>"}, "content": {}}}
    reader = ModelAnswers(template, rust())
    answer = AnswerForm(tools=LOOSE, reading=reader.reading("A:", LOOSE), calls=reader.strict)
    with pytest.raises(InvalidArgumentError, match="cannot be together with tools") as caught:
        answer.with_form(SCHEMA, lambda name: f"my {name}")
    assert caught.value.field == "my guided"
    assert answer.with_form(None, str) == (None, answer.reading)


def test_too_much_in_all() -> None:
    form = Guided(choice=("漢" * (MAX_GRAMMAR_CHARS - 10),))
    with pytest.raises(InvalidArgumentError, match=f"more than {MAX_GRAMMAR_CHARS}"):
        answer_to(ASKED).with_form(form, str)
    assert answer_to(ASKED + "<think></think>").with_form(form, str)[0] == form
    assert answer_to(ASKED).with_form(Guided(choice=("漢" * (MAX_GRAMMAR_CHARS - 1000),)), str)[0] is not None


@pytest.mark.parametrize(
    ("name", "options", "opening"),
    [
        ("qwen3", {}, "<think>"),
        ("qwen3", {"enable_thinking": False}, None),
        ("qwen3_6", {}, ""),
        ("qwen3_6", {"enable_thinking": False}, None),
        ("qwen2_5", {}, None),
        ("mistral v13 thinking", {}, "[THINK]"),
        ("mistral v11 thinking", {}, "<think>"),
    ],
)
def test_published_templates(name: str, options: dict[str, Any], opening: str | None) -> None:
    from text.chat_template import ChatTemplate
    from text.conversation import Conversation

    source = published(name)
    template = response_template(None, source)
    assert template is not None
    messages = [{"role": "user", "content": "Say <think>"}]
    prompt = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        Conversation(messages=messages, template_options=options)
    )
    thought = ModelAnswers(template, rust()).thought(prompt)
    assert (None if thought is None else thought.open) == opening
