"""What the chart renders: valid for three Kubernetes versions, as safe as it says, read by the processes themselves."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from kubernetes_validate import utils

from baton.settings import SETTINGS, load
from engine.hosts.place import DEFAULT_PORT
from tests.helm.chart import CHART, HELM, MODES, Object, arguments, find, helm, pod_spec, render, settings_of

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed")

KUBERNETES = "1.34.0"  # that of all other tests, for which it is rendered anyway
OTHER_KUBERNETES = ("1.31.0", "1.37.0")  # the oldest and the newest
FILES = (None, "values-laptop.yaml", "values-gpu-fleet.yaml")
GOLDEN = Path(__file__).parent / "golden"
ROLES = ("prefill", "decode")
CUSTOM = {
    "ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject", "LeaderWorkerSet",
    "Certificate", "Issuer", "HTTPRoute", "GRPCRoute", "InferencePool", "TriggerAuthentication",
}  # fmt: skip
EVERYTHING: dict[str, object] = {
    "metrics.serviceMonitor.enabled": True,
    "metrics.podMonitor.enabled": True,
    "metrics.prometheusRule.enabled": True,
    "metrics.aliases": {"router": "vllm", "workers": "vllm"},
    "gateway": {"enabled": True, "parentRefs": [{"name": "edge"}], "hostnames": ["llm.example.com"]},
    "kv.connector": "shared_storage",
    "model.volume": {"type": "pvc", "claimName": "models", "subPath": "a"},
    "decode.gpus": 0,  # whatever a file of values says: ranks on several pods compute on CPUs
    "decode.multiNode": {"enabled": True, "size": 2, "memberArgs": ["--log-level=debug"]},
    "networkPolicy.routerFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}],
}
VARIANTS: dict[str, dict[str, object]] = {
    **{mode: {"autoscaling.mode": mode} for mode in MODES},
    **{f"{mode}, everything": {"autoscaling.mode": mode, **EVERYTHING} for mode in MODES},
    "cert-manager": {"autoscaler.tls.mode": "cert-manager"},
    "cert-manager, own issuer": {
        "autoscaler.tls": {"mode": "cert-manager", "issuerRef": {"kind": "ClusterIssuer", "name": "ca"}}
    },
    "TLS": {"tls.enabled": True, "apiKeys.existingSecret": "keys", "metrics.serviceMonitor.enabled": True},
    "TLS, clients' CA": {"tls": {"enabled": True, "clientCertificates": True}},
    "TLS, everything": {
        "tls": {
            "enabled": True,
            "clientCertificates": True,
            "clientCa": {"existingSecret": "client-ca", "clientSecret": "client"},
            "dnsNames": ["llm.example.com"],
            "certManager": {"issuerRef": {"kind": "ClusterIssuer", "name": "ca"}},
        },
        "limits": {"default": {"requests_per_second": 5}},
        "apiKeys.keys": [{"key": "sk-1", "name": "a", "tenant": "t"}, {"key": "sk-2"}, {"key": "sha256:" + "0a" * 32}],
        "autoscaling.mode": "keda",
        "both.replicas": 2,
        "grafana.dashboards.enabled": True,
        "metrics.podMonitor.enabled": True,
        **EVERYTHING,
    },
    "LMCache": {
        "kv.store": "lmcache",
        "lmcache": {
            "enabled": True,
            "image": "registry.example.com/lmcache:0.5",
            "redis": {"url": "redis://redis.prod:6380", "existingSecret": "redis"},
        },
    },
    "endpoint picker": {
        "gateway": {"enabled": True, "parentRefs": [{"name": "edge"}], "endpointPicker": {"enabled": True}},
        "tls.enabled": True,
    },
    "secret": {"autoscaler.tls": {"mode": "secret", "secretName": "metrics-tls"}},
    "router keeps": {"router.batches": True, "router.responses": True, "router.replicas": 1},
}
_WITH_ALL_FILES = ("keda", "TLS, everything")
each_variant_and_file = pytest.mark.parametrize(
    ("variant", "file"),
    [
        pytest.param(variant, file, marks=[pytest.mark.slow] if file and variant not in _WITH_ALL_FILES else [])
        for variant in VARIANTS
        for file in FILES
    ],
)


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    """For each object, the library reads megabytes of definitions anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@pytest.mark.parametrize("file", FILES)
def test_lint_passes(file: str | None) -> None:
    done = helm("lint", "--strict", str(CHART), *arguments(file=file))
    assert done.returncode == 0, done.stdout


_seen: set[tuple[str, str]] = set()  # most objects are alike in most variants


def _check_objects(variant: str, file: str | None, kube: str) -> None:
    for document in render(VARIANTS[variant], file=file, kube=kube):
        key = (kube, json.dumps(document, sort_keys=True))
        if document["kind"] not in CUSTOM and key not in _seen:  # the API server judges custom ones, in tests/kube
            kubernetes_validate.validate(document, kube.rpartition(".")[0], strict=True)
            _seen.add(key)


@each_variant_and_file
def test_every_object_is_valid(variant: str, file: str | None) -> None:
    _check_objects(variant, file, KUBERNETES)


@pytest.mark.slow
@pytest.mark.parametrize("kube", OTHER_KUBERNETES)
@pytest.mark.parametrize(
    ("variant", "file"),
    [*((variant, None) for variant in VARIANTS), *(("TLS, everything", file) for file in FILES if file)],
)
def test_every_object_is_valid_for_other_versions(variant: str, file: str | None, kube: str) -> None:
    """What a file of values adds, it adds to every variant, so one is enough for each file."""
    _check_objects(variant, file, kube)


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"router.replicas": "two"}, "router.replicas"),
        ({"router.replica": 2}, "router"),
        ({"router.batches": True}, "router.replicas"),
        ({"router.responses": True, "router.replicas": 2}, "router.replicas"),
        ({"prefill.settings.chunk_sise": 4}, "prefill.settings"),
        ({"prefill.settings.chunk_size": 0}, "prefill.settings.chunk_size"),
        ({"decode.settings.listen": "0.0.0.0:1"}, "decode.settings"),
        ({"decode.resources.limits.memory": "4 GB"}, "decode.resources.limits.memory"),
        ({"kv.connector": "carrier-pigeon"}, "kv.connector"),
        ({"kv.settings.chunk_size": 4}, "kv.settings"),
        ({"autoscaling.mode": "auto"}, "autoscaling.mode"),
        ({"decode.autoscaling.minReplicas": 0}, "decode.autoscaling.minReplicas"),
        ({"decode.autoscaling.kvUsage": 70}, "decode.autoscaling.kvUsage"),
        ({"prefill.preStopSeconds": 0}, "prefill.preStopSeconds"),
        ({"podSecurity.runAsUser": 0}, "podSecurity.runAsUser"),
        ({"model.volume.type": "s3"}, "model.volume.type"),
        ({"model.dtype": "float8"}, "model.dtype"),
    ],
)
def test_a_bad_value_fails_lint_with_its_path(values: dict[str, object], path: str) -> None:
    done = helm("lint", str(CHART), *arguments(values))
    assert done.returncode != 0
    assert f"- {path}: " in done.stdout


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"model.volume.type": "pvc"}, "model.volume.claimName"),
        ({"kv": {"connector": "shared_storage", "sharedStorage": {"type": "hostPath"}}}, "kv.sharedStorage.hostPath"),
        ({"autoscaler.tls.mode": "secret"}, "autoscaler.tls.secretName"),
    ],
)
def test_what_a_value_needs_is_asked_for_by_name(values: dict[str, object], names: str) -> None:
    done = helm("template", "demo", str(CHART), *arguments(values))
    assert done.returncode != 0
    assert names in done.stderr


@pytest.mark.parametrize("role", ROLES)
def test_the_dtype_is_named_unless_auto_is_asked_for(role: str) -> None:
    assert settings_of(render(), f"demo-baton-{role}")["dtype"] == "bfloat16"
    assert settings_of(render({"model.dtype": "auto"}), f"demo-baton-{role}")["dtype"] == "auto"


@pytest.mark.parametrize("mode", ["keda", "planner"])
def test_scaling_to_zero_is_taken_if_it_is_possible(mode: str) -> None:
    objects = render({"autoscaling.mode": mode, "prefill.autoscaling.minReplicas": 0})
    assert settings_of(objects, "demo-baton-autoscaler")["prefill_min"] == 0


MOVING: dict[str, object] = {  # workers of both roles alone come and go
    "both.replicas": 4,
    "both.autoscaling.enabled": True,
    "autoscaling.moveRoles": True,
    **{f"{role}.autoscaling.enabled": False for role in ROLES},
    **{f"{role}.startupTimeoutSeconds": 90 for role in ROLES},
}


@pytest.mark.parametrize(
    ("values", "wait"),
    [
        ({}, None),
        ({"decode.autoscaling.minReplicas": 0}, 600),
        ({"decode.autoscaling.minReplicas": 0, "decode.startupTimeoutSeconds": 90}, 600),  # prefill's start
        (
            {"prefill.autoscaling.minReplicas": 0, **{f"{role}.startupTimeoutSeconds": 90 for role in ROLES}},
            90,
        ),
        ({"decode.autoscaling.minReplicas": 0, "router.settings": {"worker_wait": 5}}, 5),
        ({"decode.autoscaling.minReplicas": 0, "autoscaling.mode": "none"}, None),
        ({**MOVING, "both.autoscaling.minReplicas": 0}, 600),
        ({**MOVING, "both.autoscaling.minReplicas": 0, "both.startupTimeoutSeconds": 120}, 120),
        (MOVING, None),
    ],
)
def test_routers_wait_for_workers_if_there_may_be_none(values: dict[str, object], wait: int | None) -> None:
    """By default as long as a worker may take to start, or a request to be answered."""
    objects = render({"autoscaling.mode": "keda", **values})
    assert settings_of(objects, "demo-baton-router").get("worker_wait") == wait


def test_traces_go_to_one_collector_from_all() -> None:
    objects = render({"tracing.endpoint": "http://collector:4318", "tracing.protocol": "http/protobuf"})
    where = {"trace_endpoint": "http://collector:4318", "trace_protocol": "http/protobuf"}
    found = [settings_of(objects, f"demo-baton-{component}") for component in ("router", "prefill", "decode")]
    assert all(where.items() <= settings.items() for settings in found)
    assert [settings.get("trace_sample") for settings in found] == [0.01, None, None]
    assert not [name for name in settings_of(render(), "demo-baton-router") if name.startswith("trace_")]


def test_routers_have_as_many_processes_as_asked_for() -> None:
    assert settings_of(render({"router.processes": 3}), "demo-baton-router")["processes"] == 3
    assert helm("template", "demo", str(CHART), *arguments({"router.processes": 0})).returncode != 0


# ------------------------------------------------------------------------------------------- the processes


@each_variant_and_file
def test_processes_read_their_settings(variant: str, file: str | None, tmp_path: Path) -> None:
    objects = render(VARIANTS[variant], file=file)
    for document in (one for one in objects if "settings.yaml" in one.get("data", {})):
        command = document["metadata"]["labels"]["app.kubernetes.io/component"]
        path = tmp_path / "settings.yaml"
        path.write_text(document["data"]["settings.yaml"])
        settings = load(SETTINGS["worker" if command == "both" else command], {}, environ={}, config=str(path))
        assert settings.model_fields_set == set(yaml.safe_load(path.read_text()))


def test_containers_start_a_command_that_exists() -> None:
    for document in render():
        if document["kind"] == "Deployment":
            (container,) = document["spec"]["template"]["spec"]["containers"]
            assert container["args"][:2] == [container["name"], "--config=/etc/baton/settings.yaml"]
            assert container["name"] in SETTINGS


def test_model_and_kv_go_where_they_are_mounted() -> None:
    objects = render(
        {
            "model": {"name": "llama", "volume": {"type": "pvc", "claimName": "models"}},
            "kv": {"connector": "shared_storage", "sharedStorage": {"size": "5Gi", "accessMode": "ReadWriteOnce"}},
        }
    )
    settings = settings_of(objects, "demo-baton-decode")
    assert (settings["model"], settings["kv_dir"]) == ("/models/llama", "/kv/blocks")
    mounts = {mount["name"]: mount for mount in pod_spec(objects, "demo-baton-decode")["containers"][0]["volumeMounts"]}
    assert (mounts["model"]["mountPath"], mounts["model"]["readOnly"]) == ("/models", True)
    assert mounts["kv"]["mountPath"] == "/kv"
    claim = find(objects, "PersistentVolumeClaim", "demo-baton-kv")
    assert claim["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}}}


@pytest.mark.parametrize("kind", ["batches", "responses"])
def test_what_a_router_keeps_is_on_a_volume(kind: str) -> None:
    objects = render({f"router.{kind}": True, "router.replicas": 1, "router.storage.size": "5Gi"})
    settings = settings_of(objects, "demo-baton-router")
    name = {"batches": "batch_file", "responses": "response_file"}[kind]
    assert {key: value for key, value in settings.items() if key.endswith("_file")} == {
        name: f"/var/lib/baton/{kind}.db"
    }
    assert find(objects, "Deployment", "demo-baton-router")["spec"]["strategy"] == {"type": "Recreate"}
    spec = pod_spec(objects, "demo-baton-router")
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts["kept"] == "/var/lib/baton"
    claim = find(objects, "PersistentVolumeClaim", "demo-baton-router")
    assert claim["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}}}
    objects = render({f"router.{kind}": True, "router.replicas": 1, "router.storage.existingClaim": "mine"})
    assert not [one for one in objects if one["kind"] == "PersistentVolumeClaim"]
    volumes = {one["name"]: one for one in pod_spec(objects, "demo-baton-router")["volumes"]}
    assert volumes["kept"]["persistentVolumeClaim"] == {"claimName": "mine"}


def test_a_store_beside_nixl_has_its_volume() -> None:
    objects = render({"kv.store": "shared_storage"})
    settings = settings_of(objects, "demo-baton-prefill")
    assert (settings["connector"], settings["store"], settings["kv_dir"]) == ("nixl", "shared_storage", "/kv/blocks")
    mounts = {mount["name"] for mount in pod_spec(objects, "demo-baton-prefill")["containers"][0]["volumeMounts"]}
    assert "kv" in mounts
    find(objects, "PersistentVolumeClaim", "demo-baton-kv")


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({}, 18),
        ({"kv.sharedStorage.size": "2Ti"}, 0.9 * 2048),
        ({"kv.sharedStorage.size": "1.5G"}, 0.9 * 1.5e9 / 2**30),
        ({"kv.sharedStorage": {"type": "existingClaim", "claimName": "kv", "size": "100Gi"}}, 90),
        ({"kv.settings.kv_dir_size_gb": 4.5}, 4.5),
    ],
)
@pytest.mark.parametrize("how", ["connector", pytest.param("store", marks=pytest.mark.slow)])
def test_the_store_is_limited_by_its_volume(how: str, values: dict[str, object], limit: float) -> None:
    settings = settings_of(render({f"kv.{how}": "shared_storage", **values}), "demo-baton-decode")
    assert settings["kv_dir_size_gb"] == pytest.approx(limit)
    assert "kv_dir_size_gb" not in settings_of(render(), "demo-baton-decode")


def test_devices_are_requested_and_limited_alike() -> None:
    objects = render({"decode.gpus": 2, "decode.rdma": {"devices": 1, "resource": "rdma/ib", "ipcLock": True}})
    (container,) = pod_spec(objects, "demo-baton-decode")["containers"]
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["nvidia.com/gpu"] == "2"
        assert container["resources"][kind]["rdma/ib"] == "1"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert settings_of(objects, "demo-baton-decode")["device"] == "cuda"
    assert "device" not in settings_of(objects, "demo-baton-prefill")


# ------------------------------------------------------------------------------------------------ life cycle


@pytest.mark.parametrize("component", ["router", "prefill", "decode"])
def test_grace_period_holds_pre_stop_and_drain(component: str) -> None:
    objects = render({f"{component}.drainTimeoutSeconds": 200, f"{component}.preStopSeconds": 7})
    spec = pod_spec(objects, f"demo-baton-{component}")
    (container,) = spec["containers"]
    assert settings_of(objects, f"demo-baton-{component}")["drain_timeout"] == 200
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] == 7
    assert spec["terminationGracePeriodSeconds"] >= 200 + 7 + 10
    liveness = container["livenessProbe"]
    assert liveness["failureThreshold"] * liveness["periodSeconds"] > 200, "a worker that drains would be killed"


def test_startup_probe_waits_for_long_loads() -> None:
    spec = pod_spec(render({"decode.startupTimeoutSeconds": 3601}), "demo-baton-decode")
    startup = spec["containers"][0]["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 3601


def test_router_without_workers_is_not_restarted() -> None:
    (container,) = pod_spec(render(), "demo-baton-router")["containers"]
    assert container["livenessProbe"]["grpc"]["service"] == "baton.v1.RouterService"
    assert "service" not in container["readinessProbe"]["grpc"]


def test_new_settings_are_new_pods_and_a_new_chart_is_not() -> None:
    def template(values: dict[str, object]) -> Any:
        return find(render(values), "Deployment", "demo-baton-prefill")["spec"]["template"]

    assert template({}) == template({"decode.settings.chunk_size": 64})
    assert template({}) != template({"prefill.settings.chunk_size": 64})
    assert not any("version" in label or "chart" in label for label in template({})["metadata"]["labels"])


# --------------------------------------------------------------------------------------------------- scaling


@pytest.mark.parametrize("mode", MODES)
def test_replicas_are_left_out_if_something_else_sets_them(mode: str) -> None:
    objects = render({"autoscaling.mode": mode})
    for role in ("prefill", "decode"):
        assert ("replicas" in find(objects, "Deployment", f"demo-baton-{role}")["spec"]) == (mode == "none")


def test_one_role_can_stay_fixed() -> None:
    objects = render({"prefill.autoscaling.enabled": False, "prefill.replicas": 3, "autoscaling.mode": "planner"})
    assert find(objects, "Deployment", "demo-baton-prefill")["spec"]["replicas"] == 3
    settings = settings_of(objects, "demo-baton-autoscaler")
    assert "prefill_workload" not in settings
    assert settings["decode_workload"] == "deployment/demo-baton-decode"


def test_each_mode_brings_its_own_scalers_and_no_other() -> None:
    kinds = {"HorizontalPodAutoscaler", "ScaledObject", "APIService"}
    expected = {
        "external-metrics": {"HorizontalPodAutoscaler", "APIService"},
        "prometheus-adapter": {"HorizontalPodAutoscaler"},
        "keda": {"ScaledObject"},
        "planner": set(),
        "none": set(),
    }
    for mode in MODES:
        objects = render({"autoscaling.mode": mode})
        assert {one["kind"] for one in objects} & kinds == expected[mode]
        has_autoscaler = any(one["metadata"]["name"] == "demo-baton-autoscaler" for one in objects)
        assert has_autoscaler == (mode != "none")


def test_each_role_scales_on_its_own_signal() -> None:
    objects = render({"decode.autoscaling.kvUsage": 0.65, "prefill.autoscaling.queuedTokensPerPod": 4000})

    def metrics(role: str) -> dict[str, str]:
        found = find(objects, "HorizontalPodAutoscaler", f"demo-baton-{role}")["spec"]["metrics"]
        return {one["external"]["metric"]["name"]: one["external"]["target"]["averageValue"] for one in found}

    assert metrics("prefill") == {"baton_prefill_queued_tokens": "4000"}
    assert metrics("decode") == {"baton_decode_kv_used_pods": "650m", "baton_decode_requests": "32"}


def test_hpas_may_follow_the_planner() -> None:
    objects = render({"autoscaling.followPlanner": True})
    for role in ("prefill", "decode"):
        first, *others = find(objects, "HorizontalPodAutoscaler", f"demo-baton-{role}")["spec"]["metrics"]
        assert others, "its own signals, too"
        assert first["external"] == {
            "metric": {"name": "baton_desired_replicas", "selector": {"matchLabels": {"role": role}}},
            "target": {"type": "AverageValue", "averageValue": "1"},
        }


def test_multi_node_workers_are_groups_of_which_only_leaders_take_requests() -> None:
    objects = render({"decode.multiNode": {"enabled": True, "size": 4, "memberArgs": ["--x"]}})
    group = find(objects, "LeaderWorkerSet", "demo-baton-decode")["spec"]["leaderWorkerTemplate"]
    leader, member = (group[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    assert group["size"] == 4
    assert "readinessProbe" in leader
    assert not {"readinessProbe", "ports"} & set(member)
    assert member["args"][-1] == "--x"
    # Not of the group's own name: that Service is made by the LeaderWorkerSet, for members to find their leader.
    selector = find(objects, "Service", "demo-baton-decode-leaders")["spec"]["selector"]
    assert selector["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    found_at = "k8s:///prod/demo-baton-decode-leaders:grpc"
    assert [settings_of(objects, f"demo-baton-{who}")["decode"] for who in ("router", "autoscaler")] == [found_at] * 2
    target = find(objects, "HorizontalPodAutoscaler", "demo-baton-decode")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["apiVersion"]) == ("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1")


def test_pods_of_a_group_are_ranks_of_one_model_that_know_each_other_by_a_secret() -> None:
    objects = render({"decode.multiNode": {"enabled": True, "size": 3}})
    settings = settings_of(objects, "demo-baton-decode")
    assert (settings["num_hosts"], settings["tensor_parallel_size"], settings["ranks_timeout"]) == (3, 3, 1800)
    group = find(objects, "LeaderWorkerSet", "demo-baton-decode")["spec"]["leaderWorkerTemplate"]
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    secret = find(objects, "Secret", "demo-baton-decode-ranks")
    assert len(base64.b64decode(secret["data"]["secret"])) == 48
    for name in ("leaderTemplate", "workerTemplate"):
        spec = group[name]["spec"]
        [mount] = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "ranks"]
        [volume] = [one for one in spec["volumes"] if one["name"] == "ranks"]
        assert settings["ranks_secret_file"] == f"{mount['mountPath']}/secret"
        assert volume["secret"]["secretName"] == "demo-baton-decode-ranks"
    assert {"name": "ranks", "containerPort": DEFAULT_PORT} in group["leaderTemplate"]["spec"]["containers"][0]["ports"]


def test_a_pod_of_a_group_may_have_several_ranks() -> None:
    objects = render({"decode.multiNode": {"enabled": True, "size": 2}, "decode.settings.tensor_parallel_size": 6})
    settings = settings_of(objects, "demo-baton-decode")
    assert (settings["num_hosts"], settings["tensor_parallel_size"]) == (2, 6)


def test_a_secret_of_the_users_is_mounted_and_none_is_made() -> None:
    objects = render({"decode.multiNode": {"enabled": True, "size": 2, "existingSecret": "ours"}})
    assert not [one for one in objects if one["kind"] == "Secret"]
    group = find(objects, "LeaderWorkerSet", "demo-baton-decode")["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        assert {"secretName": "ours", "defaultMode": 0o440} in [
            volume.get("secret") for volume in group[name]["spec"]["volumes"]
        ]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"decode.settings.tensor_parallel_size": 3},
            "decode.settings.tensor_parallel_size: is 3, but decode.multiNode.size is 2: all pods have as many ranks",
        ),
        ({"decode.gpus": 1}, "decode.gpus: is 1, but ranks on several pods (decode.multiNode) compute on CPUs"),
        ({"decode.settings.num_hosts": 2}, "num_hosts is not allowed"),
    ],
)
def test_what_a_group_cannot_be_is_refused_by_name(values: dict[str, object], words: str) -> None:
    done = helm("template", "demo", str(CHART), *arguments({"decode.multiNode.enabled": True, **values}))
    assert done.returncode != 0
    assert words in done.stderr


def test_only_pods_of_their_kind_reach_the_other_pods_of_a_group() -> None:
    objects = render({"decode.multiNode": {"enabled": True, "size": 2}})
    leaders, members = (
        find(objects, "NetworkPolicy", f"demo-baton-decode{suffix}")["spec"] for suffix in ("", "-members")
    )
    [leader], [member] = (one["podSelector"]["matchExpressions"] for one in (leaders, members))
    assert (leader["operator"], member["operator"]) == ("In", "NotIn")
    assert leader["key"] == member["key"] == "leaderworkerset.sigs.k8s.io/worker-index"
    assert leader["values"] == member["values"] == ["0"]
    assert members["ingress"] == [{"from": [{"podSelector": {"matchLabels": members["podSelector"]["matchLabels"]}}]}]
    assert find(render(), "NetworkPolicy", "demo-baton-decode")["spec"]["podSelector"].keys() == {"matchLabels"}


# -------------------------------------------------------------------------------------------------- security


def pods(objects: list[Object]) -> list[tuple[str, Object]]:
    """Every pod spec in a rendering, by the name of its owner."""
    found: list[tuple[str, Object]] = []
    for one in objects:
        spec, name = one.get("spec", {}), one["metadata"]["name"]
        templates = {
            "Deployment": lambda spec: [spec["template"]["spec"]],
            "Pod": lambda spec: [spec],
            "LeaderWorkerSet": lambda spec: [
                spec["leaderWorkerTemplate"][which]["spec"] for which in ("leaderTemplate", "workerTemplate")
            ],
        }
        found += [(name, pod) for pod in templates.get(one["kind"], lambda _: [])(spec)]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_meet_the_restricted_level(variant: str) -> None:
    allowed_volumes = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
    rendered = pods(render(VARIANTS[variant]))
    assert len(rendered) >= 4
    for name, spec in rendered:
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        assert spec["enableServiceLinks"] is False, name
        assert all(allowed_volumes & set(volume) for volume in spec["volumes"]), name
        for container in spec["containers"] + spec.get("initContainers", []):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert security["readOnlyRootFilesystem"] is True, name
            assert container["resources"]["requests"], name
            assert "memory" in container["resources"]["limits"], name


def test_only_those_who_ask_the_api_server_get_a_token() -> None:
    tokens = {name: spec["automountServiceAccountToken"] for name, spec in pods(render())}
    assert {name for name, mounted in tokens.items() if mounted} == {"demo-baton-router", "demo-baton-autoscaler"}


@pytest.mark.parametrize("mode", MODES)
def test_permissions_are_these_and_no_more(mode: str) -> None:
    rules = {
        f"{one['kind']}/{one['metadata']['name']}": [
            " ".join([*rule["verbs"], *rule["resources"], *rule.get("resourceNames", [])]) for rule in one["rules"]
        ]
        for one in render({"autoscaling.mode": mode})
        if one["kind"] in ("Role", "ClusterRole") and not one["metadata"]["name"].endswith("-hpa")
    }
    expected = {"Role/demo-baton-router": ["list watch endpointslices"]}
    if mode != "none":
        expected["Role/demo-baton-autoscaler"] = [
            "list watch endpointslices",
            "get patch leases demo-baton-autoscaler",
            "patch pods",
        ]
    if mode == "planner":
        expected["Role/demo-baton-autoscaler"] += [
            f"get patch deployments/scale demo-baton-{role}" for role in ("decode", "prefill")
        ]
    if mode == "external-metrics":
        expected["ClusterRole/demo-baton-autoscaler-prod"] = ["get patch apiservices v1beta1.external.metrics.k8s.io"]
    assert rules == expected


def test_pods_may_be_patched_for_deletion_costs_alone() -> None:
    for is_on in (True, False):
        objects = render({"autoscaling.deletionCosts": is_on})
        rules = find(objects, "Role", "demo-baton-autoscaler")["rules"]
        assert any("pods" in rule["resources"] for rule in rules) == is_on
        assert settings_of(objects, "demo-baton-autoscaler")["deletion_costs"] == is_on


@pytest.mark.parametrize("mode", MODES)
def test_lease_belongs_to_the_release(mode: str) -> None:
    """Else it would stay when the release goes, and autoscalers would need the right to create leases."""
    objects = render({"autoscaling.mode": mode})
    leases = [one["metadata"]["name"] for one in objects if one["kind"] == "Lease"]
    assert leases == ([] if mode == "none" else [settings_of(objects, "demo-baton-autoscaler")["lease_name"]])


def test_workers_are_reached_by_router_autoscaler_and_each_other_only() -> None:
    policy = find(render(), "NetworkPolicy", "demo-baton-decode")["spec"]
    assert policy["policyTypes"] == ["Ingress"]

    def sources(rule: Object) -> set[str]:
        return {one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for one in rule["from"]}

    serving, peers, metrics = policy["ingress"]
    assert (serving["ports"], sources(serving)) == ([{"port": "grpc"}], {"router", "autoscaler"})
    assert ("ports" in peers, sources(peers)) == (False, {"prefill", "decode"})
    assert metrics["ports"] == [{"port": 9400}]


# ---------------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize("file", ["values-laptop.yaml", "values-gpu-fleet.yaml"])
def test_rendering_is_as_reviewed(file: str) -> None:
    """After a change that is meant: helm template demo helm -n prod --kube-version 1.34.0 -f helm/FILE > the golden."""
    done = helm("template", "demo", str(CHART), "-n", "prod", "--kube-version", "1.34.0", *arguments(file=file))
    assert done.stdout == (GOLDEN / file).read_text()
