"""What the README shows first, against one real stack: separate router, prefill and decode processes, a real model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from baton.client.sync_client import Client
from bench.command import BENCH
from common.config import DEFAULT_MODEL
from common.errors import InvalidArgumentError
from engine.loading.embedded_model import package_is_installed
from tests.integration.stack import CALL_TIMEOUT_S, Stack, baton

QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if not package_is_installed():
        pytest.skip("the embedded model's package is not installed")
    stack = Stack(tmp_path_factory.mktemp("stack"))
    yield stack
    assert stack.stop() == 0


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.http}/v1", api_key="none", timeout=CALL_TIMEOUT_S, max_retries=0) as client:
        yield client


def test_chat_over_grpc_with_a_handoff(stack: Stack) -> None:
    with Client(stack.grpc, timeout=CALL_TIMEOUT_S) as client:
        answer = client.chat(QUESTION, temperature=0, max_tokens=30)
        assert "".join(chunk.text for chunk in answer) == ANSWER
    report = answer.result().report
    roles = {worker.role.value: worker.address for worker in stack.workers()}
    assert (report.prefill_worker, report.decode_worker) == (roles["prefill"], roles["decode"])
    assert report.num_blocks_moved > 0
    assert report.fallback_reason == ""
    stack.settle()


def test_chat_with_the_openai_client(client: openai.OpenAI, stack: Stack) -> None:
    (model,) = client.models.list().data
    assert model.id == DEFAULT_MODEL
    whole = client.chat.completions.create(
        model=model.id, messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    assert whole.choices[0].message.content == ANSWER
    stream = client.chat.completions.create(
        model=model.id, messages=[{"role": "user", "content": QUESTION}], temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == ANSWER
    stack.settle()


def test_bad_input_names_its_field(client: openai.OpenAI, stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=DEFAULT_MODEL, prompt="x", temperature=-1)
    assert refused.value.param == "temperature"
    with Client(stack.grpc) as grpc_client, pytest.raises(InvalidArgumentError, match="temperature"):
        grpc_client.generate("x", temperature=-1).result()


def test_status_tells_of_each_worker(stack: Stack) -> None:
    run = subprocess.run(
        baton("status", "--router", stack.grpc, "--json"), capture_output=True, text=True, timeout=60, check=True
    )
    workers = json.loads(run.stdout)
    assert sorted(worker["role"] for worker in workers["workers"]) == ["decode", "prefill"]
    assert {worker["integrity"] for worker in workers["workers"]} == {"ok"}


def test_what_was_computed_outlives_its_request(stack: Stack) -> None:
    """The same prompt again is found in the prefix cache."""
    prompt = "The quick brown fox jumps over the lazy dog, and then it does so once more, and again. " * 4
    with Client(stack.grpc, timeout=CALL_TIMEOUT_S) as client:
        first = client.generate(prompt, temperature=0, max_tokens=4).result()
        again = client.generate(prompt, temperature=0, max_tokens=4).result()
    assert again.token_ids == first.token_ids
    assert (first.usage.cached_tokens, again.usage.cached_tokens > 0) == (0, True)
    stack.settle()
    assert any(Path(stack.kv_dir).rglob("*.run"))


@pytest.mark.parametrize("backend", ["openai", "baton-chat"])
def test_bench_serve_counts_what_it_asked_for(
    stack: Stack, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of common words are as long as they should be, answers too, and every request is counted."""
    url = stack.http if backend.startswith("openai") else stack.grpc
    arguments = ["--backend", backend, "--base-url", url, "--request-rate=50", "--num-prompts=4", "--num-warmups=1"]
    arguments += ["--random-input-len=20", "--random-output-len=3", "--goodput", "ttft:1e9", "--max-send-lag=1e9"]
    page = tmp_path / "run.html"
    # On a busy machine the client may be late; that is no matter here.
    assert BENCH.main(["serve", *arguments, "--json", "-o", str(page)], standalone_mode=False) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["model_id"], found["request_goodput"]) == (
        4,
        DEFAULT_MODEL,
        found["request_throughput"],
    )
    assert found["total_output_tokens"] == 12
    prompt_tokens = found["total_input_tokens"] / 4
    assert prompt_tokens == 20 if backend in ("openai", "baton") else prompt_tokens > 20  # the template's own
    assert 0 < found["mean_ttft_ms"] <= found["mean_e2el_ms"]
    assert DEFAULT_MODEL in page.read_text()
    stack.settle()
