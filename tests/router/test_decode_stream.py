"""Requests to one decode worker share a stream: it is bounded, opened anew, and done without if a worker is too old."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from common.errors import BatonError, InvalidArgumentError
from common.grpc.call_window import MAX_EVENTS, MAX_TOKENS, TOKEN_COST, WINDOW_BYTES
from common.grpc.options import REQUEST_OTHER_BYTES
from protos.baton.v1 import decode_pb2, inference_pb2, types_pb2
from router.fleet.decode_call import CallFailedError, DecodeCall, SingleCall
from router.fleet.decode_stream import CallOutbox, DecodeStreams
from tests.router.conftest import StartRouter, StartWorker
from tests.support.fake_worker import ANSWER, FakeWorker

PATIENCE_S = 60.0
Incarnation = tuple[str, str]
Call = DecodeCall | SingleCall


def request_of(request_id: str = "r", **fields: Any) -> decode_pb2.DecodeRequest:
    params = types_pb2.SamplingParams(max_tokens=100)
    return decode_pb2.DecodeRequest(request_id=request_id, prompt_token_ids=[1, 2], sampling_params=params, **fields)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 (what a server's side has seen cannot be awaited)
            await asyncio.sleep(0.005)


async def tokens_of(call: Call) -> list[int]:
    async with asyncio.timeout(PATIENCE_S), aclosing(call):
        ids: list[int] = []
        async for arrived in call:
            ids += arrived if isinstance(arrived, list) else [token.token_id for token in arrived.tokens]
    return ids


async def failure_of(call: Call) -> CallFailedError:
    with pytest.raises(CallFailedError) as caught:
        await tokens_of(call)
    return caught.value


class Client:
    """A router's streams to one worker."""

    def __init__(self, address: str) -> None:
        self.incarnation = (address, "e1")
        self.channel = grpc.aio.insecure_channel(address)
        self.streams = DecodeStreams()

    def call(self, request: decode_pb2.DecodeRequest | None = None, timeout_s: float = PATIENCE_S) -> Call:
        return self.streams.call(self.channel, self.incarnation, request or request_of(), timeout_s)


@pytest.fixture
async def client(worker: FakeWorker) -> AsyncIterator[Client]:
    one = Client(worker.address)
    yield one
    await one.channel.close()


async def test_calls_share_one_stream(client: Client, worker: FakeWorker) -> None:
    answers = await asyncio.gather(*(tokens_of(client.call(request_of(f"r{n}"))) for n in range(20)))
    assert all(answer[:-1] == worker.answer for answer in answers)
    assert worker.num_streams == 1
    assert {request.request_id for request in worker.requests} == {f"r{n}" for n in range(20)}


async def test_a_call_that_is_closed_early_is_cancelled_there(client: Client, worker: FakeWorker) -> None:
    worker.hang_after = 2
    call = client.call()
    assert await anext(call)
    await call.aclose()
    await asyncio.wait_for(worker.cancelled.wait(), PATIENCE_S)
    worker.hang_after = None
    assert (await tokens_of(client.call()))[:-1] == worker.answer
    assert worker.num_streams == 1


async def test_a_call_that_is_closed_before_it_was_sent_is_not_sent(client: Client, worker: FakeWorker) -> None:
    await client.call(request_of("never")).aclose()
    await tokens_of(client.call(request_of("sent")))
    assert [request.request_id for request in worker.requests] == ["sent"]


async def test_a_deadline_ends_its_call_alone(client: Client, worker: FakeWorker) -> None:
    worker.hang_after = 1
    late, other = client.call(timeout_s=1.0), client.call()
    assert (await failure_of(late)).code == "DEADLINE_EXCEEDED"
    await asyncio.wait_for(worker.cancelled.wait(), PATIENCE_S)
    worker.hang_after = None
    assert (await tokens_of(other))[:-1] == worker.answer
    told = [deadline for deadline in worker.deadlines if deadline is not None]
    assert told[0] < 1.01 < told[1] <= PATIENCE_S


async def test_a_refusal_keeps_its_field(client: Client, worker: FakeWorker) -> None:
    worker.refuse = InvalidArgumentError("sampling_params.max_tokens", "is wrong")
    failure = await failure_of(client.call())
    assert failure.code == "INVALID_ARGUMENT"
    assert failure.metadata


async def test_a_lost_worker_fails_all_calls_and_the_next_opens_a_stream(client: Client, worker: FakeWorker) -> None:
    worker.hang_after = 1
    calls = [client.call() for _ in range(3)]
    for call in calls:
        assert await anext(call)
    await worker.stop()
    for call in calls:
        assert (await failure_of(call)).code == "UNAVAILABLE"
    assert (await failure_of(client.call())).code == "UNAVAILABLE"
    worker.hang_after = None
    await worker.start(worker.address)

    answer: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while not answer:
            with contextlib.suppress(CallFailedError):  # while the channel waits to connect again
                answer = await tokens_of(client.call())
    assert answer[:-1] == worker.answer
    assert worker.num_streams == 2


async def test_an_older_worker_gets_a_stream_for_each_call(client: Client, worker: FakeWorker) -> None:
    worker.is_older = True
    answers = await asyncio.gather(*(tokens_of(client.call()) for _ in range(3)))
    assert all(answer[:-1] == worker.answer for answer in answers)
    assert isinstance(client.call(), SingleCall), "it is not asked again"
    worker.is_older = False
    client.incarnation = (worker.address, "e2")
    assert (await tokens_of(client.call()))[:-1] == worker.answer
    assert worker.num_streams == 1, "another process at the address may know better"


async def test_an_older_worker_s_failure_is_the_call_s(client: Client, worker: FakeWorker) -> None:
    worker.is_older = True
    worker.refuse = InvalidArgumentError("request_id", "is wrong")
    for _ in range(2):
        assert (await failure_of(client.call())).code == "INVALID_ARGUMENT"
    worker.refuse, worker.hang_after = None, 1
    assert (await failure_of(client.call(timeout_s=0.3))).code == "DEADLINE_EXCEEDED"


async def test_a_request_that_is_too_large_fails_alone(client: Client, worker: FakeWorker) -> None:
    other = client.call()
    large = request_of(prefill_addresses=["x" * REQUEST_OTHER_BYTES])
    assert (await failure_of(client.call(large))).code == "INVALID_ARGUMENT", "no other worker would do better"
    assert (await tokens_of(other))[:-1] == worker.answer


async def test_a_router_uses_one_stream_and_does_without(start_worker: StartWorker, start_router: StartRouter) -> None:
    """During a rolling update it has workers of both releases."""
    older, newer = await start_worker(), await start_worker()
    older.is_older = True
    router = await start_router(older, newer, policy="round_robin")

    async def ask() -> str:
        responses = router.inference.Generate(inference_pb2.GenerateRequest(prompt="Hello"))
        return "".join([response.text async for response in responses])

    for _ in range(3):
        assert await asyncio.gather(*(ask() for _ in range(6))) == [ANSWER] * 6
    assert older.requests
    assert newer.requests
    assert (older.num_streams, newer.num_streams) == (0, 1)


async def test_requests_move_between_releases(start_worker: StartWorker, start_router: StartRouter) -> None:
    """A worker that is lost in the middle of an answer is replaced by one of the other release."""
    for first_is_older in (True, False):
        first, second = await start_worker(), await start_worker()
        first.is_older, second.is_older = first_is_older, not first_is_older
        second.num_requests_waiting = 5
        first.die_after = 4
        router = await start_router(first, second)
        responses = [r async for r in router.inference.Generate(inference_pb2.GenerateRequest(prompt="Hello"))]
        assert "".join(response.text for response in responses) == ANSWER
        assert responses[-1].report.num_migrations == 1


# ------------------------------------------------------------------------------------------ what a worker says


Says = Callable[[int], list[decode_pb2.DecodeManyResponse]]


@asynccontextmanager
async def scripted(
    says: Says, breaks: tuple[grpc.StatusCode, str] | BatonError | None = None, *, takes_batches: bool = True
) -> AsyncIterator[tuple[FakeWorker, Client]]:
    worker = FakeWorker()
    worker.says, worker.breaks, worker.takes_batches = says, breaks, takes_batches
    client = Client(await worker.start())
    try:
        yield worker, client
    finally:
        await client.channel.close()
        await worker.stop()


def credits_of(worker: FakeWorker) -> int:
    return sum(credit.num_bytes for message in worker.heard for credit in message.credits)


def cancelled_of(worker: FakeWorker) -> list[int]:
    return [call_id for message in worker.heard for call_id in message.cancelled_call_ids]


def bare(*tokens: tuple[int, int]) -> decode_pb2.DecodeManyResponse:
    return decode_pb2.DecodeManyResponse(call_ids=[one for one, _ in tokens], token_ids=[one for _, one in tokens])


def ended(call_id: int, status: bytes = b"") -> decode_pb2.DecodeManyResponse:
    return decode_pb2.DecodeManyResponse(events=[decode_pb2.CallEvent(call_id=call_id, ended=status)])


def empty_events(number: int, call_id: int = 1) -> decode_pb2.DecodeManyResponse:
    one = decode_pb2.DecodeManyResponse(events=[decode_pb2.CallEvent(call_id=call_id)])
    return decode_pb2.DecodeManyResponse.FromString(one.SerializeToString() * number)


@pytest.mark.parametrize("takes_batches", [True, False])
async def test_calls_that_start_at_one_moment_are_one_message(takes_batches: bool) -> None:
    """A worker of an older version would take them for one call."""

    def says(call_id: int) -> list[decode_pb2.DecodeManyResponse]:
        return [bare((call_id, call_id)), ended(call_id)]

    async with scripted(says, takes_batches=takes_batches) as (worker, client):
        for first in (1, 11):
            calls = [client.call() for _ in range(10)]
            assert [await tokens_of(call) for call in calls] == [[first + n] for n in range(10)]
        batches = [[start.call_id for start in message.starts] for message in worker.heard]
        if takes_batches:
            assert batches == [[*range(1, 11)], [*range(11, 21)]]
        else:
            assert batches == [[call_id] for call_id in range(1, 21)]


async def test_tokens_that_wait_come_together_and_are_credited_when_they_are_taken() -> None:
    half = WINDOW_BYTES // TOKEN_COST // 2

    def says(call_id: int) -> list[decode_pb2.DecodeManyResponse]:
        other = call_id + 1
        return [bare(*((call_id, n) for n in range(half))), bare((call_id, 7), (other, 1))] if call_id == 1 else []

    async with scripted(says) as (worker, client):
        slow, other = client.call(), client.call()
        assert await anext(other) == [1], "nobody waits for a slow reader"
        assert credits_of(worker) == 0
        assert await anext(slow) == [*range(half), 7]
        await until(lambda: credits_of(worker) == TOKEN_COST * (half + 1))
        await slow.aclose()
        await other.aclose()
        await until(lambda: sorted(cancelled_of(worker)) == [1, 2])


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (decode_pb2.DecodeManyResponse(call_ids=[1, 1], token_ids=[5]), "1 tokens of 2 calls"),
        (decode_pb2.DecodeManyResponse(call_ids=[1] * (MAX_TOKENS + 1), token_ids=[5] * (MAX_TOKENS + 1)), "tokens of"),
        (empty_events(MAX_EVENTS + 1), "65537 events in one message"),
        (empty_events(2**20), "1048576 events in one message"),
    ],
)
async def test_a_message_that_cannot_be_ends_the_stream(said: decode_pb2.DecodeManyResponse, words: str) -> None:
    is_lying = True

    def says(call_id: int) -> list[decode_pb2.DecodeManyResponse]:
        return [said] if is_lying else [bare((call_id, 3)), ended(call_id)]

    async with scripted(says) as (_, client):
        failure = await failure_of(client.call())
        assert failure.code == "INTERNAL"
        assert words in failure.details
        is_lying = False
        assert await tokens_of(client.call()) == [3], "another stream is opened"


async def test_a_stream_that_cannot_be_written_to_is_ended_and_replaced(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:

        def broken(*_: object) -> None:
            raise ValueError("what cannot be written")

        patch.setattr(CallOutbox, "next_message", broken)
        failures = await asyncio.gather(failure_of(client.call()), failure_of(client.call()))
    assert {failure.code for failure in failures} == {"UNAVAILABLE"}
    assert "cannot be written to" in caplog.text
    assert (await tokens_of(client.call()))[:-1] == worker.answer


async def test_a_worker_that_sends_more_than_it_may_is_not_listened_to() -> None:
    number = WINDOW_BYTES // TOKEN_COST

    def says(call_id: int) -> list[decode_pb2.DecodeManyResponse]:
        if call_id == 2:
            return [bare((2, 4)), ended(2)]
        return [bare(*((1, n) for n in range(number)))] * 20

    async with scripted(says) as (worker, client):
        flooded = client.call()
        await until(lambda: cancelled_of(worker) == [1])
        taken: list[int] = []

        async def take() -> None:
            async for arrived in flooded:
                assert isinstance(arrived, list)
                taken.extend(arrived)

        with pytest.raises(CallFailedError, match="more than it has credit for"):
            await take()
        assert len(taken) <= 2 * number
        assert await tokens_of(client.call()) == [4]


async def test_empty_events_do_not_come_without_end() -> None:
    def says(call_id: int) -> list[decode_pb2.DecodeManyResponse]:
        return [empty_events(10_000)] * 100 if call_id == 1 else [bare((2, 4)), ended(2)]

    async with scripted(says) as (worker, client):
        flooded, other = client.call(), client.call()
        assert await tokens_of(other) == [4]
        taken: list[object] = []

        async def take() -> None:
            async for arrived in flooded:
                taken.append(arrived)

        with pytest.raises(CallFailedError, match="more than it has credit for"):
            await take()
        assert 0 < len(taken) <= WINDOW_BYTES
        await until(lambda: cancelled_of(worker) == [1])


async def test_an_honest_worker_s_smallest_events_are_no_flood() -> None:
    event = decode_pb2.DecodeEvent(offers_handover=True)
    number = WINDOW_BYTES // event.ByteSize()
    said = decode_pb2.DecodeManyResponse()
    for _ in range(number):
        said.events.add(call_id=1, event=event.SerializeToString())

    async with scripted(lambda _: [said, ended(1)]) as (_, client):
        call = client.call()
        assert [arrived async for arrived in call] == [event] * number


async def test_false_events_and_ends_end_their_call_alone() -> None:
    def says(call_id: int) -> list[decode_pb2.DecodeManyResponse]:
        said = {
            1: decode_pb2.CallEvent(call_id=1, event=b"\x0a\xff"),
            2: decode_pb2.CallEvent(call_id=2, ended=b"\x0a\xff"),
            3: decode_pb2.CallEvent(call_id=3, ended=b"\x08\x63"),  # a code that no status has
            4: decode_pb2.CallEvent(call_id=4, ended=b"\x12" + b"x" * 2**17),
        }
        answer = [bare((call_id, 9), (77, 1)), ended(call_id), ended(78), bare((call_id, 9))]
        return [decode_pb2.DecodeManyResponse(events=[said[call_id]])] if call_id in said else answer

    async with scripted(says) as (_, client):
        assert (await failure_of(client.call())).code == "INTERNAL"
        for _ in range(3):
            assert (await failure_of(client.call())).code == "UNKNOWN"
        assert await tokens_of(client.call()) == [9], "what is said of calls that are over, or of none, is ignored"


BREAKS = pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED])


@BREAKS
async def test_a_stream_that_worked_is_broken_by_whatever_ends_it(code: grpc.StatusCode) -> None:
    """It was neither unknown to the worker, nor refused by a full one."""
    async with scripted(lambda call_id: [bare((call_id, 3))], (code, "has had enough")) as (_, client):
        for _ in range(2):
            one, other = client.call(), client.call()
            assert await anext(one) == [3]
            for call in (one, other):
                failure = await failure_of(call)
                assert failure.code == "UNAVAILABLE"
                assert failure.details == f"its stream broke with {code.name}: has had enough"
            assert isinstance(one, DecodeCall), "it is asked for a stream of many again"


@BREAKS
async def test_an_answer_moves_from_a_stream_that_breaks(
    code: grpc.StatusCode, start_worker: StartWorker, start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await start_worker(), await start_worker()
    second.num_requests_waiting = 5
    first.hang_after = 4
    router = await start_router(first, second)
    serve = first._many.serve

    async def breaks(context: Any) -> None:
        serving = asyncio.create_task(serve(context))
        await has_some.wait()
        serving.cancel()
        await asyncio.wait([serving])
        await context.abort(code, "has had enough")

    has_some = asyncio.Event()
    monkeypatch.setattr(first._many, "serve", breaks)
    responses = []
    async for response in router.inference.Generate(inference_pb2.GenerateRequest(prompt="Hello")):
        responses.append(response)
        has_some.set()
    assert "".join(response.text for response in responses) == ANSWER
    assert responses[-1].report.num_migrations == 1


async def test_a_stream_that_ends_is_the_worker_s_fault_and_not_a_request_s() -> None:
    """An INVALID_ARGUMENT of the stream itself must not become a client's 400."""

    error = InvalidArgumentError("starts.call_id", "is wrong")
    async with scripted(lambda _: [], error) as (_, client):
        failure = await failure_of(client.call())
        assert failure.code == "UNAVAILABLE"
        assert "starts.call_id" in failure.details
