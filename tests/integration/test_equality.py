"""Greedy answers are transformers' own, token for token in float32, each way that a request can go."""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.client.report import Result
from common.types import FinishReason, WorkerRole
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from router.policy.costs import IN_PLACE_MARGIN
from tests.integration.ask import Salt, ask
from tests.integration.prompts import BY_NAME, CASES, LONG
from tests.integration.reference import Expected
from tests.integration.stack import CALL_TIMEOUT_S, Stack, running
from tests.nixl import needs_nixl

pytestmark = pytest.mark.timeout(600)  # machines differ much in what they compute

ALL = [case.name for case in CASES]
FEW = ["chat-capital", "emoji", "random-160", "ledger-250", "ledger-600"]
FEWEST = ["chat-capital", "random-160", "ledger-600"]
BLOCK_SIZE = 16

Answers = dict[str, Expected]


@pytest.fixture(scope="module")
def one(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One worker of both roles."""
    stack = Stack(tmp_path_factory.mktemp("one"), "--prefill=0", "--decode=0", "--both=1")
    with running(stack):
        yield stack


def test_prompts_are_varied(expected: Answers) -> None:
    lengths = sorted(len(one.prompt_token_ids) for one in expected.values())
    assert len(lengths) >= 30
    assert (lengths[0], lengths[-1]) == (1, 2000)
    assert sum(len(one.output_token_ids) >= 200 for one in expected.values()) >= 2
    ended_by_eos = [name for name, one in expected.items() if len(one.output_token_ids) < BY_NAME[name].max_tokens]
    assert ended_by_eos


# ------------------------------------------------------------------------------------------ one process


def test_one_process_one_at_a_time(one: Stack, expected: Answers, salt: Salt) -> None:
    results = ask(one, expected, FEWEST, salt, at_once=1)
    assert not any(result.report.prefill_worker for result in results.values())


def test_one_process_all_at_once(one: Stack, expected: Answers, salt: Salt) -> None:
    results = ask(one, expected, ALL, salt)
    for name, result in results.items():
        num_tokens = len(expected[name].output_token_ids)
        reason = FinishReason.LENGTH if num_tokens == BY_NAME[name].max_tokens else FinishReason.STOP
        assert (result.finish_reason, result.usage.completion_tokens) == (reason, num_tokens), name


def test_one_process_warm_prefix_cache(one: Stack, expected: Answers) -> None:
    ask(one, expected, FEWEST, lambda: "warm")
    for name, result in ask(one, expected, FEWEST, lambda: "warm").items():
        num_prompt_tokens = len(expected[name].prompt_token_ids)
        assert result.usage.cached_tokens == (num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE, name


# ---------------------------------------------------------------------------------------- two processes


def test_two_processes_all_at_once(two: Stack, expected: Answers, salt: Salt) -> None:
    """All but the longest ones, which follow one by one: so few tokens wait at the prefill worker that no prompt is
    computed in place."""
    lengths = {name: len(expected[name].prompt_token_ids) for name in ALL}
    *together, fourth, third, second, longest = sorted(ALL, key=lengths.__getitem__)
    assert sum(lengths[name] for name in together) < IN_PLACE_MARGIN
    results = ask(two, expected, together, salt)
    results |= ask(two, expected, (fourth, third, second, longest), salt, at_once=1)
    check_handed_over(results, expected)


def test_two_processes_while_many_tokens_wait(two: Stack, expected: Answers, salt: Salt) -> None:
    """A prompt may be computed in place if more than a thousand tokens wait at the prefill worker, but never the
    longest one: that takes longer in place, whatever waits."""
    results = ask(two, expected, [*FEW, "ledger-1200", "random-2000"], salt)
    handed_over = {name: result for name, result in results.items() if result.report.prefill_worker}
    assert "random-2000" in handed_over
    check_handed_over(handed_over, expected)


def check_handed_over(results: Mapping[str, Result], expected: Answers) -> None:
    """By the prefill worker, with all full blocks of the prompt."""
    for name, result in results.items():
        assert result.report.prefill_worker, name
        assert result.report.num_blocks_moved >= len(expected[name].prompt_token_ids) // BLOCK_SIZE, name
        assert not result.report.fallback_reason, name


def test_two_processes_warm_prefix_cache(two: Stack, expected: Answers) -> None:
    ask(two, expected, FEWEST, lambda: "warm")
    for name, result in ask(two, expected, FEWEST, lambda: "warm").items():
        num_full_blocks = (len(expected[name].prompt_token_ids) - 1) // BLOCK_SIZE
        assert result.usage.cached_tokens == num_full_blocks * BLOCK_SIZE, name
        assert result.report.num_blocks_moved <= 1, name


def test_the_same_prompt_many_times_at_once(two: Stack, expected: Answers, salt: Salt) -> None:
    same = salt()
    with two.client() as client, ThreadPoolExecutor(8) as pool:
        prompt = expected["random-160"]
        futures = [
            pool.submit(
                client.generate(prompt.prompt_token_ids, temperature=0.0, max_tokens=16, cache_salt=same).result
            )
            for _ in range(8)
        ]
        assert [list(future.result().token_ids) for future in futures] == [prompt.output_token_ids] * 8


def test_beside_requests_that_are_cancelled(two: Stack, expected: Answers, salt: Salt) -> None:
    """Blocks of requests that end at any moment go to others, whose answers are right nevertheless."""
    rng = random.Random(8)

    def cancel_some() -> None:
        for _ in range(8):
            answer = client.generate(rng.sample(range(100, 40_000), 300), max_tokens=500, ignore_eos=True)
            if rng.random() < 0.5:
                next(iter(answer))
            time.sleep(rng.random() * 0.3)
            answer.cancel()

    with two.client() as client, ThreadPoolExecutor(2) as pool:
        cancelling = [pool.submit(cancel_some) for _ in range(2)]
        ask(two, expected, FEW, salt)
        for future in cancelling:
            future.result()


def test_split_prompts(two: Stack, expected: Answers, salt: Salt) -> None:
    check_split(two, expected, salt)


def check_split(stack: Stack, expected: Answers, salt: Salt) -> None:
    """Prompts in two parts; then again, when the decode worker has them and asks nobody. A guided answer is the one of
    the whole prompt."""
    address = {worker.role: worker.address for worker in stack.workers()}
    with grpc.insecure_channel(address[WorkerRole.DECODE]) as channel:
        fingerprint = worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest()).fingerprint
        decode = decode_pb2_grpc.DecodeServiceStub(channel).Decode

        def answer(name: str, one_salt: str, split_at: int, **params: Any) -> tuple[list[int], types_pb2.RequestReport]:
            request = decode_pb2.DecodeRequest(
                request_id=f"{name}-{split_at}",
                fingerprint=fingerprint,
                prompt_token_ids=expected[name].prompt_token_ids,
                sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=BY_NAME[name].max_tokens, **params),
                cache_salt=one_salt,
                prefill_addresses=[address[WorkerRole.PREFILL]],
                split_at=split_at,
            )
            events = list(decode(request, timeout=CALL_TIMEOUT_S))
            tokens = [token.token_id for event in events for token in event.tokens]
            return tokens, [event.report for event in events if event.HasField("report")][-1]

        for name in FEWEST[1:]:
            num_prompt = len(expected[name].prompt_token_ids)
            for split_at in (num_prompt // 3, 2 * num_prompt // 3):
                one_salt, num_blocks = salt(), split_at // BLOCK_SIZE
                for num_moved in (num_blocks, 0):
                    tokens, report = answer(name, one_salt, split_at)
                    assert not expected[name].explain(tokens), (name, split_at)
                    assert report.num_blocks_moved == num_moved
                    assert report.num_tail_tokens == (num_prompt - num_blocks * BLOCK_SIZE if num_moved else 0)
                    assert not report.fallback_reason
        guided = types_pb2.Guided(regex="[a-z]{3} [0-9]{4}")
        (whole, _), (split, _) = (answer("random-160", salt(), at, guided=guided) for at in (0, 64))
        assert whole == split


def test_small_chunks(model_dir: Path, tmp_path: Path, expected: Answers, salt: Salt) -> None:
    """Of 16 tokens. The others have 512, the default, and 64 where blocks are read from the other worker."""
    stack = Stack(tmp_path, "--chunk-size=16", "--min-remote-tokens=1")
    with running(stack):
        ask(stack, expected, FEW, salt)
        stack.settle()


@needs_nixl
@pytest.mark.parametrize("flags", [(), ("--verify-checksums",)], ids=["plain", "checksums"])
def test_blocks_read_from_the_other_worker(
    model_dir: Path, tmp_path: Path, expected: Answers, salt: Salt, flags: tuple[str, ...]
) -> None:
    stack = Stack(tmp_path, "--connector=nixl", "--chunk-size=64", "--min-remote-tokens=1", *flags)
    with running(stack):
        results = ask(stack, expected, FEWEST, salt)
        check_split(stack, expected, salt)
        stack.settle()
    for name, result in results.items():
        assert result.report.num_blocks_moved >= len(expected[name].prompt_token_ids) // BLOCK_SIZE, name
        assert not result.report.fallback_reason, name


def test_preempted(model_dir: Path, tmp_path: Path, expected: Answers, salt: Salt) -> None:
    stack = Stack(tmp_path, "--num-blocks=24")  # the two longest answers need more between them
    names = [case.name for case in CASES if case.max_tokens >= LONG and len(expected[case.name].prompt_token_ids) < 99]
    with running(stack):
        results = ask(stack, expected, names, salt)
        stack.settle()
    assert sum(result.report.num_preemptions for result in results.values()) > 0


def test_kv_directory_wiped_in_mid_request(two: Stack, expected: Answers, salt: Salt) -> None:
    with wiping(two.kv_dir):
        results = ask(two, expected, ["ledger-600", "ledger-1200", "random-160"], salt)
    reasons = [result.report.fallback_reason for result in results.values()]
    assert any(reasons)
    results = ask(two, expected, ["random-160"], salt)
    assert not results["random-160"].report.fallback_reason


@contextlib.contextmanager
def wiping(folder: Path) -> Iterator[None]:
    """Empties `folder` again and again while inside."""
    ended = threading.Event()

    def wipe() -> None:
        while not ended.wait(0.005):
            for path in folder.iterdir():
                shutil.rmtree(path, ignore_errors=True)

    thread = threading.Thread(target=wipe)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
