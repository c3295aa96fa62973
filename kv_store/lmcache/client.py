"""One worker's connection to an LMCache server: whole chunks in and out, over gRPC, bytes through shared memory.

The server allots a place in its shared memory (a slot), the worker copies there itself, and says when it is done:

    store   PrepareStore -> slot -> copy -> CommitStore -> EndSession
    load    Lookup -> WaitPrefetchStatus -> PrepareRetrieve -> slot -> copy -> CommitRetrieve -> EndSession

A kind of chunks is registered with the server at its first use. A server that restarts forgets that, so a call that
fails for this reason registers again and is tried once more. All errors are `TransferError`, each call ends by its
deadline, and any thread may call; while the server is away, calls fail at once, but for one attempt every now and then.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import grpc
import msgspec
import numpy as np

from common.block_hash import HASH_BYTES
from common.errors import StartupError, TransferError
from kv_store.lmcache.groups import Bytes, Chunk
from protos.lmcache.mp import server_pb2 as pb
from protos.lmcache.mp import server_pb2_grpc as rpc

log = logging.getLogger(__name__)

_SHM = "/dev/shm"  # noqa: S108 - where POSIX shared memory is seen as files
RETRY_AFTER_S = (0.1, 2.0)  # first and longest time between two attempts to reach a lost server
_CLEAN_UP_TIMEOUT_S = 5.0
_NUM_KEY_TOKENS = HASH_BYTES // 2
_CHANNEL_OPTIONS = [
    # No keepalive pings: the server takes them for an attack and hangs up. Every call has a deadline instead.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)


class Method(Protocol[Request, Response]):
    """A unary method of a stub."""

    def __call__(self, request: Request, timeout: float | None = None) -> Response: ...


class _Slot(msgspec.Struct):
    offset: int
    length: int


class _Context(msgspec.Struct):
    slots: list[_Slot] = []


class NotRegisteredError(TransferError):
    """The server does not know this worker: the server has restarted, or has dropped the worker after a long
    silence."""


@dataclass(slots=True, frozen=True)
class _Pool:
    """One life of the server, as far as this worker has seen it."""

    memory: Bytes  # the server's shared memory
    memory_id: tuple[int, int]  # of that memory alone, for as long as it is mapped
    chunk_size: int  # tokens
    registered: set[str] = field(default_factory=set)  # model names

    def slot(self, encoded_context: bytes, num_bytes: int) -> Bytes:
        """The one slot of a prepared call. Raises `TransferError` if it makes no sense."""
        slots = _decode(encoded_context).slots
        if len(slots) != 1:
            raise TransferError(f"LMCache: {len(slots)} places instead of one")
        start = slots[0].offset
        if slots[0].length < num_bytes or start < 0 or start + num_bytes > len(self.memory):
            raise TransferError(f"LMCache: a place at {start} is too small, or beyond the shared memory")
        return self.memory[start : start + num_bytes]


class LMCacheClient:
    def __init__(self, address: str) -> None:
        """Does not connect yet."""
        self.address = address
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._transfer = rpc.EngineDrivenServiceStub(self._channel)
        self._lookup = rpc.LookupServiceStub(self._channel)
        self._controller = rpc.ControllerServiceStub(self._channel)
        self._instances: dict[str, int] = {}  # model name: id of the registration
        self._pool: _Pool | None = None
        self._connecting = threading.Lock()
        self._retry_time = 0.0  # time.monotonic() of the next attempt
        self._retry_after_s = RETRY_AFTER_S[0]

    def wait_until_up(self, timeout_s: float) -> None:
        """Raises `StartupError` if no server answers in time."""
        try:
            self._controller.GetChunkSize(pb.GetChunkSizeRequest(), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            raise StartupError(
                f"lmcache_address: no LMCache server answers at {self.address!r} ({_why(error)})"
            ) from error

    def register(self, chunks: Sequence[Chunk], timeout_s: float) -> None:
        """Registers the kinds of `chunks` before their first use. Raises `StartupError` if the server can't serve this
        worker."""
        deadline = time.monotonic() + timeout_s
        try:
            for chunk in chunks:
                self._connected(chunk, deadline)
        except TransferError as error:
            raise StartupError(f"lmcache_address: {error.message}") from error

    def store(self, chunk: Chunk, fill: Callable[[Bytes], None], deadline: float) -> bool:
        """Stores a chunk, whose bytes `fill` writes. False if the server has no place for it: it holds the chunk
        already, somebody is about to write it, or its memory is full."""
        return self._try_twice(lambda: self._store(chunk, fill, deadline), deadline)

    def contains(self, chunk: Chunk, deadline: float) -> bool:
        """Whether the server can serve `chunk`, from memory or a slower tier."""

        def once() -> bool:
            pool = self._connected(chunk, deadline)
            key = self._key(chunk, pool)
            try:
                found = self._locked_for_reading(key, deadline)
                if found:
                    request = pb.FreeLookupLocksRequest(key=key)
                    _call(self._lookup.FreeLookupLocks, request, deadline)
                else:
                    self._check_registered(chunk, key, deadline)
                return found
            finally:
                self._end(key)

        return self._try_twice(once, deadline)

    @contextmanager
    def loaded(self, chunk: Chunk, deadline: float) -> Iterator[Bytes | None]:
        """The chunk's bytes, where they lie; None if the server does not hold it. They stay for as long as the
        context is open."""
        key, slot = self._try_twice(lambda: self._load(chunk, deadline), deadline)
        try:
            yield slot
        finally:
            if slot is None:
                self._end(key)
            else:
                self._unlock(chunk, key)

    def clear(self, timeout_s: float) -> None:
        """Empties the server, for all its workers."""
        _call(self._controller.Clear, pb.ClearRequest(force=True), time.monotonic() + timeout_s)

    def close(self, timeout_s: float) -> None:
        """Releases what the server reserved for this worker. Calls under way fail."""
        deadline = time.monotonic() + timeout_s
        try:
            for instance in list(self._instances.values()):
                request = pb.UnregisterKvCacheEngineDrivenContextRequest(instance_id=instance)
                _call(self._transfer.UnregisterKvCacheEngineDrivenContext, request, deadline)
        except TransferError as error:
            log.info("did not say good-bye to LMCache", extra={"reason": error.message})
        self._pool = None
        self._channel.close()

    # ---------------------------------------------------------------------------------------- transfers

    def _store(self, chunk: Chunk, fill: Callable[[Bytes], None], deadline: float) -> bool:
        pool = self._connected(chunk, deadline)
        key, instance = self._key(chunk, pool, worker_id=0), self._instances[chunk.model_name]
        try:
            prepare = pb.PrepareStoreRequest(key=key, instance_id=instance)
            prepared = _call(self._transfer.PrepareStore, prepare, deadline)
            if not _decode(prepared.encoded_context).slots:
                return False
            fill(pool.slot(prepared.encoded_context, chunk.num_bytes))
            commit = pb.CommitStoreRequest(key=key, instance_id=instance)
            if not _call(self._transfer.CommitStore, commit, deadline).success:
                raise TransferError("LMCache gave the place of a chunk away before it was written")
            return True
        finally:
            self._end(key)

    def _load(self, chunk: Chunk, deadline: float) -> tuple[pb.IpcCacheServerKey, Bytes | None]:
        """The session's key, and the slot, which is locked; None if the server does not hold the chunk."""
        pool = self._connected(chunk, deadline)
        lookup_key = self._key(chunk, pool)
        key = self._key(chunk, pool, worker_id=0, session=lookup_key.request_id)
        try:
            if not self._locked_for_reading(lookup_key, deadline):
                self._check_registered(chunk, key, deadline)
                return key, None
            prepare = pb.PrepareRetrieveRequest(key=key, instance_id=self._instances[chunk.model_name])
            prepared = _call(self._transfer.PrepareRetrieve, prepare, deadline)
            if not prepared.success:
                return key, None  # evicted between the two calls
            return key, pool.slot(prepared.encoded_context, chunk.num_bytes)
        except BaseException:
            self._end(key)
            raise

    def _locked_for_reading(self, key: pb.IpcCacheServerKey, deadline: float) -> bool:
        """Looks a group up; if it is found, it is in memory and stays there until it is released."""
        _call(self._lookup.Lookup, pb.LookupRequest(key=key, tp_size=1), deadline)
        wait = pb.WaitPrefetchStatusRequest(request_id=key.request_id, timeout=_left(deadline))
        found = _call(self._lookup.WaitPrefetchStatus, wait, deadline)
        if not found.HasField("chunk_count"):
            raise TransferError("LMCache did not find a chunk in its slower tiers in time")
        return found.chunk_count > 0

    def _check_registered(self, chunk: Chunk, key: pb.IpcCacheServerKey, deadline: float) -> None:
        """Raises `NotRegisteredError` if the server does not know this worker. A lookup would find nothing in that
        case, without an error; the call made here fails, and otherwise does nothing."""
        request = pb.CommitRetrieveRequest(key=key, instance_id=self._instances[chunk.model_name])
        _call(self._transfer.CommitRetrieve, request, deadline)

    def _unlock(self, chunk: Chunk, key: pb.IpcCacheServerKey) -> None:
        """Ends a read, without waiting for it: if the release is lost, the lock ends by the server's own time limit."""
        request = pb.CommitRetrieveRequest(key=key, instance_id=self._instances[chunk.model_name])
        try:
            done = self._transfer.CommitRetrieve.future(request, timeout=_CLEAN_UP_TIMEOUT_S)
        except ValueError:
            return  # the channel was closed meanwhile
        done.add_done_callback(lambda _: self._end(key))

    def _end(self, key: pb.IpcCacheServerKey) -> None:
        """Ends a session, without waiting for it: the server later ends sessions whose end is lost."""
        try:
            self._lookup.EndSession.future(pb.EndSessionRequest(request_id=key.request_id), timeout=_CLEAN_UP_TIMEOUT_S)
        except ValueError:
            return  # the channel was closed meanwhile

    def _key(
        self, chunk: Chunk, pool: _Pool, *, worker_id: int | None = None, session: str | None = None
    ) -> pb.IpcCacheServerKey:
        """Tokens that spell the chunk's name."""
        tokens = struct.unpack(f"<{_NUM_KEY_TOKENS}H", chunk.name)
        return pb.IpcCacheServerKey(
            model_name=chunk.model_name,
            world_size=1,
            worker_id=worker_id,
            token_ids=tokens + (0,) * (pool.chunk_size - len(tokens)),
            end=pool.chunk_size,
            request_id=session or uuid.uuid4().hex,
            num_kv_readers=1,
        )

    # --------------------------------------------------------------------------------------- connection

    def _try_twice(self, once: Callable[[], Response], deadline: float) -> Response:
        try:
            return once()
        except NotRegisteredError:
            self._pool = None
            log.info("LMCache has forgotten this worker, registering again", extra={"address": self.address})
            return once()
        except TransferError:
            if _left(deadline) > 0:
                self._pool = None  # the server may be another one now; the next call connects anew
            raise

    def _connected(self, chunk: Chunk, deadline: float) -> _Pool:
        """Registers with the server what `chunk` needs, if it is not registered yet."""
        if (pool := self._pool) is not None and chunk.model_name in pool.registered:
            return pool
        if not self._connecting.acquire(timeout=_left(deadline)):
            raise TransferError(f"LMCache at {self.address} does not answer")
        try:
            if (pool := self._pool) is not None and chunk.model_name in pool.registered:
                return pool  # by another thread
            if pool is None and time.monotonic() < self._retry_time:
                raise TransferError(f"LMCache at {self.address} cannot be reached")
            try:
                self._pool = self._register(chunk, pool, deadline)
            except TransferError as error:
                if self._retry_after_s == RETRY_AFTER_S[0]:  # the first attempt since it was lost
                    reason = {"address": self.address, "reason": error.message}
                    log.warning("LMCache cannot be reached, its blocks are computed instead", extra=reason)
                self._retry_time = time.monotonic() + self._retry_after_s
                self._retry_after_s = min(2 * self._retry_after_s, RETRY_AFTER_S[1])
                raise
            self._retry_after_s = RETRY_AFTER_S[0]
            return self._pool
        finally:
            self._connecting.release()

    def _register(self, chunk: Chunk, known: _Pool | None, deadline: float) -> _Pool:
        """Registers the kind of `chunk`. The pool is `known` unless the server has restarted since."""
        chunk_size = _call(self._controller.GetChunkSize, pb.GetChunkSizeRequest(), deadline).chunk_size
        if chunk_size < _NUM_KEY_TOKENS:
            raise TransferError(f"LMCache: chunks of {chunk_size} tokens are too short, use {_NUM_KEY_TOKENS} or more")
        request = pb.RegisterKvCacheEngineDrivenContextRequest(
            # Ids of other workers would be taken for this one's.
            instance_id=self._instances.setdefault(chunk.model_name, random.SystemRandom().getrandbits(62)),
            model_name=chunk.model_name,
            world_size=1,
            block_size=chunk_size,
            # The server is told a shape that has a chunk's number of bytes.
            num_layers=1,
            num_physical_slots=1,
            hidden_dim_size=chunk.num_bytes,
            dtype_str="uint8",
            use_mla=True,
        )
        answer = _call(self._transfer.RegisterKvCacheEngineDrivenContext, request, deadline)
        pool = _Pool(*_map(answer.shm_name, answer.pool_size), chunk_size)
        if known is not None and (known.memory_id, known.chunk_size) == (pool.memory_id, pool.chunk_size):
            pool = known
        pool.registered.add(chunk.model_name)
        return pool


def _map(shm_name: str, pool_size: int) -> tuple[Bytes, tuple[int, int]]:
    """The server's shared memory, which is unmapped with its last view, and an id that differs in each life of the
    server, even if the name is the same."""
    if not shm_name or not pool_size:
        raise TransferError("LMCache has no shared memory: it needs --shm-name and --no-l1-use-lazy")
    try:
        fd = os.open(os.path.join(_SHM, shm_name.lstrip("/")), os.O_RDWR | os.O_CLOEXEC)
        try:
            file = os.fstat(fd)
            return np.frombuffer(mmap.mmap(fd, pool_size), np.uint8), (file.st_dev, file.st_ino)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        reason = f"cannot map the shared memory {shm_name!r} of LMCache, which has to be on this machine: {error}"
        raise TransferError(reason) from error


def _decode(encoded_context: bytes) -> _Context:
    try:
        return msgspec.msgpack.decode(encoded_context, type=_Context) if encoded_context else _Context()
    except msgspec.DecodeError as error:
        raise TransferError(f"LMCache: an answer makes no sense: {error}") from error


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _call(method: Method[Request, Response], request: Request, deadline: float) -> Response:
    """Calls a method of the server. Raises `TransferError`."""
    try:
        return method(request, timeout=_left(deadline))
    except grpc.RpcError as error:
        kind = NotRegisteredError if "not registered" in _details(error) else TransferError
        raise kind(f"LMCache: {_why(error)}") from error
    except ValueError as error:
        raise TransferError(f"LMCache: {error}") from error  # the channel was closed meanwhile


def _why(error: grpc.RpcError) -> str:
    code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
    return f"{code}: {_details(error)}"


def _details(error: grpc.RpcError) -> str:
    return str(error.details()) if isinstance(error, grpc.Call) else str(error)
