"""The client and the commands that use it, against a scripted router over real gRPC."""

from __future__ import annotations

import inspect
import io
import json
import re
from collections.abc import Iterator

import pytest

import baton
from baton.cli.main import main
from baton.client.async_client import AsyncClient
from baton.client.call_errors import CancelledError
from baton.client.messages import Tool
from baton.client.report import ModelCard, Prefix, PrefixOnWorker, Usage
from baton.client.sync_client import Client
from common.cache_hints import Retain
from common.errors import (
    BatonError,
    DeadlineError,
    IncompatibleError,
    InternalError,
    InvalidArgumentError,
    ModelNotFoundError,
    OverloadedError,
    SlowReaderError,
    UnavailableError,
)
from common.types import FinishReason, SampledToken, TokenLogprob, WorkerRole, WorkerState
from protos.baton.v1 import inference_pb2
from tests.support.fake_router import FakeRouter, fake_router


@pytest.fixture
def router() -> Iterator[tuple[FakeRouter, str]]:
    with fake_router() as both:
        yield both


@pytest.fixture
def client(router: tuple[FakeRouter, str]) -> Iterator[Client]:
    with baton.Client(router[1], timeout=60) as one:
        yield one


def test_answer_arrives_in_chunks_and_as_a_whole(client: Client) -> None:
    answer = client.generate("one two")
    assert [chunk.text for chunk in answer] == ["one ", "two ", ""]
    result = answer.result()
    assert result.text == answer.text == "one two "
    assert result.token_ids == (0, 1)
    assert result.logprobs[1] == SampledToken(1, -0.5, (TokenLogprob(1, -0.25),))
    assert (result.request_id, result.model, result.stop_reason) == ("r1", "m", "2")
    assert result.finish_reason is FinishReason.STOP
    assert result.usage == Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=3, reasoning_tokens=1)
    assert result.report.timings.prefill_ms == 10
    assert (result.report.prefill_worker, result.report.num_blocks_moved) == ("p:1", 2)


def test_result_reads_what_has_not_arrived(client: Client) -> None:
    assert client.chat("a b c").result().text == "a b c "


def test_what_is_not_set_is_not_sent(client: Client, router: tuple[FakeRouter, str]) -> None:
    client.generate(
        [3, 4], temperature=0.0, stop=["x"], logit_bias={5: -1.0}, cache_salt="s", retain=Retain(60, 2)
    ).result()
    request = router[0].requests[-1]
    assert (request.retain.seconds, request.retain.num_tokens) == (60, 2)
    assert list(request.prompt_token_ids) == [3, 4]
    assert request.cache_salt == "s"
    assert {field.name for field, _ in request.sampling_params.ListFields()} == {"temperature", "stop", "logit_bias"}
    client.chat([("system", "be brief"), ("user", "hi")]).result()
    request = router[0].requests[-1]
    assert [(one.role, one.content) for one in request.messages] == [("system", "be brief"), ("user", "hi")]
    assert not request.HasField("retain")
    with pytest.raises(InvalidArgumentError, match=r"^retain.seconds"):
        client.generate("x", retain=Retain(-1))
    assert not request.sampling_params.ListFields()


def test_chats_that_go_on_and_tools_that_are_allowed_are_sent(client: Client, router: tuple[FakeRouter, str]) -> None:
    chat = [("user", "hi"), ("assistant", "I say")]
    client.chat(chat, continue_final_message=True, add_generation_prompt=False).result()
    request = router[0].requests[-1]
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    client.chat(chat, tools=[Tool("a"), Tool("b")], allowed_tools=["b"]).result()
    assert list(router[0].requests[-1].tool_choice.allowed) == ["b"]
    client.tokenize(messages=chat, continue_final_message=True, chat_template_kwargs={"a": 1})
    asked = router[0].tokenizing[-1]
    assert [one.content for one in asked.messages] == ["hi", "I say"]
    assert (asked.continue_final_message, asked.chat_template_kwargs) == (True, '{"a": 1}')
    assert not asked.HasField("add_special_tokens")
    assert not asked.HasField("add_generation_prompt")
    client.chat(chat, chat_template="{{ messages }}").result()
    client.tokenize(messages=chat, chat_template="{{ messages }}")
    for sent in (router[0].requests[-1], router[0].tokenizing[-1]):
        assert sent.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("INVALID_ARGUMENT", InvalidArgumentError),
        ("NOT_FOUND", ModelNotFoundError),
        ("RESOURCE_EXHAUSTED", OverloadedError),
        ("UNAVAILABLE", UnavailableError),
        ("FAILED_PRECONDITION", IncompatibleError),
        ("DEADLINE_EXCEEDED", DeadlineError),
        ("ABORTED", SlowReaderError),
        ("INTERNAL", InternalError),
        ("CANCELLED", CancelledError),
    ],
)
def test_each_status_is_an_error_of_the_tree(code: str, error: type[BatonError], client: Client) -> None:
    with pytest.raises(error) as caught:
        client.generate(f"!{code}").result()
    assert type(caught.value).grpc_code == code
    if isinstance(caught.value, InvalidArgumentError):
        assert (caught.value.field, caught.value.reason) == ("top_p", "too big")
    elif isinstance(caught.value, OverloadedError):
        assert caught.value.retry_after_s == 7
    else:
        assert caught.value.message == "why"


def test_details_that_came_too_late_do_not_count(client: Client) -> None:
    with pytest.raises(DeadlineError, match="why"):
        client.generate("!LATE").result()


def test_wrong_types_name_the_option_before_anything_is_sent(client: Client, router: tuple[FakeRouter, str]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^top_k: 'many'"):
        client.generate("x", temperature=1.0, top_k="many")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"^seed: "):
        client.generate("x", seed=2**80)
    with pytest.raises(InvalidArgumentError, match=r"^colour: is not a known parameter$"):
        client.generate("x", colour=1)  # type: ignore[call-arg]
    assert router[0].requests == []


def test_cancel_reaches_the_router(client: Client, router: tuple[FakeRouter, str]) -> None:
    answer = client.generate("on and forever")
    assert next(iter(answer)).text == "on "
    answer.cancel()
    with pytest.raises(CancelledError):
        answer.result()
    assert router[0].ended.wait(60)
    assert answer.text.startswith("on ")


def test_fleet_models_and_tokens(client: Client) -> None:
    prefill, decode = client.fleet()
    assert (prefill.role, prefill.epoch, prefill.state) == (WorkerRole.PREFILL, "e1", WorkerState.READY)
    assert (prefill.num_blocks, prefill.num_free_blocks, prefill.num_leases) == (10, 7, 1)
    assert (decode.role, decode.state, decode.integrity) == (
        WorkerRole.DECODE,
        WorkerState.UNREACHABLE,
        "does not answer",
    )
    assert client.models() == [ModelCard("m", 100)]
    assert client.detokenize(client.tokenize("hé")) == "hé"


# ------------------------------------------------------------------------------------------- commands


def test_status_json_has_the_documented_keys(
    router: tuple[FakeRouter, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--json", "--router", router[1]]) == 0
    first, second = json.loads(capsys.readouterr().out)["workers"]
    assert first == {
        "role": "prefill",
        "address": "p:1",
        "epoch": "e1",
        "state": "ready",
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "goes_by_slack": False,
        "takes": None,
        "role_pinned": False,
        "num_role_shifts": 0,
        "num_blocks": 10,
        "num_free_blocks": 7,
        "num_cached_blocks": 2,
        "num_leases": 1,
        "integrity": "ok",
        "dtype": "float32",
        "dtype_reason": "the checkpoint's bfloat16 is slow here: this CPU has no [bf16]",
        "device": "cpu",
        "device_reason": "there is no CUDA device",
        "kernels": "avx512",
        "kernels_reason": "the fastest on this kind of CPU (GenuineIntel-6-207)",
        "breaker": "half open",
        "num_queued_prompt_tokens": 77,
        "num_known_blocks": 5,
        "hit_rate": 0.25,
        "tokens_per_second": 12.5,
        "time_source": "learned",
        "time_age_s": 185.0,
        "time_error_median": 0.018,
        "time_error_p90": 0.07,
        "time_drifts": True,
    }
    assert (second["role"], second["state"]) == ("decode", "unreachable")


def test_status_table(router: tuple[FakeRouter, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--router", router[1]]) == 0
    *table, reason, device, kernels = capsys.readouterr().out.splitlines()
    header, prefill, decode = (line.split() for line in table)
    assert header[:4] == ["role", "address", "state", "dtype"]
    assert prefill == ["prefill", "p:1", "ready", "float32", "0", "0", "10", "7", "2", "1", "ok"]
    assert decode[:3] == ["decode", "d:1", "unreachable"]
    assert reason == "float32: the checkpoint's bfloat16 is slow here: this CPU has no [bf16]"
    assert device == "cpu: there is no CUDA device"
    assert kernels == "kernels avx512: the fastest on this kind of CPU (GenuineIntel-6-207)"


def test_wide_status_table(router: tuple[FakeRouter, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--wide", "--router", router[1]]) == 0
    header, prefill, decode, *_ = capsys.readouterr().out.splitlines()
    assert "queued tokens" in header
    assert prefill.split()[10:16] == ["77", "5", "25%", "12.5", "half", "open"]
    told = ["learned, 3 min, error 2%, p90 7%, drifts", "no", "ok"]
    assert re.split(r" {2,}", prefill.strip())[-3:] == told
    assert "not known" in decode


def test_generate_text_and_json(router: tuple[FakeRouter, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one two", "--router", router[1], "--temperature", "0", "--stop", "x, y"]) == 0
    assert capsys.readouterr().out == "one two \n"
    params = router[0].requests[-1].sampling_params
    assert (params.temperature, list(params.stop), params.HasField("seed")) == (0, ["x, y"], False)
    assert main(["generate", "one two", "--router", router[1], "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["text"], result["finish_reason"], result["usage"]["cached_tokens"]) == ("one two ", "stop", 3)
    assert result["report"]["timings"]["total_ms"] == 20


def test_generate_several_answers(router: tuple[FakeRouter, str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "one two", "--router", router[1], "--n", "2"]
    assert main([*command, "--best-of", "3", "--timeline"]) == 0
    output = capsys.readouterr()
    assert output.out == "--- 1 of 2 ---\none two \n--- 2 of 2 ---\none two \n"
    first, second = output.err.split("--- 2 of 2 ---")
    assert "--- 1 of 2 ---" in first
    assert "prefill on p:1" in first
    assert "prefill on p:1" in second
    choices = router[0].requests[-1].choices
    assert (choices.n, choices.best_of, choices.HasField("use_beam_search")) == (2, 3, False)
    assert main([*command, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["one two "] * 2


def test_generate_by_beam_search(router: tuple[FakeRouter, str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--use-beam-search", "--length-penalty", "0.5", "--early-stopping"]
    assert main(["generate", "one", "--router", router[1], "--n", "2", *flags]) == 0
    expected = "--- 1 of 2 --- logprob -1.500\none \n--- 2 of 2 --- logprob -2.500\none \n"
    assert capsys.readouterr().out == expected
    choices = router[0].requests[-1].choices
    assert (choices.use_beam_search, choices.length_penalty, choices.early_stopping) == (True, 0.5, True)


def test_chat_with_a_question_and_its_timeline(
    router: tuple[FakeRouter, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "how", "are", "you", "--router", router[1], "--timeline", "--system", "s"]) == 0
    output = capsys.readouterr()
    assert output.out == "how are you \n"
    assert "prefill on p:1" in output.err
    assert [one.role for one in router[0].requests[-1].messages] == ["system", "user"]


def test_conversation_keeps_its_history(
    router: tuple[FakeRouter, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\nsecond\n"))
    assert main(["chat", "--router", router[1]]) == 0
    assert capsys.readouterr().out == "first \nsecond \n"
    assert [(one.role, one.content) for one in router[0].requests[-1].messages] == [
        ("user", "first"),
        ("assistant", "first "),
        ("user", "second"),
    ]


def test_a_refused_request_is_one_line(router: tuple[FakeRouter, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "!INVALID_ARGUMENT", "--router", router[1]]) == 1
    assert capsys.readouterr().err == "baton generate: error: top_p: too big\n"


def test_ctrl_c_stops_the_answer_and_leaves_the_conversation(
    router: tuple[FakeRouter, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = iter(["on and forever", "next"])

    def typed(_: str) -> str:
        try:
            return next(questions)
        except StopIteration:
            raise EOFError from None

    printed: list[str] = []

    def print_once_then_interrupt(text: str = "", **_: object) -> None:
        printed.append(text)
        if text == "on ":
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("baton.cli.ask.print", print_once_then_interrupt, raising=False)
    assert main(["chat", "--router", router[1]]) == 0
    assert router[0].ended.wait(60)
    assert [(one.role, one.content) for one in router[0].requests[-1].messages] == [
        ("user", "on and forever"),
        ("assistant", "on "),
        ("user", "next"),
    ]


def test_logprobs_that_nobody_would_see_are_refused(
    router: tuple[FakeRouter, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["generate", "one"], ["chat", "one"]):
        assert main([*command, "--router", router[1], "--logprobs", "2"]) == 2
        assert "--logprobs: is only shown by `baton generate --json`" in capsys.readouterr().err
    assert main(["generate", "one", "--json", "--router", router[1], "--logprobs", "2"]) == 0


@pytest.mark.parametrize("bias", ["5", "a=1", "5=x"])
def test_a_mapping_is_typed_as_pairs(
    router: tuple[FakeRouter, str], capsys: pytest.CaptureFixture[str], bias: str
) -> None:
    assert main(["generate", "one", "--router", router[1], "--logit-bias", bias]) == 2
    assert "--logit-bias" in capsys.readouterr().err
    assert router[0].requests == []


async def test_both_clients_say_which_prefix_is_meant(client: Client, router: tuple[FakeRouter, str]) -> None:
    tool = Tool("f")
    told = Prefix(64, 4, (PrefixOnWorker("d:1", 1, 2, 3, "why"),))
    async with AsyncClient(router[1], timeout=30) as other:
        assert client.retain_prefix(60, prompt=[1, 2], num_tokens=1, cache_salt="s", model="m") == told
        assert await other.retain_prefix(60, prompt=[1, 2], num_tokens=1, cache_salt="s", model="m") == told
        options = {"enable_thinking": False}
        assert client.evict_prefix(messages="hi", tools=[tool], chat_template_kwargs=options) == told
        assert await other.evict_prefix(messages="hi", tools=[tool], chat_template_kwargs=options) == told
        assert client.prefetch_prefix(prompt="a", session="x") == told
        assert await other.prefetch_prefix(prompt="a", session="x") == told
    assert [one["x-session-id"] for one in router[0].metadata[-2:]] == ["x", "x"]
    first, same, second, same_second, *third = router[0].requests
    assert third == [inference_pb2.PrefetchPrefixRequest(prefix=inference_pb2.Prefix(prompt="a"))] * 2
    assert (first, second) == (same, same_second)
    prefix = inference_pb2.Prefix(prompt_token_ids=[1, 2], num_tokens=1, cache_salt="s", model="m")
    assert first == inference_pb2.RetainPrefixRequest(prefix=prefix, seconds=60)
    assert [(one.role, one.content) for one in second.prefix.messages] == [("user", "hi")]
    assert [one.name for one in second.prefix.tools] == ["f"]
    assert second.prefix.chat_template_kwargs == '{"enable_thinking": false}'


def test_both_clients_offer_the_same() -> None:
    """Their methods that wait for an answer stand twice: the same names, arguments, defaults and types."""

    def offered(client: type) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, method in inspect.getmembers(client, inspect.isfunction):
            if not name.startswith("_"):
                signature = inspect.signature(method)
                found[name] = list(signature.parameters.values()), str(signature.return_annotation)
        return found

    assert offered(Client) == offered(AsyncClient)
    assert {"generate", "chat", "embed", "fleet", "close"} <= set(offered(Client))
