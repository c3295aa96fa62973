"""Small copies between the host and a device, so that a step waits for the device once: when it reads its results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise

import torch


def page_locked(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, or a copy of it, from which copies to `device` need not wait for anything."""
    # Of memory that can be swapped out, CUDA may wait for what it computes before it copies.
    # Nor does it lock the pages of a view in which one element stands for several.
    return tensor.contiguous().pin_memory() if device.type == "cuda" else tensor


def to_device(
    values: Sequence[int] | Sequence[float] | Sequence[bool] | torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`values` as a tensor on `device`, which fills it when its turn comes. Until then nobody may change a tensor that
    was given."""
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return page_locked(tensor, device).to(device, non_blocking=True)


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` this thread's current one. Triton launches its kernels there, wherever their tensors lie, and each
    new thread begins with the first CUDA device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def wait_for(device: torch.device) -> None:
    """Waits until `device` has computed all that it was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def read(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    """The elements of each, all in one copy, which waits for the device. Exact for token ids, bools and float32."""
    if len(tensors) == 1:
        values: list[float] = tensors[0].flatten().tolist()
        return [values]
    values = torch.cat([tensor.flatten().double() for tensor in tensors]).tolist()
    return [values[start:stop] for start, stop in pairwise(accumulate((t.numel() for t in tensors), initial=0))]
