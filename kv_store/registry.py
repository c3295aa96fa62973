"""Connectors by name. A backend is imported when it is asked for, so that its library is needed only then."""

from __future__ import annotations

from importlib import import_module

from common.errors import ConfigError
from kv_store.base import ConnectorConfig, KVConnector

_CONNECTORS = {
    "lmcache": "kv_store.lmcache.connector:LMCacheConnector",
    "memory": "kv_store.memory:MemoryConnector",
    "nixl": "kv_store.nixl.connector:NixlConnector",
    "shared_storage": "kv_store.shared_storage.connector:SharedStorageConnector",
}
_STORES = ("lmcache", "shared_storage")  # `is_store`, known without loading them


def connector_names() -> list[str]:
    return sorted(_CONNECTORS)


def check_store(connector: str, store: str, key: str = "store") -> None:
    """Raises `ConfigError` for `key` where `store` cannot stand beside `connector`; empty is none beside it."""
    if store and store not in _STORES:
        raise ConfigError(key, f"{store!r} is not one of {', '.join(_STORES)}")
    if store and connector in _STORES and store != connector:
        raise ConfigError(key, f"connector {connector} is a store itself; take nixl to have {store} beside it")


def create_store(connector: str, store: str, config: ConnectorConfig) -> KVConnector | None:
    """The store beside `connector`; None where there is none, or `connector` is it. Raises as `create_connector`."""
    check_store(connector, store)
    return create_connector(store, config) if store and store != connector else None


def create_connector(name: str, config: ConnectorConfig) -> KVConnector:
    """Raises `ConfigError` for an unknown name and `StartupError` where the backend cannot work here."""
    target = _CONNECTORS.get(name)
    if target is None:
        raise ConfigError("connector", f"{name!r} is not one of {', '.join(connector_names())}")
    module, _, attribute = target.partition(":")
    connector_class: type[KVConnector] = getattr(import_module(module), attribute)
    return connector_class(config)
