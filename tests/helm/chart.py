"""Runs helm on the chart."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "helm"
HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
MODES = ("external-metrics", "prometheus-adapter", "keda", "planner", "none")
Object = dict[str, Any]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if PyYAML was built with libyaml


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    environ = {**os.environ, "GOGC": "off"}  # to collect garbage takes a quarter of such a short life
    return subprocess.run([HELM, *args], capture_output=True, text=True, check=False, timeout=60, env=environ)


def arguments(values: dict[str, object] | None = None, file: str | None = None) -> list[str]:
    """Command line for a values file of the chart and for values by dotted path, as JSON."""
    args = ["-f", str(CHART / file)] if file else []
    for path, value in (values or {}).items():
        args += ["--set-json", f"{path}={json.dumps(value)}"]
    return args


def render(
    values: dict[str, object] | None = None, *, file: str | None = None, kube: str = "1.34.0", release: str = "demo"
) -> list[Object]:
    """Every object of a release in namespace `prod`."""
    options = ("-n", "prod", "--kube-version", kube, *arguments(values, file))
    objects: list[Object] = json.loads(_rendered("template", release, str(CHART), *options))
    return objects


@functools.cache
def _rendered(*args: str) -> str:
    """As JSON, which is read much faster."""
    done = helm(*args)
    assert done.returncode == 0, done.stderr
    return json.dumps([document for document in yaml.load_all(done.stdout, _LOADER) if document])


def find(objects: list[Object], kind: str, name: str) -> Object:
    found = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    assert len(found) == 1, f"{len(found)} objects {kind}/{name}"
    return found[0]


def settings_of(objects: list[Object], name: str) -> Object:
    """What the process reads from its ConfigMap."""
    document = yaml.safe_load(find(objects, "ConfigMap", name)["data"]["settings.yaml"])
    assert isinstance(document, dict)
    return document


def pod_spec(objects: list[Object], name: str, kind: str = "Deployment") -> Object:
    spec: Object = find(objects, kind, name)["spec"]["template"]["spec"]
    return spec
