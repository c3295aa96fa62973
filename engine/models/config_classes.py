"""transformers' classes for config.json, imported without what only its models need."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ACTIVATIONS = "transformers.activations"
_VALIDATORS = "transformers.utils.type_validators"


def find_config_class(model_type: str) -> type[PreTrainedConfig]:
    """The class of config.json's `model_type`. Raises `KeyError` if transformers has none."""
    if _ACTIVATIONS not in sys.modules and _VALIDATORS not in sys.modules:
        _import_validators()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    return found


def _import_validators() -> None:
    """Imports the validators of config.json's values without the activation functions.

    LlamaConfig has a validator. The module of all validators imports the activation functions, whose names one of them
    checks. Those bring torch.distributed, accelerate and text generation: 1.2 s of CPU and 900 modules at each start of
    an engine. Here the functions are imported once that validator looks at them; LlamaConfig does not use it.
    """
    importlib.import_module("transformers.utils")
    later = _Later(_ACTIVATIONS)
    sys.modules[_ACTIVATIONS] = later
    try:
        importlib.import_module(_VALIDATORS)
    finally:
        later.make_way()


class _Later(ModuleType):
    """Stands for a module that is imported once something of it is used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ACT2FN = _Activations()

    def make_way(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # the import system asks for some that it may lack
            raise AttributeError(name)
        self.make_way()
        return getattr(importlib.import_module(self.__name__), name)


class _Activations(Mapping[str, object]):
    """transformers' activation functions by name."""

    def _all(self) -> Mapping[str, object]:
        found: Mapping[str, object] = importlib.import_module(_ACTIVATIONS).ACT2FN
        return found

    def __getitem__(self, name: str) -> object:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
