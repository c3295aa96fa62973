"""Connectors by name: one line for each. A backend is imported when it is asked for, so that its library is needed only
then; its settings before, which need no library."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from common.config import Settings
from common.errors import ConfigError
from kv_store.base import ConnectorConfig, KVConnector


@dataclass(slots=True, frozen=True)
class _Entry:
    connector: str  # module:class
    settings: str = ""  # the same, of its own settings; none if empty
    is_store: bool = False  # as the class says, known without loading it
    is_for_fleets: bool = True  # workers on other hosts are reached, too


_CONNECTORS = {
    "shared_storage": _Entry(
        "kv_store.shared_storage.connector:SharedStorageConnector",
        "kv_store.shared_storage.settings:SharedStorageSettings",
        is_store=True,
    ),
    "lmcache": _Entry(
        "kv_store.lmcache.connector:LMCacheConnector", "kv_store.lmcache.settings:LMCacheSettings", is_store=True
    ),
    "nixl": _Entry("kv_store.nixl.connector:NixlConnector", "kv_store.nixl.settings:NixlSettings"),
    "memory": _Entry("kv_store.memory:MemoryConnector", is_for_fleets=False),
}


def connector_names() -> list[str]:
    return sorted(_CONNECTORS)


def store_names() -> list[str]:
    return sorted(name for name, entry in _CONNECTORS.items() if entry.is_store)


def fleet_connector_names() -> list[str]:
    return sorted(name for name, entry in _CONNECTORS.items() if entry.is_for_fleets)


def settings_classes() -> list[type[Settings]]:
    """Of all connectors that have settings of their own."""
    return [_loaded(entry.settings) for entry in _CONNECTORS.values() if entry.settings]


def check_store(connector: str, store: str, key: str = "store") -> None:
    """Raises `ConfigError` for `key` if `store` cannot stand beside `connector`; empty is none beside it."""
    if store and store not in store_names():
        raise ConfigError(key, f"{store!r} is not one of {', '.join(store_names())}")
    if store and connector in store_names() and store != connector:
        raise ConfigError(key, f"connector {connector} is a store itself; take nixl to have {store} beside it")


def create_store(connector: str, store: str, config: ConnectorConfig) -> KVConnector | None:
    """The store beside `connector`; None if there is none, or `connector` is it. Raises as `create_connector`."""
    check_store(connector, store)
    return create_connector(store, config) if store and store != connector else None


def create_connector(name: str, config: ConnectorConfig) -> KVConnector:
    """Raises `ConfigError` for an unknown name and `StartupError` if the backend cannot work here."""
    entry = _CONNECTORS.get(name)
    if entry is None:
        raise ConfigError("connector", f"{name!r} is not one of {', '.join(connector_names())}")
    connector_class: type[KVConnector] = _loaded(entry.connector)
    return connector_class(config)


def _loaded(target: str) -> Any:
    """The class `module:class`."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
