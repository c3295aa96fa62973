"""`/v1/embeddings`: the body, what becomes of it, and the answer, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import ClassVar

import msgspec
from fastapi import Request
from fastapi.responses import Response

from common.errors import InvalidArgumentError
from common.validation import ModelLimits
from protos.baton.v1 import embed_pb2
from router.api.api_keys import current_client
from router.api.rest.in_process import ROOM
from router.api.rest.openai.body_types import several
from router.api.rest.openai.chat_messages import ChatInPlace
from router.api.rest.openai.disconnect import json_answer
from router.api.rest.openai.large_json import PART_BYTES
from router.api.rest.openai.parsing import read, request_id_of
from router.api.rest.openai.tools import JsonObject
from router.fleet.served_model import ServedModel
from router.limits.clients import CallHints, call_hints
from router.running.embedding import Embedded, EmbedRequest, check_num_inputs
from router.running.request import Prompt
from router.serving.gateway import Gateway
from text.conversation import Conversation, Tools

_POOLINGS = {"last": embed_pb2.POOLING_LAST, "mean": embed_pb2.POOLING_MEAN}


class EmbeddingsBody(ChatInPlace, kw_only=True):
    input: str | list[str | int | list[int]] | None = None
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None

    # Not OpenAI's.
    pooling: str | None = None
    normalize: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    # OpenAI's, for its own records.
    user: str | None = None

    formats: ClassVar[tuple[str, ...]] = ("float", "base64")
    of_text: ClassVar[tuple[str, ...]] = ("input",)

    def check(self) -> None:
        """Raises `InvalidArgumentError` for what is well formed and still cannot be done."""
        if self.encoding_format not in (None, *self.formats):
            raise InvalidArgumentError("encoding_format", f"must be float or base64, not {self.encoding_format!r}")
        if self.pooling not in (None, *_POOLINGS):
            raise InvalidArgumentError("pooling", f"must be last or mean, not {self.pooling!r}")
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidArgumentError("dimensions", f"must be at least 1, not {self.dimensions}")
        self.check_chat()
        if self.messages is None:
            check_num_inputs(len(self.inputs()), "input")

    def inputs(self) -> list[str | list[int]]:
        if self.input is None:
            raise InvalidArgumentError("input", "is required")
        return several(self.input, "input")

    def conversation(self, limits: ModelLimits) -> Conversation:
        return self.conversation_with(Tools(), limits, asks_answer=False)

    @property
    def pooling_value(self) -> embed_pb2.Pooling.ValueType:
        return _POOLINGS[self.pooling or "last"]


async def embeddings_parts(
    body: EmbeddingsBody, request: EmbedRequest, embedded: Sequence[Embedded], part_bytes: int = PART_BYTES
) -> AsyncGenerator[bytes, None]:
    """The answer's JSON in parts of `part_bytes`, of which only the last has less. Vectors are written one by one, and
    others have their turn after each."""
    is_base64 = body.encoding_format == "base64"
    part = bytearray(b'{"object":"list","data":[')
    for index, one in enumerate(embedded):
        entry = {"object": "embedding", "index": index, "embedding": _base64(one) if is_base64 else list(one.values)}
        part += (b"," if index else b"") + msgspec.json.encode(entry)
        if len(part) >= part_bytes:
            yield bytes(part)
            part.clear()
        await asyncio.sleep(0)
    yield bytes(part) + b"]," + msgspec.json.encode(_rest(request, embedded))[1:]


def _rest(request: EmbedRequest, embedded: Sequence[Embedded]) -> JsonObject:
    num_tokens = sum(len(prompt.token_ids) for prompt in request.prompts)
    num_cached = sum(one.num_cached_tokens for one in embedded)
    return {
        "model": request.model.limits.model,
        "usage": {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        },
    }


def _base64(embedded: Embedded) -> str:
    """float32, little-endian."""
    values = array("f", embedded.values)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


class EmbeddingHandlers:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def embeddings(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        body = await read(EmbeddingsBody, request, self._gateway.admission)
        request_id = request_id_of(request, body.request_id)
        hints = call_hints(request.headers)
        of_batch = getattr(request.state, ROOM, None) is not None
        parts = self._embed(body, request_id, arrived_at, hints, of_batch)
        return await json_answer(request, parts, {"X-Request-Id": request_id})

    async def _embed(
        self, body: EmbeddingsBody, request_id: str, arrived_at: float, hints: CallHints, of_batch: bool
    ) -> AsyncGenerator[bytes, None]:
        client = current_client.get()
        gateway = self._gateway
        with gateway.admission.running("rest", client=client, of_batch=of_batch):
            model = await gateway.admission.serving(body.model or "")
            body.check()
            prompts = await self._prompts(model, body)
            wanted = gateway.preparation.embed_request(
                model,
                prompts,
                request_id=request_id,
                pooling=body.pooling_value,
                dimensions=body.dimensions or 0,
                normalize=body.normalize is not False,
                cache_salt=body.cache_salt or "",
                arrived_at=arrived_at,
                client=client,
                hints=hints,
            )
            with gateway.admission.gate.bytes_held() as held:
                embedded = await gateway.embeddings.embed(wanted, held.grow)
                async with aclosing(embeddings_parts(body, wanted, embedded)) as parts:
                    async for part in parts:
                        yield part

    async def _prompts(self, model: ServedModel, body: EmbeddingsBody) -> list[Prompt]:
        preparation, client = self._gateway.preparation, current_client.get()
        if body.messages is not None:
            conversation = body.conversation(model.limits)
            return [await preparation.chat_prompt(model, conversation, has_answer=False, client=client)]
        special = body.add_special_tokens is not False
        return await preparation.prompts(
            model, body.inputs(), "input", add_special_tokens=special, has_answer=False, client=client
        )
