"""The published templates of Llama, Qwen and Mistral: what each writes of calls, results and reasoning is what answers
in its model's own shape are read by."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from common.errors import InvalidArgumentError
from tests.router.published_templates import NAMES, WITHOUT_TOOLS, published
from tests.router.test_answer_parser import WEATHER, read
from text.chat_template import ChatTemplate
from text.conversation import Call, Conversation, Tools, make_message, named_results

TOOLS = Tools(tools=(WEATHER,))
SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
ENDS = ("<|im_end|>", "<|eot_id|>", "<EOS>")
PARIS = '{"city": "Paris", "days": 3}'
ROME = '{"city": "Rome", "days": 1}'
ONE_CALL = ("llama3_1", "llama3_2")  # their templates refuse several calls in one message
THINKS = ("qwen3", "qwen3_6", "mistral v11 thinking", "mistral v13 thinking")

USER = make_message("m", role="user", content="How is it in Paris?")
SYSTEM = make_message("m", role="system", content="Be brief")

each_with_tools = pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_TOOLS])


def called(*arguments: str, content: str | None = None, reasoning: str | None = None) -> dict[str, Any]:
    calls = [Call(call_id=f"abcdefgh{index}", name="get_weather", arguments=one) for index, one in enumerate(arguments)]
    return make_message("m", role="assistant", content=content, calls=calls, reasoning=reasoning)


def result(text: str, index: int = 0) -> dict[str, Any]:
    return make_message("m", role="tool", content=text, tool_call_id=f"abcdefgh{index}")


@functools.cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(published(name), SPECIAL)


def prompt(name: str, *messages: dict[str, Any], tools: Tools = TOOLS, **options: Any) -> str:
    conversation = Conversation(messages=named_results(messages), tools=tools, template_options=options)
    return template_of(name).render(conversation)


def written(name: str, before: list[dict[str, Any]], message: dict[str, Any]) -> tuple[str, str]:
    """(the prompt that asks for `message`, how the template writes the message)."""
    asking, whole = prompt(name, *before), prompt(name, *before, message)
    assert whole.startswith(asking)
    text = whole[len(asking) :]
    return asking, text[: min(at for end in ENDS if (at := text.find(end)) >= 0)]


@each_with_tools
def test_a_call_is_read_as_the_template_writes_it(name: str) -> None:
    asking, text = written(name, [USER], called(PARIS))
    assert "get_weather" in asking
    got = read(published(name), text, prompt=asking, tools=TOOLS)
    assert got.parsed == [("get_weather", json.loads(PARIS))]
    assert (got.content, got.reasoning) == ("", "")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*WITHOUT_TOOLS, *ONE_CALL)])
def test_several_calls_are_read_as_the_template_writes_them(name: str) -> None:
    asking, text = written(name, [USER], called(PARIS, ROME))
    got = read(published(name), text, prompt=asking, tools=TOOLS)
    assert got.parsed == [("get_weather", json.loads(PARIS)), ("get_weather", json.loads(ROME))]
    assert len(set(got.ids)) == 2


@pytest.mark.parametrize("name", ONE_CALL)
def test_what_a_template_refuses_is_told(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="single tool-calls"):
        prompt(name, USER, called(PARIS, ROME))


@each_with_tools
def test_a_conversation_of_many_turns(name: str) -> None:
    answer = make_message("m", role="assistant", content="It is sunny there.")
    follow_up = make_message("m", role="user", content="And in Rome?")
    whole = prompt(name, SYSTEM, USER, called(PARIS), result("sunny"), answer, follow_up, called(ROME), result("rain"))
    parts = [USER["content"], "Paris", "sunny", "It is sunny there.", "And in Rome?", "Rome", "rain"]
    place = whole.rfind(USER["content"])
    for part in parts:  # each behind the one before
        place = whole.find(part, place)
        assert place >= 0, part
        place += len(part)
    assert "Be brief" in whole
    asking, text = written(name, [SYSTEM, USER, called(PARIS), result("sunny")], answer)
    assert read(published(name), text, prompt=asking, tools=TOOLS).content.strip() == "It is sunny there."


@each_with_tools
def test_text_that_is_no_call_stays_text(name: str) -> None:
    asking = prompt(name, USER)
    text = "It is {sunny} [there] <now>."
    opened = "</think>\n\n" if asking.endswith("<think>\n") else ""
    assert read(published(name), opened + text, prompt=asking, tools=TOOLS).content == text


@pytest.mark.parametrize("name", THINKS)
def test_reasoning_is_read_as_the_template_writes_it(name: str) -> None:
    asking, text = written(name, [USER], called(PARIS, reasoning="They ask of Paris."))
    got = read(published(name), text, prompt=asking, tools=TOOLS)
    assert got.reasoning.strip() == "They ask of Paris."
    assert got.parsed == [("get_weather", json.loads(PARIS))]
    answer = make_message("m", role="assistant", content="Sunny.", reasoning="The tool says so.")
    asking, text = written(name, [USER, called(PARIS), result("sunny")], answer)
    got = read(published(name), text, prompt=asking, tools=TOOLS)
    assert (got.reasoning.strip(), got.content, got.calls) == ("The tool says so.", "Sunny.", [])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6"])
def test_reasoning_is_turned_off(name: str) -> None:
    asking = prompt(name, USER, enable_thinking=False)
    assert asking.endswith("<think>\n\n</think>\n\n")
    assert asking != prompt(name, USER)
    got = read(published(name), "Sunny.", prompt=asking, tools=TOOLS)
    assert (got.content, got.reasoning) == ("Sunny.", "")


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_a_template_without_tools(name: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        prompt(name, USER)
    assert refused.value.field == "tools"
    text = prompt(name, SYSTEM, USER, tools=Tools())
    assert text.index("Be brief") < text.index("How is it in Paris?")


@pytest.mark.parametrize("name", NAMES)
def test_templates_are_the_published_ones(name: str) -> None:
    assert len(published(name)) > 300
    assert "{% generation %}" not in published(name)  # what training adds
