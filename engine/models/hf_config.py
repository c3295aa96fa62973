"""config.json through transformers' own classes, so that defaults and old spellings are those of the reference.

A flag that transformers knows and Baton does not honour is refused by name, unless it has the value that it has anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import StartupError
from engine.models.base import ConfigReader
from engine.models.config_classes import find_config_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What says nothing about the computation of a token.
_WITHOUT_EFFECT = frozenset(
    {"initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp"}
    | {"attention_dropout", "resid_pdrop", "embd_pdrop", "output_router_logits", "router_aux_loss_coef"}
    | {"router_jitter_noise", "max_position_embeddings"}
)
HONOURED = frozenset(
    {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    | {"num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"}
    | {"hidden_act", "original_max_position_embeddings"}
)
# Of a class that does not know them these do not even reach its attributes.
_REFUSED = ("quantization_config", "adapter_config")


@dataclass(slots=True, frozen=True)
class HFConfig:
    """config.json as the class of transformers understands it."""

    raw: PreTrainedConfig
    values: ConfigReader

    @property
    def max_positions(self) -> int:
        """Longest sequence in tokens that the model was made for."""
        return self.values.integer("max_position_embeddings")

    def flag(self, name: str) -> object:
        return getattr(self.raw, name, None)


def read_hf_config(
    config: Mapping[str, object], model_type: str, honoured: Collection[str], known_elsewhere: Collection[str]
) -> HFConfig:
    """`honoured` are the flags that this architecture's description reads, beside `HONOURED`; `known_elsewhere` those
    of other architectures, which are refused here if they are set. Raises `StartupError` with one line that names a
    flag.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    for name in _REFUSED:
        if config.get(name):
            raise StartupError(f"config.json: {name} is not supported; take a checkpoint without it")
    config_class = find_config_class(model_type)
    try:
        raw = config_class.from_dict(dict(config))
        plain = config_class()
    except Exception as error:  # of many classes, some of them private
        raise StartupError(f"config.json: {' '.join(str(error).split())}") from error
    declared = _declared(config_class)
    honoured = HONOURED | set(honoured)
    for name in sorted(declared - honoured - _WITHOUT_EFFECT):
        value = getattr(raw, name, None)
        if value and value != getattr(plain, name, None):
            raise StartupError(f"config.json: {name} {value!r} is not supported by this architecture")
    # Checkpoints of Qwen say `max_window_layers` although they have no windows.
    others = (set(known_elsewhere) | {"layer_types"}) - (
        set() if config.get("use_sliding_window") else {"max_window_layers"}
    )
    for name in sorted(others - declared - honoured):
        if config.get(name):
            raise StartupError(f"config.json: {name} {config[name]!r} is not known to model type {model_type}")
    return HFConfig(raw, ConfigReader({name: getattr(raw, name, None) for name in declared | {"head_dim"}}))


def _declared(config_class: type[PreTrainedConfig]) -> set[str]:
    """Flags that the class itself declares, without the flags of every class."""
    from transformers import PreTrainedConfig

    names: set[str] = set()
    for each in config_class.__mro__:
        if issubclass(each, PreTrainedConfig) and each is not PreTrainedConfig:
            names |= set(inspect.get_annotations(each))
    return names
