"""Which worker has which KV blocks, by name: fed by workers' reports, asked for each prompt. Pure; time comes in.

    name of a block (16 bytes, `common.block_hash`)  ──>  the set of workers that have it, as the bits of an integer

A worker's bit is given up when the worker is gone or lists its blocks anew. A mask hides the bit at once, and `sweep`
removes it from all entries little by little, so that no event takes long, however many blocks there are.

Names are chained, and workers give up the end of a prompt before its beginning, so the workers that have block i of a
prompt are among those that have block i-1. `match` uses this: if two blocks have the same workers, all blocks between
them have these workers too. So it looks at only a few blocks of a long prompt.

A block that a request is about to bring to a worker is expected there for `EXPECTED_S`: of requests that begin alike
and come together, the second already follows the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.block_hash import HASH_BYTES

MAX_BLOCKS_PER_WORKER = 2**21  # further ones are not remembered: a worker cannot fill this process's memory
MAX_EXPECTED = 2**18
MAX_SETS = 2**16  # kept to be shared
EXPECTED_S = 10.0  # by then the worker has told of the block, or will not soon


@dataclass(slots=True, frozen=True)
class Level:
    """Workers that have equally many leading blocks of a prompt."""

    num_blocks: int  # more than none
    workers: Collection[str]  # addresses


class _Workers(Collection[str]):
    """Workers as the bits of an integer. There may be a thousand, and few of them are asked for."""

    __slots__ = ("_bits", "_bits_of", "_names")

    def __init__(self, bits: int, names: Mapping[int, str], bits_of: Mapping[str, int]) -> None:
        self._bits = bits
        self._names = names
        self._bits_of = bits_of

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __iter__(self) -> Iterator[str]:
        bits, names = self._bits, self._names
        while bits:
            bit = bits & -bits
            yield names[bit]
            bits ^= bit

    def __contains__(self, worker: object) -> bool:
        return bool(self._bits_of.get(worker, 0) & self._bits)  # type: ignore[call-overload]


class Matches(Mapping[str, int]):
    """How many leading blocks of a prompt workers have, by address; of those that have any."""

    __slots__ = ("levels", "workers")

    def __init__(self, levels: Sequence[Level], workers: frozenset[str]) -> None:
        """`levels`: those with the most blocks first. `workers`: these, and maybe others: the same object as long as no
        worker comes or goes."""
        self.levels = levels
        self.workers = workers

    @classmethod
    def of(cls, depths: Mapping[str, int]) -> Matches:
        if isinstance(depths, cls):
            return depths
        workers: dict[int, set[str]] = {}
        for worker, num_blocks in depths.items():
            workers.setdefault(num_blocks, set()).add(worker)
        levels = [Level(num_blocks, workers[num_blocks]) for num_blocks in sorted(workers, reverse=True) if num_blocks]
        return cls(levels, frozenset(depths))

    def __getitem__(self, worker: str) -> int:
        for level in self.levels:
            if worker in level.workers:
                return level.num_blocks
        raise KeyError(worker)

    def __iter__(self) -> Iterator[str]:
        return (worker for level in self.levels for worker in level.workers)

    def __len__(self) -> int:
        return sum(len(level.workers) for level in self.levels)


class PrefixIndex:
    def __init__(self, max_blocks_per_worker: int = MAX_BLOCKS_PER_WORKER, max_expected: int = MAX_EXPECTED) -> None:
        """`max_expected`: blocks, each counted as often as it is expected."""
        self._most_of_a_worker = max_blocks_per_worker
        self._most_expected = max_expected
        self._workers: dict[bytes, int] = {}  # by block name: bits
        self._sets: dict[int, int] = {}  # one object for equal sets
        self._bits: dict[str, int] = {}  # by worker
        self._all_workers: frozenset[str] | None = None  # of `_bits`, made when it is asked for
        self._names: dict[int, str] = {}  # by bit: workers
        self._counts: dict[str, int] = {}
        self._alive = 0  # bits in use
        self._dead = 0  # bits that entries may still have
        self._sweeping: deque[bytes] = deque()
        self._sweeping_bits = 0
        self._expected: dict[bytes, int] = {}
        self._expectations: deque[tuple[float, int, Sequence[bytes]]] = deque()
        self._num_expected = 0  # blocks of all expectations

    def __len__(self) -> int:
        """Blocks that are known."""
        return len(self._workers)

    def num_blocks(self, worker: str) -> int:
        """Blocks that `worker` is known to have."""
        return self._counts.get(worker, 0)

    # ---------------------------------------------------------------------------------- what workers report

    def reset(self, worker: str) -> None:
        """Forgets the worker's blocks, before the worker lists them anew."""
        self.forget(worker)
        free = ~(self._alive | self._dead)
        bit, self._all_workers = free & -free, None
        self._bits[worker], self._names[bit], self._counts[worker] = bit, worker, 0
        self._alive |= bit

    def forget(self, worker: str) -> None:
        """Forgets a worker that is gone, or whose blocks are not known any more."""
        bit, self._all_workers = self._bits.pop(worker, 0), None
        if self._counts.pop(worker, 0) or self._expectations:
            self._dead |= bit
        self._names.pop(bit, None)
        self._alive &= ~bit

    def store(self, worker: str, names: bytes) -> bool:
        """`names` (16 bytes each) can be found on `worker`, which `reset` has named. False if there is no room for
        all of them."""
        bit, count, workers = self._bits[worker], self._counts[worker], self._workers
        for name in _each(names):
            before = workers.get(name, 0)
            if not before & bit:
                if count >= self._most_of_a_worker:
                    break
                count += 1
                workers[name] = self._shared(before | bit)
        else:
            self._counts[worker] = count
            return True
        self._counts[worker] = count
        return False

    def remove(self, worker: str, names: bytes) -> None:
        bit, workers = self._bits[worker], self._workers
        for name in _each(names):
            before = workers.get(name, 0)
            if before & bit:
                self._counts[worker] -= 1
                self._put(name, before & ~bit)

    def sweep(self, limit: int) -> bool:
        """Takes up to `limit` entries of workers that are gone out of memory. False if nothing is left to do."""
        if not self._sweeping:
            if self._sweeping_bits:
                self._dead &= ~self._sweeping_bits
                self._sweeping_bits = 0
            if not self._dead:
                return False
            self._sweeping_bits = self._dead
            self._sweeping.extend(self._workers)
            self._expectations.clear()  # they may be of bits that are about to be given away
            self._expected.clear()
            self._num_expected = 0
        for _ in range(min(limit, len(self._sweeping))):
            name = self._sweeping.popleft()
            before = self._workers.get(name, 0)
            if before & self._sweeping_bits:
                self._put(name, before & ~self._sweeping_bits)
        return True

    def _put(self, name: bytes, workers: int) -> None:
        if workers:
            self._workers[name] = self._shared(workers)
        else:
            del self._workers[name]

    def _shared(self, workers: int) -> int:
        if len(self._sets) > MAX_SETS:
            self._sets.clear()
        return self._sets.setdefault(workers, workers)

    # -------------------------------------------------------------------------------------- what requests ask

    def expect(self, worker: str, names: Sequence[bytes], now: float) -> None:
        """A request that brings these blocks to `worker` was sent there. `now` in seconds."""
        bit = self._bits.get(worker)
        if bit is None or self._num_expected + len(names) > self._most_expected:
            return
        self._num_expected += len(names)
        for name in names:
            self._expected[name] = self._expected.get(name, 0) | bit
        self._expectations.append((now + EXPECTED_S, bit, names))

    def match(self, names: Sequence[bytes], now: float) -> Mapping[str, int]:
        """How many leading blocks of a prompt each worker has, or is about to have; of those that have any. To be read
        before the index changes."""
        self._end_expectations(now)
        if not names or not (first := self._at(names[0])):
            return {}
        ends: dict[int, int] = {}  # by number of blocks: workers that lack the next one
        # A span: `start`, the workers that have all blocks up to it, `stop`, and those of these workers that have
        # `stop`, too.
        spans = [(0, first, len(names) - 1, self._at(names[-1]) & first)]
        while spans:
            start, workers, stop, others = spans.pop()
            if workers == others:
                continue
            if stop - start == 1:
                ends[stop] = ends.get(stop, 0) | workers & ~others
                continue
            middle = (start + stop) // 2
            between = self._at(names[middle]) & workers
            spans += ((start, workers, middle, between), (middle, between, stop, others & between))
        levels, left = [], first
        for num_blocks in sorted(ends):
            levels.append(Level(num_blocks, _Workers(ends[num_blocks] & left, self._names, self._bits)))
            left &= ~ends[num_blocks]
        levels.append(Level(len(names), _Workers(left, self._names, self._bits)))
        if self._all_workers is None:
            self._all_workers = frozenset(self._bits)
        return Matches([level for level in reversed(levels) if level.workers], self._all_workers)

    def num_told(self, worker: str, names: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt the worker has said that it has: those that it is about to have do not
        count."""
        bit = self._bits.get(worker, 0) & self._alive
        low, high = 0, len(names) if bit else 0
        while low < high:
            middle = (low + high + 1) // 2
            if self._workers.get(names[middle - 1], 0) & bit:
                low = middle
            else:
                high = middle - 1
        return low

    def _at(self, name: bytes) -> int:
        return (self._workers.get(name, 0) | self._expected.get(name, 0)) & self._alive

    def _end_expectations(self, now: float) -> None:
        while self._expectations and self._expectations[0][0] <= now:
            _, bit, names = self._expectations.popleft()
            self._num_expected -= len(names)
            for name in names:
                if left := self._expected.get(name, 0) & ~bit:
                    self._expected[name] = left
                else:
                    self._expected.pop(name, None)


def _each(names: bytes) -> Iterator[bytes]:
    return (names[start : start + HASH_BYTES] for start in range(0, len(names) - HASH_BYTES + 1, HASH_BYTES))
