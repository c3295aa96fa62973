"""What the model runner asks of an architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from common.errors import StartupError
from common.model_files import ModelFiles
from engine.attention.base import StepAttention
from engine.kernels.library import Kernels


class CausalLM(ABC):
    """A decoder-only language model over a flat batch of tokens; of use after `load()` and `finish()`.

    If several ranks share it, each calls the same functions with the same tokens in the same order, and gets the same
    results.
    """

    num_layers: int
    num_heads: int  # of this rank, and so are KV heads
    num_kv_heads: int
    kv_shard: tuple[int, int] = (0, 1)  # which part of all KV heads this is, of how many
    head_dim: int
    vocab_size: int
    hidden_size: int
    states_dtype: torch.dtype  # of what `forward` gives; a model that gives two, by number of tokens, takes both here
    softmax_scale: float
    windows: tuple[int, ...]  # by layer, tokens that a query sees, itself included; 0: all
    soft_cap: float  # of attention scores, 0: none
    # `[num_layers, num_heads]` float32: scores of attention sinks, -inf where a head has none.
    sinks: torch.Tensor | None = None
    latent_value_dim: int = 0  # elements of a latent that are V; all of it is K. 0: K and V are kept apart
    kv_variant: (
        str  # names what decides about KV beyond config.json and weights; KV is never exchanged between variants
    )

    @abstractmethod
    def load(self, files: ModelFiles, kernels: Kernels | None) -> None:
        """Reads the weights; what is quantised stays so if `kernels` compute with it. Raises `StartupError` that names
        what is wrong."""

    @abstractmethod
    def finish(self, kernels: Kernels | None) -> None:
        """Called once, when the weights are there. `kernels` are this machine's, None if torch has to do."""

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        between_layers: Callable[[], None],
    ) -> torch.Tensor:
        """Hidden states `[num_tokens, hidden_size]`, float32 or in the model's dtype.

        `token_ids` and `positions` are `[num_tokens]` int64; there is none if a data rank has no row in the step.
        `between_layers` is called after each layer,
        or after some short ones, so that a long step does not keep others waiting.
        """

    def forward_from(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        between_layers: Callable[[], None],
    ) -> torch.Tensor:
        """As `forward`, of a stage but the first: `hidden` is what the stage before gave. May overwrite it."""
        raise NotImplementedError(f"{type(self).__name__} has no stages")

    @abstractmethod
    def last_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """What transformers calls the last hidden state, `[num_tokens, hidden_size]`, from what `forward` gave."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, vocab_size]`, float32 or in the model's dtype."""

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each row `[num_tokens]` int64, the first of equal ones: for greedy sampling."""
        return self.logits(hidden).argmax(dim=-1)

    @abstractmethod
    def best_after_norm(self, states: torch.Tensor) -> torch.Tensor:
        """The same from what `last_states` gives. Of a model that no ranks share."""

    def keep_layer_inputs(self, layers: Sequence[int]) -> None:
        """From now on each `forward` keeps what these layers begin with, ascending. Raises `StartupError` if this model
        cannot."""
        raise StartupError(
            f"layers {list(layers)} cannot be asked what they begin with: Baton has no decoder of its own for this "
            "model (docs/models.md)"
        )

    def take_layer_inputs(self) -> torch.Tensor:
        """Of the last `forward`, side by side: `[num_tokens, number of layers * hidden_size]`."""
        raise RuntimeError("no inputs of layers are kept")

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, not scaled, `[num_tokens, hidden_size]`. Of a model that no ranks share."""


class ConfigReader:
    """Typed access to config.json; a value that is missing or of the wrong type is a `StartupError` naming its key."""

    def __init__(self, config: Mapping[str, object], where: str = "config.json") -> None:
        self._config = config
        self._where = where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong(key, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def pair(self, key: str) -> tuple[int, int] | None:
        """Two positive integers, or None if they are not set."""
        value = self._config.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(isinstance(each, int) and each > 0 for each in value)
        ):
            raise self._wrong(key, "a list of two positive integers")
        return value[0], value[1]

    def keys(self) -> list[str]:
        return list(self._config)

    def section(self, key: str) -> ConfigReader | None:
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return ConfigReader(value, f"{self._where}: {key}")

    def _get(self, key: str, default: object) -> object:
        value = self._config.get(key)  # null stands for "not set" there
        return default if value is None else value

    def _wrong(self, key: str, wanted: str) -> StartupError:
        return StartupError(f"{self._where}: {key} has to be {wanted}, not {self._config.get(key)!r}")
