"""One call of `publish` or `fetch` whose blocks are under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_store.base import TransferKind

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, frozen=True, eq=False)
class Job:
    job_id: int
    kind: TransferKind
    deadline: float  # time.monotonic(): what is not done by then fails; infinite if each of its slices has its own
    after: torch.cuda.Event | None  # device work that comes before it (`CacheView.mark`)
