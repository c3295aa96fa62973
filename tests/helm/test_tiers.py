"""LMCache beside the workers, and workers of both roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.stack import lmcache_server
from tests.helm.chart import CHART, HELM, Object, arguments, find, helm, pod_spec, render, settings_of

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed")

LMCACHE: dict[str, object] = {
    "kv.store": "lmcache",
    "lmcache": {"enabled": True, "image": "registry.example.com/lmcache:1", "sizeGiB": 8},
}


def sidecar(objects: list[Object], role: str = "decode") -> Object:
    found: Object
    (found,) = pod_spec(objects, f"demo-baton-{role}")["initContainers"]
    assert found["name"] == "lmcache"
    return found


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_each_worker_has_a_server_in_its_pod(role: str) -> None:
    objects = render(LMCACHE)
    server, spec = sidecar(objects, role), pod_spec(objects, f"demo-baton-{role}")
    assert server["restartPolicy"] == "Always", "it lives beside the worker"
    settings = settings_of(objects, f"demo-baton-{role}")
    assert settings["lmcache_address"] == "127.0.0.1:5555"
    # The server that `baton up` starts is what the connector is tested with: the same words here.
    tested = lmcache_server.command(
        Path("lmcache"),
        lmcache_server.ServerSettings("127.0.0.1", 5555, 8, "baton", 8081),
    )
    assert spelled(server["command"][1:] + server["args"]) == spelled(tested[1:])
    (worker,) = spec["containers"]
    shared = {mount["name"] for mount in server["volumeMounts"]} & {mount["name"] for mount in worker["volumeMounts"]}
    assert "shm" in shared
    (shm,) = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]
    assert shm == {"medium": "Memory"}, "bounded by the containers' memory alone"
    assert server["resources"]["limits"]["memory"] == "10Gi"


def spelled(argv: list[str]) -> dict[str, str]:
    """Flags and their values, however they are joined; other words are their own value."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    found: dict[str, str] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word
            found[flag] = ""
        elif flag:
            found[flag], flag = word, ""
        else:
            found[word] = word
    return found


def test_redis_behind_the_servers() -> None:
    objects = render({**LMCACHE, "lmcache.redis": {"url": "redis://redis.prod", "existingSecret": "redis"}})
    server = sidecar(objects)
    assert server["args"][-1] == '--l2-adapter={"host":"redis.prod","port":6379,"type":"resp"}'
    secrets = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in server["env"] if "valueFrom" in one}
    assert secrets["LMCACHE_RESP_PASSWORD"] == {"name": "redis", "key": "password"}
    assert not any("l2-adapter" in argument for argument in sidecar(render(LMCACHE))["args"])


def test_sidecars_are_as_restricted_as_workers() -> None:
    objects = render(LMCACHE)
    assert (
        sidecar(objects)["securityContext"]
        == pod_spec(objects, "demo-baton-decode")["containers"][0]["securityContext"]
    )


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"lmcache": {"enabled": True, "image": "x:1"}}, "lmcache.enabled"),
        ({"kv.connector": "lmcache", "lmcache": {"enabled": True, "image": "x:1"}}, "lmcache.enabled"),
        ({"kv.store": "lmcache", "lmcache.enabled": True}, "lmcache.image"),
        ({"both.replicas": 1, "autoscaling.mode": "planner"}, "both.replicas"),
        ({"autoscaling.moveRoles": True}, "autoscaling.moveRoles"),
        ({"both.replicas": 1, "autoscaling.moveRoles": True}, "decode.autoscaling.enabled"),
        ({"both.replicas": 1, "both.autoscaling.enabled": True}, "both.autoscaling.enabled"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(values: dict[str, object], named: str) -> None:
    done = helm("template", "demo", str(CHART), *arguments(values))
    assert done.returncode != 0
    assert named in done.stderr


# ------------------------------------------------------------------------------------------------------- both


def test_workers_of_both_roles_are_found_by_both() -> None:
    objects = render({"both.replicas": 2})
    (container,) = pod_spec(objects, "demo-baton-both")["containers"]
    assert container["args"][0] == "worker"
    assert find(objects, "Deployment", "demo-baton-both")["spec"]["replicas"] == 2
    found = "k8s:///prod/demo-baton-both:grpc"
    for component in ("router", "autoscaler"):
        settings = settings_of(objects, f"demo-baton-{component}")
        for role in ("prefill", "decode"):
            assert settings[role] == f"k8s:///prod/demo-baton-{role}:grpc,{found}"
    assert not [
        one for one in objects if one["kind"] == "HorizontalPodAutoscaler" and "both" in one["metadata"]["name"]
    ]
    policy = find(objects, "NetworkPolicy", "demo-baton-decode")["spec"]
    peers = {one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for one in policy["ingress"][1]["from"]}
    assert peers == {"prefill", "decode", "both"}


@pytest.mark.parametrize("mode", ["external-metrics", "keda", "planner"])
def test_workers_whose_roles_move_come_and_go_as_a_whole(mode: str) -> None:
    alone = {f"{role}.autoscaling.enabled": False for role in ("prefill", "decode")}
    moving = {"both.replicas": 4, "both.autoscaling.enabled": True, "autoscaling.moveRoles": True}
    objects = render({**alone, **moving, "autoscaling.mode": mode})
    settings = settings_of(objects, "demo-baton-autoscaler")
    assert (settings["move_roles"], settings["both_min"], settings["both_max"]) == (True, 2, 8)
    assert "replicas" not in find(objects, "Deployment", "demo-baton-both")["spec"]
    assert find(objects, "Deployment", "demo-baton-decode")["spec"]["replicas"] == 1
    if mode == "planner":
        assert (settings["apply"], settings["both_workload"]) == (True, "deployment/demo-baton-both")
        scaled = [
            rule
            for rule in find(objects, "Role", "demo-baton-autoscaler")["rules"]
            if "deployments/scale" in rule["resources"]
        ]
        assert [rule["resourceNames"] for rule in scaled] == [["demo-baton-both"]]
    elif mode == "keda":
        (trigger,) = find(objects, "ScaledObject", "demo-baton-both")["spec"]["triggers"]
        assert trigger["metadata"]["role"] == "both"
    else:
        (metric,) = find(objects, "HorizontalPodAutoscaler", "demo-baton-both")["spec"]["metrics"]
        assert metric["external"]["metric"] == {
            "name": "baton_desired_replicas",
            "selector": {"matchLabels": {"role": "both"}},
        }


def test_there_are_none_unless_asked_for() -> None:
    assert not [one for one in render() if one["metadata"]["name"].endswith("-both")]
