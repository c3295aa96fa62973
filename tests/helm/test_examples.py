"""The examples beside the chart: what they start exists, and the objects are valid."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from baton.cli.main import GROUP

EXAMPLES = Path(__file__).parents[2] / "helm" / "examples"
CRDS_VARIABLE = "KSERVE_CRDS"  # a folder with KServe's CustomResourceDefinitions


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def test_kserve_starts_a_stack_on_the_ports_that_it_asks() -> None:
    runtime, service = objects("kserve.yaml")
    [container] = runtime["spec"]["containers"]
    assert container["command"] == ["baton", "up"]
    with click.Context(GROUP) as context:
        command = GROUP.get_command(context, "up")
        assert command is not None
        given, rest, _ = command.make_parser(click.Context(command)).parse_args(list(container["args"]))
    assert not rest
    [port] = container["ports"]
    assert int(given["http_port"]) == port["containerPort"] == container["readinessProbe"]["httpGet"]["port"]
    predictor = service["spec"]["predictor"]["model"]
    assert predictor["runtime"] == runtime["metadata"]["name"]
    assert predictor["protocolVersion"] in runtime["spec"]["protocolVersions"]
    known = {one["name"] for one in runtime["spec"]["supportedModelFormats"]}
    assert predictor["modelFormat"]["name"] in known


@pytest.mark.skipif(CRDS_VARIABLE not in os.environ, reason=f"{CRDS_VARIABLE} names no folder with KServe's CRDs")
def test_kserve_takes_the_objects() -> None:
    definitions = [yaml.safe_load(path.read_text()) for path in sorted(Path(os.environ[CRDS_VARIABLE]).glob("*.yaml"))]
    for one in objects("kserve.yaml"):
        group, _, version = one["apiVersion"].partition("/")
        [schema] = [
            served["schema"]["openAPIV3Schema"]
            for definition in definitions
            if (definition["spec"]["group"], definition["spec"]["names"]["kind"]) == (group, one["kind"])
            for served in definition["spec"]["versions"]
            if served["name"] == version
        ]
        jsonschema.validate(one, closed(schema))


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """An API server drops fields that a schema does not name; here they are errors."""
    made = {
        name: {key: closed(value) for key, value in inner.items()} if name == "properties" else inner
        for name, inner in schema.items()
    }
    if isinstance(made.get("items"), dict):
        made["items"] = closed(made["items"])
    preserves = made.get("x-kubernetes-preserve-unknown-fields") or made.get("x-kubernetes-int-or-string")
    if made.get("type") == "object" and "properties" in made and not preserves:
        made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made
