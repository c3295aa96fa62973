"""A worker without an engine: real gRPC on a real port, and an answer that is known beforehand.

Its tokens depend on the position only, so whoever continues a request continues the same text. What it does wrong is
set on the object, at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from common.errors import BatonError
from common.grpc.call_window import STARTS_KEY
from common.grpc.options import MAX_MESSAGE_BYTES, worker_server_options
from common.grpc.status import error_of_call, status_details
from common.grpc.transport import add_port
from common.tls import TlsFiles
from common.types import WorkerRole
from protos.baton.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    embed_pb2,
    embed_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from protos.convert import SAMPLING_PARAMETERS, role_to_proto
from tests.router.tiny_tokenizer import eos_id, ids_of, tokenizer_files, vocab_size
from worker.many_calls import Call, ManyCalls

MODEL = "tiny"
MAX_MODEL_LEN = 256
ANSWER = "The capital of France is Paris. How are you today?"

Context = grpc.aio.ServicerContext[object, object]


class FakeWorker(
    worker_pb2_grpc.WorkerServiceServicer, decode_pb2_grpc.DecodeServiceServicer, embed_pb2_grpc.EmbedServiceServicer
):
    def __init__(
        self,
        role: WorkerRole = WorkerRole.DECODE,
        *,
        fingerprint: str = "f1",
        fingerprint_but_dtype: str = "",
        dtype: str = "float32",
        model: str = MODEL,
    ) -> None:
        self.role = role
        self.fingerprint = fingerprint
        self.fingerprint_but_dtype = fingerprint_but_dtype  # a worker of an older version says none
        self.dtype = dtype
        self.model = model
        self.answer: list[int] = ids_of(ANSWER)
        self.epoch = "e1"
        self.state: worker_pb2.WorkerState.ValueType = worker_pb2.WORKER_STATE_READY
        self.load: dict[str, Any] = {"num_blocks": 100, "num_free_blocks": 100}  # what it reports, beside its state
        self.batch_time: worker_pb2.BatchTime | None = None
        # Faults.
        self.refuse: tuple[grpc.StatusCode, str] | BatonError | None = None
        self.die_after: int | None = None  # tokens sent in one call, then the call fails as if the connection broke
        self.end_after: int | None = None  # tokens sent in one call, then the stream ends without a reason
        self.hang_after: int | None = None  # tokens sent in one call, then nothing until it changes
        self.hangs_for_good = False  # a call that began with `hang_after` hangs although that changes
        self.offer_after: int | None = (
            None  # tokens sent in one call, then it offers a handover and again, as it goes on
        )
        self.first_report: types_pb2.RequestReport | None = None  # what it says with its first token
        self.spoil: Callable[[decode_pb2.DecodeEvent], None] | None = None  # changes each event before it is sent
        self.scores: Callable[[list[int]], list[float]] | None = (
            None  # logprob of each token of the vocabulary after these tokens; answers are then one token long
        )
        self.false_info: dict[str, Any] = {}  # what it says of itself, instead of the truth
        self.look: Callable[..., Awaitable[worker_pb2.WorkerStatus]] | None = (
            None  # instead of what it says of its status
        )
        self.says: Callable[[int], list[decode_pb2.DecodeManyResponse]] | None = (
            None  # to the start of this call on a stream of many, instead of answering; the stream stays open
        )
        self.breaks: tuple[grpc.StatusCode, str] | BatonError | None = None  # how such a stream ends after that
        self.takes_batches = True  # whether it says that it takes several starts in one message, as it does
        self.chat_template = ""  # instead of the tiny tokenizer's own
        self.silent = False  # answers calls, but reports no load
        self.report_s = 0.5  # seconds between reports of its load, if nothing changes
        self.delay_s = 0.0  # before each token
        self.block_changes: list[dict[str, Any]] = [{"starts_list": True}]  # with which each stream of blocks begins
        self.more_blocks: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.num_block_streams = 0
        # A version that does not tell of blocks, does not know some parameters, nor streams of many calls.
        self.is_older = False
        # What was seen.
        self.requests: list[decode_pb2.DecodeRequest] = []
        self.hints: list[worker_pb2.HintCacheRequest] = []
        self.orders: list[Message] = []  # of operators
        self.num_abortable = 0  # streams of any request that it is told to abort
        self.embedded: list[embed_pb2.EmbedTokensRequest] = []
        self.most_embedding = 0  # at a time
        self._num_embedding = 0
        self.cancelled = asyncio.Event()
        self.asked = asyncio.Event()
        self.deadlines: list[float | None] = []
        self.heard: list[decode_pb2.DecodeManyRequest] = []  # with `says`
        self.address = ""
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Event()
        self.num_streams = 0  # of many calls
        self._many = ManyCalls(self._decode, 1000)

    async def start(self, address: str = "127.0.0.1:0", tls: TlsFiles | None = None) -> str:
        self._server = grpc.aio.server(
            options=worker_server_options(max_message_bytes=MAX_MESSAGE_BYTES, max_streams=1024)
        )
        self.add_to(self._server)
        port = add_port(self._server, address, tls)
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        return self.address

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds its services."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)
        embed_pb2_grpc.add_EmbedServiceServicer_to_server(self, server)

    async def stop(self) -> None:
        """As a killed process: calls in flight break."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    def change(self, **attributes: object) -> None:
        """Sets attributes and reports the new load at once."""
        for name, value in attributes.items():
            setattr(self, name, value)
        self._changed.set()

    def report(self, **counts: int) -> None:
        """Reports these of its 100 blocks and of its requests, and of all others none."""
        self.change(load={"num_blocks": 100, **counts})

    @property
    def num_requests_waiting(self) -> int:
        number: int = self.load.get("num_requests_waiting", 0)
        return number

    @num_requests_waiting.setter
    def num_requests_waiting(self, number: int) -> None:
        self.load["num_requests_waiting"] = number

    @property
    def num_requests_running(self) -> int:
        number: int = self.load.get("num_requests_running", 0)
        return number

    @num_requests_running.setter
    def num_requests_running(self, number: int) -> None:
        self.load["num_requests_running"] = number

    # ------------------------------------------------------------------------------------------- services

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Context) -> worker_pb2.WorkerInfo:  # noqa: N802
        info = worker_pb2.WorkerInfo(
            worker_id=f"worker-{self.address}",
            role=role_to_proto(self.role),
            epoch=self.epoch,
            model=self.model,
            fingerprint=self.fingerprint,
            fingerprint_but_dtype=self.fingerprint_but_dtype,
            dtype=self.dtype,
            dtype_reason=f"why {self.dtype}",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=vocab_size(),
            block_size=16,
            sampling_parameters=() if self.is_older else sorted(SAMPLING_PARAMETERS),
            eos_token_ids=[eos_id()],
            batch_time=self.batch_time,
        )
        info.MergeFrom(worker_pb2.WorkerInfo(**self.false_info))
        return info

    async def WatchLoad(  # noqa: N802
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerLoad]:
        while True:
            self._changed.clear()
            if self.silent:
                await asyncio.Event().wait()
            yield self._load()
            try:
                async with asyncio.timeout(self.report_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _load(self) -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad(
            state=self.state,
            epoch=self.epoch,
            batch_time_version=0 if self.batch_time is None else self.batch_time.version,
            **self.load,
        )

    async def WatchBlocks(  # noqa: N802
        self, request: worker_pb2.WatchBlocksRequest, context: Context
    ) -> AsyncIterator[worker_pb2.BlockChanges]:
        self.num_block_streams += 1
        if self.is_older:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        for changes in self.block_changes:
            yield worker_pb2.BlockChanges(epoch=self.epoch, **changes)
        while True:
            changes = await self.more_blocks.get()
            yield worker_pb2.BlockChanges(epoch=self.epoch, **changes)

    async def GetStatus(self, request: worker_pb2.GetWorkerStatusRequest, context: Context) -> worker_pb2.WorkerStatus:  # noqa: N802
        if self.look is not None:
            return await self.look(request)
        return worker_pb2.WorkerStatus(load=self._load(), integrity="ok")

    async def GetTokenizer(  # noqa: N802
        self, request: worker_pb2.GetTokenizerRequest, context: Context
    ) -> worker_pb2.GetTokenizerResponse:
        files = dict(tokenizer_files())
        if self.chat_template:
            files["chat_template.jinja"] = self.chat_template.encode()
        return worker_pb2.GetTokenizerResponse(
            files=[worker_pb2.TokenizerFile(name=name, content=data) for name, data in files.items()]
        )

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:  # noqa: N802
        await self._ordered(request, context)
        self.change(state=worker_pb2.WORKER_STATE_DRAINING)
        return worker_pb2.DrainResponse()

    async def Pause(  # noqa: N802
        self, request: worker_pb2.PauseWorkerRequest, context: Context
    ) -> worker_pb2.PauseWorkerResponse:
        await self._ordered(request, context)
        self.change(state=worker_pb2.WORKER_STATE_PAUSED)
        return worker_pb2.PauseWorkerResponse(num_streams=2)

    async def Resume(  # noqa: N802
        self, request: worker_pb2.ResumeWorkerRequest, context: Context
    ) -> worker_pb2.ResumeWorkerResponse:
        await self._ordered(request, context)
        self.change(state=worker_pb2.WORKER_STATE_READY)
        return worker_pb2.ResumeWorkerResponse()

    def take(self, role: worker_pb2.WorkerRole.ValueType, *, is_pinned: bool = False) -> None:
        """As a worker of both roles reports what it takes."""
        num_shifts = self.load.get("num_role_shifts", 0) + (role != self.load.get("role", role))
        self.change(load={**self.load, "role": role, "num_role_shifts": num_shifts, "role_pinned": is_pinned})

    async def SetRole(  # noqa: N802
        self, request: worker_pb2.SetWorkerRoleRequest, context: Context
    ) -> worker_pb2.SetWorkerRoleResponse:
        await self._ordered(request, context)
        self.take(request.role, is_pinned=request.pin == worker_pb2.SetWorkerRoleRequest.PIN_SET)
        return worker_pb2.SetWorkerRoleResponse(num_streams=1, num_role_shifts=self.load["num_role_shifts"])

    async def Abort(self, request: worker_pb2.AbortWorkRequest, context: Context) -> worker_pb2.AbortWorkResponse:  # noqa: N802
        await self._ordered(request, context)
        return worker_pb2.AbortWorkResponse(num_streams=self.num_abortable)

    async def FlushCache(  # noqa: N802
        self, request: worker_pb2.FlushWorkerCacheRequest, context: Context
    ) -> worker_pb2.FlushWorkerCacheResponse:
        await self._ordered(request, context)
        return worker_pb2.FlushWorkerCacheResponse(num_device_blocks=5, num_host_blocks=3)

    async def SetLogLevel(  # noqa: N802
        self, request: worker_pb2.SetWorkerLogLevelRequest, context: Context
    ) -> worker_pb2.SetWorkerLogLevelResponse:
        await self._ordered(request, context)
        return worker_pb2.SetWorkerLogLevelResponse()

    async def _ordered(self, request: Message, context: Context) -> None:
        if self.is_older:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        await self._refuse(context)
        self.orders.append(request)

    async def Profile(  # noqa: N802
        self, request: worker_pb2.ProfileRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ProfilePart]:
        if self.is_older:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        await self._refuse(context)
        for content in (b"a tr", b"ace"):
            yield worker_pb2.ProfilePart(file="trace.json.gz", content=content)
        yield worker_pb2.ProfilePart(file="../engine.svg", content=b"<svg/>")
        yield worker_pb2.ProfilePart(num_steps=request.num_steps, seconds=request.timeout_s, notes=["no front.svg"])

    async def EmbedTokens(  # noqa: N802
        self, request: embed_pb2.EmbedTokensRequest, context: Context
    ) -> embed_pb2.EmbedTokensResponse:
        """(number of tokens, the first of them, 0.5, ...)"""
        self.embedded.append(request)
        self._num_embedding += 1
        self.most_embedding = max(self.most_embedding, self._num_embedding)
        await self._refuse(context)
        await asyncio.sleep(self.delay_s)
        self._num_embedding -= 1
        tokens = request.prompt_token_ids
        return embed_pb2.EmbedTokensResponse(values=[len(tokens), tokens[0], 0.5], cached_tokens=1)

    async def HintCache(  # noqa: N802
        self, request: worker_pb2.HintCacheRequest, context: Context
    ) -> worker_pb2.HintCacheResponse:
        """As if it had all blocks on its device, but for the first, and said that of more than it was asked for."""
        self.hints.append(request)
        await self._refuse(context)
        return worker_pb2.HintCacheResponse(
            num_device_blocks=len(request.block_hashes) // 16 - 1, num_host_blocks=1, num_stored_blocks=10**9
        )

    async def _refuse(self, context: Context) -> None:
        if self.refuse is not None:
            await _abort(context, self.refuse)

    async def DecodeMany(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        if self.is_older:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        self.num_streams += 1
        if self.says is None:
            await self._many.serve(context)
            return
        await context.send_initial_metadata(((STARTS_KEY, "1"),) if self.takes_batches else ())
        async for message in request_iterator:
            self.heard.append(message)
            for start in message.starts:
                for said in self.says(start.call_id):
                    await context.write(said)
                if self.breaks is not None:
                    await _abort(context, self.breaks)

    async def _decode(self, request: decode_pb2.DecodeRequest, call: Call) -> None:
        async with aclosing(self.Decode(request, _CallContext(call))) as events:  # type: ignore[arg-type, type-var]
            async for event in events:
                bare = decode_pb2.DecodeEvent(
                    tokens=[types_pb2.SampledToken(token_id=t.token_id) for t in event.tokens]
                )
                if event != bare or not call.take_tokens([token.token_id for token in event.tokens]):
                    await call.write(event)

    async def Decode(  # noqa: N802
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        self.requests.append(request)
        self.asked.set()
        self.deadlines.append(context.time_remaining())
        await self._refuse(context)
        hang_after = self.hang_after
        first = len(request.output_token_ids)
        params = request.sampling_params
        stop = min(params.max_tokens, len(self.answer) + 1)  # one more for the end of sequence
        if params.HasField("prompt_logprobs") and not first:
            for scores in self._prompt_logprobs(request):
                if self.spoil is not None:
                    self.spoil(scores)
                yield scores
        if self.scores is not None:
            yield self._scored(request, self.scores([*request.prompt_token_ids, *request.output_token_ids]))
            return
        try:
            for position in range(first, stop):
                num_sent = position - first
                if num_sent == self.die_after:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                if num_sent == self.end_after:
                    return
                is_offered = self.offer_after is not None and num_sent >= self.offer_after
                while num_sent == (hang_after if self.hangs_for_good else self.hang_after):
                    await asyncio.sleep(0.02)
                    if is_offered:
                        yield decode_pb2.DecodeEvent(offers_handover=True)
                await asyncio.sleep(self.delay_s)
                if is_offered:
                    yield decode_pb2.DecodeEvent(offers_handover=True)
                event = self._event(position, params, is_last=position == stop - 1)
                if self.spoil is not None:
                    self.spoil(event)
                yield event
        except (asyncio.CancelledError, GeneratorExit):  # the second if a message was being sent
            self.cancelled.set()
            raise

    def _scored(self, request: decode_pb2.DecodeRequest, scores: list[float]) -> decode_pb2.DecodeEvent:
        ranked = sorted(range(len(scores)), key=lambda token_id: -scores[token_id])
        token = types_pb2.SampledToken(token_id=ranked[0], logprob=scores[ranked[0]])
        for token_id in ranked[: request.sampling_params.logprobs]:
            token.top_logprobs.add(token_id=token_id, logprob=scores[token_id])
        event = decode_pb2.DecodeEvent(tokens=[token], finish_reason=types_pb2.FINISH_REASON_LENGTH)
        event.usage.cached_tokens = 3
        event.report.CopyFrom(types_pb2.RequestReport(prefill_worker="p:1", num_blocks_moved=2))
        return event

    def _prompt_logprobs(self, request: decode_pb2.DecodeRequest) -> list[decode_pb2.DecodeEvent]:
        """In two pieces; a token's logprob is its position, negated."""
        scores = []
        for position, token_id in enumerate(request.prompt_token_ids[1:], 1):
            score = types_pb2.SampledToken(token_id=token_id, logprob=-position)
            for rank in range(request.sampling_params.prompt_logprobs):
                score.top_logprobs.add(token_id=(token_id + rank) % vocab_size(), logprob=-position - rank)
            scores.append(score)
        pieces = [piece for piece in (scores[:3], scores[3:]) if piece]
        return [decode_pb2.DecodeEvent(prompt_logprobs=piece) for piece in pieces]

    def _event(self, position: int, params: types_pb2.SamplingParams, *, is_last: bool) -> decode_pb2.DecodeEvent:
        is_eos = position == len(self.answer)
        token_id = eos_id() if is_eos else self.answer[position]
        token = types_pb2.SampledToken(token_id=token_id)
        if params.HasField("logprobs"):
            token.logprob = -0.5
            for rank in range(params.logprobs):
                token.top_logprobs.add(token_id=(token_id + rank) % vocab_size(), logprob=-0.5 - rank)
        event = decode_pb2.DecodeEvent(tokens=[token], report=self.first_report)
        if is_last:
            event.finish_reason = types_pb2.FINISH_REASON_STOP if is_eos else types_pb2.FINISH_REASON_LENGTH
            if is_eos:
                event.stop_token_id = token_id
            event.usage.cached_tokens = 3
            event.report.CopyFrom(
                types_pb2.RequestReport(
                    prefill_worker="p:1",
                    num_blocks_moved=2,
                    num_bytes_moved=64,
                    timings=types_pb2.Timings(queue_ms=1.5),
                )
            )
        return event


async def _abort(context: Context, why: tuple[grpc.StatusCode, str] | BatonError) -> None:
    if isinstance(why, BatonError):
        code = grpc.StatusCode[why.grpc_code]
        await context.abort(code, why.message, trailing_metadata=status_details(why))
    else:
        await context.abort(*why)


class _CallContext:
    """What `FakeWorker.Decode` needs of a gRPC context, for one of many calls."""

    def __init__(self, call: Call) -> None:
        self.time_remaining = call.time_remaining

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> NoReturn:
        raise error_of_call(code.name, details, trailing_metadata)
