"""Requests that are cancelled at random moments leave nothing."""

from __future__ import annotations

import random
import threading
import time

import grpc
import httpx

from protos.baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.abuse.conftest import ABUSE_CANCELS
from tests.abuse.rude import Target, at_once, channel, metadata
from tests.abuse.vitals import Vitals

AT_A_TIME = 16
WARM_UP = 200
GROWTH_MIB = 16.0  # what malloc's pages differ by


def test_cancelled_requests_leave_nothing(target: Target, vitals: Vitals) -> None:
    """Blocks, leases, requests, files, tasks and memory of every process are where they were, after a warm-up."""
    vitals.until_at_rest(lambda: cancel(target, WARM_UP))
    warm = vitals.samples()
    cancel(target, ABUSE_CANCELS)
    vitals.settle()  # blocks, leases, requests; files and tasks are looked at after each test
    grown = {name: round(now.memory_mib - warm[name].memory_mib, 1) for name, now in vitals.samples().items()}
    assert all(mib <= GROWTH_MIB for mib in grown.values()), f"MiB more than after the warm-up: {grown}"


def cancel(target: Target, number: int) -> None:
    with channel(target.grpc) as opened, target.http_client() as client:
        at_once(number, lambda n: cancel_one(opened, client, n), AT_A_TIME)


def cancel_one(opened: grpc.Channel, client: httpx.Client, number: int) -> None:
    """One in eight over HTTP. Some after a moment, some after some tokens, some as they end."""
    rng = random.Random(number)
    num_prompt_tokens, max_tokens = rng.choice((2, 40, 300)), rng.choice((1, 4, 50))
    if number % 8 == 0:
        cancel_stream(client, rng, max_tokens)
        return
    request = inference_pb2.GenerateRequest(
        prompt_token_ids=[rng.randrange(300) for _ in range(num_prompt_tokens)],
        sampling_params=types_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )
    answer = inference_pb2_grpc.InferenceServiceStub(opened).Generate(request, metadata=metadata())
    if rng.random() < 0.5:
        threading.Timer(rng.random() ** 3 * 0.3, answer.cancel).start()
    num_read, stop = 0, rng.randrange(20)
    try:
        for _ in answer:
            num_read += 1
            if num_read > stop:
                answer.cancel()
    except grpc.RpcError:
        assert answer.code() is grpc.StatusCode.CANCELLED, answer


def cancel_stream(client: httpx.Client, rng: random.Random, max_tokens: int) -> None:
    """Leaving the block closes the connection."""
    sent = {"prompt": "Hello", "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "n": rng.choice((1, 2))}
    with client.stream("POST", "/v1/completions", json=sent) as answer:
        assert answer.status_code == 200
        time.sleep(rng.random() ** 3 * 0.3)
