"""The door between the engine and what computes: values go in, values come out.

Behind it stand the model on this process's own device (`engine.local`), none at all (`engine.simulated`), and the
tests' fake. The engine's core knows no more of a device than this file says, and no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import InternalError
from common.types import KVCacheSpec, SampledToken
from engine.blocks.host_tier import BlockCopy
from engine.step import StepInput, StepOutput, StepRow

if TYPE_CHECKING:
    from kv_store.base import KVCache  # connectors read the cache; the engine only hands it on


def do_nothing() -> None:
    """Default of `meanwhile`."""


class StepGivenUp(Exception):  # noqa: N818  # nothing went wrong
    """Raised by `meanwhile`: nobody wants the rest of the step now."""


@dataclass(slots=True, frozen=True, kw_only=True)
class DeviceInfo:
    """What the engine has to know of a model on its device. Never changes."""

    spec: KVCacheSpec
    num_blocks: int
    num_host_blocks: int = 0  # of host memory, for what the device evicts and what swapped requests leave
    max_model_len: int  # tokens, prompt and answer
    vocab_size: int
    hidden_size: int
    window: int = 0  # tokens that the layer which sees the most sees, the new one included; 0: all
    eos_token_ids: tuple[int, ...]
    dtype_reason: str
    device: str  # as torch names it
    device_reason: str
    kernels: str = ""  # the variant of the CPU kernels that computes, or torch
    kernels_reason: str = ""
    # A step that begins while another one is under way is computed beside it. Another thread may be in `end` meanwhile.
    overlaps_steps: bool = False
    gives_up: bool = False  # a step ends early, between two layers, if `meanwhile` raises `StepGivenUp`
    free_rows: float  # that a step multiplies while it reads the weights: engine/speculation/step_cost.py


@dataclass(slots=True, frozen=True, kw_only=True)
class KVPlane:
    """One shard of the KV cache, which a connector reads and writes beside the device."""

    spec: KVCacheSpec
    cache: KVCache  # [num_blocks, *spec.block_shape]


@dataclass(slots=True, frozen=True)
class Ticket:
    """A step that has begun."""

    number: int  # of the step


class Device(ABC):
    """Only the engine's thread may call it."""

    info: DeviceInfo

    @abstractmethod
    def begin(self, step: StepInput) -> Ticket:
        """Begins a step; does not wait for it. Its copies are carried out as by `copy`: who reads the cache by `planes`
        once this has returned sees them done. Steps are computed in the order in which they begin, after the copies
        that were asked for before. Raises `InternalError` if the step is not valid: nothing has begun then."""

    @abstractmethod
    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        """Waits for the step, once. `meanwhile` is called many times until then; it may not touch this device, and may
        raise `StepGivenUp` if the device `gives_up`: then all that it says of the step is `is_given_up`, and the KV of
        the rows' new tokens is not written.

        What the device cannot compute is told in `failures`; then the KV of those rows' new tokens is not written.
        """

    @abstractmethod
    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies whole blocks between device and host in the order given: one copy may read a block that a later copy
        fills. Steps that begin later see them done, and so does who reads the cache by `planes`. For copies that cannot
        wait for a step: a transfer reads or fills their block before it, or there is none. Others come with a step."""

    @abstractmethod
    def planes(self) -> list[KVPlane]:
        """The KV cache, shard by shard."""

    def check_alive(self) -> None:  # noqa: B027
        """Raises `InternalError` if a process that computes for this device is gone. Never waits. The engine's
        thread calls it, also if another one computes the steps."""

    def say_end(self) -> None:  # noqa: B027
        """Tells processes of other hosts, which compute for this device, that it ends as intended. Any thread may call
        it."""

    def check(self, row: StepRow) -> None:
        """Raises `InternalError` if a row has no new tokens, more than the model takes, or too few blocks for them."""
        info, end = self.info, row.num_computed_tokens + len(row.token_ids)
        if not row.token_ids or end > info.max_model_len:
            raise InternalError(f"a step has {len(row.token_ids)} new tokens up to {end} of {info.max_model_len}")
        if len(row.block_ids) * info.spec.block_size < end:
            raise InternalError(f"a step has {len(row.block_ids)} blocks for {end} tokens")

    def execute(self, rows: Sequence[StepRow], meanwhile: Callable[[], None] = do_nothing) -> list[SampledToken | None]:
        """One step at once: the tokens that its rows drew. Raises `InternalError` if one of them failed."""
        output = self.compute(rows, meanwhile)
        if output.failures:
            raise InternalError(next(iter(output.failures.values())))
        return output.tokens

    def compute(self, rows: Sequence[StepRow], meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        """One step at once."""
        return self.end(self.begin(StepInput(number=self.next_number(), rows=rows)), meanwhile)

    _number = 0

    def next_number(self) -> int:
        """For the next step's `StepInput`."""
        self._number += 1
        return self._number
