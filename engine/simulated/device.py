"""A device without weights: its steps take the time that a model of time predicts, and its tokens follow from the KV.

Everything else is real: scheduler, blocks, connectors, gRPC, faults. So a fleet of many workers runs on a few cores.

KV of one token are two numbers of 32 bits: K is the token's id, V a checksum of the context up to it,

    V[p] = V[p - 1] + weight[p] * (token[p] + 1)    modulo 2^32, all weights odd

and the next token is a fixed function of the last V. A row that goes on from KV which this device did not just write
has all of it checked first, so blocks that were lost, mixed up or changed on their way fail the row instead of changing
an answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.config import EngineSettings
from common.errors import ConfigError
from common.types import KVCacheSpec, SampledToken, TokenLogprob
from engine.blocks.host_tier import BlockCopy
from engine.context_length import fit_context
from engine.device import Device, DeviceInfo, KVPlane, Ticket, do_nothing
from engine.loading.ends import known_ends
from engine.local.device_choice import SIMULATED
from engine.local.host_memory import num_host_blocks
from engine.simulated.data_sheet import simulated_time
from engine.simulated.model import read_simulated_model
from engine.step import Draw, Drawn, StepInput, StepOutput, StepRow

Uint32s = npt.NDArray[np.uint32]

log = logging.getLogger(__name__)

HIDDEN_SIZE = 16
PIECE_S = 0.005  # `meanwhile` is called this often while a step takes its time
_KEPT_STEPS = 2  # whose drawn tokens a later step may begin with
_UNLIKELY = -20.0  # logprob of tokens that are told beside the drawn one, which is certain


class SimulatedDevice(Device):
    """Reads of the model's folder only what says how it talks: configuration and tokenizer."""

    def __init__(
        self,
        model_dir: Path,
        settings: EngineSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises `ConfigError` if `--simulated-time` is unknown, and `StartupError` if the folder holds no model."""
        if settings.speculation not in ("none", "ngram"):
            raise ConfigError("--speculation", "a simulated device guesses by none or ngram; it loads no model")
        if settings.quantization != "none":
            raise ConfigError(
                "--quantization", "a simulated device has no weights; --simulated-time says how fast it is"
            )
        simulated = simulated_time(settings.simulated_time)
        model = read_simulated_model(model_dir)
        self.time = simulated.time
        spec = KVCacheSpec(
            model_id=model.identity,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=settings.block_size,
            dtype="float32",
        )
        num_blocks = settings.num_blocks or max(simulated.kv_tokens // settings.block_size, 1)
        cache = np.zeros((num_blocks, *spec.block_shape), dtype=np.float32)
        self._planes = [KVPlane(spec=spec, cache=cache)]
        self._slots: Uint32s = cache.view(np.uint32).reshape(num_blocks, 2, settings.block_size)
        # Host memory has room for as many blocks as it would of the device that is simulated.
        num_on_host = num_host_blocks(settings, simulated.kv_token_bytes * settings.block_size)
        self._host_slots: Uint32s = np.zeros((num_on_host, 2, settings.block_size), dtype=np.uint32)
        self.info = DeviceInfo(
            spec=spec,
            num_blocks=num_blocks,
            num_host_blocks=num_on_host,
            max_model_len=fit_context(settings.max_model_len or model.max_positions, num_blocks, settings),
            vocab_size=model.vocab_size,
            hidden_size=HIDDEN_SIZE,
            eos_token_ids=tuple(known_ends(model.ends, model.vocab_size)),
            dtype_reason="two numbers of 32 bits stand for a token's K and V",
            device=SIMULATED,
            device_reason=simulated.source,
            free_rows=simulated.free_rows,
        )
        self._weights = _odd_weights(self.info.max_model_len)
        self._words = model.words
        self._clock, self._sleep = clock, sleep
        self._free_at = 0.0  # when all steps that have begun are done
        self._begun: dict[int, tuple[StepInput, float, float]] = {}  # with the end of each, and how long it takes
        self._drawn: dict[int, list[SampledToken | None]] = {}
        self._written: set[tuple[int, int]] = set()  # (block, slot) of each row's last token in the step before
        log.info("simulated device ready", extra={"num_blocks": num_blocks, "times": simulated.source})

    def warm_up(self) -> None:
        """Computes one token, so that no request waits for what happens once."""
        self.execute([StepRow(token_ids=[0], num_computed_tokens=0, block_ids=[0])])
        self._written.clear()

    def begin(self, step: StepInput) -> Ticket:
        for row in step.rows:
            self.check(row)
        if step.copies:
            self.copy(step.copies)
        seconds = self.time.seconds(step.shape) if step.rows else 0.0
        self._free_at = max(self._clock(), self._free_at) + seconds
        self._begun[step.number] = step, self._free_at, seconds
        return Ticket(step.number)

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        step, ends_at, seconds = self._begun.pop(ticket.number)
        tokens: list[SampledToken | None] = []
        scores: dict[int, list[SampledToken]] = {}
        pooled: dict[int, list[float]] = {}
        failures: dict[int, str] = {}
        written: set[tuple[int, int]] = set()
        for index, row in enumerate(step.rows):
            tokens.append(None)
            before = self._sum_before(row, written)
            if before is None:
                failures[index] = f"the KV of {row.num_computed_tokens} tokens is not what was written"
                continue
            token_ids = row.token_ids if row.first is None else self._resolved(row.token_ids, row.first)
            if token_ids is None:
                failures[index] = "the token before is not known"
                continue
            sums = self._write(row, token_ids, before)
            written.add(self._slot(row, row.num_computed_tokens + len(token_ids) - 1))
            if row.score is not None:
                scores[index] = [_certain(each, row.score.num_top) for each in row.score.token_ids]
            if row.num_pooled:
                pooled[index] = _state(sums[-row.num_pooled :])
            if row.draw is not None:
                tokens[index] = self._draw(int(sums[-1]), row.draw)
        self._written = written
        while (left_s := ends_at - self._clock()) > 0:
            self._sleep(min(left_s, PIECE_S))
            meanwhile()
        self._drawn[ticket.number] = tokens
        self._drawn.pop(ticket.number - _KEPT_STEPS, None)
        return StepOutput(tokens=tokens, scores=scores, pooled=pooled, failures=failures, elapsed_s=seconds)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            if copy.to_host:
                self._host_slots[copy.host_block] = self._slots[copy.device_block]
            else:
                self._slots[copy.device_block] = self._host_slots[copy.host_block]
        self._written.clear()

    def planes(self) -> list[KVPlane]:
        return self._planes

    def _resolved(self, token_ids: list[int], first: Drawn) -> list[int] | None:
        """None if that row drew no token."""
        token = self._drawn[first.step][first.row]
        return None if token is None else [token.token_id, *token_ids[1:]]

    def _slot(self, row: StepRow, position: int) -> tuple[int, int]:
        block, slot = divmod(position, self.info.spec.block_size)
        return int(row.block_ids[block]), slot

    def _sum_before(self, row: StepRow, written: Set[tuple[int, int]]) -> int | None:
        """The checksum of the row's computed tokens; None if their KV is not what was written. `written`: slots of last
        tokens that this step has written."""
        num_before = row.num_computed_tokens
        if not num_before:
            return 0
        block, slot = self._slot(row, num_before - 1)
        found = int(self._slots[block, 1, slot])
        if (block, slot) in self._written or (block, slot) in written:
            return found
        num_blocks = -(-num_before // self.info.spec.block_size)
        kv = self._slots[np.asarray(row.block_ids[:num_blocks], dtype=np.int64)]
        token_ids, sums = (kv[:, plane].reshape(-1)[:num_before] for plane in (0, 1))
        return found if np.array_equal(self._sums(token_ids, 0, 0), sums) else None

    def _sums(self, token_ids: Uint32s, start: int, before: int) -> Uint32s:
        weights = self._weights[start : start + len(token_ids)]
        with np.errstate(over="ignore"):
            added: Uint32s = np.cumsum(weights * (token_ids + np.uint32(1)), dtype=np.uint32)
            return added + np.uint32(before)

    def _write(self, row: StepRow, token_ids: list[int], before: int) -> Uint32s:
        """Writes the KV of the row's new tokens; their checksums."""
        start, size = row.num_computed_tokens, self.info.spec.block_size
        new = np.array(token_ids, dtype=np.uint32)
        sums = self._sums(new, start, before)
        places = np.arange(start, start + len(new))
        blocks = np.asarray(row.block_ids, dtype=np.int64)[places // size]
        self._slots[blocks, 0, places % size] = new
        self._slots[blocks, 1, places % size] = sums
        return sums

    def _draw(self, checksum: int, draw: Draw) -> SampledToken | None:
        """The first token that is allowed, from the one on that the checksum names."""
        start = _mixed(checksum) % len(self._words)
        edits = draw.edits
        if not draw.mask and (edits is None or not (edits.allowed_ids or edits.banned_ids or edits.bad_ids)):
            return _certain(int(self._words[start]), draw.num_top)
        allowed = np.ones(self.info.vocab_size, dtype=bool)
        if draw.mask:
            bits = np.unpackbits(np.frombuffer(draw.mask, dtype=np.uint8), bitorder="little")
            allowed &= bits[: self.info.vocab_size].astype(bool)
        if edits is not None:
            if edits.allowed_ids:
                listed = np.zeros_like(allowed)
                listed[[each for each in edits.allowed_ids if each < len(listed)]] = True
                allowed &= listed
            allowed[[each for each in (*edits.banned_ids, *edits.bad_ids) if each < len(allowed)]] = False
        words = np.roll(self._words, -start)
        found = words[allowed[words]]
        if not len(found):
            found = np.flatnonzero(allowed)  # an end of the answer, or another mark
        return _certain(int(found[0]), draw.num_top) if len(found) else None


def _odd_weights(number: int) -> Uint32s:
    return np.random.Generator(np.random.PCG64(20)).integers(0, 2**31, number, dtype=np.uint32) * 2 + 1


def _mixed(checksum: int) -> int:
    """All bits of the result depend on all bits of the checksum (the end of MurmurHash3, Appleby)."""
    mixed = ((checksum ^ checksum >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ mixed >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return mixed ^ mixed >> 16


def _certain(token_id: int, num_top: int | None) -> SampledToken:
    if num_top is None:
        return SampledToken(token_id)
    others = [TokenLogprob(each, _UNLIKELY) for each in range(num_top) if each != token_id][: max(num_top - 1, 0)]
    top = (TokenLogprob(token_id, 0.0), *others) if num_top else ()
    return SampledToken(token_id, 0.0, top)


def _state(sums: Uint32s) -> list[float]:
    """Sums of hidden states, `[HIDDEN_SIZE]`."""
    bits = sums[:, None] >> np.arange(HIDDEN_SIZE, dtype=np.uint32) & np.uint32(3)
    return [float(each) + 1.0 for each in bits.sum(axis=0)]
