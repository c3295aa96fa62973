"""Fuzzers that know the protos and the OpenAPI page. Whatever they send, no answer blames the service."""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, TypeVar

import grpc
import hypothesis
import pytest
import schemathesis
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from schemathesis.core.result import Ok

from protos.baton.v1 import (
    admin_pb2,
    decode_pb2,
    demand_pb2,
    inference_pb2,
    prefill_pb2,
    router_pb2,
    types_pb2,
    worker_pb2,
)
from protos.envoy import external_processor_pb2
from protos.inference import open_inference_pb2
from tests.abuse.mutate import message_of, mutated
from tests.abuse.rude import RUDE_KEY, Target, channel, ending, metadata
from tests.abuse.vitals import Vitals
from tests.router.envoy import request_headers

T = TypeVar("T")
CALL_S = 2.0  # of one call: those that answer at length are cut off
AT_A_TIME = 8
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


def service(file: ModuleType, name: str) -> ServiceDescriptor:
    found: ServiceDescriptor = file.DESCRIPTOR.services_by_name[name]
    return found


ROUTER = [
    service(inference_pb2, "InferenceService"),
    service(open_inference_pb2, "GRPCInferenceService"),
    service(router_pb2, "RouterService"),
    service(admin_pb2, "AdminService"),
    service(demand_pb2, "DemandService"),
    HEALTH,
    REFLECTION,
]
WORKER = [service(worker_pb2, "WorkerService"), HEALTH, REFLECTION]
PREFILL = [*WORKER, service(prefill_pb2, "PrefillService")]
DECODE = [*WORKER, service(decode_pb2, "DecodeService")]
PICKER = [service(external_processor_pb2, "ExternalProcessor"), HEALTH]
PORTS = {"grpc": ROUTER, "prefill": PREFILL, "decode": DECODE, "picker": PICKER}
NOT_ASKED = ("baton.v1.WorkerService.Drain", "baton.v1.WorkerService.Pause")  # they do what they are for

INFER = open_inference_pb2.ModelInferRequest(
    inputs=[
        open_inference_pb2.ModelInferRequest.InferInputTensor(
            name=name,
            datatype="BYTES",
            shape=[1],
            contents=open_inference_pb2.InferTensorContents(bytes_contents=[text]),
        )
        for name, text in (("text_input", b"Hello"), ("sampling_parameters", b'{"max_tokens": 3}'))
    ]
)
LITTLE = types_pb2.SamplingParams(max_tokens=3)
RIGHT: dict[str, Callable[[Target], Message]] = {
    "Generate": lambda _: inference_pb2.GenerateRequest(prompt="Hello", sampling_params=LITTLE),
    "Chat": lambda _: inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role="user", content="Hello")], sampling_params=LITTLE
    ),
    "ModelInfer": lambda _: INFER,
    "ModelStreamInfer": lambda _: INFER,
    "Embed": lambda _: inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="Hello")]),
    "Decode": lambda target: decode_pb2.DecodeRequest(
        request_id="r", prompt_token_ids=[5] * 40, sampling_params=LITTLE, prefill_addresses=[target.prefill]
    ),
    "DecodeMany": lambda target: decode_pb2.DecodeManyRequest(
        starts=[
            decode_pb2.StartCall(
                call_id=1,
                timeout_s=CALL_S,
                request=decode_pb2.DecodeRequest(
                    request_id="r",
                    prompt_token_ids=[5] * 40,
                    sampling_params=LITTLE,
                    prefill_addresses=[target.prefill],
                ),
            )
        ]
    ),
    "Process": lambda _: request_headers("/v1/completions", {"authorization": f"Bearer {RUDE_KEY}"}),
    "Prefill": lambda _: prefill_pb2.PrefillRequest(
        start=prefill_pb2.PrefillStart(request_id="p", prompt_token_ids=[5] * 40, sampling_params=LITTLE)
    ),
}
"""To which some fields are added, so that what is sent gets behind the first checks."""


def messages_to(rng: random.Random, method: MethodDescriptor, target: Target) -> list[bytes]:
    """What one call sends: one message; none or some if the method takes a stream, and at times if not."""
    found = []
    for number in range(rng.choice((1, 1, 1, 1, 0, 2, 5)) if rng.random() < 0.3 or method.client_streaming else 1):
        message = message_of(rng, method.input_type)
        if method.name in RIGHT and rng.random() < 0.7 and number == 0:
            right = copy.deepcopy(RIGHT[method.name](target))
            if rng.random() < 0.8:
                for field in rng.sample(list(method.input_type.fields), 1):
                    message.ClearField(field.name)
            if rng.random() < 0.5:
                right.MergeFrom(message)
            message = right
        found.append(mutated(rng, message.SerializeToString()))
    return found


@pytest.mark.parametrize(("port", "services"), PORTS.items())
def test_protos(
    target: Target, vitals: Vitals, unstalled: None, fuzz_seconds: float, port: str, services: list[ServiceDescriptor]
) -> None:
    methods = [m for s in services for m in s.methods if m.full_name not in NOT_ASKED]
    end_at, codes = time.monotonic() + fuzz_seconds / len(PORTS), Counter[grpc.StatusCode]()

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        method = rng.choice(methods)
        path = f"/{method.containing_service.full_name}/{method.name}"
        key = RUDE_KEY if rng.random() < 0.95 else None
        end = ending(opened, path, messages_to(rng, method, target), key=key, timeout_s=CALL_S)
        codes[end.code] += 1
        is_bad = end.is_our_fault or end.code is grpc.StatusCode.UNAVAILABLE
        assert not is_bad, f"seed {seed}: {path} ended with {end}"

    def ask_all(seeds: Iterator[int]) -> None:
        for seed in seeds:
            ask(seed)

    def seeds() -> Iterator[int]:
        for seed in range(10**9):
            if time.monotonic() >= end_at:
                return
            yield seed

    with channel(getattr(target, port)) as opened, ThreadPoolExecutor(AT_A_TIME) as pool:
        turns = seeds()
        done = [pool.submit(ask_all, turns_of(turns)) for _ in range(AT_A_TIME)]
        for one in done:
            one.result()
    assert codes[grpc.StatusCode.OK], codes
    assert codes[grpc.StatusCode.INVALID_ARGUMENT], codes


def turns_of(turns: Iterator[int]) -> Iterator[int]:
    """Of an iterator that threads share."""
    while True:
        try:
            yield next(turns)
        except StopIteration:
            return
        except ValueError:  # another thread takes one at this moment
            continue


def test_the_openapi_page(target: Target, vitals: Vitals, unstalled: None, fuzz_seconds: float) -> None:
    """schemathesis makes requests from the page, right ones and wrong ones."""
    schema = schemathesis.openapi.from_url(f"{target.http}/openapi.json", headers=dict(metadata()))
    results = list(schema.get_all_operations())
    operations = [result.ok() for result in results if isinstance(result, Ok)]
    assert len(operations) == len(results), results
    seconds = fuzz_seconds / (len(operations) * 2)
    statuses = Counter[int]()
    for operation in operations:
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            statuses.update(ask_within(operation, mode, target.http, seconds))
    assert statuses[200], statuses
    assert statuses[400], statuses


class _TimeIsUpError(Exception):
    pass


def ask_within(
    operation: schemathesis.APIOperation[Any, Any, Any, Any],
    mode: schemathesis.GenerationMode,
    url: str,
    seconds: float,
) -> list[int]:
    """The statuses of what is asked in that time."""
    found: list[int] = []
    end = time.monotonic() + seconds

    @hypothesis.settings(
        max_examples=100_000,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case[Any]) -> None:
        if time.monotonic() >= end:
            raise _TimeIsUpError
        case.body = short(case.body)
        try:
            status = case.call(base_url=url, headers=dict(metadata()), timeout=60).status_code
        except (ValueError, UnicodeError):  # what cannot be sent by this client
            return
        found.append(status)
        assert status < 500 or status == 503, (case.method, case.path, case.body, status)

    with contextlib.suppress(_TimeIsUpError, hypothesis.errors.Unsatisfiable):  # there may be nothing to be wrong about
        ask()
    return found


def short(body: T) -> T | dict[str, Any]:
    """With a short answer, if it asks for one."""
    if not isinstance(body, dict) or not ("prompt" in body or "messages" in body):
        return body
    return {**body, "max_tokens": 2} if isinstance(body.get("max_tokens"), int | None) else body
