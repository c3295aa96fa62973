"""Chat templates of clients: what they may do, and what becomes of those that mean harm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from common import bounded_process
from common.bounded_process import Limits
from common.errors import InvalidArgumentError
from tests.router import chat_templates
from text.chat_template import BaseTemplate, ChatTemplate
from text.conversation import Conversation, Tool, Tools
from text.template_process import MAX_KNOWN, TemplateProcess

LIMITS = Limits(cpu_s=20, num_bytes=64 * 2**20, stack_bytes=2 * 2**20)
SPECIAL = {"bos_token": "<s>"}
MAX_CHARS = 100_000
ASK = Conversation(messages=[{"role": "user", "content": "Où? 東京"}])
GOOD = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

MEMORY = "cannot be used: it costs more than 64 MiB to render"
UNSAFE = "refuses the messages: .*unsafe"
SLOW = {
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
}
HOSTILE = {
    "text": ("{{ 'a' * 10**9 }}", MEMORY),
    "padded": ("{{ '%1000000000d' % messages | length }}", MEMORY),
    "indented": ("{{ messages | tojson(indent=10**9) }}", MEMORY),
    "doubled": (
        "{% set n = namespace(t='a') %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
        MEMORY,
    ),
    "many": ("{{ range(10**9) | list }}", "OverflowError|Range too big"),
    "long": ("{{ 'a' * 10**6 }}", "writes a prompt of 1000000 characters, more than 100000"),
    "class": ("{{ ''.__class__.__mro__ }}", UNSAFE),
    "globals": ("{{ raise_exception.__globals__.os }}", UNSAFE),
    "popen": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", UNSAFE),
    "attr": ("{{ (messages | attr('__class__')).x }}", UNSAFE),
    "changes": ("{{ messages.append(1) }}", UNSAFE),
    "own words": ("{{ raise_exception('one question only') }}", "refuses the messages: one question only$"),
    "many words": ("{{ raise_exception('a' * 10**6) }}", r"aaa\.\.\.$"),
    "syntax": ("x\n{% if %}", "cannot be compiled: .* at line 2$"),
    "no end": ("{% for m in messages %}", "cannot be compiled: "),
    "recursion": ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "cannot be (used|rendered): "),
    "nested": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be (used|compiled): "),
    "blocks": ("{% if 1 %}" * 500 + "{% endif %}" * 500, "cannot be (used|compiled): "),
    "includes": ("{% include '/etc/passwd' %}", "refuses the messages: no loader"),
}


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """What costs too much costs processor time, and on a busy machine that may take long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_process, "MAX_ANSWER_S", 200.0)
        yield


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(LIMITS)
    yield process
    process.close()


def render(process: TemplateProcess, source: str, conversation: Conversation = ASK) -> str:
    return process.template(source, SPECIAL, MAX_CHARS).render(conversation)


@pytest.mark.parametrize(("source", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_refused_by_name(process: TemplateProcess, source: str, words: str) -> None:
    process.start()
    keeper = process.pid
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        render(process, source)
    assert caught.value.field == "chat_template"
    assert len(caught.value.reason) < 1100
    assert render(process, GOOD) == "<s>user: Où? 東京\n"
    assert process.pid == keeper


def test_templates_that_take_too_long_are_refused() -> None:
    """Nothing else is rendered here: on a slow machine it might take as long."""
    process = TemplateProcess(replace(LIMITS, cpu_s=0.3))
    try:
        for source in SLOW.values():
            with pytest.raises(InvalidArgumentError, match=r"cannot be used: it costs more than 0\.3 s to render"):
                render(process, source)
    finally:
        process.close()


TOOLS = Tools(tools=(Tool(name="f", description="Does it", parameters={"type": "object"}), Tool(name="g")))
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1.5, "y": [None, "é"]}}}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "c", "name": "f"}


@pytest.mark.parametrize("source", [chat_templates.HERMES, chat_templates.LLAMA, chat_templates.MISTRAL, GOOD])
@pytest.mark.parametrize(
    "conversation",
    [
        ASK,
        Conversation(messages=ASK.messages, tools=TOOLS),
        Conversation(messages=ASK.messages, tools=Tools(tools=TOOLS.tools, choice="none")),
        Conversation(messages=ASK.messages, tools=Tools(tools=TOOLS.tools, parallel=False), has_generic_tools=True),
        Conversation(messages=[*ASK.messages, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]),
        Conversation(messages=ASK.messages, template_options={"enable_thinking": False}),
        Conversation(messages=ASK.messages, template_options={"bos_token": "x"}),
        Conversation(messages=ASK.messages, effort="high", effort_field="reasoning.effort"),
        Conversation(messages=ASK.messages, effort="medium"),
        Conversation(messages=ASK.messages, asks_answer=False),
        Conversation(messages=[*ASK.messages, {"role": "assistant", "content": "So"}], continues_last=True),
    ],
)
def test_it_writes_what_the_same_template_of_a_model_writes(
    process: TemplateProcess, source: str, conversation: Conversation
) -> None:
    own, given = ChatTemplate(source, SPECIAL), process.template(source, SPECIAL, MAX_CHARS)
    assert (given.variables, given.knows_tools, given.knows_calls) == (own.variables, own.knows_tools, own.knows_calls)
    expected, said = outcome(own, conversation)
    assert outcome(given, conversation) == (expected, said.replace("the model's chat", "the request's chat"))


def outcome(template: BaseTemplate, conversation: Conversation) -> tuple[str, str]:
    """(the prompt, the error)"""
    try:
        return template.render(conversation), ""
    except InvalidArgumentError as error:
        return "", error.message


@pytest.mark.parametrize(
    "source", ["{{ '{0.__class__}'.format(1) }}", "{{ ''.__class__ }}", "{{ ''|attr('__class__') }}"]
)
def test_what_is_unsafe_has_no_text(process: TemplateProcess, source: str) -> None:
    assert render(process, source) == ""


def test_templates_that_are_kept_are_bounded(process: TemplateProcess) -> None:
    for index in range(MAX_KNOWN + 20):
        assert render(process, f"{index}") == f"{index}"
    assert len(process._known) == MAX_KNOWN


def test_clocks_and_extras_work_in_the_child(process: TemplateProcess) -> None:
    source = "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{{ lipsum(1, false, 3, 5) | length > 3 }}"
    assert render(process, source)[4:] == "True"
