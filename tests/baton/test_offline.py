"""`LLM`: the engine in this process, and a scripted router in place of a stack that runs elsewhere."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from baton import LLM, Client, LatencyTargets, SamplingParams
from baton.client.messages import Message, Tool
from baton.offline.local import LocalEngine
from baton.offline.outputs import RequestOutput
from common.errors import ConfigError, InvalidArgumentError, UnavailableError
from common.sampling import parameters
from engine import messages as m
from router.api.rest.openai.chat_messages import ChatMessage, ContentPart, conversation_of
from tests.chaos.tiny_model import random_prompt, reference_answer, write_tiny_model
from tests.router.chat_templates import HERMES
from tests.router.test_every_parameter import LIMITS, example, sent
from tests.router.tiny_tokenizer import eos_id, ids_of, tiny_tokenizer
from tests.support.fake_router import fake_router
from text.conversation import Tools

OPTIONS: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "num_threads": 1, "num_blocks": 64, "block_size": 16}
PROMPTS = [random_prompt(random.Random(number), length) for number, length in enumerate((40, 3, 17, 33))]


def greedy(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def answers(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, max_len=512)
    return folder


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(str(model_dir), **OPTIONS) as one:
        yield one


def core(llm: LLM) -> Any:
    assert isinstance(llm._backend, LocalEngine)
    return llm._backend._core


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        engine = core(request.getfixturevalue("llm"))
        assert not engine.scheduler.requests
        assert engine.scheduler.check_integrity() == []


def test_greedy_answers_are_those_of_transformers(llm: LLM, model_dir: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(model_dir)
    wanted = [reference_answer(model, prompt, 12, temperature=0, seed=0) for prompt in PROMPTS]
    outputs = llm.generate(PROMPTS, greedy(), use_tqdm=False)
    assert [got[: len(want)] for got, want in zip(answers(outputs), wanted, strict=True)] == wanted
    assert max(map(len, wanted)) == 12
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    texts = [tiny_tokenizer().decode([*prompt, *got]) for prompt, got in zip(PROMPTS, answers(outputs), strict=True)]
    assert all(text.endswith(output.outputs[0].text) for text, output in zip(texts, outputs, strict=True))


def test_every_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    params = [greedy(2), greedy(5), greedy(3), SamplingParams(seed=7)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(got) for got in answers(outputs)] == [2, 5, 3, 16]


def test_several_answers_have_seeds_that_follow_each_other(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], SamplingParams(n=3, seed=5, max_tokens=8), use_tqdm=False)
    singles = [
        llm.generate(PROMPTS[0], SamplingParams(seed=5 + number, max_tokens=8), use_tqdm=False)[0].outputs[0]
        for number in range(3)
    ]
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in singles]
    assert [one.index for one in output.outputs] == [0, 1, 2]


def test_the_best_are_kept(llm: LLM) -> None:
    (all_of_them,) = llm.generate(PROMPTS[0], SamplingParams(n=4, logprobs=0, seed=5, max_tokens=8), use_tqdm=False)
    (best,) = llm.generate(PROMPTS[0], SamplingParams(n=2, best_of=4, seed=5, max_tokens=8), use_tqdm=False)
    ranked = sorted(all_of_them.outputs, key=lambda one: -(one.cumulative_logprob or 0) / len(one.token_ids))
    assert [one.token_ids for one in best.outputs] == [one.token_ids for one in ranked[:2]]
    assert best.outputs[0].logprobs is None


def test_logprobs_of_answer_and_prompt(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[1], greedy(4, logprobs=2, prompt_logprobs=1), use_tqdm=False)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert [next(iter(one)) for one in answer.logprobs] == answer.token_ids  # greedy: the likeliest
    first = answer.logprobs[0][answer.token_ids[0]]
    assert (first.rank, first.decoded_token) == (1, tiny_tokenizer().decode([answer.token_ids[0]]))
    assert answer.cumulative_logprob == pytest.approx(
        sum(one[token].logprob for one, token in zip(answer.logprobs, answer.token_ids, strict=True))
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [token in (one or {}) for token, one in zip(PROMPTS[1][1:], output.prompt_logprobs[1:], strict=True)] == [
        True,
        True,
    ]


def test_several_answers_share_the_blocks_of_a_prompt_that_is_scored(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """21 blocks, the last of them with two tokens: its KV is computed once, and lies in memory once."""
    engine, prompt = core(llm), random_prompt(random.Random(9), 20 * 16 + 2)
    prepare, most, computed = engine.prepare, 0, 0

    def counted() -> Any:
        nonlocal most, computed
        output = prepare()
        most = max(most, engine.blocks.num_blocks - engine.blocks.num_available_blocks)
        computed += sum(output.num_tokens.values())
        return output

    monkeypatch.setattr(engine, "prepare", counted)
    params = SamplingParams(n=8, seed=3, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert most == 21 + 7  # each has a block of its own for the tail and its answer
    assert computed == len(prompt) + 7 * 2 + 8 * 1
    (alone,) = llm.generate([prompt], SamplingParams(seed=3, max_tokens=2, prompt_logprobs=1), use_tqdm=False)
    assert output.prompt_logprobs == alone.prompt_logprobs
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert len(output.outputs) == 8
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_stop_strings_and_tokens(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], greedy(12), use_tqdm=False)
    text, token_ids = whole.outputs[0].text, whole.outputs[0].token_ids
    stop = text[len(text) // 2 :][:2]
    (cut,) = llm.generate(PROMPTS[0], greedy(12, stop=stop), use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    (cut,) = llm.generate(PROMPTS[0], greedy(12, stop_token_ids=[token_ids[3]]), use_tqdm=False)
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", token_ids[3])


def test_a_stop_string_that_is_kept(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPTS[0], greedy(), use_tqdm=False)
    text = plain.outputs[0].text
    stop = text[3:6]
    (output,) = llm.generate(PROMPTS[0], greedy(stop=[stop], include_stop_str_in_output=True), use_tqdm=False)
    assert output.outputs[0].text == text[: text.index(stop) + len(stop)]
    assert output.outputs[0].stop_reason == stop


def test_the_last_tokens_of_a_prompt_are_kept(llm: LLM) -> None:
    long = PROMPTS[0] * 20
    assert len(long) > 512
    asked = [greedy(4, truncate_prompt_tokens=6), greedy(4, truncate_prompt_tokens=-1)]
    cut, fitting = llm.generate([PROMPTS[0], long], asked, use_tqdm=False)
    assert cut.prompt_token_ids == PROMPTS[0][-6:]
    assert cut.outputs[0].token_ids == llm.generate(PROMPTS[0][-6:], greedy(4), use_tqdm=False)[0].outputs[0].token_ids
    assert fitting.prompt_token_ids == long[-(512 - 4) :]
    (chat,) = llm.chat("hello", greedy(4, truncate_prompt_tokens=3), use_tqdm=False)
    assert len(chat.prompt_token_ids or ()) == 3
    with pytest.raises(InvalidArgumentError, match="truncate_prompt_tokens: must be -1 or at least 1"):
        llm.generate(PROMPTS[0], greedy(truncate_prompt_tokens=0), use_tqdm=False)


def test_guided_text(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_id()}))
    with LLM(str(tmp_path / "model"), **OPTIONS) as llm:
        (output,) = llm.generate("Paris is", greedy(guided={"choice": ["yes it is", "no"]}), use_tqdm=False)
        assert output.outputs[0].text in ("yes it is", "no")
        with pytest.raises(InvalidArgumentError, match="guided"):
            llm.generate("Paris is", greedy(guided={"regex": "("}), use_tqdm=False)


def test_chat_takes_pairs_mappings_and_messages(llm: LLM) -> None:
    text = "hello world"
    part = {"type": "text", "text": text}
    forms: list[Any] = [text, [("user", text)], [Message(role="user", content=text)]]
    forms += [[{"role": "user", "content": content}] for content in (text, [part])]
    outputs = [llm.chat(form, greedy(), use_tqdm=False)[0] for form in forms]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    prompt = outputs[0].prompt_token_ids
    assert prompt is not None
    assert tiny_tokenizer().decode(prompt, skip_special_tokens=False) == (
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )
    several = llm.chat([[("user", text)], [("user", "how are you")]], greedy(), use_tqdm=False)
    assert several[0].outputs == outputs[0].outputs
    assert len(several) == 2


def test_an_answer_goes_on_with_the_last_message(llm: LLM) -> None:
    chat = [("user", "hello"), ("assistant", "how are")]
    begun = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhow are"
    (output,) = llm.chat(chat, greedy(), use_tqdm=False, continue_final_message=True)
    tokens = llm.tokenize_chat(chat, continue_final_message=True)
    assert output.prompt_token_ids == tokens
    assert tiny_tokenizer().decode(tokens, skip_special_tokens=False) == begun
    asks_nothing = llm.tokenize_chat(chat, add_generation_prompt=False)
    assert tiny_tokenizer().decode(asks_nothing, skip_special_tokens=False) == begun + "<|im_end|>\n"
    with pytest.raises(InvalidArgumentError, match=r"^continue_final_message"):
        llm.tokenize_chat("hello", continue_final_message=True)


def test_a_template_of_the_callers_own(llm: LLM) -> None:
    written = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{{ end }}"
    (output,) = llm.chat("hello", greedy(), use_tqdm=False, chat_template=written, chat_template_kwargs={"end": "."})
    assert output.prompt_token_ids == ids_of("user: hello;.")
    assert llm.tokenize_chat("hello", chat_template=written) == ids_of("user: hello;")
    for wrong in ("{% if %}", "{{ raise_exception('no') }}"):
        with pytest.raises(InvalidArgumentError, match=r"(?s)^(chat_template|messages): the chat template given"):
            llm.tokenize_chat("hello", chat_template=wrong)


def test_parts_are_joined_as_over_rest(llm: LLM) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    outputs = [llm.chat([("user", "hello\nworld")], greedy(2), use_tqdm=False)[0]]
    outputs += llm.chat([{"role": "user", "content": parts}], greedy(2), use_tqdm=False)
    messages = [ChatMessage(role="user", content=[ContentPart(type="text", text=part["text"]) for part in parts])]
    assert conversation_of(messages, Tools(), None, LIMITS).messages[0]["content"] == "hello\nworld"
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    Tool(name="weather", description="The weather", parameters=WEATHER),
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
]


@pytest.fixture(scope="module")
def llm_with_tools(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(model_dir, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_id()}))
    (folder / "chat_template.jinja").write_text(HERMES)
    with LLM(str(folder), **OPTIONS) as one:
        yield one


@pytest.mark.parametrize(("choice", "names"), [("weather", {"weather"}), ("required", {"weather", "time"})])
def test_forced_calls(llm_with_tools: LLM, choice: str, names: set[str]) -> None:
    (output,) = llm_with_tools.chat(
        "hello", greedy(100), use_tqdm=False, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
    )
    answer = output.outputs[0]
    (call,) = answer.tool_calls
    assert (answer.finish_reason, answer.text) == ("tool_calls", "")
    assert call.name in names
    if call.name == "weather":
        assert call.values() in ({"unit": "C"}, {"unit": "F"})


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_the_model_writes_by_itself(llm_with_tools: LLM, parallel: bool) -> None:
    """A model of random weights writes what a form makes it write."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"unit": "C"}}\n</tool_call>'
    params = greedy(200, guided={"regex": re.escape(f"Yes.\n{call}\n{call}")})
    (output,) = llm_with_tools.chat("hello", params, use_tqdm=False, tools=TOOLS, parallel_tool_calls=parallel)
    answer = output.outputs[0]
    assert (answer.finish_reason, answer.text) == ("tool_calls", "Yes.")
    assert [(one.name, one.values()) for one in answer.tool_calls] == [("weather", {"unit": "C"})] * (1 + parallel)


def test_tools_calls_and_results_are_in_the_prompt(llm_with_tools: LLM) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"unit": "C"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    for choice, name in (("auto", "reasoning"), ("none", "reasoning_content")):
        messages[1] = {**messages[1], "reasoning": None, "reasoning_content": None, name: "hm"}
        (output,) = llm_with_tools.chat(messages, greedy(1), use_tqdm=False, tools=TOOLS, tool_choice=choice)
        assert output.prompt_token_ids is not None
        prompt = tiny_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)
        assert ("The weather" in prompt) is (choice == "auto")
        assert '<think>hm</think><tool_call>\n{"name": "weather", "arguments": {"unit": "C"}}\n</tool_call>' in prompt
        assert "<|im_start|>tool\nsunny<|im_end|>" in prompt


class RecordedError(Exception):
    pass


def commands(llm: LLM, monkeypatch: pytest.MonkeyPatch, ask: Callable[[LLM], object]) -> list[m.AddRequest]:
    """What the engine is asked, without what it would compute."""
    recorded, handle = [], core(llm).handle

    def record(command: m.Command) -> None:
        if isinstance(command, m.AddRequest):
            recorded.append(command)
            raise RecordedError
        handle(command)

    with monkeypatch.context() as patched:
        patched.setattr(core(llm), "handle", record)
        with pytest.raises(RecordedError):
            ask(llm)
    return recorded


@pytest.mark.parametrize("name", parameters())
def test_every_parameter_reaches_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    value, params = example(name)[0], SamplingParams(**{name: sent(name)})  # type: ignore[arg-type]
    asked = commands(llm, monkeypatch, lambda llm: llm.generate("hello", params, use_tqdm=False))
    asked += commands(llm, monkeypatch, lambda llm: llm.chat("hello", params, use_tqdm=False))
    assert [getattr(one.sampling_params, name) for one in asked] == [value, value]


def test_priority_reaches_the_engine(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(model_dir), **OPTIONS, queue_policy="priority") as llm:
        asked = commands(llm, monkeypatch, lambda llm: llm.generate("hello", use_tqdm=False, priority=[-5]))
        asked += commands(llm, monkeypatch, lambda llm: llm.chat("hello", use_tqdm=False, priority=[-5]))
    assert [one.priority for one in asked] == [-5, -5]


def test_targets_reach_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    soon = LatencyTargets(ttft_ms=5)
    asked = commands(llm, monkeypatch, lambda llm: llm.generate(["a", "b"], use_tqdm=False, slo=[soon, None]))
    asked += commands(llm, monkeypatch, lambda llm: llm.generate(["a", "b"], use_tqdm=False, slo=[None, soon]))
    asked += commands(llm, monkeypatch, lambda llm: llm.chat("hello", use_tqdm=False, slo=soon))
    assert [one.targets for one in asked] == [soon, None, soon]


def test_embeddings(llm: LLM) -> None:
    prompts: list[str | dict[str, list[int]]] = ["hello world", {"prompt_token_ids": ids_of("hello world")}]
    one, two = llm.embed(prompts, use_tqdm=False)
    assert one.outputs.embedding == pytest.approx(two.outputs.embedding)
    assert sum(value**2 for value in one.outputs.embedding) == pytest.approx(1)
    assert isinstance(llm._backend, LocalEngine)
    longest = llm._backend._model.limits.max_model_len
    llm.embed({"prompt_token_ids": [5] * longest}, use_tqdm=False)  # nothing follows it
    (short,) = llm.embed("hello world", pooling="mean", dimensions=8, use_tqdm=False)
    assert len(short.outputs.embedding) == 8


def test_progress_goes_to_standard_error(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, greedy(2))
    assert "4/4" in capsys.readouterr().err
    llm.generate(PROMPTS, greedy(2), use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda llm: llm.generate(["hello", ""]), "prompts[1]"),
        (lambda llm: llm.generate([[1, 10**6]]), "prompts"),
        (lambda llm: llm.generate({"prompt": "hello", "image": b""}), "prompts"),
        (lambda llm: llm.generate(["a", "b"], [SamplingParams()]), "sampling_params"),
        (lambda llm: llm.generate("a", SamplingParams(temperature=-1)), "temperature"),
        (lambda llm: llm.generate("a", priority=[1]), "priority"),
        (lambda llm: llm.generate("a", slo=LatencyTargets()), "slo"),
        (lambda llm: llm.generate(["a", "b"], slo=[LatencyTargets(tpot_ms=5)]), "slo"),
        (lambda llm: llm.chat("a", slo_class="fast"), "slo_class"),
        (lambda llm: llm.generate("a", SamplingParams(n=0)), "n"),
        (lambda llm: llm.generate("a", SamplingParams(n=3, best_of=2)), "best_of"),
        (lambda llm: llm.generate("a", SamplingParams(heat=1)), "heat"),  # type: ignore[call-arg]
        (lambda llm: llm.chat([{"role": "user", "image": ""}]), "messages[0].image"),
        (lambda llm: llm.chat([{"content": "hello"}]), "messages[0]"),
        (
            lambda llm: llm.chat([{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}]),
            "messages[0].reasoning",
        ),
        (lambda llm: llm.chat("hello", tools=[{"type": "function"}]), "tools[0]"),
        (lambda llm: llm.embed("hello", pooling="max"), "pooling"),
        (lambda llm: llm.embed("hello", dimensions=10**4), "dimensions"),
    ],
)
def test_what_is_wrong_is_named(llm: LLM, ask: Callable[[LLM], object], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ask(llm)
    assert caught.value.field == field


def test_a_form_beside_tools_and_reasoning(llm_with_tools: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is reasoning, and a call or text of the form; a bias chooses here."""
    form = {"choice": ["yes", "no"]}
    (y,) = ids_of("y")
    params = greedy(50, guided=form, logit_bias={y: 100.0})
    (output,) = llm_with_tools.chat("hello", params, use_tqdm=False, tools=TOOLS)
    answer = output.outputs[0]
    assert (answer.finish_reason, answer.text, answer.reasoning, answer.tool_calls) == ("stop", "yes", "", ())
    (asked,) = commands(
        llm_with_tools, monkeypatch, lambda llm: llm.chat("hello", greedy(5, guided=form), use_tqdm=False, tools=TOOLS)
    )
    assert asked.sampling_params.guided is not None
    thought, rest = json.loads(asked.sampling_params.guided.structural_tag)["format"]["elements"]
    assert thought["content"]["elements"][0] == {"type": "mark", "value": "<think>"}
    assert "<tool_call>" in json.dumps(rest["elements"][0])
    assert rest["elements"][1]["elements"][0] == {"type": "const_string", "value": "yes"}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_block": 5}, "num_block"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"engine_timeout": 5}, "engine_timeout"),
        ({"queue_policy": "slo", "slo_late": "refuse"}, "slo_late"),
        ({"target": "127.0.0.1:1", "dtype": "float32"}, "dtype"),
    ],
)
def test_options_that_are_wrong_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**options)
    assert caught.value.field == field


def test_nothing_is_answered_after_the_end(model_dir: Path) -> None:
    with LLM(str(model_dir), **OPTIONS) as llm:
        llm.close()
    with pytest.raises(UnavailableError, match="closed"):
        llm.generate("hello")


# ----------------------------------------------------------------------------------------------- elsewhere


def test_a_stack_that_runs_elsewhere() -> None:
    with fake_router() as (router, address), LLM(target=address) as llm:
        prompts: list[str | list[int]] = ["one two", [1, 2, 3]]
        outputs = llm.generate(prompts, SamplingParams(n=2, seed=4, logprobs=1), use_tqdm=False)
        assert [len(output.outputs) for output in outputs] == [2, 2]
        assert outputs[0].prompt_token_ids == list(b"one two")
        assert outputs[1].outputs[0].text == "1 2 3 "
        assert (outputs[1].outputs[0].finish_reason, outputs[1].num_cached_tokens) == ("stop", 3)
        assert [(request.sampling_params.seed, request.choices.n) for request in router.requests] == [(4, 2), (4, 2)]
        assert {request.sampling_params.max_tokens for request in router.requests} == {16}

        (chat,) = llm.chat([{"role": "user", "content": "a b"}], use_tqdm=False)
        assert (chat.outputs[0].text, chat.prompt_token_ids) == ("a b ", None)
        tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        (called,) = llm.chat("a b", tools=[tool], use_tqdm=False)
        assert called.outputs[0].tool_calls[0].name == "add"
        assert called.outputs[0].finish_reason == "tool_calls"
        llm.chat("a b", use_tqdm=False, parallel_tool_calls=False)
        assert [one.parallel_tool_calls for one in router.requests[-3:]] == [True, True, False]
        llm.chat("a b", use_tqdm=False, tools=[tool], allowed_tools=["add"])
        assert list(router.requests[-1].tool_choice.allowed) == ["add"]
        llm.chat([("assistant", "a")], use_tqdm=False, continue_final_message=True)
        assert router.requests[-1].continue_final_message
        llm.chat("a b", use_tqdm=False, chat_template="{{ messages }}")
        assert router.requests[-1].chat_template == "{{ messages }}"
        llm.tokenize_chat([("assistant", "a")], continue_final_message=True, tools=[tool])
        assert router.tokenizing[-1].messages[0].content == "a"
        assert router.tokenizing[-1].tools[0].name == "add"
        vectors = llm.embed(["a"] * 70, use_tqdm=False)
        assert [vector.outputs.embedding for vector in vectors] == [[1, 0.5]] * 70


def test_more_answers_than_a_router_gives_at_once() -> None:
    with fake_router() as (router, address), LLM(target=address) as llm:
        (output,) = llm.generate("a b", SamplingParams(n=10, seed=4, prompt_logprobs=0), use_tqdm=False)
        params = [(request.choices.n, request.sampling_params) for request in router.requests]
    assert [one.text for one in output.outputs] == ["97 32 98 "] * 10
    # Both calls are under way at once, so either may come first. One scores the prompt, which is the same.
    asked = sorted((one.seed, num, one.HasField("prompt_logprobs")) for num, one in params)
    assert asked == [(4, 8, True), (12, 2, False)]


def test_more_prompts_than_are_in_flight_and_a_failure() -> None:
    with fake_router() as (router, address), LLM(target=Client(address, timeout=60)) as llm:
        assert [
            output.outputs[0].text for output in llm.generate([[number] for number in range(70)], use_tqdm=False)
        ] == [f"{number} " for number in range(70)]
        with pytest.raises(InvalidArgumentError, match="top_p"):
            llm.chat([[("user", "!INVALID_ARGUMENT")], [("user", "wait forever")]], use_tqdm=False)
        assert router.ended.wait(60)  # the other one was cancelled


def test_tools_for_a_template_that_knows_none(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, max_len=1024)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_id()}))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        (output,) = llm.chat("hello", greedy(100), use_tqdm=False, tools=TOOLS, tool_choice="weather")
    (call,) = output.outputs[0].tool_calls
    assert call.values() in ({"unit": "C"}, {"unit": "F"})
    assert output.prompt_token_ids is not None
    assert "You can call the functions" in tiny_tokenizer().decode(output.prompt_token_ids)


def test_an_answer_that_ends_inside_a_call(llm_with_tools: LLM) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"unit": "say </tool_call> now"}}\n</tool_call>'
    for end, reason, arguments in (
        (None, "tool_calls", '{"unit": "say </tool_call> now"}'),
        (" now", "stop", '{"unit": "say </tool_call>'),
    ):
        params = greedy(200, guided={"regex": re.escape(f"Yes.\n{call}")}, **({} if end is None else {"stop": [end]}))
        (output,) = llm_with_tools.chat("hello", params, use_tqdm=False, tools=TOOLS)
        (made,) = output.outputs[0].tool_calls
        assert (output.outputs[0].finish_reason, made.arguments) == (reason, arguments)
