"""Connectors by name: one line for each, and the one door to their packages.

A backend is imported when it is asked for, so that its library is needed only then. Settings need no library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from common.config import Settings
from common.errors import ConfigError
from kv_store.base import ConnectorConfig, KVConnector, own_part
from kv_store.lmcache.settings import LMCacheServerSettings, LMCacheSettings
from kv_store.nixl.settings import NixlSettings
from kv_store.shared_storage.settings import SharedStorageSettings


@dataclass(slots=True, frozen=True)
class _Entry:
    connector: str  # module:class
    about: str  # a word or two for help
    settings: type[Settings] | None = None  # of its own
    stack_settings: type[Settings] | None = None  # of what `baton up` starts for it
    is_store: bool = False  # as the class says, known without loading it
    is_for_fleets: bool = True  # workers on other hosts are reached, too


_CONNECTORS = {
    "shared_storage": _Entry(
        "kv_store.shared_storage.connector:SharedStorageConnector", "files", SharedStorageSettings, is_store=True
    ),
    "lmcache": _Entry(
        "kv_store.lmcache.connector:LMCacheConnector", "a server", LMCacheSettings, LMCacheServerSettings, is_store=True
    ),
    "nixl": _Entry("kv_store.nixl.connector:NixlConnector", "memory to memory", NixlSettings),
    "memory": _Entry("kv_store.memory:MemoryConnector", "inside one process, for tests", is_for_fleets=False),
}


def connector_names() -> list[str]:
    return sorted(_CONNECTORS)


def store_names() -> list[str]:
    return sorted(name for name, entry in _CONNECTORS.items() if entry.is_store)


def fleet_connector_names() -> list[str]:
    return sorted(name for name, entry in _CONNECTORS.items() if entry.is_for_fleets)


def connectors_in_words() -> str:
    """Each connector of a fleet and how it moves KV, for help."""
    return _in_words([f"{name} ({_CONNECTORS[name].about})" for name in fleet_connector_names()])


def stores_in_words() -> str:
    return _in_words(store_names())


def _in_words(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def settings_classes() -> list[type[Settings]]:
    """The settings classes of all connectors that have settings of their own."""
    return [entry.settings for entry in _CONNECTORS.values() if entry.settings is not None]


def stack_settings_classes() -> list[type[Settings]]:
    """The settings classes of what `baton up` starts for connectors."""
    return [entry.stack_settings for entry in _CONNECTORS.values() if entry.stack_settings is not None]


def lmcache_size_gb(section: Mapping[str, object]) -> float:
    """Memory in GiB of the LMCache server that `baton up` starts."""
    return own_part(section, LMCacheServerSettings).lmcache_size_gb


def lmcache_address(section: Mapping[str, object]) -> str | None:
    """The LMCache server that connectors' settings name; None if they name none."""
    return own_part(section, LMCacheSettings).lmcache_address


def kv_dir(section: Mapping[str, object]) -> str | None:
    """The directory for a store's files that connectors' settings name; None if they name none."""
    return own_part(section, SharedStorageSettings).kv_dir


def nixl_backends() -> list[str]:
    """Backends that the installed NIXL brings. Raises `StartupError` if NIXL is not installed."""
    from kv_store.nixl.agent import backends

    return backends()


def wait_for_lmcache(address: str, timeout_s: float) -> None:
    """Returns when the LMCache server at `address` answers. Raises `StartupError` if it does not within `timeout_s`."""
    from kv_store.lmcache.client import LMCacheClient

    LMCacheClient(address).wait_until_up(timeout_s)


def check_store(connector: str, store: str, key: str = "store") -> None:
    """Raises `ConfigError` for `key` if `store` cannot stand beside `connector`; empty is none beside it."""
    if store and store not in store_names():
        raise ConfigError(key, f"{store!r} is not one of {', '.join(store_names())}")
    if store and connector in store_names() and store != connector:
        raise ConfigError(key, f"connector {connector} is a store itself; take nixl to have {store} beside it")


def create_store(connector: str, store: str, config: ConnectorConfig, num_ranks: int = 1) -> KVConnector | None:
    """The store beside `connector`; None if there is none, or `connector` is it. Raises as `create_connector`."""
    check_store(connector, store)
    return create_connector(store, config, num_ranks) if store and store != connector else None


def create_connector(name: str, config: ConnectorConfig, num_ranks: int = 1) -> KVConnector:
    """Of a worker with so many ranks. Raises `ConfigError` for an unknown name and `StartupError` if the backend cannot
    work here."""
    found = connector_class(name)
    if num_ranks == 1:
        return found(config)
    from kv_store.ranks import join_connectors  # which loads numpy: a command's help has no need of it

    return join_connectors([found(config) for _ in range(num_ranks)])


def connector_class(name: str) -> type[KVConnector]:
    """Imports the backend. Raises `ConfigError` for an unknown name."""
    entry = _CONNECTORS.get(name)
    if entry is None:
        raise ConfigError("connector", f"{name!r} is not one of {', '.join(connector_names())}")
    module, _, name_in_module = entry.connector.partition(":")
    found: type[KVConnector] = getattr(import_module(module), name_in_module)
    return found
