"""The attention interface: a backend prepares each step once, then every layer asks the prepared step.

row of a layer's cache, seen as rows of head_dim elements (all layers alike, one offset apart):

  block 0                                              block 1
  | layer 0                     | layer 1 | ...      | layer 0 ...
  | K: head 0, head 1 ... | V   |
  | t0 t1 ... t15 | t0 ...

With latent attention there is one plane, of one head, in place of K and V: the whole row is K, the start of it is V.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.types import KVCacheSpec
from engine.attention.shared_prefixes import SharedPrefixes
from engine.attention.step_tables import StepTables
from engine.device_copies import to_device
from engine.step import StepRow


@dataclass(slots=True, frozen=True, kw_only=True)
class AttentionShape:
    """What a backend needs to know of the model beyond the cache's own shape."""

    num_heads: int
    softmax_scale: float
    windows: tuple[
        int, ...
    ] = ()  # by layer, tokens that a query sees, itself included; 0: all. Empty: all in all layers
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0: they stay
    value_dim: int = 0  # elements of V, the first ones of K; 0: V is a plane of its own, as wide as K
    # `[num_layers, num_heads]` float32, contiguous: one more score for each head's softmax, without a V; -inf: none.
    sinks: torch.Tensor | None = None

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def distinct_windows(self) -> list[int]:
        return sorted(set(self.windows)) or [0]


class StepAttention(ABC):
    """One step's attention; made by `AttentionBackend.prepare`, used by every layer once, in order."""

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Writes `kv` into the cache, then attends.

        `q` `[num_tokens, num_heads, head_dim]` and `kv` `[num_tokens, num_planes, num_kv_heads, head_dim]` (K, then V)
        are rotated already and may be views with strides. Returns `[num_tokens, num_heads * (elements of V)]`.
        """


class PagedStep(StepAttention):
    """A step of a backend that reads K and V from the cache alone, so that whoever rotates K may have written both."""

    writer: KVWriter
    rows: torch.Tensor  # `KVWriter.rows` of the step

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """As `forward`, after K and V were written."""

    def forward(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        self.writer.write(layer, self.rows, kv)
        return self.attend(layer, q)


class FixedDecode(PagedStep):
    """Attention of a fixed number of single tokens, whose tables lie at fixed addresses: a recorded graph of kernels
    reads them there each time it is replayed."""

    @abstractmethod
    def fill(self, sequences: Sequence[StepRow], shared: SharedPrefixes | None = None) -> None:
        """Takes the tables of the next replay, in whose order its tokens lie. Does not wait for the device. `shared`:
        of a `fixed_cascade`, whose first `sequences` are in its order; None before it is recorded."""

    @abstractmethod
    def begin(self) -> None:
        """Before the first layer, and recorded like the layers: what is computed of the tables on the device."""


class AttentionBackend(ABC):
    """Bound to one cache `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`.

    Slots that no token was written to hold anything, NaN included; a backend never lets them reach a result. The same
    goes for blocks that lie before every query's window: they may belong to another sequence by now.
    """

    def __init__(self, cache: torch.Tensor, spec: KVCacheSpec, shape: AttentionShape) -> None:
        self.cache = cache
        self.spec = spec
        self.shape = shape
        self.device = cache.device

    def keys_and_values(self, planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of `planes` `[num_planes, ..., head_dim]`."""
        keys, values = planes[0], planes[-1]
        return keys, values[..., : self.shape.value_dim or self.spec.head_dim]

    @abstractmethod
    def prepare(self, sequences: Sequence[StepRow]) -> StepAttention:
        """`sequences` in the order in which their tokens lie in the step's flat batch."""

    has_fixed_decode = False

    def fixed_decode(self, size: int) -> FixedDecode:
        """Attention of `size` single tokens for a recorded graph, if `has_fixed_decode`."""
        raise NotImplementedError(f"{type(self).__name__}: {size} single tokens in a recorded graph")

    cascades = False

    def shared_prefixes(self, sequences: Sequence[StepRow]) -> SharedPrefixes | None:  # noqa: ARG002
        """Which of these single tokens a `fixed_cascade` should attend together; None if that does not pay, or never
        if not `cascades`."""
        return None

    def fixed_cascade(self, size: int) -> FixedDecode:
        """As `fixed_decode`, for steps that have `shared_prefixes`. `size` is at least 2."""
        raise NotImplementedError(f"{type(self).__name__}: {size} single tokens that share blocks, in a recorded graph")


def first_seen(num_before: int, window: int) -> int:
    """The first token that the query after `num_before` others sees."""
    return max(0, num_before + 1 - window) if window else 0


class KVWriter:
    """Writes K and V of a step's new tokens, each layer in one scatter. A backend keeps one from step to step."""

    def __init__(self, backend: AttentionBackend) -> None:
        spec = backend.spec
        num_planes = spec.num_planes * spec.num_kv_heads
        self._device = backend.device
        self._all_rows = backend.cache.view(-1, spec.head_dim)
        self._rows_per_layer = num_planes * spec.block_size
        self._rows_per_block = spec.num_layers * self._rows_per_layer
        self._planes = torch.arange(num_planes) * spec.block_size
        self.planes_there = to_device(self._planes, backend.device)

    def rows(self, tables: StepTables) -> torch.Tensor:
        """The rows of layer 0 that each new token's K and V take, `[num_tokens, num_planes * num_kv_heads]` int64."""
        return to_device(torch.from_numpy(self.first_rows(tables))[:, None] + self._planes, self._device)

    def first_rows(self, tables: StepTables) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The first of each token's `rows`. The others are `planes_there` further on."""
        blocks, offsets = tables.slots()
        return blocks.astype(np.int64) * self._rows_per_block + offsets

    def write(self, layer: int, rows: torch.Tensor, kv: torch.Tensor) -> None:
        """`rows` as above, whichever the layer is."""
        self.layer_rows(layer).index_put_((rows,), kv.flatten(1, 2))

    def layer_rows(self, layer: int) -> torch.Tensor:
        """`[any, head_dim]`: what `rows` are rows of, in this layer."""
        # The same numbers in a view that starts later are those of a later layer.
        return self._all_rows[layer * self._rows_per_layer :]
