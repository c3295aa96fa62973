"""The call of source/sample.h."""

from __future__ import annotations

from ctypes import c_void_p
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.library import Kernels


@dataclass(slots=True, frozen=True)
class Sampled:
    tokens: list[int]  # -1: none is allowed
    logprobs: torch.Tensor  # [num_rows, 1 + most_top]: of the token, and of the likeliest ones
    top_ids: torch.Tensor  # [num_rows, most_top] int64


def sample_rows(kernels: Kernels, logits: torch.Tensor, asked: np.ndarray, most_top: int) -> Sampled:
    """One token for each row of `logits` `[num_rows, vocab_size]` float32, contiguous. `asked` `[num_rows]` has dtype
    `ASKED`; what it points to has to stay until this returns. No row wants more than `most_top` likeliest tokens."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    logprobs = torch.empty(num_rows, 1 + most_top)
    top_ids = torch.empty(num_rows, most_top, dtype=torch.int64)
    kernels.library.baton_sample(
        kernels.team,
        c_void_p(asked.ctypes.data),
        logits.data_ptr(),
        num_rows,
        vocab_size,
        most_top,
        tokens.data_ptr(),
        logprobs.data_ptr(),
        top_ids.data_ptr(),
    )
    return Sampled(tokens.tolist(), logprobs, top_ids)
