"""Answers of models with tools and reasoning, in each known shape, whole and cut into any pieces."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UnavailableError
from tests.router import chat_templates
from tests.router.tiny_tokenizer import tiny_tokenizer, tokenizer_files
from text.answer_parser import ModelAnswers
from text.answer_parts import PartsParser, TextPart
from text.conversation import Tool, Tools
from text.detokenizer import Detokenizer
from text.forced_calls import forced_reading
from text.response_templates import response_template
from text.tokenizer import Tokenizer

WEATHER = Tool(
    name="get_weather",
    description="The weather in a city",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
    },
)
CHATML = "<|im_start|>assistant\n"


@dataclass
class Read:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    is_cut: bool = False

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(
    chat_template: str,
    text: str,
    *,
    prompt: str = CHATML,
    own: object = None,
    tools: Tools | None = None,
    cuts: list[int] | None = None,
) -> Read:
    """`cuts`: where `text` is cut; character by character if None."""
    template = response_template(own, chat_template)
    assert template is not None
    tools = tools or Tools(tools=(WEATHER,))
    reading = ModelAnswers(template, tiny_tokenizer().rust).reading(prompt, tools)
    assert reading is not None
    return taken(reading.parser(), text, cuts)


def taken(parser: PartsParser, text: str, cuts: list[int] | None) -> Read:
    """What `parser` makes of `text`, which is cut as in `read`."""
    ends = range(len(text) + 1) if cuts is None else [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    result = Read()
    for pieces in [*(parser.add(text[a:b]) for a, b in itertools.pairwise(ends)), parser.end()]:
        result.content += "".join(pieces.content)
        result.reasoning += "".join(pieces.reasoning)
        for delta in pieces.calls:
            if delta.call_id:
                assert delta.index == len(result.calls)
                result.calls.append((delta.name, ""))
                result.ids.append(delta.call_id)
            name, arguments = result.calls[delta.index]
            result.calls[delta.index] = (name, arguments + delta.arguments)
    assert parser.num_calls == len(result.calls)
    result.is_cut = parser.is_cut
    return result


PARIS = '{"city": "Paris", "days": 3}'
HERMES_TWO = (
    'Let me see.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {"city": "{\\"\\\\R}"}, "name": "get_weather"}\n</tool_call>'
)
TAGGED = (
    "<think>\nhm\n</think>\n\nSo:\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>"
)
SHAPES = {
    "hermes": (chat_templates.HERMES, HERMES_TWO, "Let me see.", "", [PARIS, '{"city": "{\\"\\\\R}"}']),
    "tagged": (chat_templates.TAGGED, TAGGED, "So:", "hm", ['{"city": "Paris", "days": 3, "exact": true}']),
    "llama": (chat_templates.LLAMA, f'{{"name": "get_weather", "parameters": {PARIS}}}', "", "", [PARIS]),
    "llama python tag": (
        chat_templates.LLAMA,
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}',
        "",
        "",
        [PARIS],
    ),
    "mistral list": (
        chat_templates.MISTRAL_LIST,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "get_weather", "arguments": {{}}}}]',
        "",
        "",
        [PARIS, "{}"],
    ),
    "mistral": (
        chat_templates.MISTRAL,
        f"Well, [TOOL_CALLS]get_weather[ARGS]{PARIS} [TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{{}}",
        "Well,",
        "",
        [PARIS, "{}"],
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@given(cuts=st.one_of(st.none(), st.lists(st.integers(0, 400), max_size=12)))
def test_each_shape_is_read_however_it_is_cut(shape: str, cuts: list[int] | None) -> None:
    chat_template, text, content, reasoning, arguments = SHAPES[shape]
    result = read(chat_template, text, cuts=cuts)
    assert (result.content, result.reasoning) == (content, reasoning)
    assert result.calls == [("get_weather", one) for one in arguments]
    assert len(set(result.ids)) == len(arguments)
    assert all(len(one) == 9 and one.isalnum() for one in result.ids)


def test_parts_keep_their_order_if_they_come_at_once() -> None:
    template = response_template(None, chat_templates.HERMES)
    assert template is not None
    reading = ModelAnswers(template, tiny_tokenizer().rust).reading(CHATML, Tools(tools=(WEATHER,)))
    assert reading is not None
    call = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    parts = reading.parser().add(f"One {call} two {call} three.").parts
    told = [part.text if isinstance(part, TextPart) else part.index for part in parts]
    assert told == ["One", 0, "two", 1, "three."]


def test_arguments_come_while_they_are_written() -> None:
    template = response_template(None, chat_templates.HERMES)
    assert template is not None
    reading = ModelAnswers(template, tiny_tokenizer().rust).reading(CHATML, Tools(tools=(WEATHER,)))
    assert reading is not None
    parser = reading.parser()
    first = parser.add('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa')
    assert [(one.name, one.arguments) for one in first.calls] == [("get_weather", '{"city": "Pa')]
    assert [one.arguments for one in parser.add("ris").calls] == ["ris"]
    assert [one.arguments for one in parser.add('"}}').calls] == ['"}']
    assert not parser.add("</tool_call>").calls


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nno JSON\n</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>["get_weather"]</tool_call>',
        "<tool_call>" + "[" * 3000,
        "a < b, <tool, <tool_cal",
        '{"name": "get_weather"}',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    result = read(chat_templates.HERMES, text)
    assert (result.content, result.calls) == (text, [])


def test_an_answer_that_is_cut_off_keeps_what_has_come() -> None:
    result = read(chat_templates.HERMES, HERMES_TWO[: HERMES_TWO.index("Paris") + 3])
    assert result.calls == [("get_weather", '{"city": "Par')]
    result = read(chat_templates.HERMES, 'Hi <tool_call>{"name": "get_wea')
    assert (result.content, result.calls) == ('Hi <tool_call>{"name": "get_wea', [])


def test_arguments_that_are_a_text_of_json_are_json() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>'
    assert read(chat_templates.HERMES, text).parsed == [("get_weather", {"city": "Paris"})]
    assert read(chat_templates.HERMES, '<tool_call>{"name": "get_weather"}</tool_call>').calls == [
        ("get_weather", "{}")
    ]


@pytest.mark.parametrize("shape", ["hermes", "mistral list", "mistral"])
def test_without_parallel_calls_the_first_is_the_last(shape: str) -> None:
    chat_template, text, content, _, arguments = SHAPES[shape]
    result = read(chat_template, text, tools=Tools(tools=(WEATHER,), parallel=False))
    assert (result.content, result.calls) == (content, [("get_weather", arguments[0])])


def test_reasoning_that_the_template_began_or_ended() -> None:
    text = "I think so.\n</think>\n\n Yes. "
    prompt = "<|im_start|>user\n<think>no</think><|im_end|>\n<|im_start|>assistant\n<think>\n"
    result = read(chat_templates.THINKS_AT_ONCE, text, prompt=prompt, tools=Tools())
    assert (result.reasoning, result.content) == ("I think so.", "Yes. ")
    result = read(chat_templates.HERMES, "Yes.", prompt=f"{CHATML}<think>\n\n</think>\n\n")
    assert (result.reasoning, result.content) == ("", "Yes.")
    result = read(chat_templates.HERMES, "<think>\nnever done ", prompt=CHATML)
    assert (result.reasoning, result.content) == ("never done", "")


def test_calls_are_text_if_there_are_no_tools() -> None:
    text = "<think>a</think>" + HERMES_TWO
    for tools in (Tools(), Tools(tools=(WEATHER,), choice="none")):
        result = read(chat_templates.HERMES, text, tools=tools)
        assert (result.reasoning, result.content, result.calls) == ("a", HERMES_TWO, [])


def test_long_answers_are_not_kept() -> None:
    template = response_template(None, chat_templates.HERMES)
    assert template is not None
    reading = ModelAnswers(template, tiny_tokenizer().rust).reading(CHATML, Tools(tools=(WEATHER,)))
    assert reading is not None
    parser: Any = reading.parser()
    for _ in range(2000):
        assert parser.add("word word ").content
    assert len(parser._parser._buffer) < 10_000
    assert len(parser._parser._body) < 100
    calls = parser.add('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>').calls
    assert [(one.name, one.arguments) for one in calls] == [("f", '{"a": 1}')]


def test_the_tokenizers_own_template_decides() -> None:
    own = {
        "start_anchor": CHATML,
        "fields": {
            "thinking": {"open": "<<", "close": ">>"},
            "tool_calls": {
                "open_pattern": r"CALL (?P<name>\w+) ",
                "close": ";",
                "repeats": True,
                "content": "kv-lines",
                "content_args": {"line_sep": ","},
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    }
    result = read(chat_templates.HERMES, "<<hm>>Yes. CALL get_weather city:Paris,days:3;", own=own)
    assert (result.reasoning, result.content) == ("hm", "Yes.")
    assert result.parsed == [("get_weather", {"city": "Paris", "days": 3})]
    templates: tuple[dict[str, object], ...] = (
        {"fields": {}},
        {"start_anchor": "x", "fields": {"content": {"open_pattern": "("}}},
        {"fields": 1},
    )
    for wrong in templates:
        with pytest.raises(UnavailableError, match="response_template"):
            ModelAnswers(wrong, tiny_tokenizer().rust)


def test_control_tokens_that_open_calls_are_seen_and_no_others() -> None:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer

    rust = RustTokenizer.from_str(tokenizer_files()["tokenizer.json"].decode())
    rust.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("[ARGS]", special=True)])
    template = response_template(None, chat_templates.MISTRAL)
    assert template is not None
    tokenizer = Tokenizer(rust, None)
    reading = ModelAnswers(template, rust).reading("[/INST]", Tools(tools=(WEATHER,)))
    assert reading is not None
    ids = rust.encode("é [TOOL_CALLS]get_weather[ARGS]{}<|im_end|>", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer, [], reading.shown_token_ids)
    text = "".join(detokenizer.add(token_id) for token_id in ids) + detokenizer.flush()
    assert text == "é [TOOL_CALLS]get_weather[ARGS]{}"
    assert "".join(Detokenizer(tokenizer, []).add(token_id) for token_id in ids) == "é get_weather{}"


MARKS = {
    "hermes": "</tool_call>",
    "llama": "<|python_tag|>",
    "llama python tag": "<|python_tag|>{",
    "mistral list": "[TOOL_CALLS] [",
    "mistral": " [TOOL_CALLS]get_weather[ARGS]{}",
}


@pytest.mark.parametrize("shape", MARKS)
@given(cuts=st.one_of(st.none(), st.lists(st.integers(0, 400), max_size=12)))
def test_a_mark_inside_a_string_ends_nothing(shape: str, cuts: list[int] | None) -> None:
    chat_template, text, content, _, arguments = SHAPES[shape]
    city = f'say \\" {MARKS[shape]} now\\\\'
    changed = text.replace("Paris", city)
    result = read(chat_template, changed, cuts=cuts)
    assert result.content == content
    assert result.calls == [("get_weather", one.replace("Paris", city)) for one in arguments]


def test_a_quote_that_nobody_closed_hides_no_later_call() -> None:
    good = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    bad = '<tool_call>\n{"name: 1}\n</tool_call>'
    result = read(chat_templates.HERMES, bad + good)
    assert (result.content, result.calls) == (bad, [("get_weather", "{}")])


@pytest.mark.parametrize(
    ("shape", "text", "content", "calls", "is_cut"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')], True),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}', "", [("f", '{"x": 1}')], True),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}\n', "", [("f", '{"x": 1}')], False),
        ("hermes", 'A <tool_call>{"name": "f"', 'A <tool_call>{"name": "f"', [], True),
        ("tagged", TAGGED[TAGGED.index("<tool") : TAGGED.index("</function>")], ..., [], True),
        ("llama", '{"name": "f", "parameters": {"x": "a', "", [("f", '{"x": "a')], True),
        (
            "mistral list",
            '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arg',
            '{"name": "g", "arg',
            [("f", "{}")],
            True,
        ),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{", "", [("f", "{}"), ("g", "{")], True),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}", "", [("f", "{}"), ("g", "{}")], False),
    ],
)
def test_what_ends_inside_a_call_is_cut(
    shape: str, text: str, content: str | EllipsisType, calls: list[tuple[str, str]], is_cut: bool
) -> None:
    result = read(SHAPES[shape][0], text)
    assert result.content == (text if content is ... else content)
    assert (result.calls, result.is_cut) == (calls, is_cut)


@pytest.mark.parametrize(
    ("named", "text", "content", "calls", "is_cut"),
    [
        ("f", "", "", [("f", "")], True),
        ("f", "{", "", [("f", "{")], True),
        ("f", '{"x": "}', "", [("f", '{"x": "}')], True),
        ("f", '{"x": "}"}', "", [("f", '{"x": "}"}')], False),
        ("", "[", "", [], True),
        ("", '[{"na', "", [], True),
        ("", '[{"name": "f', "", [], True),
        ("", '[{"name": "f", "par', "", [("f", "")], True),
        ("", '[{"name": "f", "parameters": {}}, {"na', "", [("f", "{}")], True),
        ("", '[{"name": "f", "parameters": {}}, {"name": "g", "par', "", [("f", "{}"), ("g", "")], True),
        ("", "No call.", "No call.", [], True),  # of a worker that keeps no grammar: nothing is lost
        ("", '[{"name": "f", "parameters": {}}]', "", [("f", "{}")], False),
    ],
)
def test_a_forced_call_that_is_cut(
    named: str, text: str, content: str, calls: list[tuple[str, str]], is_cut: bool
) -> None:
    tools = Tools(tools=(Tool(name="f"), Tool(name="g")), choice="required", named=named)
    result = taken(forced_reading(tools).parser(), text, None)
    assert (result.content, result.calls, result.is_cut) == (content, calls, is_cut)


def test_calls_of_an_earlier_turn_do_not_begin_an_answer() -> None:
    before = f"{CHATML}{HERMES_TWO}<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant:"
    result = read(chat_templates.HERMES, HERMES_TWO, prompt=before)
    assert [arguments for _, arguments in result.calls] == SHAPES["hermes"][4]
