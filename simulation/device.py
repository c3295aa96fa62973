"""A device that computes nothing: a step is over as soon as it is asked for, and says how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from common.batch_time import BatchTime
from common.traffic.requests import answer_id
from common.types import KVCacheSpec, SampledToken
from engine.blocks.host_tier import BlockCopy
from engine.device import Device, DeviceInfo, KVPlane, Ticket, do_nothing
from engine.step import StepInput, StepOutput

if TYPE_CHECKING:
    import torch

VOCABULARY = 2**31  # ids of runs, and of their answers


def spec_of(block_size: int) -> KVCacheSpec:
    """KV without bytes: links count those of `SimulatedTime.kv_token_bytes`."""
    return KVCacheSpec(
        model_id="simulation", num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32"
    )


class VirtualDevice(Device):
    """The answer to a prompt is the token `answer_id` of the prompt's last one, again and again, so that a later prompt
    that repeats the answer finds its KV."""

    def __init__(self, time: BatchTime, *, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.time = time
        self.begun_s = 0.0  # what the step that began last takes
        self.info = DeviceInfo(
            spec=spec_of(block_size),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=VOCABULARY,
            hidden_size=1,
            eos_token_ids=(),
            dtype_reason="nothing is computed",
            device="virtual",
            device_reason="a simulation",
            free_rows=1.0,
        )
        self._begun: dict[int, tuple[StepInput, float]] = {}

    def begin(self, step: StepInput) -> Ticket:
        self.begun_s = self.time.seconds(step.shape) if step.rows else 0.0
        self._begun[step.number] = step, self.begun_s
        return Ticket(step.number)

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:  # noqa: ARG002
        step, seconds = self._begun.pop(ticket.number)
        tokens = [None if row.draw is None else SampledToken(answer_id(row.token_ids[-1])) for row in step.rows]
        return StepOutput(tokens=tokens, elapsed_s=seconds)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """There are no bytes."""

    def planes(self) -> list[KVPlane]:
        return [KVPlane(spec=self.info.spec, cache=cast("torch.Tensor", None))]  # `Link` does not look at it
