"""What a worker says of its requests and blocks, at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from simulation.counted.job import Job

if TYPE_CHECKING:
    from simulation.counted.worker import CountedWorker


class Owner(Protocol):
    def ask_prefill(self, job: Job, first_block: int, stop_block: int) -> None:
        """A prefill worker has to compute the blocks from `first_block` on; with a `stop_block` those before it."""

    def ask_loan(self, job: Job, first_block: int, stop_block: int) -> None:
        """The decode worker of this prefill has these blocks."""

    def published(self, job: Job, num_blocks: int, *, is_last: bool) -> None:
        """More blocks of a prefill are there; `is_last`: all, and the first token unless it is a part."""

    def needs_no_more(self, job: Job) -> None:
        """A remote request has all its KV, or computes it itself."""

    def first_token(self, job: Job) -> None:
        """The worker drew it."""

    def ended(self, job: Job) -> None:
        """Its answer is complete."""

    def report_blocks(self, worker: CountedWorker, stored: bytes, removed: bytes) -> None: ...
