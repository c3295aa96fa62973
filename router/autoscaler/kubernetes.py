"""Everything that the autoscaler reads from a cluster and writes to it."""

from __future__ import annotations

import base64
import json
import logging
from dataclasses import dataclass

from common.errors import ConfigError, StartupError
from router.autoscaler.external_metrics import GROUP_VERSION
from router.autoscaler.tls import FrontProxy, merged_bundle
from router.fleet.discovery.kubernetes import ApiServer, Json, KubernetesError

log = logging.getLogger(__name__)

API_SERVICE = "/apis/apiregistration.k8s.io/v1/apiservices/" + ".".join(reversed(GROUP_VERSION.split("/")))
AUTHENTICATION = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
CONFLICT, NOT_FOUND = 409, 404

_KINDS = {
    "deployment": "/apis/apps/v1/namespaces/{namespace}/deployments/{name}",
    "statefulset": "/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}",
    "leaderworkerset": "/apis/leaderworkerset.x-k8s.io/v1/namespaces/{namespace}/leaderworkersets/{name}",
}


@dataclass(slots=True, frozen=True)
class Workload:
    """What holds the replicas of one role."""

    kind: str
    name: str

    @classmethod
    def parse(cls, text: str, key: str) -> Workload:
        """`deployment/NAME` and the like. Raises `ConfigError` naming `key`."""
        kind, _, name = text.partition("/")
        if kind not in _KINDS or not name:
            raise ConfigError(key, f"{text!r} is none of " + ", ".join(f"{one}/NAME" for one in _KINDS))
        return cls(kind, name)


@dataclass(slots=True, frozen=True)
class Lease:
    """A coordination.k8s.io Lease. `version` is None if it does not exist yet."""

    holder: str
    renewed: str  # as written by the holder: compared, never read as a time
    duration_s: int
    transitions: int
    version: str | None


class Cluster:
    """One namespace of a cluster. Every method raises `KubernetesError` if the API server refuses or is away."""

    def __init__(self, api: ApiServer, namespace: str) -> None:
        self._api = api
        self.namespace = namespace

    async def front_proxy(self) -> FrontProxy:
        """Raises `StartupError` if the cluster has no aggregation layer."""
        data = (await self._api.request("GET", AUTHENTICATION)).get("data") or {}
        ca = data.get("requestheader-client-ca-file")
        if not ca:
            raise StartupError("the cluster names no requestheader-client-ca-file: its API server does not aggregate")
        return FrontProxy(ca, frozenset(json.loads(data.get("requestheader-allowed-names") or "[]")))

    async def trust(self, certificate: bytes) -> bool:
        """Makes sure that the APIService's CA bundle holds `certificate`; True if it had to be added.

        Raises `KubernetesError` with status 409 if somebody else changed the bundle meanwhile: try again.
        """
        service = await self._api.request("GET", API_SERVICE)
        bundle = base64.b64decode(service["spec"].get("caBundle") or "")
        merged = merged_bundle(bundle, certificate)
        if merged == bundle:
            return False
        await self._api.patch(
            API_SERVICE,
            {
                "metadata": {"resourceVersion": service["metadata"]["resourceVersion"]},
                "spec": {"caBundle": base64.b64encode(merged).decode(), "insecureSkipTLSVerify": False},
            },
        )
        return True

    async def replicas(self, workload: Workload) -> int:
        """What its owner is told to have, whether or not it has it yet."""
        scale = await self._api.request("GET", self._path(workload) + "/scale")
        return int((scale.get("spec") or {}).get("replicas") or 0)

    async def scale(self, workload: Workload, replicas: int) -> None:
        await self._api.patch(self._path(workload) + "/scale", {"spec": {"replicas": replicas}})

    async def set_deletion_cost(self, pod: str, cost: int) -> bool:
        """Pods with the least cost go first. False if the pod is gone."""
        body: Json = {"metadata": {"annotations": {DELETION_COST: str(cost)}}}
        try:
            await self._api.patch(f"/api/v1/namespaces/{self.namespace}/pods/{pod}", body)
        except KubernetesError as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return True

    async def read_lease(self, name: str) -> Lease | None:
        try:
            answer = await self._api.request("GET", f"{self._leases}/{name}")
        except KubernetesError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        spec = answer.get("spec") or {}
        return Lease(
            holder=spec.get("holderIdentity") or "",
            renewed=spec.get("renewTime") or "",
            duration_s=int(spec.get("leaseDurationSeconds") or 0),
            transitions=int(spec.get("leaseTransitions") or 0),
            version=answer["metadata"]["resourceVersion"],
        )

    async def write_lease(self, name: str, lease: Lease) -> bool:
        """Creates it, or changes the version that `lease` names. False if somebody else was faster."""
        spec: Json = {
            "holderIdentity": lease.holder,
            "renewTime": lease.renewed,
            "leaseDurationSeconds": lease.duration_s,
            "leaseTransitions": lease.transitions,
        }
        try:
            if lease.version is None:
                metadata: Json = {"name": name, "namespace": self.namespace}
                body: Json = {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": metadata,
                    "spec": spec,
                }
                await self._api.request("POST", self._leases, body=body)
            else:
                # Not replaced: whoever made it, as the chart does, has labels on it.
                metadata = {"resourceVersion": lease.version}
                await self._api.patch(f"{self._leases}/{name}", {"metadata": metadata, "spec": spec})
        except KubernetesError as error:
            if error.status == CONFLICT:
                return False
            raise
        return True

    @property
    def _leases(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"

    def _path(self, workload: Workload) -> str:
        return _KINDS[workload.kind].format(namespace=self.namespace, name=workload.name)
