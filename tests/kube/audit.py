"""What service accounts asked of the API server, and what they may: from its audit log and from the roles in force."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.kube.control_plane import Kubectl

Json = dict[str, Any]
EVERYWHERE = ""  # of a namespace or a name: any


@dataclass(frozen=True, order=True)
class Permission:
    """One verb on one resource, with its subresource after a slash."""

    verb: str
    group: str
    resource: str
    name: str = EVERYWHERE
    namespace: str = EVERYWHERE

    def covers(self, request: Request) -> bool:
        return (
            (self.verb, self.group, self.resource) == (request.verb, request.group, request.resource)
            and self.name in (EVERYWHERE, request.name)
            and self.namespace in (EVERYWHERE, request.namespace)
        )


@dataclass(frozen=True)
class Request:
    """One line of the log: a request that was answered, or a watch that began."""

    user: str
    verb: str
    group: str
    resource: str
    name: str
    namespace: str
    allowed: bool


def account(namespace: str, name: str) -> str:
    """The user that a service account is."""
    return f"system:serviceaccount:{namespace}:{name}"


def position(log: Path) -> int:
    """The log's end: what comes later is what is asked from now on."""
    return log.stat().st_size


def requests(log: Path, start: int = 0, *, user: str) -> list[Request]:
    """What `user` asked since `start`. A watch counts once, when it begins."""
    return [one for event in _events(log, start) if (one := _request(event)) is not None and one.user == user]


def _events(log: Path, start: int) -> Iterator[Json]:
    with log.open("rb") as file:
        file.seek(start)
        for line in file:
            if line.endswith(b"\n"):  # the last one may be half written
                yield json.loads(line)


def _request(event: Json) -> Request | None:
    resource = event.get("objectRef")
    if resource is None:  # /version and the like, which everybody may read
        return None
    if event["verb"] == "watch" and event["stage"] != "ResponseStarted":
        return None
    path = "/".join(part for part in (resource["resource"], resource.get("subresource")) if part)
    return Request(
        user=event["user"]["username"],
        verb=event["verb"],
        group=resource.get("apiGroup", ""),
        resource=path,
        name=resource.get("name", ""),
        namespace=resource.get("namespace", ""),
        allowed=event.get("annotations", {}).get("authorization.k8s.io/decision") == "allow",
    )


def granted(cluster: Kubectl, release: str, user: str) -> set[Permission]:
    """What the release's own Roles and ClusterRoles give to `user`; roles that come with Kubernetes are left out."""
    return {one for role, namespace in _roles(cluster, release, user) for one in _permissions(role, namespace)}


@contextmanager
def taken_away(cluster: Kubectl, release: str, user: str, permission: Permission) -> Iterator[None]:
    """`user` may do all that the release gives but this."""
    roles = [
        role for role, namespace in _roles(cluster, release, user) if permission in set(_permissions(role, namespace))
    ]
    assert roles, f"nobody gives {permission}"
    for role in roles:
        namespace = permission.namespace
        rest = [_rule(one) for one in _permissions(role, namespace) if one != permission]
        cluster.kubectl("replace", "-f", "-", stdin=json.dumps(_bare(role) | {"rules": rest}))
    try:
        yield
    finally:
        for role in roles:
            cluster.kubectl("replace", "-f", "-", stdin=json.dumps(_bare(role)))


def _roles(cluster: Kubectl, release: str, user: str) -> list[tuple[Json, str]]:
    """The release's roles that are bound to `user`, each with the namespace where it holds."""
    kinds = "roles,rolebindings,clusterroles,clusterrolebindings"
    listed = cluster.kubectl("get", kinds, "-A", "-l", f"app.kubernetes.io/instance={release}", "-o", "json")
    objects: list[Json] = json.loads(listed)["items"]
    roles = {(one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]): one for one in objects}
    found = []
    for binding in objects:
        if not any(_is(subject, user) for subject in binding.get("subjects") or ()):
            continue
        namespace = binding["metadata"].get("namespace", EVERYWHERE)
        reference = binding["roleRef"]
        role = roles.get((reference["kind"], namespace if reference["kind"] == "Role" else "", reference["name"]))
        if role is not None:
            found.append((role, namespace))
    return found


def _bare(role: Json) -> Json:
    """To be written back whatever has happened to it since."""
    metadata = {key: value for key, value in role["metadata"].items() if key != "resourceVersion"}
    return {**role, "metadata": metadata}


def _is(subject: Mapping[str, str], user: str) -> bool:
    return subject["kind"] == "ServiceAccount" and account(subject["namespace"], subject["name"]) == user


def _permissions(role: Json, namespace: str) -> Iterator[Permission]:
    for rule in role["rules"] or ():
        for verb in rule["verbs"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for name in rule.get("resourceNames") or (EVERYWHERE,):
                        yield Permission(verb, group, resource, name, namespace)


def _rule(one: Permission) -> Json:
    rule: Json = {"verbs": [one.verb], "apiGroups": [one.group], "resources": [one.resource]}
    return rule | ({"resourceNames": [one.name]} if one.name != EVERYWHERE else {})


def policy() -> Json:
    """Logs what service accounts ask, but those of Kubernetes' own controllers; of them, who reads external metrics."""
    hpa = account("kube-system", "horizontal-pod-autoscaler")
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "Metadata", "users": [hpa], "resources": [{"group": "external.metrics.k8s.io"}]},
            {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
            {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
            {"level": "None"},
        ],
    }
