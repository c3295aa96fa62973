"""EAGLE heads guess: a decoder layer of their own, on the model's states (`eagle_head`), one token after the other.

The layer has a KV cache, with as many blocks as the model's. What it holds for a request is a run without gaps, which
begins at the first token whose state this device has computed:

    tokens   | prompt, computed by another worker or found in a cache | computed here ... | last one | guesses
    run                                                               | start             | end      |

So after a handoff, a prefix hit, or KV that came back from host memory, the layer sees the tokens from there on, at
their own positions. That decides how many guesses come true, and nothing else.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.config import EngineSettings
from common.errors import StartupError
from common.model_files import open_model
from common.types import KVCacheSpec
from engine.attention.base import AttentionShape
from engine.attention.registry import attention_backend
from engine.device_copies import as_current, to_device
from engine.local.device import LocalDevice
from engine.local.eagle_files import read_head
from engine.local.eagle_head import EagleHead
from engine.local.memory import num_cache_blocks, weight_bytes
from engine.messages import RequestMode
from engine.request import Request, block_table
from engine.step import StepRow

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Run:
    """What the layer has computed of a request."""

    start: int  # positions of tokens
    end: int
    block_ids: array[int] = field(default_factory=block_table)  # the first slot is that of `start`
    guessed: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # [hidden_size], the state of token `end`

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(slots=True, frozen=True)
class _Part:
    """Tokens of a run that are computed next, from position `run.end` on."""

    run: _Run
    token_ids: list[int]  # that follow those

    @property
    def row(self) -> StepRow:
        return StepRow(token_ids=self.token_ids, num_computed_tokens=len(self.run), block_ids=self.run.block_ids)


class EagleDrafter:
    def __init__(self, device: LocalDevice, head: EagleHead, cost: float, cache: torch.Tensor) -> None:
        """`cost`: of a guess of one token, as a share of a step of the model. `cache` is of `cache_spec`."""
        device.keep_states(head.layers)
        self.cost = cost
        self._device, self._head, self._cache = device, head, cache
        self._spec = cache_spec(head, device)
        shape = AttentionShape(num_heads=head.config.num_heads, softmax_scale=head.config.softmax_scale)
        self._attention = attention_backend(cache, self._spec, shape, kernels=device.kernels)
        self._free = list(range(len(cache)))
        self._runs: dict[Request, _Run] = {}

    def anew(self) -> EagleDrafter:
        """The same head, following no request."""
        return EagleDrafter(self._device, self._head, self.cost, self._cache)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Computes a prompt and a token after it, so that no request waits for what happens once."""
        run = _Run(0, 0, block_table([0]))
        with as_current(self._device.device):
            for num_tokens in (self._spec.block_size - 1, 1):
                if num_tokens and run.end + num_tokens <= self._device.info.max_model_len:
                    states = torch.zeros(num_tokens, self._head.config.hidden_size, dtype=self._device.dtype)
                    guessed = self._compute([_Part(run, [0] * num_tokens)], states.to(self._device.device))
                    self._head.best_tokens(guessed).tolist()
                    run.end += num_tokens

    @torch.inference_mode()
    def follow(self, requests: Iterable[Request]) -> None:
        """Computes what the last step has given states of."""
        wanted = dict.fromkeys(one for one in requests if _may_draft(one))
        for gone in [one for one in self._runs if one not in wanted]:
            self._leave(gone)
        parts = [one for request in wanted if (one := self._next_part(request)) is not None]
        if not parts:
            return
        parts.sort(key=lambda one: (len(one[1]) > 1, len(one[0].run)))  # as attention wants them
        with as_current(self._device.device):
            states = self._head.states([row for _, rows in parts for row in rows])
            guessed = self._compute([part for part, _ in parts], states)
        for (part, rows), state in zip(parts, guessed, strict=True):
            part.run.end += len(rows)
            part.run.guessed = state

    @torch.inference_mode()
    def draft(self, lengths: Mapping[Request, int]) -> dict[Request, list[int]]:
        runs: dict[Request, _Run] = {}
        for request, length in lengths.items():
            run = self._runs.get(request)
            if run is not None and run.end == request.num_tokens - 1 and self._reserve(run, len(run) + length - 1):
                runs[request] = run
        if not runs:
            return {}
        going = sorted(runs, key=lambda request: len(runs[request]))
        drafts: dict[Request, list[int]] = {request: [] for request in going}
        with as_current(self._device.device):
            guessed = torch.stack([runs[request].guessed for request in going])
            while True:
                tokens = self._head.best_tokens(guessed).tolist()  # waits for the device
                for request, token in zip(going, tokens, strict=True):
                    drafts[request].append(token)
                kept = [index for index, request in enumerate(going) if len(drafts[request]) < lengths[request]]
                if not kept:
                    return drafts
                going = [going[index] for index in kept]
                parts = [self._ahead(runs[request], drafts[request]) for request in going]
                guessed = self._compute(parts, guessed[to_device(kept, self._device.device)])

    def _next_part(self, request: Request) -> tuple[_Part, list[int]] | None:
        """Tokens of a request that its run lacks, and the rows of their states. Begins another run if there is a gap.
        None if there are none, or no block is free."""
        run, end = self._runs.get(request), request.num_computed_tokens
        if run is not None and run.end == end:
            return None
        rows = self._device.rows_of_states(request.block_ids, end) if end < request.num_tokens else []
        start = end - len(rows)
        if run is not None and not start <= run.end < end:
            self._leave(request)
            run = None
        if not rows:
            return None
        if run is None:
            run = self._runs[request] = _Run(start, start)
        if not self._reserve(run, end - run.start):
            self._leave(request)
            return None
        return _Part(run, request.token_ids[run.end + 1 : end + 1]), rows[run.end - start :]

    @staticmethod
    def _ahead(run: _Run, draft: Sequence[int]) -> _Part:
        """The last token of a draft. What is computed of it lies behind the run, which overwrites it later."""
        behind = _Run(run.start, run.end + len(draft) - 1, run.block_ids)
        return _Part(behind, [draft[-1]])

    def _compute(self, parts: Sequence[_Part], states: torch.Tensor) -> torch.Tensor:
        """The states guessed after the last token of each part, `[len(parts), hidden_size]`."""
        device = self._device.device
        token_ids = [token_id for part in parts for token_id in part.token_ids]
        positions = [part.run.end + index for part in parts for index in range(len(part.token_ids))]
        attention = self._attention.prepare([part.row for part in parts])
        guessed = self._head.forward(to_device(token_ids, device), states, to_device(positions, device), attention)
        if len(parts) == len(guessed):
            return guessed
        last, end = [], 0
        for part in parts:
            end += len(part.token_ids)
            last.append(end - 1)
        return guessed[to_device(last, device)]

    def _reserve(self, run: _Run, num_tokens: int) -> bool:
        """Gives the run blocks for so many tokens. Returns False if there are none left."""
        num_lacking = -(-num_tokens // self._spec.block_size) - len(run.block_ids)
        if num_lacking > len(self._free):
            return False
        run.block_ids.extend(self._free.pop() for _ in range(num_lacking))
        return True

    def _leave(self, request: Request) -> None:
        self._free += self._runs.pop(request).block_ids


def _may_draft(request: Request) -> bool:
    """Whether it may get a second token here."""
    params = request.sampling_params
    generates = request.embed is None and request.mode is not RequestMode.PREFILL and params.max_tokens > 1
    return generates and params.speculate


def cache_spec(head: EagleHead, device: LocalDevice) -> KVCacheSpec:
    """Of the layer's KV, which never leaves this device."""
    return KVCacheSpec(
        model_id="EAGLE head",
        num_layers=1,
        num_kv_heads=head.config.num_kv_heads,
        head_dim=head.config.head_dim,
        block_size=device.info.spec.block_size,
        dtype=device.info.spec.dtype,
    )


def make_cache(head: EagleHead, device: LocalDevice, num_blocks: int) -> torch.Tensor:
    shape = (num_blocks, *cache_spec(head, device).block_shape)
    return torch.empty(shape, dtype=device.dtype, device=device.device)


def load_eagle(path: Path, device: LocalDevice, settings: EngineSettings, model_dir: Path) -> EagleDrafter:
    """The head in `path`, as it was published beside the papers, for the model of `device`. Raises `StartupError`."""
    head = read_head(path, device)
    cost = head.num_weights / weight_bytes(open_model(model_dir), 1)
    as_many = settings.model_copy(update={"num_blocks": device.info.num_blocks})
    try:
        num_blocks = num_cache_blocks(cache_spec(head, device), device.device, as_many)
    except StartupError as error:
        raise StartupError(f"--speculation {path}: beside that of the model, {error}") from error
    log.info("EAGLE head ready", extra={"path": str(path), "cost": round(cost, 3)})
    drafter = EagleDrafter(device, head, cost, make_cache(head, device, num_blocks))
    drafter.warm_up()
    return drafter
