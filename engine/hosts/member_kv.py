"""The connectors of a rank on another host. Rank 0 asks them for what it asks its own connectors for; they move their
rank's part of each block."""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from common.errors import BatonError, IncompatibleError, TransferError
from common.metric_relay import MetricRelay
from engine.device import KVPlane
from engine.hosts import kv_messages as m
from engine.hosts.handshake import receive_bytes, send
from kv_store.base import Eviction, KVConnector

log = logging.getLogger(__name__)

MakeConnectors = Callable[[m.Open], Sequence[KVConnector]]
"""Of this rank, for what rank 0 opens. Raises `BatonError`."""


class MemberKV:
    """Two threads: one reads what rank 0 asks for, the other alone calls the connectors.

    Rank 0 sends copies of blocks between device and host among the steps, so they may be done later than a call comes
    that rank 0 made after them, such as the publication of a block that a copy fills. A call waits until as many copies
    are done as rank 0 had sent.
    """

    def __init__(
        self, end: socket.socket, plane: KVPlane, make: MakeConnectors, relay: MetricRelay | None = None
    ) -> None:
        """`end`: the connection for KV. `plane`: the KV cache of this rank. `relay`: of `COUNTERS`; None if rank 0
        is in this process, too."""
        self._end = end
        self._plane = plane
        self._make = make
        self._relay = relay
        self._num_copies = 0  # messages with copies that were done
        self._calls: deque[m.Call] = deque()
        self._opening: m.Open | None = None
        self._evictions: dict[int, Eviction] = {}  # by number: not done yet
        self._news = threading.Event()
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._read, name="kv calls", daemon=True),
            threading.Thread(target=self._run, name="kv", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def copied(self) -> None:
        """Call when the copies of one message are done."""
        self._num_copies += 1
        self._news.set()

    def close(self) -> None:
        """Ends the threads and the connectors. `end` has to be shut down before."""
        self._is_over = True
        self._news.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _read(self) -> None:
        try:
            while True:
                message = m.to_member.decode(receive_bytes(self._end, m.MAX_BYTES))
                if isinstance(message, m.Open):
                    self._opening = message
                else:
                    self._calls.append(message)
                self._news.set()
        except (EOFError, OSError):  # rank 0 is gone, and this rank ends
            self._is_over = True
            self._news.set()

    def _run(self) -> None:
        connectors: Sequence[KVConnector] = ()
        try:
            while True:
                self._news.wait()
                self._news.clear()
                if self._is_over:
                    return
                if self._opening is not None:
                    connectors = self._open(self._opening)
                    self._opening = None
                while self._calls and self._calls[0].after <= self._num_copies:
                    call = self._calls.popleft()
                    self._carry_out(call, connectors[call.of])
                for of, connector in enumerate(connectors):
                    if results := connector.poll():
                        send(self._end, m.Results(of=of, results=results))
                self._tell_evictions()
                if self._relay is not None and (changes := self._relay.changes()):
                    send(self._end, m.Counted(changes=changes))
        except OSError as error:
            log.debug("rank 0 hears no results", extra={"reason": str(error)})
        finally:
            for connector in connectors:
                connector.close()

    def _open(self, opening: m.Open) -> Sequence[KVConnector]:
        connectors: list[KVConnector] = []  # registered
        try:
            for connector in self._make(opening):
                connector.register_kv_cache(self._plane.cache, self._plane.spec, self._news.set)
                connectors.append(connector)
            opened = m.Opened(descriptions=[connector.describe() for connector in connectors])
        except BatonError as error:
            send(self._end, m.Refused(reason=error.message))
            return connectors
        send(self._end, opened)
        return connectors

    def _carry_out(self, call: m.Call, connector: KVConnector) -> None:
        match call:
            case m.AddPeer():
                try:
                    connector.add_peer(call.peer)
                except (IncompatibleError, TransferError) as error:  # fetches from it fail, block by block
                    log.warning("a peer's KV blocks cannot be read", extra={"reason": error.message})
            case m.Publish():
                connector.publish(call.job_id, call.blocks)
            case m.Fetch():
                connector.fetch(call.job_id, call.blocks)
            case m.Release():
                connector.release(call.job_id)
            case m.Touch():
                connector.touch(call.block_hashes)
            case m.Evict():
                self._evictions[call.number] = connector.evict(call.block_hashes)

    def _tell_evictions(self) -> None:
        for number, eviction in list(self._evictions.items()):
            if eviction.num_blocks is not None:
                del self._evictions[number]
                send(self._end, m.Evicted(number=number, num_blocks=eviction.num_blocks, failure=eviction.failure))
