"""The gRPC API with stock tools, deadlines and cancellation. The tools are found by $KUBEBUILDER_ASSETS."""

from __future__ import annotations

import json
import subprocess

import pytest

from baton.client.call_errors import CancelledError
from baton.client.sync_client import Client
from common.errors import DeadlineError
from tests.integration.ask import Salt
from tests.integration.reference import Expected
from tests.integration.stack import Stack, baton, wait_for
from tests.integration.stock_tools import grpcurl, output, tool

pytestmark = pytest.mark.timeout(600)


def test_grpcurl_finds_its_way_by_reflection(two: Stack) -> None:
    found = tool("grpcurl")
    services = output(found, "-plaintext", two.grpc, "list").split()
    assert {"baton.v1.InferenceService", "baton.v1.RouterService", "grpc.health.v1.Health"} <= set(services)
    described = output(found, "-plaintext", two.grpc, "describe", "baton.v1.InferenceService")
    assert "rpc Generate ( .baton.v1.GenerateRequest ) returns ( stream .baton.v1.GenerateResponse )" in described
    for worker in two.workers():
        assert "baton.v1.WorkerService" in output(found, "-plaintext", worker.address, "list").split()


def test_grpcurl_generate(two: Stack, expected: dict[str, Expected]) -> None:
    prompt = expected["capital"]
    request = {"promptTokenIds": prompt.prompt_token_ids, "samplingParams": {"temperature": 0, "maxTokens": 16}}
    messages = grpcurl(two.grpc, "baton.v1.InferenceService/Generate", request)
    assert [token for one in messages for token in one.get("token_ids", [])] == prompt.output_token_ids
    assert "".join(one.get("text", "") for one in messages) == prompt.text
    assert messages[-1]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert messages[-1]["usage"]["completion_tokens"] == 16
    assert messages[-1]["report"]["timings"]["ttft_ms"] > 0


def test_grpcurl_shows_which_field_is_wrong(two: Stack) -> None:
    request = '{"prompt": "x", "samplingParams": {"temperature": -1}}'
    command = [tool("grpcurl"), "-plaintext", "-d", request, two.grpc, "baton.v1.InferenceService/Generate"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    assert "InvalidArgument" in run.stderr
    assert "sampling_params.temperature" in run.stderr


def test_health_probe(two: Stack) -> None:
    probe = tool("grpc_health_probe")
    for address in [two.grpc, *(worker.address for worker in two.workers())]:
        output(probe, f"-addr={address}")
    output(probe, f"-addr={two.grpc}", "-service=baton.v1.InferenceService")
    run = subprocess.run([probe, f"-addr={two.grpc}", "-service=no.Such"], capture_output=True, timeout=60)
    assert run.returncode != 0


def test_ghz_hundreds_of_calls(two: Stack) -> None:
    request = {"prompt": "Hello {{.RequestNumber}}", "samplingParams": {"temperature": 0, "maxTokens": 1}}
    report = json.loads(
        output(
            tool("ghz"), "--insecure", "--call=baton.v1.InferenceService.Generate", f"--data={json.dumps(request)}",
            "--total=300", "--concurrency=20", "--timeout=120s", "--format=json", two.grpc,
        )
    )  # fmt: skip
    assert report["count"] == 300
    assert report["statusCodeDistribution"] == {"OK": 300}


def test_status_command(two: Stack) -> None:
    status = json.loads(output(*baton("status", f"--router={two.grpc}", "--json")))
    assert sorted(worker["role"] for worker in status["workers"]) == ["decode", "prefill"]
    for worker in status["workers"]:
        assert (worker["integrity"], worker["state"], worker["num_leases"]) == ("ok", "ready", 0)
        assert worker["num_free_blocks"] + worker["num_cached_blocks"] == worker["num_blocks"] == 512
        assert set(worker) >= {"address", "epoch", "num_requests_running", "num_requests_waiting"}


# What a request held is free again after each of these; the fixture `settled` looks.


def test_deadline_in_mid_prompt(two: Stack, expected: dict[str, Expected], salt: Salt) -> None:
    with Client(two.grpc, timeout=0.25) as client:
        answer = client.generate(expected["random-2000"].prompt_token_ids, cache_salt=salt(), max_tokens=500)
        with pytest.raises(DeadlineError):
            answer.result()


def test_deadline_in_mid_stream(two: Stack, salt: Salt) -> None:
    for timeout_s in (3, 10, 60):  # the next, if this machine is too busy for a first token by then
        with Client(two.grpc, timeout=timeout_s) as client:
            answer = client.generate("Once upon a time", cache_salt=salt(), ignore_eos=True, max_tokens=8000)
            with pytest.raises(DeadlineError):
                answer.result()
        if answer.text:
            break
    assert answer.text


def test_cancelled_in_mid_prompt(two: Stack, expected: dict[str, Expected], salt: Salt) -> None:
    with two.client() as client:
        answer = client.generate(expected["random-2000"].prompt_token_ids, cache_salt=salt(), max_tokens=500)
        wait_for("the prompt is computed", lambda: any(worker.num_requests_running for worker in two.workers()))
        answer.cancel()
        with pytest.raises(CancelledError):
            answer.result()


def test_cancelled_in_mid_stream(two: Stack, salt: Salt) -> None:
    with two.client() as client:
        answer = client.generate("Once upon a time", cache_salt=salt(), ignore_eos=True, max_tokens=8000)
        for number, _ in enumerate(answer):
            if number == 5:
                answer.cancel()
                break
        with pytest.raises(CancelledError):
            answer.result()


def test_client_that_goes_away(two: Stack, salt: Salt) -> None:
    client = two.client()
    answers = [client.generate("Once upon a time", cache_salt=salt(), max_tokens=8000) for _ in range(3)]
    assert [next(iter(answer)).token_ids != () for answer in answers] == [True] * 3
    client.close()
