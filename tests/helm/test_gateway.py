"""The chart's InferencePool, and the endpoint picker behind it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from tests.helm.chart import CHART, HELM, Object, arguments, find, helm, pod_spec, render, settings_of
from tests.helm.test_examples import closed

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed")

INFERENCE_POOLS = Path(__file__).parent / "crds" / "inferencepools.yaml"
CRD_VARIABLE = "INFERENCE_POOL_CRD"  # the extension's own definition, to be asked in place of the one here
PICKER = {"enabled": True, "parentRefs": [{"name": "edge"}], "endpointPicker": {"enabled": True}}


def schema() -> dict[str, Any]:
    definition = yaml.safe_load(Path(os.environ.get(CRD_VARIABLE, INFERENCE_POOLS)).read_text())
    [version] = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    assert definition["spec"]["names"]["kind"] == "InferencePool"
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render({"gateway": PICKER})


def test_the_pool_is_valid(objects: list[Object]) -> None:
    pool = find(objects, "InferencePool", "demo-baton-router")
    jsonschema.validate(pool, closed(schema()))
    spec = pool["spec"]
    for path, value in (
        (("endpointPickerRef", "failureMode"), "FailSoft"),
        (("endpointPickerRef", "port"), {"number": 0}),
        (("targetPorts",), []),
        (("selector",), {"app": "x"}),
    ):
        wrong = {**pool, "spec": {**spec, path[0]: value if len(path) == 1 else {**spec[path[0]], path[1]: value}}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, closed(schema()))


def test_the_pool_has_the_routers_and_their_picker(objects: list[Object]) -> None:
    spec = find(objects, "InferencePool", "demo-baton-router")["spec"]
    labels = find(objects, "Deployment", "demo-baton-router")["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    [container] = pod_spec(objects, "demo-baton-router")["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    settings = settings_of(objects, "demo-baton-router")
    assert spec["targetPorts"] == [{"number": ports["http"]}]
    assert f"--endpoint-picker-address=$(POD_IP):{ports['http']}" in container["args"]
    assert settings["endpoint_picker_listen"].endswith(f":{ports['picker']}")
    assert settings["endpoint_picker_replicas"] == "k8s:///prod/demo-baton-router:http"

    service = find(objects, "Service", spec["endpointPickerRef"]["name"])["spec"]
    assert service["selector"].items() <= labels.items()
    [port] = service["ports"]
    assert (port["port"], port["targetPort"]) == (spec["endpointPickerRef"]["port"]["number"], "picker")
    assert port["appProtocol"] == "kubernetes.io/h2c"

    secret = find(objects, "Secret", "demo-baton-endpoint-picker")
    [volume] = [
        one["secret"]
        for one in pod_spec(objects, "demo-baton-router")["volumes"]
        if one.get("secret", {}).get("secretName") == secret["metadata"]["name"]
    ]
    [mount] = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "picker"]
    assert settings["endpoint_picker_key_file"] == f"{mount}/{volume['items'][0]['path']}"
    assert volume["items"][0]["key"] in secret["data"]

    [policy] = [
        one for one in objects if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "demo-baton-router"
    ]
    assert {"port": "picker"} in policy["spec"]["ingress"][0]["ports"]


def test_http_goes_by_the_pool_and_grpc_by_the_service(objects: list[Object]) -> None:
    [rule] = find(objects, "HTTPRoute", "demo-baton-router")["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "demo-baton-router"}
    ]
    [rule] = find(objects, "GRPCRoute", "demo-baton-router")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "demo-baton-router", "port": 50051}]


def test_without_a_picker_there_is_nothing_of_it() -> None:
    assert "icker" not in json.dumps(render({"gateway": {"enabled": True, "parentRefs": [{"name": "edge"}]}}))


def test_a_secret_and_a_certificate_of_yours() -> None:
    picker = {"enabled": True, "existingSecret": "mine", "tls": "router"}
    rendered = render({"gateway": {**PICKER, "endpointPicker": picker}, "tls.enabled": True})
    assert not [one for one in rendered if one["kind"] == "Secret" and "picker" in one["metadata"]["name"]]
    assert '"secretName": "mine"' in json.dumps(pod_spec(rendered, "demo-baton-router"))
    assert settings_of(rendered, "demo-baton-router")["endpoint_picker_tls"] == "router"
    done = helm("template", "demo", str(CHART), *arguments({"gateway.endpointPicker": picker}))
    assert "gateway.endpointPicker.tls: router is for tls.enabled" in done.stderr
