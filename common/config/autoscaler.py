"""Settings of the autoscaler."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.config.base import Addresses, LogSettings, Positive, TlsSettings


class AutoscalerSettings(TlsSettings, LogSettings):
    """`baton autoscaler`."""

    prefill: Addresses = Field((), description="prefill workers: host:port, dns:///name:port or k8s:///ns/service:port")
    decode: Addresses = Field((), description="decode workers, spelled likewise")
    routers: Addresses = Field(
        (), description="routers' gRPC endpoints, spelled likewise: arrivals, and what waits for a first worker"
    )
    http_listen: str = Field(
        "127.0.0.1:8010", description="/metrics, /healthz, /readyz, /decisions; port 0: a free one"
    )
    external_metrics_listen: str | None = Field(
        None, description="external.metrics.k8s.io over TLS for HPAs, host:port; off if unset"
    )
    external_metrics_service: str | None = Field(
        None, description="NAMESPACE/NAME of the Service before --external-metrics-listen, for its certificate"
    )
    external_metrics_cert: str | None = Field(
        None, description="certificate (PEM) of --external-metrics-listen; if unset one is made and published"
    )
    external_metrics_key: str | None = Field(None, description="its key (PEM); both are read again when they change")
    front_proxy_ca: str | None = Field(
        None, description="CA of the API server's client certificate (PEM); asked from the cluster if unset"
    )
    front_proxy_names: Addresses = Field(
        (), description="common names that it may have; asked from the cluster if --front-proxy-ca is unset"
    )
    keda_listen: str | None = Field(None, description="KEDA external scaler over gRPC, host:port; off if unset")
    namespace: str | None = Field(None, description="Kubernetes namespace; the pod's own if unset")
    leader_elect: bool = Field(False, description="of several replicas, one sets replicas and deletion costs")
    lease_name: str = Field("baton-autoscaler", description="name of the Lease that elects it")
    apply: bool = Field(False, description="set the replicas of --prefill-workload and --decode-workload")
    prefill_workload: str | None = Field(
        None, description="deployment/NAME, statefulset/NAME or leaderworkerset/NAME of the prefill workers"
    )
    decode_workload: str | None = Field(None, description="that of the decode workers")
    both_workload: str | None = Field(None, description="that of workers of both roles, whose roles move")
    deletion_costs: bool = Field(False, description="emptiest pods go first: set their deletion cost (k8s:/// only)")
    prefill_min: int = Field(1, ge=0, description="fewest prefill workers; 0 scales to zero")
    prefill_max: Positive = Field(10, description="most prefill workers")
    decode_min: int = Field(1, ge=0, description="fewest decode workers; 0 scales to zero")
    decode_max: Positive = Field(10, description="most decode workers")
    both_min: int = Field(2, ge=0, description="fewest workers of both roles; 0 scales to zero")
    both_max: Positive = Field(20, description="most workers of both roles")
    move_roles: bool = Field(
        False,
        description="workers that are in --prefill and in --decode take work of the role that is short; pods are asked "
        "for only if the fleet is short as a whole (docs/roles.md)",
    )
    role_interval: float = Field(30.0, ge=1, description="seconds from one change of a worker's role to the next")
    role_delay: float = Field(3.0, ge=0, description="seconds that a role must be short before a worker's role changes")
    role_gain: float = Field(
        0.1, ge=0, lt=1, description="share of what the shorter role lacks that a change of a role must take away"
    )
    target_queued_tokens: float = Field(8192, gt=0, description="prompt tokens queued for each prefill worker")
    target_prefill_rate: float | None = Field(
        None, gt=0, description="prompt tokens/s that one prefill worker should be given; learned if unset"
    )
    target_kv_usage: float = Field(0.7, gt=0, le=1, description="share of KV blocks in use on a decode worker")
    target_requests: float = Field(32, gt=0, description="requests running and waiting on a decode worker")
    planner: Literal["signals", "advisory", "model"] = Field(
        "signals",
        description="signals: each divided by its target; model: the fewest workers that keep --target-ttft-ms and "
        "--target-tpot-ms, by forecast and the workers' models of time; advisory: signals decide, and what model would "
        "do is reported",
    )
    target_ttft_ms: float | None = Field(None, gt=0, description="milliseconds to the first token; of --planner model")
    target_tpot_ms: float | None = Field(None, gt=0, description="milliseconds for each further token; likewise")
    target_share: float = Field(0.95, gt=0, lt=1, description="share of requests that keep both; likewise")
    startup_time: float = Field(
        60.0, ge=1, description="seconds from asking for a worker until it serves; likewise, which plans so far ahead"
    )
    tolerance: float = Field(0.1, ge=0, lt=1, description="no change within this share of the target")
    arrival_window: float = Field(60.0, gt=0, description="seconds over which arrivals are averaged")
    scale_up_delay: float = Field(3.0, ge=0, description="seconds that a need must last before workers are added")
    scale_down_delay: float = Field(120.0, ge=0, description="seconds that a lack of need must last before any go")
    idle_timeout: float = Field(300.0, ge=0, description="seconds without any request before scaling to zero")
