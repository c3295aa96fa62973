"""What is asked of a router, or of a worker directly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from bench.instant_worker import MAX_STREAMS, MODEL
from bench.load.clients import Client, GrpcClient, Request, RestClient
from common.errors import InternalError
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, types_pb2

PROMPT = "Which of the dogs in the yard was it that the quick brown fox jumped over, and how often did it do so? " * 2
NUM_PROMPT_TOKENS = 50  # about as many


def chat(max_tokens: int) -> Request:
    """An answer of one token is not streamed."""
    return Request(prompt=PROMPT, max_tokens=max_tokens, is_chat=True, model=MODEL, is_streamed=max_tokens > 1)


class Direct:
    """A decode worker itself, with as many prompt tokens."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = decode_pb2_grpc.DecodeServiceStub(self._channel)

    async def events(self, request: Request) -> AsyncIterator[int]:
        params = types_pb2.SamplingParams(max_tokens=request.max_tokens)
        direct = decode_pb2.DecodeRequest(prompt_token_ids=[1] * NUM_PROMPT_TOKENS, sampling_params=params)
        try:
            async for _ in self._stub.Decode(direct):
                yield 1
        except grpc.aio.AioRpcError as error:
            raise InternalError(f"the worker answers {error.code().name}: {error.details()}") from error

    async def close(self) -> None:
        await self._channel.close()


@dataclass(slots=True, frozen=True)
class Endpoint:
    kind: str  # "rest", "grpc" or "decode"
    address: str

    def connect(self) -> Client:
        """Needs a running loop."""
        match self.kind:
            case "rest":
                return RestClient(self.address)
            case "grpc":
                return GrpcClient(self.address, max_streams=MAX_STREAMS)
            case "decode":
                return Direct(self.address)
        raise ValueError(f"no client is called {self.kind!r}")
