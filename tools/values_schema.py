"""Makes helm/values.schema.json: the chart's own values below, each process's settings from its settings class, and the
connectors from their registry.

    python -m tools.values_schema --write      after a change of any of them

So the chart refuses, by path, a setting that no process has, and offers each that one has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from baton.settings import WORKER_SETTINGS, RouterCommandSettings, with_connectors
from common.config import MAX_PROCESSES, AutoscalerSettings, ConnectorSettings, Settings
from kv_store.registry import fleet_connector_names, store_names
from tools.generated import main

Schema = dict[str, Any]
CONNECTOR_SETTINGS = with_connectors(ConnectorSettings)
PATH = Path(__file__).parents[1] / "helm" / "values.schema.json"

# What the chart itself decides, from other values.
_OWNED = {
    "log_level", "log_format", "listen", "advertise", "drain_timeout", "metrics_port", "http_listen", "grpc_listen",
    "prefill", "decode", "routers", "connector", "store", "kv_dir", "model", "served_model_name", "dtype",
    "external_metrics_listen", "external_metrics_service", "keda_listen", "namespace", "leader_elect", "lease_name",
    "apply", "prefill_workload", "decode_workload", "deletion_costs", "external_metrics_cert", "external_metrics_key",
    "tls_cert", "tls_key", "tls_ca", "tls_server_name", "tls_client_ca", "health_listen", "api_keys_file",
    "limits_file", "metrics_aliases", "processes", "trace_endpoint", "trace_protocol", "trace_sample", "trace_content",
    "endpoint_picker_listen", "endpoint_picker_address", "endpoint_picker_replicas", "endpoint_picker_key_file",
    "endpoint_picker_tls",
    "batch_file", "response_file", "num_hosts", "host_index", "ranks_address", "ranks_secret_file",
    "prefill_min", "prefill_max", "decode_min", "decode_max", "target_queued_tokens", "target_prefill_rate",
    "target_kv_usage", "target_requests",
}  # fmt: skip
_KEPT = {
    "description", "type", "enum", "const", "anyOf", "items", "prefixItems",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
}  # fmt: skip


def obj(**properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def integer(minimum: int = 0, maximum: int | None = None) -> Schema:
    return {"type": "integer", "minimum": minimum} | ({} if maximum is None else {"maximum": maximum})


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def number_or_null(maximum: float | None = None) -> Schema:
    return {"type": ["number", "null"], "exclusiveMinimum": 0} | ({} if maximum is None else {"maximum": maximum})


STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
MAP: Schema = {"type": "object"}  # Kubernetes' own; the API server knows what is right
STRINGS: Schema = {"type": "object", "additionalProperties": STRING}
PORT = integer(1, 65535)
SECONDS = integer(0)
SIZE: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)$"}
QUANTITY: Schema = {
    "anyOf": [
        {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$"},
        {"type": "number", "minimum": 0},
    ]
}
NAME: Schema = {"type": "string", "pattern": r"^([a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?)?$"}
STORAGE_CLASS: Schema = {"type": "string", "pattern": "^(-|[a-z0-9.-]*)$"}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+h)?([0-9]+m)?([0-9]+s)?$"}
WHO: Schema = {"type": "string", "pattern": r"^[A-Za-z0-9._@-]{1,64}$"}
PATH_OR_EMPTY: Schema = {"type": "string", "pattern": r"^(/.*)?$"}
COUNT_OR_PERCENT: Schema = {
    "anyOf": [integer(0), {"type": "string", "pattern": r"^[0-9]+%$"}],
}

DEFINITIONS: dict[str, Schema] = {
    "resources": obj(
        requests={"type": "object", "additionalProperties": QUANTITY},
        limits={"type": "object", "additionalProperties": QUANTITY},
    ),
    "strategy": obj(maxSurge=COUNT_OR_PERCENT, maxUnavailable=COUNT_OR_PERCENT),
    "podDisruptionBudget": obj(enabled=BOOLEAN, maxUnavailable=COUNT_OR_PERCENT),
    "image": obj(repository={"type": "string", "minLength": 1}, tag=STRING),
    "monitor": obj(enabled=BOOLEAN, interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}, labels=STRINGS),
}
PLACEMENT: dict[str, Schema] = {
    "resources": ref("resources"),
    "podDisruptionBudget": ref("podDisruptionBudget"),
    "antiAffinity": one_of("none", "soft", "hard"),
    "topologySpreadKeys": array(STRING),
    "nodeSelector": STRINGS,
    "tolerations": array(MAP),
    "affinity": MAP,
    "priorityClassName": NAME,
    "podLabels": STRINGS,
    "podAnnotations": STRINGS,
    "env": array(MAP),
}


def settings(settings_class: type[Settings], without: type[Settings] | None = None) -> Schema:
    """The values that `settings_class` takes in a configuration file, less what the chart decides."""
    left_out = _OWNED | (set(without.model_fields) if without else set())
    whole = settings_class.model_json_schema()
    properties = {name: _plain(schema) for name, schema in sorted(whole["properties"].items()) if name not in left_out}
    return obj(**properties)


def _plain(schema: Schema) -> Schema:
    plain = {key: value for key, value in schema.items() if key in _KEPT}
    return {key: [_plain(one) for one in value] if key == "anyOf" else value for key, value in plain.items()}


def worker(scaling: Schema) -> Schema:
    return obj(
        replicas=integer(0),
        settings=ref("workerSettings"),
        drainTimeoutSeconds=SECONDS,
        preStopSeconds=integer(1),
        startupTimeoutSeconds=integer(10),
        gpus=integer(0),
        gpuResource={"type": "string", "minLength": 1},
        rdma=obj(devices=integer(0), resource={"type": "string", "minLength": 1}, ipcLock=BOOLEAN),
        shmSize=QUANTITY,
        strategy=ref("strategy"),
        runtimeClassName=NAME,
        multiNode=obj(
            enabled=BOOLEAN,
            size=integer(2),
            existingSecret=NAME,
            leaderArgs=array(STRING),
            memberArgs=array(STRING),
        ),
        autoscaling=scaling,
        **PLACEMENT,
    )


def scaling(**targets: Schema) -> Schema:
    return obj(
        enabled=BOOLEAN,
        minReplicas=integer(0),
        maxReplicas=integer(1),
        scaleUpSeconds=integer(0, 3600),
        scaleDownSeconds=integer(0, 3600),
        **targets,
    )


def _never_zero() -> Schema:
    """An HPA cannot scale to zero."""
    role = {"properties": {"autoscaling": {"properties": {"minReplicas": {"minimum": 1}}}}}
    mode = {"enum": ["external-metrics", "prometheus-adapter"]}
    return {
        "if": {"properties": {"autoscaling": {"properties": {"mode": mode}}}},
        "then": {"properties": {"prefill": role, "decode": role, "both": role}},
    }


def _alone_if_it_keeps() -> Schema:
    """What a router keeps is a file of one pod: another pod, if it was asked, would not know it."""
    keeps = [{"properties": {name: {"const": True}}, "required": [name]} for name in ("batches", "responses")]
    return {"if": {"anyOf": keeps}, "then": {"properties": {"replicas": {"maximum": 1}}}}


def values_schema() -> Schema:
    root = obj(
        nameOverride=NAME,
        fullnameOverride=NAME,
        commonLabels=STRINGS,
        images=obj(
            registry=STRING,
            tag=STRING,
            pullPolicy=one_of("Always", "IfNotPresent", "Never"),
            pullSecrets=array(NAME),
            router=ref("image"),
            worker=ref("image"),
        ),
        logging=obj(level=one_of("debug", "info", "warning", "error"), format=one_of("text", "json")),
        tracing=obj(
            endpoint={"type": "string", "pattern": "^(https?://.+)?$"},
            protocol=one_of("grpc", "http/protobuf"),
            sample={"type": "number", "minimum": 0, "maximum": 1},
            content=BOOLEAN,
        ),
        model=obj(
            name={"type": "string", "minLength": 1},
            servedName=STRING,
            dtype=one_of("auto", "bfloat16", "float32", "float16"),
            volume=obj(
                type=one_of("none", "pvc", "hostPath"),
                claimName=NAME,
                subPath=STRING,
                hostPath=PATH_OR_EMPTY,
                mountPath={"type": "string", "pattern": "^/."},
            ),
        ),
        kv=obj(
            connector=one_of(*fleet_connector_names()),
            store=one_of("", *store_names()),
            settings=ref("connectorSettings"),
            sharedStorage=obj(
                type=one_of("pvc", "existingClaim", "hostPath"),
                claimName=NAME,
                hostPath=PATH_OR_EMPTY,
                storageClassName=STORAGE_CLASS,
                volumeName=NAME,
                accessMode=one_of("ReadWriteOnce", "ReadWriteMany"),
                size=SIZE,
                keep=BOOLEAN,
            ),
        ),
        router=obj(
            replicas=integer(0),
            processes={"type": "integer", "minimum": 1, "maximum": MAX_PROCESSES},
            settings=ref("routerSettings"),
            batches=BOOLEAN,
            responses=BOOLEAN,
            storage=obj(existingClaim=NAME, storageClassName=STORAGE_CLASS, size=SIZE, keep=BOOLEAN),
            drainTimeoutSeconds=SECONDS,
            preStopSeconds=integer(1),
            service=obj(
                type=one_of("ClusterIP", "NodePort", "LoadBalancer"), annotations=STRINGS, httpPort=PORT, grpcPort=PORT
            ),
            strategy=ref("strategy"),
            **PLACEMENT,
        )
        | _alone_if_it_keeps(),
        lmcache=obj(
            enabled=BOOLEAN,
            image=STRING,
            sizeGiB=integer(1),
            redis=obj(
                url={"type": "string", "pattern": r"^(redis://[A-Za-z0-9.-]+(:[0-9]{1,5})?)?$"}, existingSecret=NAME
            ),
            resources=ref("resources"),
        ),
        tls=obj(
            enabled=BOOLEAN,
            existingSecret=NAME,
            certManager=obj(issuerRef=MAP, duration=DURATION, renewBefore=DURATION),
            dnsNames=array({"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"}),
            clientCertificates=BOOLEAN,
            clientCa=obj(existingSecret=NAME, clientSecret=NAME),
        ),
        apiKeys=obj(
            existingSecret=NAME,
            keys=array(
                obj(
                    key={"type": "string", "pattern": r"^(sha256:[0-9a-fA-F]{64}|[!-\"$-9;-~]+)$"},
                    name=WHO,
                    tenant=WHO,
                )
                | {"required": ["key"]}
            ),
        ),
        limits=MAP,
        both=worker(scaling()),
        grafana=obj(dashboards=obj(enabled=BOOLEAN, labels=STRINGS)),
        prefill=worker(scaling(queuedTokensPerPod=number_or_null(), arrivalTokensPerSecond=number_or_null())),
        decode=worker(scaling(kvUsage=number_or_null(1), requestsPerPod=number_or_null())),
        autoscaling=obj(
            mode=one_of("external-metrics", "prometheus-adapter", "keda", "planner", "none"),
            deletionCosts=BOOLEAN,
            moveRoles=BOOLEAN,
            followPlanner=BOOLEAN,
            keda=obj(pollingIntervalSeconds=integer(1), cooldownSeconds=integer(0)),
        ),
        autoscaler=obj(
            replicas=integer(1),
            settings=ref("autoscalerSettings"),
            tls=obj(mode=one_of("self", "cert-manager", "secret"), secretName=NAME, issuerRef=MAP),
            **PLACEMENT,
        ),
        metrics=obj(
            workerPort=PORT,
            serviceMonitor=ref("monitor"),
            podMonitor=ref("monitor"),
            prometheusRule=obj(enabled=BOOLEAN, labels=STRINGS),
            aliases=obj(router=one_of("none", "vllm"), workers=one_of("none", "vllm")),
        ),
        networkPolicy=obj(enabled=BOOLEAN, routerFrom=array(MAP), metricsFrom=array(MAP)),
        gateway=obj(
            enabled=BOOLEAN,
            parentRefs=array(MAP),
            hostnames=array(STRING),
            endpointPicker=obj(
                enabled=BOOLEAN,
                port=PORT,
                failureMode=one_of("FailOpen", "FailClose"),
                tls=one_of("none", "self-signed", "router"),
                existingSecret=NAME,
            ),
        ),
        serviceAccount=obj(annotations=STRINGS),
        podSecurity=obj(runAsUser=integer(1), runAsGroup=integer(1), fsGroup=integer(1)),
    )
    root["properties"]["global"] = MAP  # helm itself adds it
    generated = {
        "workerSettings": settings(WORKER_SETTINGS, without=CONNECTOR_SETTINGS),
        "connectorSettings": settings(CONNECTOR_SETTINGS),
        "routerSettings": settings(RouterCommandSettings),
        "autoscalerSettings": settings(AutoscalerSettings),
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the Baton chart",
        "definitions": {**DEFINITIONS, **generated},
        **root,
        **_never_zero(),
    }


def text() -> str:
    return json.dumps(values_schema(), indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main("tools.values_schema", __doc__, PATH, text()))
