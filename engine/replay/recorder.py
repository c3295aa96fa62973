"""A device that writes its first steps to a file."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from engine.blocks.host_tier import BlockCopy
from engine.device import Device, KVPlane, Ticket, do_nothing
from engine.replay.step_file import RecordedStep, StepFileWriter
from engine.step import StepInput, StepOutput

log = logging.getLogger(__name__)


class RecordingDevice(Device):
    """Does what `device` does, and records the first `num_steps` steps. For looking at a problem: a recorded step reads
    all KV that it depends on twice."""

    def __init__(self, device: Device, writer: StepFileWriter, num_steps: int) -> None:
        self.info = replace(device.info, gives_up=False)  # a file has whole steps
        self._device = device
        self._writer = writer
        self._num_left = num_steps
        self._begun: dict[int, tuple[StepInput, dict[int, bytes]]] = {}
        self._digests: dict[int, bytes] = {}  # of the blocks as the file has them
        self._host_digests: dict[int, bytes] = {}  # of those in host memory that the file's own copies filled
        (plane,) = device.planes()
        self._cache = torch.as_tensor(plane.cache)  # the same memory

    def begin(self, step: StepInput) -> Ticket:
        if self._num_left:
            if not self._knows_sources(step.copies):
                self.copy(step.copies)
                step = replace(step, copies=())
            self._begun[step.number] = step, self._missing(step)
        return self._device.begin(step)

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        output = self._device.end(ticket, meanwhile)
        if (begun := self._begun.pop(ticket.number, None)) is not None:
            step, blocks = begun
            self._writer.add(RecordedStep(step=step, output=output, blocks=blocks))
            for block_id in _blocks(step, self.info.spec.block_size, written=True):
                self._digests[block_id] = _digest(block_bytes(self._cache, block_id))
            self._num_left -= 1
            if not self._num_left:
                self._writer.close()
                self._digests.clear()
                self._host_digests.clear()
                log.info("all steps are recorded")
        return output

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """These are not in the file: what host memory has there is not known to it any more."""
        for copy in copies:
            if copy.to_host:
                self._host_digests.pop(copy.host_block, None)
        self._device.copy(copies)

    def planes(self) -> list[KVPlane]:
        return self._device.planes()

    def _missing(self, step: StepInput) -> dict[int, bytes]:
        """The blocks that the step reads and the file does not have as they are now: another device wrote them, or a
        transfer did."""
        missing: dict[int, bytes] = {}
        filled = set[int]()  # by the step's own copies, which have not been carried out
        for copy in step.copies:
            if copy.to_host:
                if copy.device_block not in filled:
                    self._look_at(copy.device_block, missing)
                self._host_digests[copy.host_block] = self._digests[copy.device_block]
            else:
                self._digests[copy.device_block] = self._host_digests[copy.host_block]
                filled.add(copy.device_block)
        for block_id in _blocks(step, self.info.spec.block_size, written=False):
            if block_id not in filled:
                self._look_at(block_id, missing)
        return missing

    def _look_at(self, block_id: int, missing: dict[int, bytes]) -> None:
        data = block_bytes(self._cache, block_id)
        if (digest := _digest(data)) != self._digests.get(block_id):
            self._digests[block_id] = digest
            missing[block_id] = data

    def _knows_sources(self, copies: Sequence[BlockCopy]) -> bool:
        """Whether the file has what these copies read of host memory."""
        known = set(self._host_digests)
        for copy in copies:
            if copy.to_host:
                known.add(copy.host_block)
            elif copy.host_block not in known:
                return False
        return True


def block_bytes(cache: torch.Tensor, block_id: int) -> bytes:
    return cache[block_id].contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def _blocks(step: StepInput, block_size: int, *, written: bool) -> Iterable[int]:
    """Ids of the blocks that the step's new tokens go to, or of those with the tokens before them; each once."""
    found = dict[int, None]()
    for row in step.rows:
        first, end = row.num_computed_tokens, row.num_computed_tokens + len(row.token_ids)
        start, stop = (first // block_size, -(-end // block_size)) if written else (0, -(-first // block_size))
        found.update(dict.fromkeys(row.block_ids[start:stop]))
    return found


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
