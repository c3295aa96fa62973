"""The schema is current, and every value of the chart is in it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from baton.settings import WORKER_SETTINGS
from common.config import RouterSettings
from kv_store import registry
from tests.helm.chart import CHART
from tools import values_schema


def test_schema_is_current() -> None:
    assert values_schema.PATH.read_text() == values_schema.text(), "run: python -m tools.values_schema --write"


def test_every_default_is_in_the_schema_and_the_other_way_round() -> None:
    """A value without a default cannot be found by reading values.yaml."""
    schema = values_schema.values_schema()

    def compare(values: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        if "additionalProperties" not in schema or schema["additionalProperties"] is not False:
            return
        assert set(values) == set(schema["properties"]) - {"global"}, path
        for name, value in values.items():
            below = schema["properties"][name]
            if "$ref" in below:
                below = definitions[below["$ref"].rpartition("/")[2]]
            if isinstance(value, dict) and name not in ("settings", "resources"):
                compare(value, below, f"{path}.{name}")

    definitions = schema["definitions"]
    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


def test_a_connector_is_in_the_schema_when_it_is_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    def kv() -> dict[str, Any]:
        properties: dict[str, Any] = values_schema.values_schema()["properties"]["kv"]["properties"]
        return properties

    assert kv()["connector"]["enum"] == ["lmcache", "nixl", "shared_storage"]  # memory is within one process
    assert kv()["store"]["enum"] == ["", "lmcache", "shared_storage"]
    monkeypatch.setitem(registry._CONNECTORS, "postal", registry._Entry("m:C", "by post"))
    assert "postal" in kv()["connector"]["enum"]
    assert "postal" not in kv()["store"]["enum"]
    monkeypatch.setitem(registry._CONNECTORS, "postal", registry._Entry("m:C", "by post", is_store=True))
    assert "postal" in kv()["store"]["enum"]


def test_settings_are_offered_unless_the_chart_decides_them() -> None:
    definitions = values_schema.values_schema()["definitions"]
    worker = set(definitions["workerSettings"]["properties"]) | set(definitions["connectorSettings"]["properties"])
    assert set(WORKER_SETTINGS.model_fields) - worker == {
        "listen", "advertise", "drain_timeout", "metrics_port", "connector", "store", "kv_dir", "model",
        "served_model_name", "dtype", "log_level", "log_format",
        "tls_cert", "tls_key", "tls_ca", "tls_server_name", "health_listen", "trace_endpoint", "trace_protocol",
        "metrics_aliases", "num_hosts", "host_index", "ranks_address", "ranks_secret_file",
    }  # fmt: skip
    router = set(definitions["routerSettings"]["properties"])
    assert set(RouterSettings.model_fields) - router == {
        "prefill", "decode", "http_listen", "grpc_listen", "drain_timeout", "log_level", "log_format",
        "tls_cert", "tls_key", "tls_ca", "tls_server_name", "tls_client_ca", "health_listen", "api_keys_file",
        "limits_file", "metrics_aliases", "processes", "trace_endpoint", "trace_protocol", "trace_sample",
        "trace_content",
        "endpoint_picker_listen", "endpoint_picker_address", "endpoint_picker_replicas", "endpoint_picker_key_file",
        "endpoint_picker_tls",
        "batch_file", "response_file",
    }  # fmt: skip
