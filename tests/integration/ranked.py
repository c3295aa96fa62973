"""What tests of workers with several ranks share: their fleet, and what must hold of a pair of unlike workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.integration.ask import Salt, ask
from tests.integration.reference import Expected
from tests.integration.stack import Fleet, running

NUM_RANKS = 3  # the embedded model has 9 heads, and 3 for K and V
NAMES = ("one-token", "capital", "story", "chat-capital", "ledger-1200")

Size = int | tuple[int, int]
"""How many ranks a worker has, or how many stages and how many ranks each of them has."""


class RankedFleet(Fleet):
    """One prefill worker and further decode workers, each of a size of its own."""

    def __init__(self, folder: Path, connector: str, sizes: Sequence[Size], *flags: str, dealt: str = "") -> None:
        """`dealt`: what ranks have whole, `experts`, or `requests`, too."""
        self._sizes, self._dealt = list(sizes), dealt
        self._size_of: dict[str, Size] = {}
        flags = (f"--connector={connector}", "--chunk-size=64", *flags)
        router_flags = ("--min-remote-tokens=1",)
        super().__init__(folder, *flags, prefill=1, decode=len(sizes) - 1, router_flags=router_flags)

    def flags_of(self, address: str) -> Sequence[str]:
        if address not in self._size_of:
            self._size_of[address] = self._sizes.pop(0)
        size = self._size_of[address]
        num_stages, number = (1, size) if isinstance(size, int) else size
        if self._dealt == "requests":
            return (f"--data-parallel-size={number}",)
        return (
            f"--pipeline-parallel-size={num_stages}",
            f"--tensor-parallel-size={number}",
            f"--expert-parallel-size={number if self._dealt else 1}",
        )


def check_pair(
    folder: Path, connector: str, sizes: Sequence[Size], expected: Mapping[str, Expected], salt: Salt
) -> None:
    """A prefill worker hands over to a decode worker, and the answers are those of one process."""
    fleet = RankedFleet(folder, connector, sizes)
    with running(fleet):
        results = ask(fleet, expected, NAMES, salt)
        assert results["ledger-1200"].report.num_blocks_moved >= 1200 // 16
        assert not any(result.report.fallback_reason for result in results.values())
