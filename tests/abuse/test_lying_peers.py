"""Workers that lie, to a decode worker and to a router: requests go on elsewhere or fail, and nobody ends for it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx

from protos.baton.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.abuse.mutate import any_of
from tests.abuse.rude import PATIENCE_S, RUDE_KEY, Target, at_once, channel
from tests.abuse.vitals import Vitals
from tests.integration.stack import Fleet
from tests.support.fake_worker import Context, FakeWorker

NUM_REQUESTS = 150
NUM_TOKENS = 4
MOST = 2**32 - 1


class Liar(FakeWorker, prefill_pb2_grpc.PrefillServiceServicer):
    """Says of itself what an honest worker says, more or less, and then anything."""

    def __init__(self, honest: worker_pb2.WorkerInfo, tokenizer: worker_pb2.GetTokenizerResponse) -> None:
        super().__init__()
        self._honest, self._tokenizer = honest, tokenizer
        self._rng = random.Random(7)
        self.num_asked = 0
        self.epoch, self.says = honest.epoch, self._lies

    def add_to(self, server: grpc.aio.Server) -> None:
        super().add_to(server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Prefill(  # noqa: N802
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillRequest], context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.num_asked += 1
        rng = random.Random(self.num_asked)
        if rng.random() < 0.7:
            yield prefill_pb2.PrefillEvent(accepted=prefill_pb2.PrefillAccepted(worker_id="p", epoch="e"))
        for _ in range(rng.randrange(6)):
            event = any_of(rng, prefill_pb2.PrefillEvent)
            yield event

    async def Decode(  # noqa: N802
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        self.num_asked += 1
        rng = random.Random(self.num_asked)
        for _ in range(rng.randrange(6)):
            event = any_of(rng, decode_pb2.DecodeEvent)
            if rng.random() < 0.5:
                del event.tokens[:]
                token = types_pb2.SampledToken(token_id=rng.choice((5, 399, 400, MOST)))
                event.tokens.extend([token] * rng.randrange(4))
            yield event

    def _lies(self, call_id: int) -> list[decode_pb2.DecodeManyResponse]:
        self.num_asked += 1
        rng = random.Random(self.num_asked)
        lies = [self._lie(rng, call_id) for _ in range(rng.randrange(6))]
        return [*lies, decode_pb2.DecodeManyResponse(events=[decode_pb2.CallEvent(call_id=call_id, ended=b"")])]

    def _lie(self, rng: random.Random, call_id: int) -> decode_pb2.DecodeManyResponse:
        lie = decode_pb2.DecodeManyResponse()
        match rng.randrange(4):
            case 0:  # tokens, of calls that there are and of others
                for _ in range(rng.randrange(4)):
                    lie.call_ids.append(rng.choice((call_id, call_id, 0, MOST)))
                    lie.token_ids.append(rng.choice((5, 399, 400, MOST)))
            case 1:
                event = any_of(rng, decode_pb2.DecodeEvent)
                lie.events.add(call_id=call_id, event=event.SerializeToString())
            case 2:
                lie.events.add(call_id=call_id, **{rng.choice(("event", "ended")): rng.randbytes(rng.randrange(40))})
            case _:
                lie.MergeFrom(any_of(rng, decode_pb2.DecodeManyResponse))
        return lie

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Context) -> worker_pb2.WorkerInfo:  # noqa: N802
        info = worker_pb2.WorkerInfo()
        info.CopyFrom(self._honest)
        if self._rng.random() < 0.3:
            info.MergeFrom(any_of(self._rng, worker_pb2.WorkerInfo))
        return info

    async def WatchLoad(  # noqa: N802
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerLoad]:
        for _ in range(self._rng.randrange(30)):
            load = any_of(self._rng, worker_pb2.WorkerLoad)
            if self._rng.random() < 0.7:
                load.state = worker_pb2.WORKER_STATE_READY
                load.epoch = self._honest.epoch
                load.batch_time_version = self._honest.batch_time.version
            yield load
            await asyncio.sleep(0.05)

    async def GetStatus(self, request: worker_pb2.GetWorkerStatusRequest, context: Context) -> worker_pb2.WorkerStatus:  # noqa: N802
        return any_of(self._rng, worker_pb2.WorkerStatus)

    async def GetTokenizer(  # noqa: N802
        self, request: worker_pb2.GetTokenizerRequest, context: Context
    ) -> worker_pb2.GetTokenizerResponse:
        return self._tokenizer


@contextmanager
def lying(honest: str) -> Iterator[tuple[Liar, str]]:
    """A liar, in a thread of its own, that knows what the worker at `honest` says of itself; and its address."""
    with channel(honest) as opened:
        stub = worker_pb2_grpc.WorkerServiceStub(opened)
        info = stub.GetInfo(worker_pb2.GetInfoRequest())
        info.epoch = "lies"
        liar = Liar(info, stub.GetTokenizer(worker_pb2.GetTokenizerRequest()))
    loop, ready, done = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    addresses: list[str] = []

    async def serve() -> None:
        addresses.append(await liar.start())
        ready.set()
        await done.wait()
        await liar.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield liar, addresses[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def test_a_prefill_worker_that_lies(target: Target, vitals: Vitals) -> None:
    """Each request ends with as many tokens as were asked for, whatever was said of its prompt."""

    def ask(number: int) -> int:
        request = decode_pb2.DecodeRequest(
            request_id=f"r{number}",
            prompt_token_ids=[5 + number % 300] * 40,
            sampling_params=types_pb2.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
            cache_salt=str(number),
            prefill_addresses=[address, address],
        )
        events = list(decode_pb2_grpc.DecodeServiceStub(opened).Decode(request, timeout=60))
        assert events[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
        return sum(len(event.tokens) for event in events)

    with lying(target.prefill) as (liar, address), channel(target.decode) as opened:
        assert at_once(NUM_REQUESTS, ask, 8) == {NUM_TOKENS: NUM_REQUESTS}
        assert liar.num_asked >= NUM_REQUESTS


def test_a_decode_worker_that_lies(fleet: Fleet, target: Target, vitals: Vitals, tmp_path: Path) -> None:
    """To a router of its own, beside the honest one."""

    def ask(number: int) -> int:
        body = {"prompt": "Hello", "max_tokens": NUM_TOKENS, "n": 1 + number % 2, "stream": number % 3 == 0}
        if number % 4 == 0:
            body["logprobs"] = 2
        return client.post("/v1/completions", json=body).status_code

    with lying(target.decode) as (liar, address):
        flags = (f"--decode={target.decode},{address}", "--request-timeout=10")
        url = fleet.another_router("lied-to", *flags)
        process = fleet.every_router[-1].process
        headers = {"authorization": f"Bearer {RUDE_KEY}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            until = time.monotonic() + PATIENCE_S
            while True:  # the router has to believe the liar for a moment
                found = at_once(NUM_REQUESTS, ask, 8)
                assert set(found) <= {200, 429, 503, 504}, found
                assert found[200]
                if liar.num_asked or time.monotonic() > until:
                    break
            assert client.get("/health").status_code in (200, 503)
        assert process.running
        assert "Traceback" not in process.log.read_text(), process.log.read_text()  # but it says who lies, and how
        assert liar.num_asked
        process.kill()
