"""A connector is a line of the registry: its name, its flags and its part of the settings follow from that."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import ClassVar, cast

import pytest

from baton.cli.options import GROUPS, setting_options
from baton.settings import UP_SETTINGS, WORKER_SETTINGS, load, to_flags, with_connectors
from common.config import Settings, WorkerSettings
from common.errors import ConfigError, StartupError
from kv_store import registry
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from kv_store.shared_storage.settings import SharedStorageSettings


class PostalSettings(Settings):
    postal_code: str = "00000"


class PostalConnector(MemoryConnector):
    name: ClassVar[str] = "postal"

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.own = config.own(PostalSettings)


@pytest.fixture
def settings_class(monkeypatch: pytest.MonkeyPatch) -> type[WorkerSettings]:
    entry = registry._Entry(f"{__name__}:PostalConnector", "by post", PostalSettings)
    monkeypatch.setitem(registry._CONNECTORS, "postal", entry)
    monkeypatch.setitem(cast("dict[object, str]", GROUPS), PostalSettings, "KV blocks")
    return with_connectors(WorkerSettings)


def test_a_new_connector_has_flags_a_variable_and_a_yaml_key(
    settings_class: type[WorkerSettings], tmp_path: Path
) -> None:
    assert "--postal-code" in {option.opts[0] for option in setting_options(settings_class)}
    (tmp_path / "baton.yaml").write_text("postal_code: '10115'\nconnector: postal\n")
    settings = load(settings_class, {}, environ={}, config=str(tmp_path / "baton.yaml"))
    assert to_flags(settings) == ["--connector=postal", "--postal-code=10115"]
    with pytest.raises(ConfigError, match=r"postal_code in .*: no such setting"):
        load(WORKER_SETTINGS, {}, environ={}, config=str(tmp_path / "baton.yaml"))


def test_it_gets_its_own_part_in_the_engine_process(settings_class: type[WorkerSettings]) -> None:
    given = settings_class.model_validate({"connector": "postal", "postal_code": "10115", "kv_dir": "/kv"})
    read = WorkerSettings.model_validate_json(given.model_dump_json())  # as the engine's process does
    config = ConnectorConfig(section=read.model_extra or {})
    connector = registry.create_connector(read.connector, config)
    assert isinstance(connector, PostalConnector)
    assert connector.own == PostalSettings(postal_code="10115")
    assert config.own(SharedStorageSettings).kv_dir == "/kv"
    assert config.own(SharedStorageSettings).kv_dir_size_gb is None


@pytest.mark.usefixtures("settings_class")
def test_help_names_it() -> None:
    assert registry.connectors_in_words().endswith(", postal (by post) or shared_storage (files)")
    assert "postal" not in registry.stores_in_words()


def test_only_a_stack_takes_the_settings_of_what_it_starts_for_a_connector() -> None:
    stack = load(UP_SETTINGS, {"lmcache_size_gb": "2"}, environ={})
    assert registry.lmcache_size_gb(stack.model_dump()) == 2
    with pytest.raises(ConfigError, match="--lmcache-size-gb"):
        load(WORKER_SETTINGS, {"lmcache_size_gb": "2"}, environ={})


def test_what_no_connector_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="--zip-code"):
        load(WORKER_SETTINGS, {"zip_code": "1"}, environ={})


def test_who_waits_for_an_lmcache_server_hears_that_none_answers() -> None:
    with pytest.raises(StartupError, match=r"no LMCache server answers at '127\.0\.0\.1:1'"):
        registry.wait_for_lmcache("127.0.0.1:1", timeout_s=0.05)


@pytest.mark.parametrize("name", registry.connector_names())
def test_what_the_registry_says_of_a_connector_is_so(name: str) -> None:
    connector = pkgutil.resolve_name(registry._CONNECTORS[name].connector)
    assert connector.name == name
    assert connector.is_store == (name in registry.store_names())
