"""A producer and a consumer of KV blocks, each a process of its own, with every connector on the same two caches.

    producer                            consumer
    <- which connector                  clock starts
    connector.publish
    -> references, as they come         connector.fetch
                                        the last result: clock stops

The consumer takes turns: memcpy, raw NIXL, each connector, then again, so that what disturbs one disturbs all. Block
ids are shuffled, the same way for everything that is compared: no transport profits from blocks that lie side by side.
Each process has a core of its own, as the workers of `baton up` have.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import random
import select
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from baton.stack.stack_plan import usable_cores
from bench.nixl_raw import RawNixlReads
from common.errors import BatonError, TransferError
from common.types import KVCacheSpec
from engine.process import Wakeup
from kv_store.base import ConnectorConfig, FetchBlock, KVConnector, LocalBlock, TransferResult
from kv_store.host_pages import prepare_pages
from kv_store.registry import create_connector

MEMCPY, RAW_NIXL = "memcpy", "raw NIXL read"
TURNS = 4  # of all but stores, while a store has one: those that only copy are soon done, and less even
_GIVE_UP_S = 120.0  # for the blocks of one repeat
_END_GRACE_S = 10.0


@dataclass(slots=True, frozen=True, kw_only=True)
class PairConfig:
    """`connectors` by the name that figures have: which connector, and its settings but for epoch and worker_id."""

    spec: KVCacheSpec
    num_blocks: int
    repeats: int
    connectors: Mapping[str, tuple[str, ConnectorConfig]]
    seed: int = 1


def measure_pair(config: PairConfig) -> Iterator[tuple[str, dict[str, float] | str]]:
    """Runs the two processes. Yields (system, figures of one repeat) as they come, or why a system cannot work here.

    Figures are seconds: `whole` from asking the producer to the consumer's last result, `publish` and `fetch` the
    connector's own on either side. memcpy and raw NIXL have only `whole`. Raises `TransferError` if one fails.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    to_producer, to_consumer = context.Pipe()
    processes = [
        context.Process(target=_produce, args=(to_consumer, config), daemon=True),
        context.Process(target=_consume, args=(theirs, to_producer, config), daemon=True),
    ]
    try:
        for process in processes:
            process.start()
        for end in (theirs, to_producer, to_consumer):
            end.close()  # so that each process sees the other end
        while True:
            try:
                message = ours.recv()
            except EOFError:
                raise TransferError("the consumer of a measurement ended early; its reason is above") from None
            if message is None:
                return
            if isinstance(message, str):
                raise TransferError(message)
            yield message
    finally:
        ours.close()
        for process in processes:
            process.join(_END_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()


# ------------------------------------------------------------------------------------------- both processes


def block_order(config: PairConfig, side: str) -> list[int]:
    """The block ids of one side, by index in the block table."""
    ids = list(range(config.num_blocks))
    random.Random(f"{config.seed} {side}").shuffle(ids)
    return ids


def block_hash(job: int, index: int) -> bytes:
    """New with each job: a store would not write what it has."""
    return hashlib.blake2b(f"{job} {index}".encode(), digest_size=16).digest()


class _Side:
    """One process's cache, and its connectors by the names that figures have."""

    def __init__(self, config: PairConfig, side: str) -> None:
        spec = config.spec
        if cores := usable_cores():
            os.sched_setaffinity(0, {cores[0 if side == "producer" else -1]})
        self._wakeup = Wakeup()
        self.cache = torch.empty((config.num_blocks, *spec.block_shape), dtype=getattr(torch, spec.dtype))
        prepare_pages(self.cache)  # as the engine does
        self.cache.zero_()
        self.rows = self.cache.view(-1).view(torch.uint8).view(config.num_blocks, spec.block_bytes)
        self.connectors: dict[str, KVConnector] = {}
        self.failures: dict[str, str] = {}
        for number, (label, (name, connector_config)) in enumerate(config.connectors.items()):
            try:
                own = replace(connector_config, worker_id=f"bench-{side}-{number}", epoch=f"{os.getpid():x}")
                connector = create_connector(name, own)
                connector.register_kv_cache(self.cache, spec, self._wakeup.set)
            except BatonError as error:
                self.failures[label] = error.message
            else:
                self.connectors[label] = connector

    def wait(self, label: str, also: Connection | None = None) -> list[TransferResult]:
        """The next results of a connector, woken as an engine is; none if `also` is readable before.

        Raises `TransferError` if none come, or one is bad.
        """
        poller = select.poll()
        poller.register(self._wakeup.read_fd, select.POLLIN)
        if also is not None:
            poller.register(also.fileno(), select.POLLIN)
        while not (results := self.connectors[label].poll()):
            ready = [fd for fd, _ in poller.poll(_GIVE_UP_S * 1000)]
            if not ready:
                raise TransferError(f"{label}: no result after {_GIVE_UP_S:g} s")
            self._wakeup.clear()
            if also is not None and also.fileno() in ready:
                return self.connectors[label].poll()
        for result in results:
            if result.error is not None:
                raise TransferError(f"{label}: {result.error}")
        return results

    def close(self) -> None:
        for connector in self.connectors.values():
            connector.close()


# ------------------------------------------------------------------------------------------------- producer


def _produce(pipe: Connection, config: PairConfig) -> None:
    """Publishes what it is asked for until the other end of the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, and ends us by closing
    side = _Side(config, "producer")
    fill(side.rows.numpy(), config)
    try:
        pipe.send((side.failures, {label: connector.describe() for label, connector in side.connectors.items()}))
        job = 0
        while True:
            label = pipe.recv()
            job += 1
            _publish(side, pipe, config, label, job)
            pipe.recv()  # the consumer has them: the lease ends
            side.connectors[label].release(job)
    except TransferError as error:
        pipe.send(error.message)
    except (EOFError, OSError):
        return  # the consumer is done
    finally:
        side.close()


def _publish(side: _Side, pipe: Connection, config: PairConfig, label: str, job: int) -> None:
    """Sends lists of references as they come, each with the seconds since the start."""
    order = block_order(config, "producer")
    blocks = [LocalBlock(index, block_id, block_hash(job, index)) for index, block_id in enumerate(order)]
    start = time.perf_counter()
    side.connectors[label].publish(job, blocks)
    num_left = len(blocks)
    while num_left:
        results = side.wait(label)
        num_left -= len(results)
        pipe.send(([result.ref for result in results], time.perf_counter() - start))


def fill(rows: np.ndarray[Any, np.dtype[np.uint8]], config: PairConfig) -> None:
    """Content of each producer block, which differs from all others: `rows` is `[num_blocks, block_bytes]`."""
    for block_id in range(config.num_blocks):
        rows[block_id] = np.random.default_rng([config.seed, block_id]).integers(0, 256, rows.shape[1], dtype=np.uint8)


# ------------------------------------------------------------------------------------------------- consumer


def _consume(results: Connection, producer: Connection, config: PairConfig) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    side = _Side(config, "consumer")
    try:
        _measure(side, results, producer, config)
        results.send(None)
    except BrokenPipeError:
        return  # whoever asked has gone
    except EOFError:
        results.send("the producer of a measurement ended early; its reason is above")
    except BatonError as error:
        results.send(error.message)
    finally:
        side.close()


def _measure(side: _Side, results: Connection, producer: Connection, config: PairConfig) -> None:
    failures, peers = _receive(producer)
    for label, reason in {**failures, **side.failures}.items():
        results.send((label, reason))
        side.connectors.pop(label, None)
    for label, connector in side.connectors.items():
        connector.add_peer(peers[label])
    consumer = _Consumer(side, producer, config)
    with contextlib.ExitStack() as stack:
        systems = [MEMCPY, *consumer.start_raw_nixl(stack, results), *side.connectors]
        for system in systems:  # a warm-up, and proof that the bytes are right
            consumer.run(system)
            consumer.check(system)
        stores = {label for label, connector in side.connectors.items() if connector.is_store}
        for _ in range(config.repeats):
            for system in [one for one in systems if one not in stores] * TURNS + sorted(stores):
                results.send((system, consumer.run(system)))


def _receive(producer: Connection) -> Any:
    """The producer's next message. Raises `TransferError` if it is why it cannot go on."""
    message = producer.recv()
    if isinstance(message, str):
        raise TransferError(message)
    return message


class _Consumer:
    def __init__(self, side: _Side, producer: Connection, config: PairConfig) -> None:
        self._side = side
        self._producer = producer
        self._config = config
        self._order = block_order(config, "consumer")
        self._sources = block_order(config, "producer")
        self._copied = torch.empty_like(side.rows)
        fill(self._copied.numpy(), config)
        self._raw: RawNixlReads | None = None
        self._job = 0

    def start_raw_nixl(self, stack: contextlib.ExitStack, results: Connection) -> list[str]:
        """Its name, if it works here."""
        num_blocks, block_bytes = self._side.rows.shape
        try:
            raw = RawNixlReads(num_blocks, block_bytes, remote_ids=self._sources, local_ids=self._order)
        except BatonError as error:
            results.send((RAW_NIXL, error.message))
            return []
        self._raw = stack.enter_context(raw)
        return [RAW_NIXL]

    def run(self, system: str) -> dict[str, float]:
        if system == MEMCPY:
            return {"whole": self._memcpy()}
        if system == RAW_NIXL:
            assert self._raw is not None
            return {"whole": self._raw.read()}
        return self._hand_over(system)

    def check(self, system: str) -> None:
        """Raises `TransferError` if a block differs from the producer's, and wipes them all. Raw reads check
        themselves, and have a cache of their own."""
        if system == RAW_NIXL:
            return
        rows = self._side.rows
        for index, (source, target) in enumerate(zip(self._sources, self._order, strict=True)):
            if not rows[target].equal(self._copied[source]):
                raise TransferError(f"{system}: block {index} does not hold what the producer has")
        rows.zero_()

    def _memcpy(self) -> float:
        """One thread, block by block, between two buffers of this process."""
        source, target = self._copied.numpy(), self._side.rows.numpy()
        start = time.perf_counter()
        for from_id, to_id in zip(self._sources, self._order, strict=True):
            target[to_id] = source[from_id]
        return time.perf_counter() - start

    def _hand_over(self, label: str) -> dict[str, float]:
        connector = self._side.connectors[label]
        num_blocks, num_announced, num_left = self._config.num_blocks, 0, self._config.num_blocks
        publish_s = fetch_start = 0.0
        start = time.perf_counter()
        self._producer.send(label)
        while num_left:
            is_announced = num_announced == num_blocks
            if not is_announced and (num_announced == 0 or self._producer.poll()):
                refs, publish_s = _receive(self._producer)
                fetch_start = fetch_start or time.perf_counter()
                num_announced += len(refs)
                self._job += 1
                connector.fetch(self._job, [FetchBlock(ref, self._order[ref.index]) for ref in refs])
            else:
                num_left -= len(self._side.wait(label, None if is_announced else self._producer))
        end = time.perf_counter()
        self._producer.send(None)
        return {"whole": end - start, "publish": publish_s, "fetch": end - fetch_start}
