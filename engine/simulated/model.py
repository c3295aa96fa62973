"""What a simulated device reads of a model's folder: how the model talks, and no weights.

Read once for all workers that are forks of one process: a vocabulary takes longer to read than all else that a
simulated worker does at its start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.model_files import open_model

_LENGTHS = ("max_position_embeddings", "max_target_positions", "n_positions")  # keys of config.json
_DEFAULT_LENGTH = 2048


@dataclass(slots=True, frozen=True, kw_only=True)
class SimulatedModel:
    identity: str  # 32 hex digits. No other device's KV has it
    vocab_size: int
    max_positions: int
    ends: Mapping[int, str]  # ids that end an answer, and the files that name each
    words: npt.NDArray[np.int64]  # ids of tokens that are text


@lru_cache(maxsize=1)
def read_simulated_model(model_dir: Path) -> SimulatedModel:
    """Raises `StartupError` if the folder holds no model. A folder that changes later is not read again."""
    files = open_model(model_dir)
    token_ids = files.token_ids()
    ends = files.ends(token_ids)
    vocab_size = _number(files.config, ("vocab_size",)) or max(token_ids.values(), default=0) + 1
    return SimulatedModel(
        identity=_identity(model_dir),
        vocab_size=vocab_size,
        max_positions=_number(files.config, _LENGTHS) or _DEFAULT_LENGTH,
        ends=ends,
        words=_plain_words(token_ids, vocab_size, ends.keys()),
    )


def _identity(model_dir: Path) -> str:
    digest = hashlib.blake2b(b"simulated", digest_size=16)
    for name in ("config.json", "tokenizer.json"):
        digest.update(hashlib.blake2b((model_dir / name).read_bytes()).digest())
    return digest.hexdigest()


def _number(config: Mapping[str, object], keys: Sequence[str]) -> int | None:
    """The first of `keys` that config.json has, or its part about text."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in keys:
            if isinstance(number := part.get(key), int):
                return number
    return None


def _plain_words(token_ids: Mapping[str, int], vocab_size: int, ends: Set[int]) -> npt.NDArray[np.int64]:
    """Ids of tokens that are text: neither an end nor a mark in angle brackets."""
    marks = {each for token, each in token_ids.items() if token.startswith("<") and token.endswith(">")}
    known = sorted({*token_ids.values()} - marks - {*ends}) or [each for each in range(vocab_size) if each not in ends]
    return np.array([each for each in known if each < vocab_size], dtype=np.int64)
