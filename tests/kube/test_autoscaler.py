"""Against a real API server, its aggregator and its HPA controller. No node: pods stay Pending, replicas count.

The autoscaler runs here, as a ServiceAccount that may do what docs/autoscaling.md says and nothing else; workers are
fakes on real sockets, which report the load that a test gives them.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from common.config import AutoscalerSettings
from common.types import WorkerRole
from router.autoscaler.kubernetes import DELETION_COST
from router.autoscaler.server import serve
from router.fleet.discovery.kubernetes import EndpointSlices
from tests.kube.control_plane import ControlPlane, why_not
from tests.support.fake_worker import FakeWorker

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")

WAIT_S = 90.0
NAMESPACE = "scaled"
SERVICE_ACCOUNT = f"""
apiVersion: v1
kind: Namespace
metadata: {{name: {NAMESPACE}}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {{name: autoscaler, namespace: {NAMESPACE}}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: autoscaler, namespace: {NAMESPACE}}}
rules:
  - {{apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}}
  - {{apiGroups: [coordination.k8s.io], resources: [leases], verbs: [create]}}
  - {{apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [baton-autoscaler], verbs: [get, patch]}}
  - {{apiGroups: [""], resources: [pods], verbs: [patch]}}
  - {{apiGroups: [apps], resources: [deployments/scale], resourceNames: [prefill, decode], verbs: [get, patch]}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: autoscaler, namespace: {NAMESPACE}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: autoscaler}}
subjects: [{{kind: ServiceAccount, name: autoscaler, namespace: {NAMESPACE}}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: baton-autoscaler, namespace: kube-system}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: extension-apiserver-authentication-reader}}
subjects: [{{kind: ServiceAccount, name: autoscaler, namespace: {NAMESPACE}}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: baton-autoscaler}}
rules:
  - apiGroups: [apiregistration.k8s.io]
    resources: [apiservices]
    resourceNames: [v1beta1.external.metrics.k8s.io]
    verbs: [get, patch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: baton-autoscaler}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: baton-autoscaler}}
subjects: [{{kind: ServiceAccount, name: autoscaler, namespace: {NAMESPACE}}}]
"""
API_SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: autoscaler, namespace: %(namespace)s}
spec: {type: ExternalName, externalName: localhost, ports: [{port: %(port)d}]}
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1beta1.external.metrics.k8s.io}
spec:
  group: external.metrics.k8s.io
  version: v1beta1
  groupPriorityMinimum: 100
  versionPriority: 100
  service: {namespace: %(namespace)s, name: autoscaler, port: %(port)d}
"""


def deployment(name: str) -> str:
    return json.dumps(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": {"app": name}},
                "template": {
                    "metadata": {"labels": {"app": name}},
                    "spec": {"containers": [{"name": "c", "image": "none"}]},
                },
            },
        }
    )


def autoscaled(name: str, metric: str, target: dict[str, str]) -> str:
    external = {"metric": {"name": metric}, "target": target}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": 1,
        "maxReplicas": 8,
        "metrics": [{"type": "External", "external": external}],
    }
    return json.dumps(
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": spec,
        }
    )


@asynccontextmanager
async def _saying(what: str) -> AsyncIterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise AssertionError(f"not after {WAIT_S:g} s: {what}") from error


class Scene:
    """One namespace of a real cluster, and workers here."""

    def __init__(self, plane: ControlPlane, prefill: FakeWorker, decode: FakeWorker) -> None:
        self.plane = plane
        self.prefill = prefill
        self.decode = decode

    async def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return await asyncio.to_thread(self.plane.kubectl, *args, stdin=stdin)

    async def get(self, *args: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self.kubectl("-n", NAMESPACE, "get", *args, "-o", "json"))
        return found

    async def replicas(self, name: str) -> int:
        return int((await self.get("deployment", name))["spec"]["replicas"])

    async def until(self, what: str, holds: Callable[[], Any]) -> None:
        """Asks `holds`, a coroutine function, until it says yes."""
        async with _saying(what), asyncio.timeout(WAIT_S):
            while not await holds():  # noqa: ASYNC110 (kubectl cannot be awaited)
                await asyncio.sleep(0.3)

    async def until_replicas(self, name: str, number: int) -> None:
        async def holds() -> bool:
            return await self.replicas(name) == number

        await self.until(f"{name} has {number} replicas", holds)

    @asynccontextmanager
    async def autoscaler(self, **settings: object) -> AsyncIterator[dict[str, str]]:
        ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        values = {
            "http_listen": "127.0.0.1:0",
            "namespace": NAMESPACE,
            "prefill": (self.prefill.address,),
            "decode": (self.decode.address,),
            "target_queued_tokens": 1000,
            "target_requests": 10,
            "scale_up_delay": 0,
            "scale_down_delay": 0,
            **settings,
        }
        task = asyncio.create_task(serve(AutoscalerSettings.model_validate(values), ready.set_result, stop))
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)  # type: ignore[type-var]
        if task.done():
            task.result()
        try:
            yield await ready
        finally:
            stop.set()
            await task


def service_account(plane: ControlPlane, folder: Path) -> Path:
    """A kubeconfig of the autoscaler's ServiceAccount."""
    token = plane.kubectl("-n", NAMESPACE, "create", "token", "autoscaler").strip()
    path = folder / "autoscaler.kubeconfig"
    cluster = {"server": plane.server, "certificate-authority": str(plane.certs / "ca.crt")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One of this file's own, since a test kills its API server."""
    if reason := why_not():
        pytest.skip(reason)
    with ControlPlane(tmp_path_factory.mktemp("autoscaler")) as plane:
        yield plane


@pytest.fixture
async def scene(
    control_plane: ControlPlane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Scene]:
    control_plane.apply(SERVICE_ACCOUNT)
    control_plane.kubectl_until("the namespace's account", "-n", NAMESPACE, "get", "serviceaccount", "default")
    for name in ("prefill", "decode"):
        control_plane.apply(deployment(name))
    monkeypatch.setenv("KUBECONFIG", str(service_account(control_plane, tmp_path)))
    prefill, decode = FakeWorker(WorkerRole.PREFILL), FakeWorker(WorkerRole.DECODE)
    for worker in (prefill, decode):
        await worker.start()
        worker.report(num_free_blocks=100)
    try:
        yield Scene(control_plane, prefill, decode)
    finally:
        await prefill.stop()
        await decode.stop()
        control_plane.run("kubectl", "delete", "apiservice", "v1beta1.external.metrics.k8s.io", "--ignore-not-found")
        control_plane.run("kubectl", "-n", NAMESPACE, "delete", "hpa,deployment,lease,endpointslice", "--all", "--wait")


async def test_hpas_scale_each_role_on_metrics_that_we_serve(scene: Scene) -> None:
    listen = {"external_metrics_listen": "127.0.0.1:0", "external_metrics_service": f"{NAMESPACE}/autoscaler"}
    async with scene.autoscaler(**listen) as addresses:
        port = int(addresses["external_metrics"].rpartition(":")[2])
        await scene.kubectl("apply", "-f", "-", stdin=API_SERVICE % {"namespace": NAMESPACE, "port": port})
        await scene.kubectl(
            "wait", "--for=condition=Available", "apiservice/v1beta1.external.metrics.k8s.io", "--timeout=90s"
        )
        path = f"/apis/external.metrics.k8s.io/v1beta1/namespaces/{NAMESPACE}/baton_desired_replicas"
        found = json.loads(await scene.kubectl("get", "--raw", f"{path}?labelSelector=role%3Dprefill"))
        assert [item["metricLabels"] for item in found["items"]] == [{"role": "prefill"}]

        queue = autoscaled("prefill", "baton_prefill_queued_tokens", {"type": "AverageValue", "averageValue": "1000"})
        usage = autoscaled("decode", "baton_decode_kv_used_pods", {"type": "AverageValue", "averageValue": "300m"})
        scene.decode.report(num_requests_running=1, num_free_blocks=80)
        await scene.kubectl("apply", "-f", "-", stdin=queue)
        await scene.kubectl("apply", "-f", "-", stdin=usage)

        scene.prefill.report(num_queued_prompt_tokens=3500, num_free_blocks=100)
        await scene.until_replicas("prefill", 4)
        assert await scene.replicas("decode") == 1
        scene.prefill.report(num_free_blocks=100)
        scene.decode.report(num_requests_running=9, num_free_blocks=5)
        await scene.until_replicas("prefill", 1)

        async def decode_grew() -> bool:
            return await scene.replicas("decode") == 4  # 0.95 of one worker's KV, in thirds

        await scene.until("decode grows", decode_grew)

    # Gone, it says nothing, and nothing moves: the HPA keeps what it has.
    async def inactive() -> bool:
        conditions = (await scene.get("hpa", "decode"))["status"].get("conditions", [])
        return any(one["type"] == "ScalingActive" and one["status"] == "False" for one in conditions)

    await scene.until("the HPA has no metric", inactive)
    assert await scene.replicas("decode") == 4


async def test_two_replicas_share_one_api_service(scene: Scene) -> None:
    listen = {"external_metrics_listen": "127.0.0.1:0", "external_metrics_service": f"{NAMESPACE}/autoscaler"}
    await scene.kubectl("apply", "-f", "-", stdin=API_SERVICE % {"namespace": NAMESPACE, "port": 1})

    async def num_certificates() -> int:
        import base64

        bundle = (await scene.get("apiservice", "v1beta1.external.metrics.k8s.io"))["spec"].get("caBundle", "")
        return base64.b64decode(bundle).count(b"BEGIN CERTIFICATE")

    async with scene.autoscaler(**listen), scene.autoscaler(**listen) as second:

        async def both() -> bool:
            return await num_certificates() == 2

        await scene.until("both certificates are known", both)
        port = int(second["external_metrics"].rpartition(":")[2])
        await scene.kubectl("apply", "-f", "-", stdin=API_SERVICE % {"namespace": NAMESPACE, "port": port})
        await scene.kubectl(
            "wait", "--for=condition=Available", "apiservice/v1beta1.external.metrics.k8s.io", "--timeout=90s"
        )


async def test_the_leader_scales_and_is_followed(scene: Scene) -> None:
    apply = {
        "leader_elect": True,
        "apply": True,
        "prefill_workload": "deployment/prefill",
        "decode_workload": "deployment/decode",
    }

    async def holder() -> str:
        return str((await scene.get("lease", "baton-autoscaler"))["spec"].get("holderIdentity") or "")

    async with scene.autoscaler(**apply):
        scene.decode.report(num_requests_running=45, num_free_blocks=100)
        await scene.until_replicas("decode", 5)
        first = await holder()
        async with scene.autoscaler(**apply):
            await asyncio.sleep(2)
            assert await holder() == first
            scene.decode.report(num_requests_running=25, num_free_blocks=100)
            await scene.until_replicas("decode", 3)
            assert await scene.replicas("prefill") == 1
    assert await holder() == ""  # given back by the first, or by the second after it
    async with scene.autoscaler(**apply):
        scene.decode.report(num_requests_running=65, num_free_blocks=100)
        await scene.until_replicas("decode", 7)
        assert await holder() not in ("", first)


def own_address() -> str:
    """An address of this machine that is not the loopback's, which EndpointSlices refuse."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing
            address = str(probe.getsockname()[0])
        except OSError:
            address = ""
    if not address or address.startswith("127."):
        pytest.skip("this machine has no address but the loopback's")
    return address


def endpoint_slice(*endpoints: tuple[str, str], port: int = 50061, service: str = "decode") -> str:
    return json.dumps(
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{service}-1",
                "namespace": NAMESPACE,
                "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": "IPv4",
            "ports": [{"name": "grpc", "port": port}],
            "endpoints": [
                {
                    "addresses": [address],
                    "conditions": {"ready": True, "serving": True},
                    "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": pod},
                }
                for address, pod in endpoints
            ],
        }
    )


async def test_pods_are_ranked_by_their_load(scene: Scene) -> None:
    host = own_address()
    worker = FakeWorker(WorkerRole.DECODE)
    port = int((await worker.start(f"{host}:0")).rpartition(":")[2])
    worker.report(num_requests_running=3, num_free_blocks=100)

    async def pods() -> list[dict[str, Any]]:
        return list((await scene.get("pods", "-l", "app=decode"))["items"])

    async def there() -> bool:
        return bool(await pods())

    try:
        await scene.until("the deployment's pod is there", there)
        pod = (await pods())[0]["metadata"]["name"]
        await scene.kubectl("apply", "-f", "-", stdin=endpoint_slice((host, pod), port=port))
        async with scene.autoscaler(decode=(f"k8s:///{NAMESPACE}/decode:grpc",), deletion_costs=True):

            async def ranked() -> bool:
                cost: str | None = (await pods())[0]["metadata"].get("annotations", {}).get(DELETION_COST)
                return cost == "200"

            await scene.until("the pod has a cost", ranked)
    finally:
        await worker.stop()


async def test_endpoint_slices_of_a_real_server_through_its_restart(scene: Scene) -> None:
    await scene.kubectl("apply", "-f", "-", stdin=endpoint_slice(("10.1.2.3", "a")))
    source = EndpointSlices(NAMESPACE, "decode", "grpc")
    sets = source.watch()
    try:
        async with asyncio.timeout(WAIT_S):
            assert [one.address for one in await anext(sets)] == ["10.1.2.3:50061"]
            await scene.kubectl("apply", "-f", "-", stdin=endpoint_slice(("10.1.2.3", "a"), ("10.1.2.4", "b")))
            assert [one.pod for one in await anext(sets)] == ["a", "b"]

            upcoming = asyncio.ensure_future(anext(sets))
            plane = scene.plane
            await asyncio.to_thread(plane.processes["kube-apiserver"].kill)
            await asyncio.sleep(1)
            assert not upcoming.done()
            await asyncio.to_thread(plane.start_api_server)
            await scene.kubectl("apply", "-f", "-", stdin=endpoint_slice(("10.1.2.5", "c")))
            assert [one.address for one in await upcoming] == ["10.1.2.5:50061"]
    finally:
        await sets.aclose()
