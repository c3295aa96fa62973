"""Results on their way from a connector's threads to the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kv_store.base import BlockRef, FetchBlock, LocalBlock, TransferKind, TransferResult
from kv_store.jobs import Job


class ResultQueue:
    """Any thread adds, the engine's thread drains. `deque` appends and pops are atomic, so there is no lock."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._results: deque[TransferResult] = deque()

    def add(self, results: Iterable[TransferResult]) -> None:
        added = list(results)
        self._results.extend(added)
        if added:
            self._wake()

    def drain(self) -> list[TransferResult]:
        """What was added so far, in order. Never waits."""
        drained: list[TransferResult] = []
        while self._results:
            drained.append(self._results.popleft())
        return drained


def block_result(
    job: Job,
    block: LocalBlock,
    *,
    error: str | None = None,
    ref: BlockRef | None = None,
    num_bytes: int = 0,
    is_final: bool = True,
) -> TransferResult:
    return TransferResult(
        job_id=job.job_id,
        kind=job.kind,
        index=block.index,
        block_id=block.block_id,
        error=error,
        ref=ref,
        num_bytes=num_bytes,
        is_final=is_final,
    )


def fetched(job_id: int, block: FetchBlock, *, error: str | None, num_bytes: int = 0) -> TransferResult:
    """`num_bytes` counts if there is no `error`."""
    return TransferResult(
        job_id=job_id,
        kind=TransferKind.FETCH,
        index=block.ref.index,
        block_id=block.block_id,
        error=error,
        num_bytes=0 if error else num_bytes,
    )
