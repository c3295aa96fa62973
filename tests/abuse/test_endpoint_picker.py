"""A proxy that misbehaves: streams that are cut at any moment, or never go on. Places, load and files of the router are
as before."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator

import grpc
import httpx

from protos.envoy import external_processor_pb2 as pb
from protos.envoy import external_processor_pb2_grpc as pb_grpc
from tests.abuse.conftest import ABUSE_CANCELS
from tests.abuse.rude import OUR_FAULTS, RUDE_KEY, Target, at_once, channel
from tests.abuse.vitals import Vitals
from tests.integration.stack import wait_for
from tests.router.envoy import body_messages, request_headers, response_headers

HEADERS = {"authorization": f"Bearer {RUDE_KEY}", "content-type": "application/json"}


def whole(rng: random.Random) -> list[pb.ProcessingRequest]:
    """A request, its response and all."""
    prompt = [rng.randrange(300) for _ in range(rng.choice((2, 40, 300)))]
    body = json.dumps({"prompt": prompt, "max_tokens": 4}).encode()
    return [
        request_headers("/v1/completions", HEADERS),
        *body_messages(body),
        response_headers("127.0.0.1:1"),
        *body_messages(b"answer" * 20, kind="response_body"),
    ]


def cut(opened: grpc.Channel, number: int) -> str:
    """Sends some of a request's messages, reads some answers, and goes away: at once, after a moment, or in the end."""
    rng = random.Random(number)
    messages = whole(rng)
    sent, read = rng.randrange(len(messages) + 1), rng.randrange(12)
    stays_s = rng.random() ** 3 * 0.2

    def some() -> Iterator[pb.ProcessingRequest]:
        yield from messages[:sent]
        if rng.random() < 0.5:
            time.sleep(stays_s)

    call = pb_grpc.ExternalProcessorStub(opened).Process(some(), timeout=20)
    try:
        for _, _answer in zip(range(read), call, strict=False):
            pass
    except grpc.RpcError:
        assert call.code() not in OUR_FAULTS, call
        return str(call.code())
    call.cancel()
    return "cut"


def test_a_request_goes_with_its_pair(target: Target, vitals: Vitals) -> None:
    """The real fleet, in good order: what is chosen is what is done."""
    body = json.dumps({"prompt": [random.randrange(300) for _ in range(300)], "max_tokens": 4}).encode()
    sent = iter([request_headers("/v1/completions", HEADERS), *body_messages(body)])
    with channel(target.picker) as opened, target.http_client() as client:
        answers = list(pb_grpc.ExternalProcessorStub(opened).Process(sent, timeout=20))
        mutation = answers[0].request_headers.response.header_mutation
        chosen = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
        served = chosen.pop("x-gateway-destination-endpoint")
        back = [one.request_body.response.body_mutation.streamed_response.body for one in answers[1:]]
        response = client.post(f"http://{served}/v1/completions", content=b"".join(back), headers={**HEADERS, **chosen})
        assert response.status_code == 200, response.text
        decisions = client.get("/decisions?limit=20").json()["decisions"]
    [decision] = [one for one in decisions if one["request_id"] == chosen["x-request-id"]]
    assert decision["reasons"][0] == f"chosen by the endpoint picker of {served}"
    assert (decision["decode_worker"], decision["prefill_workers"]) == (target.decode, [target.prefill])


def load(target: Target) -> float:
    """Requests that the router thinks are with workers, those included that were chosen for."""
    page = httpx.get(f"{target.http}/metrics", trust_env=False).text
    return sum(float(one) for one in re.findall(r"^baton_router_endpoint_requests\{[^}]*\} (\S+)$", page, re.M))


def test_streams_that_are_cut_leave_nothing(target: Target, vitals: Vitals, unstalled: None) -> None:
    number = max(100, ABUSE_CANCELS // 5)
    with channel(target.picker) as opened:
        outcomes = at_once(number, lambda n: cut(opened, n), at_a_time=8)
    assert outcomes["cut"] > number / 4, outcomes
    wait_for("no request is counted as load", lambda: load(target) <= 1)  # the quiet client may have one


def test_streams_that_never_go_on_are_ended(target: Target, vitals: Vitals) -> None:
    """They hold their places for as long as a body may take, and then make room."""

    def ends(number: int) -> tuple[str, int]:
        def begun() -> Iterator[pb.ProcessingRequest]:
            yield request_headers("/v1/completions", HEADERS)
            yield body_messages(b"x" * 40)[0]
            time.sleep(6)  # beyond the router's --receive-timeout

        call = pb_grpc.ExternalProcessorStub(opened).Process(begun(), timeout=30)
        try:
            answers = list(call)
        except grpc.RpcError:
            return str(call.code()), 0
        return "ended", answers[-1].immediate_response.status.code if answers else 0

    with channel(target.picker) as opened:
        outcomes: Counter[tuple[str, int]] = at_once(60, ends, at_a_time=60)
        assert outcomes == {("ended", 408): 60}, outcomes
        last = pb_grpc.ExternalProcessorStub(opened).Process(iter(whole(random.Random(1))[:-1]), timeout=20)
        assert next(last).HasField("request_headers")
        last.cancel()
