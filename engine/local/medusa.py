"""Medusa heads guess (Cai et al., 2024): small networks on the model's last hidden state, each of which names a later
token.

    state of the last token whose KV is computed ──> the model's head: the token after it, which is drawn already
                                                └──> head 0: the token after that one
                                                └──> head 1: the next one, …

So all tokens of a guess are known at once, and nothing has to be kept for a request: neither KV nor a prompt that is
computed twice. On a decode worker whose prompt another worker computed, guesses begin after its first step.

Only each head's likeliest token is guessed, one after the other: a chain, no tree.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F

from common.errors import StartupError
from common.model_files import open_model
from engine.layers import Linear
from engine.local.device import LocalDevice
from engine.local.head_files import read_config, read_tensors
from engine.local.memory import weight_bytes
from engine.request import Request

log = logging.getLogger(__name__)

_FILES = ("medusa_lm_head.safetensors", "model.safetensors", "medusa_lm_head.pt")
# Where a tensor belongs: (head, block) of a residual block, (head,) of what names the token.
_BLOCK = (
    re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"),
    re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"),
)
_HEAD = (re.compile(r"(\d+)\.(\d+)\.weight"), re.compile(r"lm_heads\.(\d+)\.weight"))


class MedusaHead:
    """Residual blocks `x + silu(W x + b)`, then a product with a row for each token."""

    def __init__(self, blocks: list[Linear], head: Linear) -> None:
        self._blocks, self._head = blocks, head

    def best_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """From `[num_rows, hidden_size]` to `[num_rows]` int64."""
        for block in self._blocks:
            states = states + F.silu(block(states))
        return self._head(states).argmax(dim=-1)


class MedusaDrafter:
    def __init__(self, device: LocalDevice, heads: list[MedusaHead], cost: float) -> None:
        """`cost`: of one head, as a share of a step of the model."""
        device.keep_states()
        self.cost = cost
        self._device, self._heads = device, heads

    def anew(self) -> MedusaDrafter:
        """The same heads: they know nothing of requests."""
        return self

    @torch.inference_mode()
    def draft(self, lengths: Mapping[Request, int]) -> dict[Request, list[int]]:
        known: dict[Request, int] = {}  # where its state lies
        for request in lengths:
            last = request.num_computed_tokens - 1
            if last == request.num_tokens - 2:
                row = self._device.row_of_state(request.block_ids, last)
                if row is not None:
                    known[request] = row
        if not known:
            return {}
        states = self._device.states(list(known.values()))
        most = min(max(lengths[request] for request in known), len(self._heads))
        tokens = torch.stack([head.best_tokens(states) for head in self._heads[:most]], dim=1).tolist()
        return {request: guessed[: lengths[request]] for request, guessed in zip(known, tokens, strict=True)}


def is_medusa(path: Path) -> bool:
    """Whether a directory has heads rather than a model."""
    config = read_config(path)
    return "medusa_num_heads" in config or config.get("model_type") == "medusa"


def load_medusa(path: Path, device: LocalDevice, model_dir: Path) -> MedusaDrafter:
    """The heads in `path`, as they were published beside the paper (`medusa_lm_head.pt` or `.safetensors`) or as vLLM
    names them, for the model of `device`. Raises `StartupError`."""
    file = next((path / name for name in _FILES if (path / name).is_file()), None)
    if file is None:
        raise StartupError(f"--speculation {path}: Medusa heads are in none of {', '.join(_FILES)}")
    heads = heads_of(read_tensors(file), device, f"--speculation {file}")
    num_weights = sum(of_head for _, of_head in heads)
    cost = num_weights / len(heads) / weight_bytes(open_model(model_dir), 1)
    log.info("Medusa heads ready", extra={"file": str(file), "num_heads": len(heads), "cost": round(cost, 3)})
    return MedusaDrafter(device, [head for head, _ in heads], cost)


def heads_of(tensors: Mapping[str, torch.Tensor], device: LocalDevice, source: str) -> list[tuple[MedusaHead, int]]:
    """The heads, in order, and how many weights each has. Raises `StartupError` that names a tensor which is missing,
    not known, or of another shape than the model of `device` has."""
    hidden, vocab = device.info.hidden_size, device.info.vocab_size
    blocks: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
    outs: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if match := _match(_BLOCK, name):
            number, block, kind = int(match[1]), int(match[2]), match[3]
            shape = (hidden, hidden) if kind == "weight" else (hidden,)
            blocks.setdefault(number, {}).setdefault(block, {})[kind] = tensor
        elif match := _match(_HEAD, name):
            shape, outs[int(match[1])] = (vocab, hidden), tensor
        else:
            raise StartupError(f"{source} has tensor {name}, which no Medusa head has")
        if tuple(tensor.shape) != shape:
            raise StartupError(f"{source}: tensor {name} has shape {list(tensor.shape)}, the model needs {list(shape)}")
    if not outs or sorted(outs) != list(range(len(outs))):
        raise StartupError(f"{source} has the heads {sorted(outs)}, not those from 0 on")
    found = []
    for number in range(len(outs)):
        own = blocks.pop(number, {})
        for block, parts in own.items():
            if "weight" not in parts:
                raise StartupError(f"{source} lacks the weight of block {block} of head {number}")
        linears = [device.linear(own[block]["weight"], own[block].get("bias")) for block in sorted(own)]
        num_weights = len(own) * hidden * hidden + vocab * hidden
        found.append((MedusaHead(linears, device.linear(outs[number], is_head=True)), num_weights))
    if blocks:
        raise StartupError(f"{source} lacks what names the tokens of head {min(blocks)}")
    return found


def _match(patterns: tuple[re.Pattern[str], ...], name: str) -> re.Match[str] | None:
    return next((match for pattern in patterns if (match := pattern.fullmatch(name))), None)
