"""What each request asks of its row of logits, as source/sample.h reads it, and the call."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.library import Kernels

NO_IDS = (0, 0, 0)
_IDS = [("ids", "u8"), ("numbers", "u8"), ("count", "i8")]
ROW = np.dtype(
    [
        *((name, _IDS) for name in ("penalised", "biased", "allowed", "banned", "bad")),
        ("mask", "u8"),
        ("uniform", "f8"),
        ("top_p", "f8"),
        *((name, "f4") for name in ("temperature", "min_p", "repetition", "presence", "frequency")),
        ("top_k", "i4"),
        ("num_top", "i4"),
    ],
    align=True,
)
"""`Asked` of sample.h: addresses of int64 token ids, of a float32 for each of them (0: none), and how many they are."""


@dataclass(slots=True, frozen=True)
class Sampled:
    tokens: list[int]  # -1: none is allowed
    logprobs: torch.Tensor  # [num_rows, 1 + most_top]: of the token, and of the likeliest ones
    top_ids: torch.Tensor  # [num_rows, most_top] int64


def sample_rows(kernels: Kernels, logits: torch.Tensor, rows: Sequence[tuple[object, ...]], most_top: int) -> Sampled:
    """One token for each row of `logits` `[num_rows, vocab_size]` float32, contiguous. `rows` have the fields of `ROW`;
    what they point to has to stay until this returns. No row wants more than `most_top` likeliest tokens."""
    num_rows, vocab_size = logits.shape
    asked = np.array(rows, dtype=ROW)
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
