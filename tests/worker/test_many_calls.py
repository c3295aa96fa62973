"""Many calls in one stream: each with its own end, and together no more than one router may hold."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import pytest
from google.rpc import code_pb2, status_pb2

from common.errors import BatonError, InvalidArgumentError, OverloadedError
from common.grpc.call_window import MAX_TOKENS, STARTS_KEY, TOKEN_COST, WINDOW_BYTES
from common.grpc.status import DETAILS_KEY, error_of_call
from protos.baton.v1 import decode_pb2, types_pb2
from tests.support.fake_engine import Script, answer_to
from tests.worker.conftest import RunningWorker, StartWorker, decode_request
from tests.worker.fronts import Front, request_of, until
from tests.worker.words import ANSWER, WAIT
from worker import engine_stream
from worker.many_calls import BATCH_BYTES, Call, Caller, ManyCalls

PATIENCE_S = 60.0
PROMPT = [11] * 8


@dataclass(slots=True)
class Heard:
    """What came of one call."""

    token_ids: list[int] = field(default_factory=list)
    num_bare: int = 0  # of the tokens, those without an event
    events: list[decode_pb2.DecodeEvent] = field(default_factory=list)
    end: bytes | None = None

    @property
    def error(self) -> BatonError:
        status = status_pb2.Status.FromString(self.end or b"")
        return error_of_call(code_pb2.Code.Name(status.code), status.message, ((DETAILS_KEY, self.end or b""),))


class Stream:
    """A router's end of a stream."""

    def __init__(self, stub: Any) -> None:
        self.rpc = stub.DecodeMany()
        self.num_messages = 0
        self._heard: dict[int, Heard] = {}

    async def start(self, call_id: int, request: decode_pb2.DecodeRequest, **fields: Any) -> None:
        start = decode_pb2.StartCall(call_id=call_id, request=request, **fields)
        await self.rpc.write(decode_pb2.DecodeManyRequest(starts=[start]))

    async def cancel(self, *call_ids: int) -> None:
        await self.rpc.write(decode_pb2.DecodeManyRequest(cancelled_call_ids=call_ids))

    async def credit(self, call_id: int, num_bytes: int) -> None:
        credit = decode_pb2.Credit(call_id=call_id, num_bytes=num_bytes)
        await self.rpc.write(decode_pb2.DecodeManyRequest(credits=[credit]))

    def heard(self, call_id: int) -> Heard:
        return self._heard.setdefault(call_id, Heard())

    async def read(self) -> None:
        """One message."""
        async with asyncio.timeout(PATIENCE_S):
            message = await self.rpc.read()
        assert isinstance(message, decode_pb2.DecodeManyResponse)
        self.take_in(message)

    def take_in(self, message: decode_pb2.DecodeManyResponse) -> None:
        self.num_messages += 1
        for call_id, token_id in zip(message.call_ids, message.token_ids, strict=True):
            self.heard(call_id).token_ids.append(token_id)
            self.heard(call_id).num_bare += 1
        for one in message.events:
            heard = self.heard(one.call_id)
            assert heard.end is None, "nothing comes after the end"
            if one.HasField("ended"):
                heard.end = one.ended
            else:
                event = decode_pb2.DecodeEvent.FromString(one.event)
                heard.events.append(event)
                heard.token_ids += [token.token_id for token in event.tokens]

    async def ended(self, call_id: int) -> Heard:
        while self.heard(call_id).end is None:
            await self.read()
        return self.heard(call_id)

    async def has_tokens(self, call_id: int, number: int) -> Heard:
        while len(self.heard(call_id).token_ids) < number:
            await self.read()
        return self.heard(call_id)


@pytest.fixture
async def worker(start_worker: StartWorker) -> RunningWorker:
    return await start_worker()


async def test_calls_of_one_stream_get_their_own_answers(decode: Front) -> None:
    stream = Stream(decode.decode)
    prompts = {1: [11] * 8, 2: [12] * 12, 7: [13] * 20}
    for call_id, prompt in prompts.items():
        await stream.start(
            call_id, request_of(prompt, script=Script(on_status=True), request_id=f"r{call_id}", max_tokens=10)
        )
    await until(lambda: len(decode.told("AddRequest")) == len(prompts), "the engine has all requests")
    for number in range(1, 11):  # one by one: tokens that come together may share an event
        await decode.load()
        for call_id in prompts:
            await stream.has_tokens(call_id, number)
    for call_id, prompt in prompts.items():
        heard = await stream.ended(call_id)
        assert (heard.token_ids, heard.end) == (answer_to(prompt, 10), b"")
        assert heard.num_bare == 7, "the first two and the last have more to say"
        assert heard.events[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
        assert heard.events[-1].HasField("usage")
    await decode.settled()


async def test_a_cancelled_call_ends_alone(decode: Front) -> None:
    stream = Stream(decode.decode)
    await stream.start(1, request_of(PROMPT, script=Script(stall_at=3), request_id="goes"))
    await stream.start(2, request_of(PROMPT, script=Script(token_s=0.05), request_id="stays"))
    await stream.has_tokens(1, 3)
    await stream.cancel(1, 1, 99)  # whatever was cancelled before, or never there, is of no account
    assert (await stream.ended(2)).token_ids == answer_to(PROMPT, 5)
    await decode.settled()
    assert stream.heard(1).end is None, "who cancelled it knows"


@pytest.mark.parametrize("how", ["broken", "half closed"])
async def test_whatever_ends_the_stream_ends_its_calls(decode: Front, how: str) -> None:
    stream = Stream(decode.decode)
    for call_id in range(1, 4):
        await stream.start(call_id, request_of(PROMPT, script=Script(stall_at=2), request_id=f"r{call_id}"))
    for call_id in range(1, 4):
        await stream.has_tokens(call_id, 2)
    if how == "broken":
        stream.rpc.cancel()
    else:
        await stream.rpc.done_writing()
        assert await stream.rpc.read() is grpc.aio.EOF
    await decode.settled()
    assert len(decode.told("Release")) == 3


async def test_each_call_has_its_own_deadline(decode: Front) -> None:
    stream = Stream(decode.decode)
    await stream.start(1, request_of(PROMPT, script=Script(stall_at=2), request_id="late"), timeout_s=0.2)
    await stream.start(2, request_of(PROMPT, script=Script(stall_at=2), request_id="waits"), timeout_s=60.0)
    assert (await stream.ended(1)).error.grpc_code == "DEADLINE_EXCEEDED"
    await stream.start(3, request_of(PROMPT))
    assert (await stream.ended(3)).token_ids == answer_to(PROMPT, 5)
    assert stream.heard(2).end is None
    stream.rpc.cancel()


async def test_a_refused_request_ends_alone_and_says_why(worker: RunningWorker) -> None:
    stream = Stream(worker.decode)
    await stream.start(1, decode_request(ANSWER, prompt_token_ids=[]))
    await stream.start(2, decode_request(ANSWER), timeout_s=math.nan)
    await stream.start(3, decode_request(ANSWER))
    assert (await stream.ended(3)).end == b""
    for call_id, name in ((1, "prompt_token_ids"), (2, "starts.timeout_s")):
        error = (await stream.ended(call_id)).error
        assert isinstance(error, InvalidArgumentError)
        assert error.field == name


async def test_a_full_worker_refuses_with_a_delay(start_worker: StartWorker) -> None:
    worker = await start_worker(max_waiting_requests=1)
    stream = Stream(worker.decode)
    await stream.start(1, decode_request(WAIT))
    await stream.start(2, decode_request(ANSWER))
    error = (await stream.ended(2)).error
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s


async def test_one_slow_reader_is_cut_and_delays_nobody(worker: RunningWorker) -> None:
    stream = Stream(worker.decode)
    await stream.start(1, decode_request(11, sampling_params=types_pb2.SamplingParams(max_tokens=50_000)))
    heard = await stream.ended(1)
    assert heard.error.grpc_code == "ABORTED"
    num_bytes = TOKEN_COST * heard.num_bare + sum(event.ByteSize() for event in heard.events)
    assert num_bytes <= WINDOW_BYTES + 1000, "what it left unread was bounded"
    assert "Release" in (await worker.status()).integrity
    await stream.start(2, decode_request(ANSWER))
    assert (await stream.ended(2)).end == b""


async def test_credit_lets_a_call_go_on(decode: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_stream, "MAX_UNREAD_EVENTS", 2**16)  # however slow this test reads
    stream, number = Stream(decode.decode), 3 * WINDOW_BYTES // TOKEN_COST // 2
    await stream.start(1, request_of(PROMPT, max_tokens=number))
    num_credited = 0
    while stream.heard(1).end is None:
        await stream.read()
        num_new = len(stream.heard(1).token_ids) - num_credited
        if num_new > 100:
            num_credited += num_new
            await stream.credit(1, num_new * 2**11)  # events count more than tokens, and the window grows no wider
    assert (stream.heard(1).token_ids, stream.heard(1).end) == (answer_to(PROMPT, number), b"")


async def test_ids_go_up(worker: RunningWorker) -> None:
    stream = Stream(worker.decode)
    await stream.start(5, decode_request(WAIT))
    await stream.start(5, decode_request(ANSWER))
    with pytest.raises(grpc.aio.AioRpcError, match=r"starts\.call_id") as failed:
        await stream.read()
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await answered(worker)).end == b""


async def answered(worker: RunningWorker) -> Heard:
    stream = Stream(worker.decode)
    await stream.start(1, decode_request(ANSWER))
    return await stream.ended(1)


async def test_rubbish_ends_the_stream_alone(worker: RunningWorker, caplog: pytest.LogCaptureFixture) -> None:
    raw: Any = worker.channel
    call = raw.stream_stream("/baton.v1.DecodeService/DecodeMany")()
    await call.write(b"\x0a\xff")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await asyncio.wait_for(call.read(), PATIENCE_S)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await answered(worker)).end == b""
    assert "Traceback" not in caplog.text


async def test_a_worker_that_drains_goes_on_with_what_it_has(decode: Front) -> None:
    stream = Stream(decode.decode)
    await stream.start(1, request_of(PROMPT, script=Script(token_s=0.4), request_id="runs"))
    await stream.has_tokens(1, 1)
    await decode.drain(60.0)
    while True:  # until it has begun to drain
        call_id = stream.num_messages + 2
        await stream.start(call_id, request_of(PROMPT, request_id=f"late{call_id}"))
        if (await stream.ended(call_id)).end:
            break
    assert stream.heard(call_id).error.grpc_code == "UNAVAILABLE"
    assert (await stream.ended(1)).token_ids == answer_to(PROMPT, 5)
    assert await decode.task == 0


async def test_a_worker_that_drains_offers_its_calls(decode: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.drain.HANDOVER_AT", 0.01)
    stream = Stream(decode.decode)
    await stream.start(1, request_of(PROMPT, script=Script(stall_at=2)))
    await stream.has_tokens(1, 2)
    await decode.drain(30)
    while not any(event.offers_handover for event in stream.heard(1).events):
        await stream.read()
    await stream.cancel(1)
    await decode.task


# ------------------------------------------------------------------------------------ without a server


class Router:
    """The other end of a stream, which takes messages when it likes."""

    def __init__(self) -> None:
        self.to_worker: asyncio.Queue[Any] = asyncio.Queue()
        self.messages: list[decode_pb2.DecodeManyResponse] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.told = Stream.__new__(Stream)
        self.told.num_messages, self.told._heard = 0, {}

    async def send_initial_metadata(self, _: object) -> None:
        pass

    async def read(self) -> Any:
        return await self.to_worker.get()

    async def write(self, message: decode_pb2.DecodeManyResponse) -> None:
        await self.may_write.wait()
        self.messages.append(message)
        self.told.take_in(message)

    def start(self, *call_ids: int) -> None:
        for call_id in call_ids:
            start = decode_pb2.StartCall(call_id=call_id, request=decode_pb2.DecodeRequest(request_id=str(call_id)))
            self.to_worker.put_nowait(decode_pb2.DecodeManyRequest(starts=[start]))

    def credit(self, call_id: int, num_bytes: int) -> None:
        credit = decode_pb2.Credit(call_id=call_id, num_bytes=num_bytes)
        self.to_worker.put_nowait(decode_pb2.DecodeManyRequest(credits=[credit]))


class Calls:
    """Runs that end when they are told to."""

    def __init__(self) -> None:
        self.callers: dict[str, Caller] = {}
        self.ends: dict[str, asyncio.Event] = {}

    async def run(self, request: decode_pb2.DecodeRequest, call: Call) -> None:
        self.callers[request.request_id] = call
        self.ends[request.request_id] = asyncio.Event()
        await self.ends[request.request_id].wait()


@asynccontextmanager
async def served(*call_ids: int, max_calls: int = 100) -> AsyncIterator[tuple[Router, Calls]]:
    router, calls = Router(), Calls()
    task = asyncio.create_task(ManyCalls(calls.run, max_calls).serve(cast("Any", router)))
    router.start(*call_ids)
    await until(lambda: len(calls.callers) == len(call_ids), "all have begun")
    yield router, calls
    router.to_worker.put_nowait(grpc.aio.EOF)
    await task


async def test_calls_that_start_in_one_message_are_calls_of_their_own(worker: RunningWorker) -> None:
    stream = Stream(worker.decode)
    starts = [
        decode_pb2.StartCall(call_id=1, request=decode_request(ANSWER)),
        decode_pb2.StartCall(call_id=2, request=decode_request(ANSWER, prompt_token_ids=[])),
        decode_pb2.StartCall(call_id=3, request=decode_request(WAIT, request_id="late"), timeout_s=0.2),
        decode_pb2.StartCall(call_id=5, request=decode_request(WAIT, request_id="cancelled")),
    ]
    assert STARTS_KEY in await stream.rpc.initial_metadata(), "routers know by that"
    await stream.rpc.write(decode_pb2.DecodeManyRequest(starts=starts))
    assert (await stream.ended(1)).end == b""
    assert isinstance((await stream.ended(2)).error, InvalidArgumentError)
    assert (await stream.ended(3)).error.grpc_code == "DEADLINE_EXCEEDED"
    await stream.cancel(5)
    await stream.start(6, decode_request(ANSWER))
    assert (await stream.ended(6)).end == b""
    assert stream.heard(5).end is None


async def test_of_starts_in_one_message_those_beyond_the_bound_are_refused() -> None:
    run: list[str] = []

    async def note(request: decode_pb2.DecodeRequest, _call: Call) -> None:
        run.append(request.request_id)

    router = Router()
    task = asyncio.create_task(ManyCalls(note, max_calls=2).serve(cast("Any", router)))
    starts = [decode_pb2.StartCall(call_id=number) for number in (1, 2, 3)]
    router.to_worker.put_nowait(decode_pb2.DecodeManyRequest(starts=starts))
    await until(lambda: len(run) == 2, "those within the bound have run")
    router.to_worker.put_nowait(grpc.aio.EOF)
    await task
    assert len(run) == 2


async def test_what_comes_at_one_moment_is_one_message() -> None:
    async with served(1, 2, 3) as (router, calls):
        for number, caller in enumerate(calls.callers.values()):
            assert caller.take_tokens([number, 10])
        await until(lambda: router.messages, "a message")
        assert [list(message.call_ids) for message in router.messages] == [[1, 1, 2, 2, 3, 3]]
        router.may_write.clear()
        for token_id in range(5):
            for caller in calls.callers.values():
                assert caller.take_tokens([token_id])
            await asyncio.sleep(0)
        router.may_write.set()
        await until(lambda: router.told.heard(3).token_ids[2:] == [*range(5)], "all tokens")
        assert len(router.messages) <= 3, "what waits for a message on its way goes together"


async def test_a_call_s_end_comes_with_its_last_event() -> None:
    async def run(request: decode_pb2.DecodeRequest, call: Call) -> None:
        await call.write(decode_pb2.DecodeEvent())

    router = Router()
    task = asyncio.create_task(ManyCalls(run, 10).serve(cast("Any", router)))
    router.start(1)
    await until(lambda: router.told.heard(1).end == b"", "its end")
    assert len(router.messages) == 1
    router.to_worker.put_nowait(grpc.aio.EOF)
    await task


async def test_order_is_kept_between_tokens_and_events() -> None:
    async with served(1, 2) as (router, calls):
        router.may_write.clear()
        caller, other = calls.callers.values()
        assert caller.take_tokens([1])
        await caller.write(decode_pb2.DecodeEvent(tokens=[types_pb2.SampledToken(token_id=2)]))
        assert not caller.take_tokens([3]), "it would come before the event"
        assert other.take_tokens([8])
        await caller.write(decode_pb2.DecodeEvent(tokens=[types_pb2.SampledToken(token_id=3)]))
        calls.ends["1"].set()
        router.may_write.set()
        await until(lambda: router.told.heard(1).end == b"", "its end")
        assert router.told.heard(1).token_ids == [1, 2, 3]
        assert router.told.heard(2).token_ids == [8]


async def test_a_call_beyond_its_window_waits_for_credit_alone() -> None:
    async with served(1, 2) as (router, calls):
        slow, other = calls.callers.values()
        assert slow.take_tokens([7] * (WINDOW_BYTES // TOKEN_COST))
        assert not slow.take_tokens([7])
        assert other.take_tokens([8])
        writing = asyncio.create_task(slow.write(decode_pb2.DecodeEvent(offers_handover=True)))
        await until(lambda: router.told.heard(1).events, "one event beyond the window is sent")
        assert not writing.done()
        router.credit(1, 1)
        await asyncio.sleep(0.01)
        assert not writing.done(), "it has exceeded the window by more than one byte"
        router.credit(1, 2**31)
        await writing
        assert slow.take_tokens([7] * (WINDOW_BYTES // TOKEN_COST)), "credit makes the window whole"
        assert not slow.take_tokens([7]), "and not wider"


async def test_large_events_of_one_call_do_not_hold_up_the_tokens_of_others() -> None:
    async with served(1, 2) as (router, calls):
        router.may_write.clear()
        large, other = calls.callers.values()
        event = decode_pb2.DecodeEvent(tokens=[types_pb2.SampledToken(token_id=1)] * (BATCH_BYTES // 8))
        writes = [asyncio.create_task(large.write(event)) for _ in range(8)]
        await asyncio.sleep(0)
        assert other.take_tokens([5])
        router.may_write.set()
        await until(lambda: len(router.told.heard(1).events) == 8, "all of it")
        assert max(message.ByteSize() for message in router.messages) < 2 * BATCH_BYTES
        is_with = next(index for index, message in enumerate(router.messages) if 5 in message.token_ids)
        assert is_with <= 1
        for task in writes:
            task.cancel()


async def test_more_tokens_than_a_message_takes_keep_their_order() -> None:
    per_call = WINDOW_BYTES // TOKEN_COST
    ids = range(1, 2 * MAX_TOKENS // per_call + 1)
    async with served(*ids) as (router, calls):
        router.may_write.clear()
        for number, caller in enumerate(calls.callers.values()):
            assert caller.take_tokens([*range(number, number + per_call)])
        for end in calls.ends.values():
            end.set()
        await asyncio.sleep(0.01)
        router.may_write.set()
        await until(lambda: all(router.told.heard(one).end == b"" for one in ids), "all ends")
        assert [router.told.heard(one).token_ids for one in ids] == [[*range(n, n + per_call)] for n in range(len(ids))]
        assert max(len(message.token_ids) for message in router.messages) == MAX_TOKENS


async def test_a_message_has_no_more_events_than_routers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.many_calls.MAX_EVENTS", 2)
    async with served(*range(1, 8)) as (router, calls):
        router.may_write.clear()
        for end in calls.ends.values():
            end.set()
        await asyncio.sleep(0.01)
        router.may_write.set()
        await until(lambda: all(router.told.heard(one).end == b"" for one in range(1, 8)), "all ends")
        assert max(len(message.events) for message in router.messages) == 2


async def test_calls_are_bounded_and_so_are_their_unread_ends() -> None:
    router, calls = Router(), Calls()
    task = asyncio.create_task(ManyCalls(calls.run, 2).serve(cast("Any", router)))
    router.start(1, 2, 3)
    await until(lambda: router.told.heard(3).end, "the third is refused")
    assert isinstance(router.told.heard(3).error, OverloadedError)
    router.may_write.clear()
    router.start(*range(4, 10))
    with pytest.raises(OverloadedError, match="unread"):
        await asyncio.wait_for(task, PATIENCE_S)


@pytest.mark.parametrize("how", ["cancelled calls", "one call with credit"])
async def test_what_a_router_does_not_read_is_bounded(how: str) -> None:
    async def run(request: decode_pb2.DecodeRequest, call: Call) -> None:
        assert call.take_tokens([7] * 100)
        while True:
            await call.write(large)

    large = decode_pb2.DecodeEvent(tokens=[types_pb2.SampledToken(token_id=1)] * 25_000)
    max_calls, num_asked = 10, 0
    router = Router()
    task = asyncio.create_task(ManyCalls(run, max_calls).serve(cast("Any", router)))
    router.may_write.clear()
    while not task.done() and num_asked < 100:
        num_asked += 1
        if how == "cancelled calls":
            router.start(num_asked)
            await asyncio.sleep(0.001)
            router.to_worker.put_nowait(decode_pb2.DecodeManyRequest(cancelled_call_ids=[num_asked]))
        elif num_asked == 1:
            router.start(1)
        else:
            router.credit(1, 2**31)
        await asyncio.sleep(0.001)
    with pytest.raises(OverloadedError, match="bytes of the stream are unread"):
        await asyncio.wait_for(task, PATIENCE_S)
    assert num_asked <= max_calls


async def test_what_was_read_does_not_count_as_unread() -> None:
    """A stream that carries much for long goes on."""

    async def run(request: decode_pb2.DecodeRequest, call: Call) -> None:
        assert call.take_tokens([7] * 1000)
        await call.write(decode_pb2.DecodeEvent(tokens=[types_pb2.SampledToken(token_id=1)] * 1000))

    router = Router()
    task = asyncio.create_task(ManyCalls(run, 2).serve(cast("Any", router)))
    for call_id in range(1, 20):
        router.start(call_id)
        await until(lambda call_id=call_id: router.told.heard(call_id).end == b"", "its end")  # type: ignore[misc]
    router.to_worker.put_nowait(grpc.aio.EOF)
    await task


async def test_a_last_event_waits_for_no_credit() -> None:
    """Its router may close the call once it has that, and give no more."""

    async def run(request: decode_pb2.DecodeRequest, call: Call) -> None:
        tokens = [types_pb2.SampledToken(token_id=1)] * WINDOW_BYTES
        await call.write(decode_pb2.DecodeEvent(tokens=tokens, finish_reason=types_pb2.FINISH_REASON_LENGTH))

    router = Router()
    task = asyncio.create_task(ManyCalls(run, 10).serve(cast("Any", router)))
    router.start(1)
    await until(lambda: router.told.heard(1).end == b"", "its end")
    router.to_worker.put_nowait(grpc.aio.EOF)
    await task


async def test_a_defect_ends_its_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def run(request: decode_pb2.DecodeRequest, call: Call) -> None:
        if request.request_id == "1":
            raise ZeroDivisionError
        await call.write(decode_pb2.DecodeEvent())

    router = Router()
    task = asyncio.create_task(ManyCalls(run, 10).serve(cast("Any", router)))
    router.start(1, 2)
    await until(lambda: router.told.heard(1).end and router.told.heard(2).end == b"", "both ends")
    assert router.told.heard(1).error.grpc_code == "INTERNAL"
    assert "ZeroDivisionError" in caplog.text
    router.to_worker.put_nowait(grpc.aio.EOF)
    await task
