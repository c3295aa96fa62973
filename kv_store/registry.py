"""Connectors by name. A backend is imported when it is asked for, so that its library is needed only then."""

from __future__ import annotations

from importlib import import_module

from common.errors import ConfigError
from kv_store.base import ConnectorConfig, KVConnector

_CONNECTORS = {
    "lmcache": "kv_store.lmcache:LMCacheConnector",
    "memory": "kv_store.memory:MemoryConnector",
    "nixl": "kv_store.nixl:NixlConnector",
    "shared_storage": "kv_store.shared_storage:SharedStorageConnector",
}


def connector_names() -> list[str]:
    return sorted(_CONNECTORS)


def create_connector(name: str, config: ConnectorConfig) -> KVConnector:
    """Raises `ConfigError` for an unknown name and `StartupError` where the backend cannot work here."""
    target = _CONNECTORS.get(name)
    if target is None:
        raise ConfigError("connector", f"{name!r} is not one of {', '.join(connector_names())}")
    module, _, attribute = target.partition(":")
    connector_class: type[KVConnector] = getattr(import_module(module), attribute)
    return connector_class(config)
