"""The connectors of a worker whose ranks are on several hosts: rank 0's side.

Each host's rank has connectors of its own, over its own cache. Those of other hosts are asked over TCP: a `RemoteRank`
stands for each. `kv_store.ranks` joins them with rank 0's, as it joins those of ranks of one host.
"""

from __future__ import annotations

import itertools
import logging
import queue
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from common.errors import StartupError
from common.metric_relay import MetricRelay
from engine.hosts import kv_messages as m
from engine.hosts.handshake import receive_bytes, send
from kv_store.base import Eviction, FetchBlock, KVConnector, LocalBlock, TransferResult
from kv_store.ranks import join_connectors
from kv_store.results import ResultQueue

if TYPE_CHECKING:
    from common.types import KVCacheSpec
    from kv_store.base import KVCache

log = logging.getLogger(__name__)

_LOOK_MS = 100  # between two looks at whether a rank that opens its connectors lives


class KVLink:
    """Rank 0's end of the connection for KV to one other rank. One thread sends and another one receives, so the
    engine's thread never waits for the network."""

    def __init__(
        self, number: int, end: socket.socket, num_copies: Callable[[], int], relay: MetricRelay | None = None
    ) -> None:
        """`number`: of the rank. `num_copies`: messages with copies of blocks that the rank was sent so far. `relay`:
        of `COUNTERS` if None."""
        self.number = number
        self._end = end
        self._num_copies = num_copies
        self._calls: queue.SimpleQueue[m.Call | None] = queue.SimpleQueue()
        self._relay = relay or MetricRelay(m.COUNTERS)
        self._ranks: list[RemoteRank] = []
        self._evictions: dict[int, tuple[Eviction, RemoteRank]] = {}
        self._numbers = itertools.count(1)
        self._threads: list[threading.Thread] = []

    def ask_to_open(self, opening: m.Open) -> None:
        """Raises `OSError`."""
        send(self._end, opening)

    def opened(self, check_alive: Callable[[], None]) -> list[RemoteRank]:
        """The rank's connectors, once they are there. `check_alive` is called meanwhile, and what it raises ends the
        waiting. Raises `StartupError` if the rank cannot open them, `OSError` or `EOFError` if it is gone."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        while not poll.poll(_LOOK_MS):
            check_alive()
        answer = m.to_rank_0.decode(receive_bytes(self._end, m.MAX_BYTES))
        if isinstance(answer, m.Refused):
            raise StartupError(f"rank {self.number}: {answer.reason}")
        if not isinstance(answer, m.Opened):
            raise StartupError(f"rank {self.number} said {type(answer).__name__}")
        self._ranks = [RemoteRank(self, of, description) for of, description in enumerate(answer.descriptions)]
        for target in (self._send, self._receive):
            thread = threading.Thread(target=target, name=f"kv of rank {self.number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self._ranks

    @property
    def num_copies(self) -> int:
        return self._num_copies()

    def call(self, call: m.Call) -> None:
        self._calls.put(call)

    def evict(self, rank: RemoteRank, of: int, block_hashes: Sequence[bytes]) -> Eviction:
        number, eviction = next(self._numbers), Eviction()
        self._evictions[number] = eviction, rank
        self.call(m.Evict(of=of, number=number, block_hashes=list(block_hashes)))
        return eviction

    def close(self) -> None:
        """Ends the threads. The connection has to be shut down before."""
        self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                send(self._end, call)
        except OSError as error:  # the device finds out that the rank is lost, and the engine ends
            log.debug("a rank does not hear what it is asked for", extra={"rank": self.number, "reason": str(error)})

    def _receive(self) -> None:
        try:
            while True:
                match m.to_rank_0.decode(receive_bytes(self._end, m.MAX_BYTES)):
                    case m.Results(of=of, results=results):
                        self._ranks[of].add(results)
                    case m.Evicted() as evicted:
                        eviction, rank = self._evictions.pop(evicted.number)
                        eviction.failure = evicted.failure
                        eviction.num_blocks = evicted.num_blocks  # last: it says that the rest is there
                        rank.wake()
                    case m.Counted(changes=changes):
                        self._relay.apply(changes)
                    case message:
                        raise ValueError(f"rank {self.number} said {type(message).__name__}")
        except (EOFError, OSError) as error:
            log.debug("a rank gives no results any more", extra={"rank": self.number, "reason": str(error)})


class RemoteRank(KVConnector):
    """A connector of another host's rank."""

    name: ClassVar[str] = "remote"  # the joined connector has rank 0's
    is_store: ClassVar[bool] = False

    def __init__(self, link: KVLink, of: int, description: bytes) -> None:
        self._link = link
        self._of = of
        self._description = description
        self.wake: Callable[[], None] = lambda: None
        self._results = ResultQueue(lambda: self.wake())

    def register_kv_cache(self, cache: KVCache, spec: KVCacheSpec, wake: Callable[[], None]) -> None:  # noqa: ARG002
        """The rank has registered its cache itself."""
        self.wake = wake

    def describe(self) -> bytes:
        return self._description

    def add_peer(self, peer: bytes) -> None:
        """If the rank cannot reach the peer, its fetches fail."""
        self._link.call(m.AddPeer(of=self._of, peer=peer))

    def lookup(self, block_hashes: Sequence[bytes]) -> int:  # noqa: ARG002
        """Nothing: rank 0 looks up for all."""
        return 0

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        self._link.call(m.Touch(of=self._of, block_hashes=list(block_hashes)))

    def evict(self, block_hashes: Sequence[bytes]) -> Eviction:
        return self._link.evict(self, self._of, block_hashes)

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        after = self._link.num_copies
        self._link.call(m.Publish(of=self._of, after=after, job_id=job_id, blocks=list(blocks)))

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        after = self._link.num_copies
        self._link.call(m.Fetch(of=self._of, after=after, job_id=job_id, blocks=list(blocks)))

    def poll(self) -> list[TransferResult]:
        return self._results.drain()

    def release(self, job_id: int) -> None:
        self._link.call(m.Release(of=self._of, job_id=job_id))

    def close(self) -> None:
        """The connection closes with the device."""

    def add(self, results: Sequence[TransferResult]) -> None:
        self._results.add(results)


def join_hosts(
    own: Sequence[KVConnector], links: Sequence[KVLink], opening: m.Open, check_alive: Callable[[], None]
) -> list[KVConnector]:
    """Rank 0's connectors, each joined with those of the other ranks. Raises as `KVLink.opened`."""
    for link in links:
        link.ask_to_open(opening)
    others = [link.opened(check_alive) for link in links]
    return [join_connectors([connector, *(ranks[of] for ranks in others)]) for of, connector in enumerate(own)]
