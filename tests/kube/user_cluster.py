"""A cluster that the user has: only ever used when they said so, and only inside namespaces made for the test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.kube.control_plane import Kubectl, tool

MAY_USE_VARIABLE = "KUBE_TESTS_MAY_USE"  # the name of the context that the user allowed


class UserCluster(Kubectl):
    """Nodes must have the images already: `kind load`, `minikube image load`, or a registry."""

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__(kubeconfig)
        self._forwards: list[subprocess.Popen[str]] = []

    def forward(self, service: str, port: int) -> int:
        """A port on 127.0.0.1 that leads to one pod of a Service (`name.namespace`)."""
        name, _, namespace = service.partition(".")
        process = subprocess.Popen(
            [tool("kubectl"), "-n", namespace, "port-forward", f"service/{name}", f":{port}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
        )
        self._forwards.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        if found is None:
            raise RuntimeError(f"kubectl port-forward {service}: {line!r}")
        return int(found.group(1))

    def load_image(self, archive: Path) -> None:
        """Nothing to do: see the class."""

    def close(self) -> None:
        for process in self._forwards:
            process.terminate()
            process.communicate()


def current_context(kubeconfig: Path) -> str:
    """Name of the context that KUBECONFIG selects, and the server behind it, for the question to the user."""
    view = json.loads(Kubectl(kubeconfig).kubectl("config", "view", "--minify", "-o", "json"))
    return f"{view['current-context']} at {view['clusters'][0]['cluster']['server']}"


def ask_to_use(kubeconfig: Path, answer: Callable[[str], str] | None) -> str:
    """The context that the user allows, for MAY_USE_VARIABLE; empty if they do not. `answer` puts a question to
    them; None if nobody is there."""
    context = current_context(kubeconfig)
    question = f"Install Baton in namespaces of its own on {context}, test it, and remove it again? [y/N] "
    if answer is not None and answer(question).strip().lower() in ("y", "yes"):
        return context
    print(f"left alone: {context}; a local cluster is used instead", file=sys.stderr)
    return ""


def allowed_cluster(environ: Mapping[str, str]) -> UserCluster | None:
    """The cluster that its user allowed, if any. Raises RuntimeError if KUBECONFIG selects another one by now."""
    allowed, kubeconfig = environ.get(MAY_USE_VARIABLE), environ.get("KUBECONFIG")
    if not allowed or not kubeconfig:
        return None
    context = current_context(Path(kubeconfig))
    if context != allowed:
        raise RuntimeError(f"{MAY_USE_VARIABLE} is {allowed!r}, but KUBECONFIG selects {context!r}")
    return UserCluster(Path(kubeconfig))
