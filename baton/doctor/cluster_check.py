"""Whether a Kubernetes cluster can be reached from here, and what we may do there: one part of `baton doctor`."""

from __future__ import annotations

import asyncio
import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import BatonError
from router.fleet.discovery.kubernetes import ApiServer, Json, own_namespace

TIMEOUT_S = 5.0  # for all requests together
POD = "this pod's service account"


@dataclass(slots=True, frozen=True)
class Right:
    verb: str
    group: str  # of the API; empty: the core
    resource: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


# What a router does (`k8s:///`), which the chart's Role gives it.
ROUTER = (Right("list", "discovery.k8s.io", "endpointslices"), Right("watch", "discovery.k8s.io", "endpointslices"))
# What `helm install` does. Nobody can give a role rights that they lack, so the router's are among them.
INSTALL = (
    Right("create", "apps", "deployments"),
    Right("create", "", "services"),
    Right("create", "", "configmaps"),
    Right("create", "", "secrets"),  # where helm keeps its releases
    Right("create", "", "serviceaccounts"),
    Right("create", "rbac.authorization.k8s.io", "roles"),
    Right("create", "rbac.authorization.k8s.io", "rolebindings"),
    *ROUTER,
)


@dataclass(slots=True, frozen=True)
class Cluster:
    access: str  # where the credentials come from; empty: there are none
    namespace: str = ""
    version: str = ""  # empty: the server did not answer
    allowed: tuple[Right, ...] = ()
    missing: tuple[Right, ...] = ()  # of those that are needed here
    error: str = ""


def look(timeout_s: float = TIMEOUT_S) -> Cluster:
    """Never raises for what it finds. Takes `timeout_s` at most, and no time if there are no credentials."""
    access = find_access()
    if not access:
        return Cluster("")
    try:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            return runner.run(_ask(access, timeout_s))
    except TimeoutError:
        return Cluster(access, error=f"the API server did not answer within {timeout_s:g} s")
    except BatonError as error:
        return Cluster(access, error=error.message)
    except Exception as error:  # a kubeconfig may hold anything, and its readers raise what they like
        return Cluster(access, error=f"cannot be used: {error!r}")


class _Loop(asyncio.SelectorEventLoop):
    """Ends the processes that it started: the Kubernetes client would leave a plugin for credentials behind."""

    def __init__(self) -> None:
        super().__init__()
        self._children: list[asyncio.SubprocessTransport] = []

    async def subprocess_exec(self, *args: Any, **options: Any) -> Any:
        transport, protocol = await super().subprocess_exec(*args, **options)
        self._children.append(transport)
        return transport, protocol

    def close(self) -> None:
        self.run_until_complete(self._end_children())
        super().close()

    async def _end_children(self) -> None:
        for transport in self._children:
            if transport.get_returncode() is None:
                transport.kill()
            while transport.get_returncode() is None:  # noqa: ASYNC110 (a transport cannot be awaited)
                await asyncio.sleep(0.01)
            transport.close()


def find_access() -> str:
    """What `ApiServer.connect` would read."""
    kubeconfig = os.environ.get("KUBECONFIG")
    if kubeconfig:
        return f"KUBECONFIG={kubeconfig}"
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return POD
    default = Path("~/.kube/config")
    return str(default) if default.expanduser().exists() else ""


async def _ask(access: str, timeout_s: float) -> Cluster:
    async with asyncio.timeout(timeout_s):
        api = await ApiServer.connect()  # runs the credentials' plugin, if they name one
        try:
            version = str((await api.request("GET", "/version")).get("gitVersion", "unknown"))
            is_pod = access == POD
            namespace = own_namespace() if is_pod else _namespace_of_context()
            needed = ROUTER if is_pod else INSTALL
            answers = await asyncio.gather(*(_may(api, namespace, right) for right in needed))
        finally:
            await api.close()
    allowed = tuple(right for right, may in zip(needed, answers, strict=True) if may)
    return Cluster(access, namespace, version, allowed, tuple(right for right in needed if right not in allowed))


async def _may(api: ApiServer, namespace: str, right: Right) -> bool:
    attributes = {"namespace": namespace, "verb": right.verb, "group": right.group, "resource": right.resource}
    body: Json = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await api.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=body)
    status = answer.get("status")
    return isinstance(status, dict) and status.get("allowed") is True


def _namespace_of_context() -> str:
    """Where kubectl and helm act without `--namespace`."""
    config = importlib.import_module("kubernetes.aio.config")
    _, active = config.list_kube_config_contexts(config_file=os.environ.get("KUBECONFIG") or "~/.kube/config")
    return str(active["context"].get("namespace") or "default")
