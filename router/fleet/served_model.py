"""The model that a fleet serves, and which workers go with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from common.block_hash import block_hashes, extra_keys, root_hash
from common.types import WorkerRole
from common.validation import ModelLimits
from protos.baton.v1 import worker_pb2, worker_pb2_grpc
from protos.convert import role_of
from text.tokenizer import Tokenizer, load_tokenizer


@dataclass(slots=True, frozen=True)
class ServedModel:
    """What the fleet serves now, as the first decode worker that answered describes it. But `max_model_len` is the
    longest of the decode workers that are ready, or were last: policies send a request to one that can take it."""

    limits: ModelLimits
    fingerprint: str
    fingerprint_but_dtype: str  # empty if the worker is too old to say
    dtype: str
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer
    block_size: int  # tokens per KV block

    def block_names(self, token_ids: Sequence[int], cache_salt: str) -> list[bytes]:
        """The names of the full blocks of these tokens."""
        root, extra = root_hash(self.fingerprint), extra_keys(cache_salt=cache_salt)
        return block_hashes(root, token_ids, self.block_size, extra)


async def ask_for_model(info: worker_pb2.WorkerInfo, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> ServedModel:
    """Asks a worker, which said `info` of itself, for its model."""
    answer = await stub.GetTokenizer(worker_pb2.GetTokenizerRequest(), timeout=30.0, wait_for_ready=True)
    files = {file.name: file.content for file in answer.files}
    tokenizer = await asyncio.to_thread(load_tokenizer, files)
    limits = ModelLimits(
        model=info.model,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_token_bytes=tokenizer.max_token_bytes,
        is_token=tokenizer.is_token,
    )
    return ServedModel(
        limits,
        info.fingerprint,
        info.fingerprint_but_dtype,
        info.dtype,
        frozenset(info.eos_token_ids),
        tokenizer,
        info.block_size,
    )


def why_excluded(info: worker_pb2.WorkerInfo | None, role: WorkerRole, model: ServedModel | None) -> str:
    """Why a worker that is configured for `role` must not be used for `model`; empty if nothing speaks against it.
    `info` is None if it never answered, `model` if none is served yet."""
    if info is None:
        return ""
    own_role = role_of(info.role)
    if own_role is not role and own_role is not WorkerRole.BOTH:
        return f"is configured for role {role.value}, but is a worker for {own_role.value if own_role else '?'}"
    if model is None:
        return ""
    if info.model != model.limits.model:
        return f"serves model {info.model!r}, not {model.limits.model!r}"
    if info.fingerprint == model.fingerprint:
        return ""
    if info.fingerprint_but_dtype and info.fingerprint_but_dtype == model.fingerprint_but_dtype:
        return (
            f"holds KV of another kind: it computes in {info.dtype} ({info.dtype_reason}), others in "
            f"{model.dtype}. Nothing else differs: give all workers one --dtype"
        )
    return f"holds KV of another kind ({info.fingerprint}, not {model.fingerprint})"
