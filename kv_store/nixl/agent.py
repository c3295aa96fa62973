"""The part of the NIXL library that Baton uses: agents over one KV cache, and reads of blocks between them.

NIXL has no call that surely ends a transfer: a released transfer goes on writing if its peer goes on sending, even
minutes later and after the peer was removed. Only the end of the agent ends the transfer, since that closes its
connections. So reading has an agent of its own (`ReadingAgent`), which can be thrown away at any time, beside the one
that peers read from (`ServingAgent`).
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import torch

from common.errors import StartupError, TransferError
from kv_store.shards import Run

log = logging.getLogger(__name__)

MODULES = ("nixl_cu13", "nixl_cu12", "nixl")  # the first two don't import torch a second time, the last picks one
_BACKEND = "UCX"
_ADDRESSES = 1 << 64
_MAX_DEVICES = 1024
_PROGRESS_INTERVAL_US = 20_000  # a look takes 30 us of what may be the engine's core: every 2 ms, 1.5 % of it


class ServedMemory(msgspec.Struct, frozen=True):
    """Where a worker's blocks lie, and how its serving agent is reached; as msgpack inside `describe()`."""

    agent: str
    metadata: bytes  # the agent's own: addresses of its transports, keys of its memory
    kind: str  # "DRAM" or "VRAM"
    device_id: int
    address: int  # of block 0
    num_blocks: int
    block_bytes: int
    is_staging: bool = False  # a pool of slots, not the cache

    def check(self, num_blocks: int, block_bytes: int) -> None:
        """Raises `TransferError` for what cannot be the memory of a worker of so many such blocks."""
        is_whole = self.num_blocks == num_blocks or (self.is_staging and 1 <= self.num_blocks <= num_blocks)
        if not is_whole or self.block_bytes != block_bytes:
            raise TransferError(
                f"{self.num_blocks} blocks of {self.block_bytes} bytes are not the {num_blocks} of {block_bytes}"
            )
        is_address = 0 < self.address <= _ADDRESSES - num_blocks * block_bytes
        if not is_address or not 0 <= self.device_id < _MAX_DEVICES or self.kind not in ("DRAM", "VRAM"):
            raise TransferError(f"no memory lies at {self.address} of {self.kind!r} {self.device_id}")

    def descriptors(self, runs: Sequence[tuple[int, int]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """`[num_blocks * len(runs), 3]`: address, length and device of each run (offset, length) of each block."""
        rows = np.empty((self.num_blocks, len(runs), 3), dtype=np.uint64)
        starts = self.address + np.arange(self.num_blocks, dtype=np.uint64) * np.uint64(self.block_bytes)
        rows[:, :, 0] = starts[:, None] + np.array([offset for offset, _ in runs], dtype=np.uint64)
        rows[:, :, 1] = [num_bytes for _, num_bytes in runs]
        rows[:, :, 2] = self.device_id
        return rows.reshape(-1, 3)


def load_library() -> ModuleType:
    """Raises `StartupError` that names the extra if NIXL is not installed."""
    # Ending an agent in mid-transfer is ordinary here; UCX would warn of every request that it drops then.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # standard output is its default
    failures: list[str] = []
    raises_log_errors = logging.raiseExceptions
    for name in MODULES:
        try:
            library = import_module(f"{name}._api")
        except ImportError as error:
            failures.append(str(error))
        else:
            # NIXL prints to standard output and hushes the errors of all logging. Its lines belong into our log.
            logging.raiseExceptions = raises_log_errors
            logger = logging.getLogger("nixl")
            logger.handlers.clear()
            logger.propagate = True
            logger.setLevel(logging.WARNING)
            _let_progress_threads_sleep(library)
            return library
    raise StartupError(f"connector: nixl needs NIXL, install Baton with the extra 'nixl' ({'; '.join(failures)})")


def backends() -> list[str]:
    """Backends that the installed NIXL brings. Raises `StartupError` as `load_library` does."""
    library = load_library()
    agent = library.nixl_agent(f"backends-{uuid.uuid4().hex}", library.nixl_agent_config(backends=[]))
    return sorted(agent.get_plugin_list())


def _let_progress_threads_sleep(library: ModuleType) -> None:
    """Gives agents' progress threads a pause. NIXL's Python API has them poll without one, which takes a whole core,
    and a worker may have only one. The thread also waits for events, so a pause delays nothing (TCP is as fast with 50
    ms as with 2 ms); polling is NIXL's remedy against events that UCX loses. NIXL's config has the setting, but its
    Python API overwrites it.
    """
    bindings = library.nixlBind
    if getattr(bindings.nixlAgentConfig, "is_patient", False):
        return

    class PatientConfig(bindings.nixlAgentConfig):  # type: ignore[misc,name-defined]  # the library has no types
        is_patient = True

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, _PROGRESS_INTERVAL_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = PatientConfig


class _Agent:
    def __init__(self, library: ModuleType, name: str, *, has_progress_thread: bool) -> None:
        self.name = f"{name}-{uuid.uuid4().hex}"  # NIXL refuses a second agent of a known name
        config = library.nixl_agent_config(
            enable_prog_thread=has_progress_thread,
            backends=[_BACKEND],
            sync_mode=library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._agent: Any = library.nixl_agent(self.name, config)
        if _BACKEND not in self._agent.backends:
            raise StartupError(f"connector: this NIXL has no {_BACKEND} backend, only {self._agent.get_plugin_list()}")

    def register(self, rows: torch.Tensor, *, is_staging: bool = False) -> ServedMemory:
        """Registers blocks, contiguous `[num_blocks, block_bytes]` of uint8, once."""
        kind = "DRAM" if rows.device.type == "cpu" else "VRAM"
        device_id = 0 if rows.device.type == "cpu" else rows.get_device()
        address, (num_blocks, block_bytes) = rows.data_ptr(), rows.shape
        self._agent.register_memory([(address, num_blocks * block_bytes, device_id, "")], kind)
        return ServedMemory(
            agent=self.name,
            metadata=self._agent.get_agent_metadata(),
            kind=kind,
            device_id=device_id,
            address=address,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            is_staging=is_staging,
        )


class ServingAgent(_Agent):
    """Lets peers read this worker's blocks. Passive: its transports work in threads of their own."""

    def __init__(self, library: ModuleType, name: str) -> None:
        super().__init__(library, name, has_progress_thread=True)

    def notifications(self) -> list[bytes]:
        """What peers sent with reads that are done, since the last call."""
        return [message for messages in self._agent.get_new_notifs().values() for message in messages]

    def close(self) -> None:
        self._agent = None


class Read:
    """A read under way. Belongs to its agent and ends with it."""

    def __init__(self, handle: Any) -> None:
        self.handle: Any = handle
        self.is_done = False


@dataclass(slots=True, frozen=True)
class _Route:
    """Prepared descriptors of the runs of each block, ours and a peer's: `num_runs` for each, block by block."""

    local: Any
    remote: Any
    num_runs: int


class ReadingAgent(_Agent):
    """Reads blocks of peers into this worker's memory. For one thread, which also makes it progress: a thread of its
    own would spin on UCX's lock for as long as a transport copies inside `start`. On a worker with one core that halves
    the speed (5 GB/s through shared memory, not 10).

    If a method raises `TransferError`, bytes may still be on their way: only after `close` will none land.
    """

    def __init__(self, library: ModuleType, name: str, rows: torch.Tensor) -> None:
        """Reads into `rows`, contiguous `[num_blocks, block_bytes]` of uint8. Raises `TransferError`."""
        failure = None
        try:
            super().__init__(library, name, has_progress_thread=False)
            self._memory = self.register(rows)
        except Exception as error:
            failure = _reason(error)
        _raise(failure)
        self._device = rows.device
        self._locals: dict[tuple[tuple[int, int], ...], Any] = {}  # runs -> prepared descriptors of our blocks
        self._routes: dict[str, _Route] = {}  # by agent name
        self._reads: set[Read] = set()

    def connect(self, memory: ServedMemory, runs: Sequence[Run]) -> None:
        """Makes `runs` of the blocks of a peer readable. Raises `TransferError`."""
        failure = None
        try:
            peer = self._agent.add_remote_agent(memory.metadata)
            theirs = memory.descriptors([(run.remote_offset, run.num_bytes) for run in runs])
            ours = tuple((run.local_offset, run.num_bytes) for run in runs)
            if ours not in self._locals:
                descriptors = self._memory.descriptors(ours)
                self._locals[ours] = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", descriptors, self._memory.kind)
            remote = self._agent.prep_xfer_dlist(peer, theirs, memory.kind)
            self._routes[memory.agent] = _Route(self._locals[ours], remote, len(runs))
        except Exception as error:
            failure = _reason(error)
        _raise(failure)

    def disconnect(self, agent: str) -> None:
        """Forgets a peer that nothing is read from any more. Raises `TransferError`."""
        failure = None
        try:
            self._routes.pop(agent).remote.release()
            self._agent.remove_remote_agent(agent)
        except Exception as error:
            failure = _reason(error)
        _raise(failure)

    @property
    def connected(self) -> set[str]:
        """Agent names of the peers that are readable."""
        return set(self._routes)

    def start(self, agent: str, remote_ids: Sequence[int], local_ids: Sequence[int], report: bytes = b"") -> Read:
        """Reads the peer's blocks `remote_ids` into our `local_ids`. If the transport copies in the caller's
        thread, the read is done on return. The peer gets `report` when the read is done, unless it is empty. Raises
        `TransferError`."""
        failure = None
        try:
            route = self._routes[agent]
            local, remote = _indexes(local_ids, route.num_runs), _indexes(remote_ids, route.num_runs)
            read = Read(self._agent.make_prepped_xfer("READ", route.local, local, route.remote, remote, report))
            self._reads.add(read)
            self._take_state(read, self._agent.transfer(read.handle))
        except Exception as error:
            failure = _reason(error)
        _raise(failure)
        return read

    def check(self, read: Read) -> bool:
        """Whether the read is done; the bytes are there then. Raises `TransferError`."""
        if read.is_done:
            return True
        failure = None
        try:
            self._take_state(read, self._agent.check_xfer_state(read.handle))
        except Exception as error:
            failure = _reason(error)
        _raise(failure)
        return read.is_done

    def progress(self) -> None:
        """Makes progress on connections while nothing is read; `check` does so during reads. Raises `TransferError`."""
        failure = None
        try:
            self._agent.get_new_notifs()  # no notification is ever sent, but this call makes progress
        except Exception as error:
            failure = _reason(error)
        _raise(failure)

    def close(self) -> None:
        """Ends every read: once this returns, no byte lands any more."""
        # The library's agent ends with the last reference to it, and each of its handles holds one.
        for read in self._reads:
            read.handle = None
        self._reads.clear()
        self._routes.clear()
        self._locals.clear()
        self._agent = None
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)  # copies between devices may be queued already

    def _take_state(self, read: Read, state: str) -> None:
        if state == "DONE":
            self._reads.discard(read)
            read.is_done = True
            read.handle = None
        elif state != "PROC":
            raise TransferError(f"state {state}")


def _indexes(block_ids: Sequence[int], num_runs: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The indexes, in a prepared list, of all runs of the blocks, block by block."""
    first = np.asarray(block_ids, dtype=np.int32) * np.int32(num_runs)
    return (first[:, None] + np.arange(num_runs, dtype=np.int32)).reshape(-1).astype(np.int32)


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"


def _raise(failure: str | None) -> None:
    """Raises the error outside of the `except` block, since a traceback from inside the library would keep its agent
    alive."""
    if failure is not None:
        raise TransferError(f"NIXL: {failure}")
