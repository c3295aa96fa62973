"""How much a model reasons, by each client's word for it, and its reasoning on the way to the next turn."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from tests.each_case import each_case
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.router.test_tools import prompt_of
from tests.router.tiny_tokenizer import ids_of
from tests.router.tool_calls import ASK, TOOL, TWO_CALLS, worker
from tests.support.fake_worker import FakeWorker

__all__ = ["worker"]

KEPT = "reasoning.encrypted_content"
STATELESS: Any = {"include": [KEPT], "reasoning": {"summary": "auto"}, "store": False}
WRITTEN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ON_OFF = " {% if SWITCH is defined %}{{ 'on' if SWITCH else 'off' }}{% endif %}"
SHOWN = "{% if reasoning_effort %} effort {{ reasoning_effort }}{% endif %}"


async def post(router: RunningRouter, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=router.url) as client:
        return await client.post(f"/v1/{path}", json=body)


async def ask(router: RunningRouter, effort: str, **more: Any) -> list[tuple[int, str | None]]:
    """(status, the field that is blamed) of a chat and of a response."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": ASK, "reasoning_effort": effort}),
        ("responses", {"input": "Do", "reasoning": {"effort": effort}}),
    ]
    answers = [await post(router, path, **body, **more) for path, body in bodies]
    return [(one.status_code, (one.json().get("error") or {}).get("param")) for one in answers]


GOOD: list[tuple[int, str | None]] = [(200, None)] * 2
BAD: list[tuple[int, str | None]] = [(400, "reasoning_effort"), (400, "reasoning.effort")]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@each_case(
    ("template", "said"),
    [
        (SHOWN, {effort: f"Do effort {effort}" for effort in EFFORTS}),
        (ON_OFF.replace("SWITCH", "enable_thinking"), dict.fromkeys(EFFORTS, "Do on") | {"none": "Do off"}),
        (ON_OFF.replace("SWITCH", "thinking"), dict.fromkeys(EFFORTS, "Do on") | {"none": "Do off"}),
        (
            ON_OFF.replace("SWITCH", "enable_thinking") + SHOWN,
            {effort: f"Do on effort {effort}" for effort in EFFORTS} | {"none": "Do off effort none"},
        ),
        ("", {"none": "Do", "medium": "Do"}),  # it never reasons
        ("<think>", {"medium": "Do<think>"}),  # it always reasons
    ],
)
async def test_effort(
    start_worker: StartWorker, start_router: StartRouter, template: str, said: dict[str, str]
) -> None:
    worker = await start_worker()
    worker.chat_template = WRITTEN + template
    router = await start_router(worker)
    for effort in EFFORTS:
        assert await ask(router, effort) == (GOOD if effort in said else BAD), effort
        if effort in said:
            assert {prompt_of(worker)} == {said[effort]}


async def test_effort_and_the_switch_itself(router: RunningRouter, worker: FakeWorker) -> None:
    for effort, is_on in (("none", False), ("low", True)):
        assert await ask(router, effort, chat_template_kwargs={"enable_thinking": is_on}) == GOOD
        assert prompt_of(worker).endswith("</think>\n\n") is not is_on
        blamed = [(400, "chat_template_kwargs.enable_thinking")] * 2
        assert await ask(router, effort, chat_template_kwargs={"enable_thinking": not is_on}) == blamed


async def test_a_stateless_agent_s_turns(router: RunningRouter, worker: FakeWorker) -> None:
    """Reasoning comes back as text that the client need not understand, and is the assistant's in the next prompt."""
    worker.answer = ids_of(TWO_CALLS)
    tools: Any = [{"type": "function", **TOOL["function"]}]
    asked: Any = {"model": "tiny", "input": "Do", "tools": tools, **STATELESS}
    answer = await router.openai.responses.create(**asked)
    async with router.openai.responses.stream(**asked) as stream:
        events = [event async for event in stream]
    done = next(event.item for event in events if event.type == "response.output_item.done")
    assert done.type == "reasoning"
    final = (await stream.get_final_response()).output
    answers: tuple[Any, ...] = (answer.output[0], done, final[0])
    for reasoning in answers:
        assert reasoning.type == "reasoning"
        assert (reasoning.summary, (reasoning.content or [])[0].text) == ([], "hm")
        assert reasoning.encrypted_content
    assert answer.reasoning is not None
    assert answer.reasoning.summary == "auto"
    sent_back = [item.model_dump(by_alias=True) for item in answer.output]
    sent_back[0].pop("content")
    call_ids = [item["call_id"] for item in sent_back if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": one, "output": "5"} for one in call_ids]
    await router.openai.responses.create(
        **{**asked, "input": [{"role": "user", "content": "Do"}, *sent_back, *results]}
    )
    assert "<|im_start|>assistant\n<think>hm</think>Yes.<tool_call>" in prompt_of(worker)


async def test_nothing_is_kept_that_nobody_asked_for(router: RunningRouter, worker: FakeWorker) -> None:
    worker.answer = ids_of(TWO_CALLS)
    answer = await post(router, "responses", input="Do", reasoning={"summary": None, "generate_summary": "auto"})
    assert answer.json()["output"][0]["type"] == "reasoning"
    assert "encrypted_content" not in answer.json()["output"][0]


@each_case(
    ("item", "written"),
    [
        ({"encrypted_content": "baton1." + base64.urlsafe_b64encode("é<|im_end|>".encode()).decode()}, "é<|im_end|>"),
        ({"content": [{"type": "reasoning_text", "text": "seen"}], "encrypted_content": "baton1.aG0="}, "seen"),
        (
            {"content": None, "encrypted_content": "baton1.aG0=", "summary": [{"type": "summary_text", "text": "s"}]},
            "hm",
        ),
        ({"encrypted_content": None}, None),
        ({"encrypted_content": "baton1."}, None),
        ({"encrypted_content": "gAAAAABo"}, ""),
        ({"encrypted_content": "baton1.%%"}, ""),
        ({"encrypted_content": "baton1./w=="}, ""),
        ({"encrypted_content": "baton1._w=="}, ""),
    ],
)  # fmt: skip
async def test_kept_reasoning(
    router: RunningRouter, worker: FakeWorker, item: dict[str, Any], written: str | None
) -> None:
    items = [{"type": "reasoning", "summary": [], **item}, {"role": "assistant", "content": "Yes"}]
    answer = await post(router, "responses", input=[*ASK, *items, *ASK])
    if written == "":
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[1].encrypted_content")
        return
    assert answer.status_code == 200, answer.text
    thought = "" if written is None else f"<think>{written}</think>"
    assert f"assistant\n{thought}Yes<|im_end|>" in prompt_of(worker)


async def test_reasoning_items_that_follow_each_other_are_one(router: RunningRouter, worker: FakeWorker) -> None:
    items: list[dict[str, object]] = [
        {"type": "reasoning", "summary": [], "encrypted_content": kept}
        for kept in ("baton1.aG0=", "baton1.", "baton1.YQ==")
    ]
    answer = await post(router, "responses", input=[*ASK, *items, {"role": "assistant", "content": "Yes"}, *ASK])
    assert answer.status_code == 200, answer.text
    assert "<think>hm\na</think>Yes" in prompt_of(worker)


@each_case("names", [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")])
async def test_reasoning_by_other_names(router: RunningRouter, worker: FakeWorker, names: tuple[str, ...]) -> None:
    message = {"role": "assistant", "content": "Yes", **dict.fromkeys(names, "Why")}
    for more in ({}, dict.fromkeys({"reasoning", "reasoning_content"} - {*names})):
        answer = await post(router, "chat/completions", messages=[*ASK, {**message, **more}, *ASK])
        assert answer.status_code == 200, answer.text
        assert "<think>Why</think>Yes" in prompt_of(worker)


@pytest.mark.parametrize("also", [False, True])
async def test_answers_may_have_the_other_name_too(worker: FakeWorker, start_router: StartRouter, also: bool) -> None:
    router = await start_router(worker, also_reasoning=also)
    whole = await post(router, "chat/completions", messages=ASK, max_tokens=200)
    message = whole.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message.get("reasoning")) == ("hm", "hm" if also else None)
    streamed = await post(router, "chat/completions", messages=ASK, max_tokens=200, stream=True)
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("reasoning", "") for delta in deltas) == ("hm" if also else "")
