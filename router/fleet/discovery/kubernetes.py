"""Workers behind a Kubernetes Service, and the connection to the API server (which the autoscaler shares).

    list ──> resourceVersion ──> watch ──event──> new set
      ^                            │
      │                            ├─ ended, connection lost: watch again from the last event (with a backoff)
      └── 410 Gone, or RESYNC_S ───┘

Objects are plain JSON: a handful of fields of four resources does not need the generated classes.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from common.errors import StartupError, UnavailableError
from router.fleet.discovery.base import Found

log = logging.getLogger(__name__)

NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
REQUEST_TIMEOUT_S = 10.0
WATCH_S = 60  # the API server ends a watch after this long; one that is cut off without a word lasts no longer
RESYNC_S = 600.0
BACKOFF_S = (0.1, 3.0)  # first and longest wait after a failure
GONE = 410

Json = dict[str, Any]


class KubernetesError(UnavailableError):
    """The API server refused, or did not answer (`status` None)."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def own_namespace() -> str:
    """The pod's namespace. Raises `StartupError` outside of a pod."""
    try:
        return Path(NAMESPACE_FILE).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise StartupError("the Kubernetes namespace is not known outside of a pod: name it") from error


class ApiServer:
    """JSON requests to the API server, as the pod's service account or as `KUBECONFIG` says."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    async def connect(cls) -> ApiServer:
        """Reads the credentials; the server need not be up. Raises `StartupError` if there are none."""
        try:
            # Not at the top: without Kubernetes nobody needs the package, and it takes a second to import.
            client = importlib.import_module("kubernetes.aio.client")
            config = importlib.import_module("kubernetes.aio.config")
        except ImportError as error:
            raise StartupError("k8s:/// needs the Kubernetes client: pip install 'baton-serve[kubernetes]'") from error
        configuration = client.Configuration()
        kubeconfig = os.environ.get("KUBECONFIG")
        try:
            if not kubeconfig and os.environ.get("KUBERNETES_SERVICE_HOST"):
                config.load_incluster_config(client_configuration=configuration)
            else:
                # Named, because the package remembers the variable as it was when it was imported.
                await config.load_kube_config(
                    config_file=kubeconfig or "~/.kube/config", client_configuration=configuration
                )
        except (config.ConfigException, OSError) as error:
            raise StartupError(f"no access to Kubernetes: {' '.join(str(error).split())}") from error
        return cls(client.ApiClient(configuration))

    async def close(self) -> None:
        await self._client.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """Raises `KubernetesError`."""
        response = await self._send(method, path, query, body, content_type, read_timeout_s=REQUEST_TIMEOUT_S)
        try:
            answer = json.loads(await response.read())
        except (OSError, ValueError, _client_error()) as error:
            raise KubernetesError(f"{method} {path}: {error!r}") from error
        if not isinstance(answer, dict):
            raise KubernetesError(f"{method} {path}: the answer is no JSON object")
        return answer

    async def patch(self, path: str, body: Json) -> Json:
        """A merge patch; with `metadata.resourceVersion` in it, status 409 means that somebody was faster."""
        return await self.request("PATCH", path, body=body, content_type="application/merge-patch+json")

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[Json, None]:
        """Yields watch events until the server ends the watch. Raises `KubernetesError`."""
        response = await self._send("GET", path, query, None, "application/json", read_timeout_s=WATCH_S + 10.0)
        try:
            while line := await response.response.content.readline():
                yield json.loads(line)
        except (OSError, ValueError, _client_error()) as error:
            raise KubernetesError(f"watch {path}: {error!r}") from error
        finally:
            response.response.close()

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Json | None,
        content_type: str,
        *,
        read_timeout_s: float,
    ) -> Any:
        aiohttp = importlib.import_module("aiohttp")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_TIMEOUT_S, sock_read=read_timeout_s)
        try:
            request = await self._client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await self._client.call_api(*request, _request_timeout=timeout)
        except (OSError, aiohttp.ClientError) as error:
            raise KubernetesError(f"{method} {path}: {error!r}") from error
        if response.status >= 400:
            reason = _reason(await response.response.text(errors="replace"))
            response.response.close()
            raise KubernetesError(f"{method} {path}: {response.status} {reason}", response.status)
        return response


def _client_error() -> type[Exception]:
    error: type[Exception] = importlib.import_module("aiohttp").ClientError
    return error


def _reason(text: str) -> str:
    """The message of a Status object, or the beginning of whatever else came."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:200]


class Backoff:
    """Waits that double, with jitter, so that a fleet does not come back in step after an outage."""

    def __init__(self, first_s: float = BACKOFF_S[0], longest_s: float = BACKOFF_S[1]) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s

    def reset(self) -> None:
        self._next_s = self._first_s

    async def wait(self) -> None:
        await asyncio.sleep(self._next_s * random.uniform(0.5, 1.0))  # noqa: S311 - not a secret
        self._next_s = min(2 * self._next_s, self._longest_s)


class EndpointSlices:
    """Serving endpoints of one Service at the port named `port` (or numbered so).

    A pod that is terminating but still serves stays: its worker says itself that it drains.
    """

    def __init__(self, namespace: str, service: str, port: str, *, api: ApiServer | None = None) -> None:
        self._namespace = namespace
        self._service = service
        self._port = port
        self._api = api
        self._slices: dict[str, Json] = {}
        self.complete = False

    async def watch(self) -> AsyncGenerator[tuple[Found, ...], None]:
        api = self._api or await ApiServer.connect()
        namespace = self._namespace or own_namespace()
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        known: tuple[Found, ...] | None = None
        try:
            async with aclosing(self._changes(api, path)) as changes:
                async for _ in changes:
                    current = found_in(list(self._slices.values()), self._port)
                    self.complete = True
                    if current != known:
                        known = current
                        yield current
        finally:
            if self._api is None:
                await api.close()

    async def _changes(self, api: ApiServer, path: str) -> AsyncGenerator[None, None]:
        """Keeps `_slices` current; yields after each change."""
        selector = {"labelSelector": f"kubernetes.io/service-name={self._service}"}
        extra = {"path": path, "service": self._service}
        loop = asyncio.get_running_loop()
        backoff = Backoff()
        version: str | None = None
        listed_at = 0.0
        problem = ""
        while True:
            started_at = loop.time()
            try:
                if version is None or loop.time() - listed_at > RESYNC_S:
                    answer = await api.request("GET", path, query=selector)
                    self._slices = {one["metadata"]["name"]: one for one in answer.get("items") or ()}
                    version, listed_at = answer["metadata"]["resourceVersion"], loop.time()
                    yield
                query = {
                    **selector,
                    "watch": "true",
                    "allowWatchBookmarks": "true",
                    "resourceVersion": version,
                    "timeoutSeconds": str(WATCH_S),
                }
                async with aclosing(api.watch(path, query)) as events:
                    async for event in events:
                        version = self._apply(event)
                        backoff.reset()
                        problem = ""
                        if event["type"] != "BOOKMARK":
                            yield
            except KubernetesError as error:
                if error.status == GONE:
                    version = None  # the server no longer has the events since then
                    log.info("a watch is too old, listing again", extra=extra)
                elif problem != str(error):
                    problem = str(error)
                    log.warning("cannot watch endpoints, keeping what is known", extra={**extra, "reason": problem})
            except (KeyError, TypeError) as error:
                version = None
                log.warning("an odd answer about endpoints, listing again", extra={**extra, "reason": repr(error)})
            else:
                if loop.time() - started_at > 1:
                    continue  # the watch ended in its own time
            await backoff.wait()

    def _apply(self, event: Json) -> str:
        """Returns the resourceVersion to go on from."""
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            raise KubernetesError(str(item.get("message")), item.get("code"))
        name = item["metadata"].get("name", "")
        if kind == "DELETED":
            self._slices.pop(name, None)
        elif kind != "BOOKMARK":
            self._slices[name] = item
        return str(item["metadata"]["resourceVersion"])


def found_in(slices: Sequence[Json], port: str) -> tuple[Found, ...]:
    """Serving endpoints, one for each pod: of a dual-stack Service the IPv4 address."""
    by_target: dict[str, Found] = {}
    for one in sorted(slices, key=lambda s: (str(s.get("addressType")), str(s["metadata"]["name"]))):
        number = _port_number(one, port)
        if number is None:
            continue
        for endpoint in one.get("endpoints") or ():
            conditions = endpoint.get("conditions") or {}
            serving = conditions.get("serving")
            if serving is None:
                serving = conditions.get("ready") is not False
            if not serving or not endpoint.get("addresses"):
                continue
            host = endpoint["addresses"][0]
            address = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
            target = endpoint.get("targetRef") or {}
            pod = str(target.get("name", "")) if target.get("kind") == "Pod" else ""
            by_target.setdefault(pod or address, Found(address, pod))
    return tuple(sorted(by_target.values()))


def _port_number(one: Json, port: str) -> int | None:
    for entry in one.get("ports") or ():
        if entry.get("port") is not None and port in (entry.get("name"), str(entry["port"])):
            return int(entry["port"])
    return None
