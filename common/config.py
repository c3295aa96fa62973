"""Every setting of every process, validated. Flags, `BATON_*` variables and YAML keys are all made from these fields.

A field's name is its YAML key; `--num-blocks` and `BATON_NUM_BLOCKS` are the same setting. Descriptions are the help
texts. Defaults that depend on the machine or model are None here and decided where the machine or model is known.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from common.choices import MAX_BEST_OF, MAX_N
from common.logs import LogFormat

DEFAULT_MODEL = "smollm2-135m-instruct"


def comma_separated(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Addresses = Annotated[tuple[str, ...], BeforeValidator(comma_separated)]
MAX_PROCESSES = 64  # of one router
Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(gt=0)]


def default_cache_dir() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "baton")


class Settings(BaseModel):
    """Base of all settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), validate_default=True)


class LogSettings(Settings):
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log line shown")
    log_format: LogFormat = Field("text", description="text, or json (one object per line)")


class TlsSettings(Settings):
    """Certificates of one process, for its ports and for its channels to others; plain text if none is given.

    The files are read again when they change.
    """

    tls_cert: str | None = Field(
        None, description="certificate chain (PEM) that this process shows, as server and as client"
    )
    tls_key: str | None = Field(None, description="its private key (PEM)")
    tls_ca: str | None = Field(
        None,
        description="CA (PEM) that peers' certificates have to come from; a worker then takes no client without one",
    )
    tls_server_name: str | None = Field(
        None, description="name that peers' certificates have to hold; the host of their address if unset"
    )


class HealthSettings(Settings):
    health_listen: str | None = Field(
        None, description="further gRPC address with health checks alone, in plain text, for probes; off if unset"
    )


class ModelSettings(Settings):
    model: str = Field(
        DEFAULT_MODEL,
        description=f"{DEFAULT_MODEL} (embedded), a model directory or GGUF file on disk, or org/name on a hub",
    )
    served_model_name: str | None = Field(None, description="name that clients use; the model's own if unset")
    cache_dir: str = Field(default_factory=default_cache_dir, description="where converted models are kept")


class EngineSettings(ModelSettings):
    """What one engine process needs."""

    dtype: Literal["auto", "bfloat16", "float32", "float16"] = Field(
        "auto",
        description="of weights, activations and KV; auto: the model's own, or float32 on a CPU that is slow in it",
    )
    device: str = Field("auto", description="cpu, cuda or cuda:N; auto: a CUDA device if there is one, else cpu")
    kernels: Literal["auto", "avx2", "avx512", "avx512_bf16", "amx", "neon", "torch"] = Field(
        "auto", description="instruction set of the CPU kernels; auto: the best that this CPU has; torch: none"
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="of weights, when they are loaded; needs the CPU kernels"
    )
    block_size: Positive = Field(16, description="tokens per KV block")
    num_blocks: Positive | None = Field(None, description="KV blocks; from --kv-cache-memory-gb if unset")
    kv_cache_memory_gb: float | None = Field(
        None, gt=0, description="KV cache size in GiB; if unset 1 on CPU, --memory-utilization on CUDA"
    )
    memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a CUDA device's memory that may be used")
    max_model_len: Positive | None = Field(None, description="prompt and answer tokens; the model's own if unset")
    max_num_seqs: Positive = Field(64, description="requests in one batch")
    max_num_batched_tokens: Positive = Field(2048, description="tokens in one engine step")
    chunk_size: Positive = Field(512, description="tokens of one prompt in one engine step")
    announce: Literal["chunk", "end"] = Field(
        "chunk", description="when prefill announces KV blocks: chunk by chunk, or all at the end (to measure overlap)"
    )
    enable_prefix_caching: bool = Field(True, description="reuse KV blocks of equal prefixes")
    retain_share: float = Field(
        0.5, ge=0, le=1, description="share of the KV blocks that requests may have retained (docs/cache-hints.md)"
    )
    retain_tenant_share: float = Field(0.25, ge=0, le=1, description="the same of each tenant's requests")
    speculation: str = Field(
        "none",
        description="guess tokens of answers, several of which one step checks; no answer changes: none, "
        "ngram (as the text went on where its last tokens stood before), or a smaller model, as --model names one",
    )
    speculation_tokens: Positive = Field(8, description="most tokens of one guess")
    queue_policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="who is next: who came first, and priorities are refused; or by priority, one step of which is "
        "worth 10 seconds of waiting",
    )
    preemption_mode: Literal["recompute", "swap"] = Field(
        "recompute", description="what happens to a request that has to give its KV blocks back"
    )
    host_cache_gb: float = Field(
        0.0, ge=0, description="host memory in GiB for KV blocks that the device evicts; only worth it on a device"
    )
    swap_space_gb: float = Field(1.0, gt=0, description="host memory for --preemption-mode swap, GiB")
    engine_timeout: float = Field(
        30.0, gt=0, description="seconds of silence after which an engine process that hangs is killed"
    )
    num_threads: Positive | None = Field(None, description="compute threads; the pinned cores' number if unset")
    cpu_cores: Annotated[tuple[int, ...], BeforeValidator(comma_separated)] = Field(
        (), description="cores that the engine process is pinned to, as 0,1; none pinned if empty"
    )


class ConnectorSettings(Settings):
    """What all connectors share. Further fields are those of single connectors, which each has a class for in its own
    package: they are carried along here unread, by name. `kv_store.registry` knows those classes; `baton.settings` puts
    them together, so that a command knows every flag and refuses unknown ones."""

    model_config = ConfigDict(extra="allow")

    connector: str = Field(
        "shared_storage",
        description="how KV blocks move: shared_storage (files), nixl (memory to memory) or lmcache (a server)",
    )
    store: str = Field(
        "",
        description="keeps computed KV for all workers, beside a connector that is no store: shared_storage or lmcache",
    )
    transfer_timeout_s: float = Field(10.0, gt=0, description="a KV block's transfer fails after this many seconds")
    verify_checksums: bool = Field(False, description="verify KV that moves from peer to peer (stores always do)")
    lend_blocks: bool = Field(
        True, description="decode workers lend prefill workers the blocks of a prompt that these lack (nixl)"
    )


class WorkerSettings(EngineSettings, ConnectorSettings, TlsSettings, HealthSettings, LogSettings):
    """`baton prefill`, `baton decode` and `baton worker`."""

    model_config = ConfigDict(extra="allow")  # see ConnectorSettings

    listen: str = Field("127.0.0.1:50061", description="gRPC address; port 0 takes a free one")
    advertise: str | None = Field(None, description="address by which others reach this worker; --listen if unset")
    max_waiting_requests: Positive = Field(
        1024, description="requests that wait for the engine to begin with them; further ones are refused"
    )
    max_waiting_tokens: Positive = Field(524_288, description="prompt tokens of those requests, likewise")
    max_request_time: float = Field(
        3600.0, gt=0, description="seconds that a request or a lease may take here, whatever its caller says"
    )
    drain_timeout: float = Field(
        30.0,
        ge=0,
        description="seconds that SIGTERM lets streams and leases end; streams are handed over after 3/4 of them",
    )
    metrics_port: Port | None = Field(None, description="port of Prometheus' /metrics over HTTP; off if unset")


class PolicySettings(Settings):
    """How a router chooses workers."""

    policy: str = Field(
        "least_load",
        description="who gets a request: least_load, power_of_two, prefix_aware, round_robin or session",
    )
    prefill_policy: str | None = Field(None, description="which of them chooses prefill workers; --policy if unset")
    decode_policy: str | None = Field(None, description="which of them chooses decode workers; --policy if unset")
    min_remote_tokens: Positive | None = Field(
        None,
        description="fewest prompt tokens without KV for which a prefill worker is asked; one KV block if unset",
    )
    hedge_prefill: bool = Field(
        False,
        description="ask a second prefill worker if the first is much later than others were for as long a prompt; "
        "the first to answer goes on",
    )


class LimitSettings(Settings):
    """How much a router takes on, and from whom."""

    limits_file: str | None = Field(
        None, description="YAML of what keys and tenants may ask for; read again when it changes; no limits if unset"
    )
    max_running: Positive | None = Field(
        None,
        description="answers that workers make at a time; further ones wait here for their turn; no queue if unset",
    )
    max_queued: Positive = Field(256, description="answers that wait for their turn; further ones are refused")
    max_queue_wait: float = Field(
        30.0, gt=0, description="seconds that one may wait for its turn; what would wait longer is refused at once"
    )


class RouterSettings(PolicySettings, LimitSettings, TlsSettings, HealthSettings, LogSettings):
    """`baton router`. With --tls-cert and --tls-key both of its ports speak TLS."""

    prefill: Addresses = Field((), description="prefill workers: host:port, dns:///name:port or k8s:///ns/service:port")
    decode: Addresses = Field((), description="decode workers, spelled likewise (a worker of both roles in both)")
    http_listen: str = Field("127.0.0.1:8000", description="REST address; port 0 takes a free one")
    grpc_listen: str = Field("127.0.0.1:50051", description="gRPC address; port 0 takes a free one")
    processes: int = Field(
        1,
        ge=1,
        le=MAX_PROCESSES,
        description="router processes that share both ports (Linux only); limits hold for all of them together",
    )
    tls_client_ca: str | None = Field(
        None, description="CA (PEM) of clients' certificates; --tls-ca's are taken, too; clients need none if unset"
    )
    api_keys_file: str | None = Field(
        None,
        description="file of API keys, of which a client needs one; read again when it changes; all may if unset",
    )
    drain_timeout: float = Field(30.0, ge=0, description="seconds that SIGTERM waits for answers to end")
    request_timeout: float = Field(
        600.0, gt=0, description="deadline in seconds of a request that brings none, and the most that one may ask for"
    )
    max_requests: Positive = Field(
        1024, description="requests in flight, each choice of an answer counted; more are refused with a delay"
    )
    max_requests_per_key: Positive | None = Field(
        None, description="those of one API key; half of --max-requests if unset"
    )
    max_request_mb: float | None = Field(
        None, gt=0, description="MiB of one request's body; from the model's context if unset, over gRPC at most 4"
    )
    max_buffered_mb: float = Field(256.0, gt=0, description="MiB of the bodies of all requests in flight")
    max_answer_tokens: Positive | None = Field(
        None,
        description="tokens of all answers to one request: max_tokens, times n (best_of) and prompts, times 1 + "
        "logprobs / 4 rounded up; prompt tokens whose logprobs are asked for count likewise. A request that asks for "
        "more is refused, one without max_tokens ends there. If unset, what one answer may need in the model's "
        "context, and 2^20 at least",
    )
    max_retain: float = Field(
        3600.0, ge=0, description="seconds for which a request may have its prompt's KV retained; 0: not at all"
    )
    max_connections: Positive = Field(1024, description="connections of clients, of REST and of gRPC each")
    receive_timeout: float = Field(
        30.0,
        gt=0,
        description="seconds that a client may take for its TLS handshake, for the head of a request, and for its body",
    )
    control_tokens: bool = Field(
        False,
        description="control tokens (such as <|im_end|>) in chat messages are control tokens, not text: clients may "
        "then begin and end turns in a message",
    )
    worker_wait: float = Field(
        0.0, ge=0, description="seconds that a request waits while there is no worker (a fleet scaled to zero)"
    )


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
    deletion_costs: bool = Field(False, description="emptiest pods go first: set their deletion cost (k8s:/// only)")
    prefill_min: int = Field(1, ge=0, description="fewest prefill workers; 0 scales to zero")
    prefill_max: Positive = Field(10, description="most prefill workers")
    decode_min: int = Field(1, ge=0, description="fewest decode workers; 0 scales to zero")
    decode_max: Positive = Field(10, description="most decode workers")
    target_queued_tokens: float = Field(8192, gt=0, description="prompt tokens queued for each prefill worker")
    target_prefill_rate: float | None = Field(
        None, gt=0, description="prompt tokens/s that one prefill worker should be given; learned if unset"
    )
    target_kv_usage: float = Field(0.7, gt=0, le=1, description="share of KV blocks in use on a decode worker")
    target_requests: float = Field(32, gt=0, description="requests running and waiting on a decode worker")
    tolerance: float = Field(0.1, ge=0, lt=1, description="no change within this share of the target")
    arrival_window: float = Field(60.0, gt=0, description="seconds over which arrivals are averaged")
    scale_up_delay: float = Field(3.0, ge=0, description="seconds that a need must last before workers are added")
    scale_down_delay: float = Field(120.0, ge=0, description="seconds that a lack of need must last before any go")
    idle_timeout: float = Field(300.0, ge=0, description="seconds without any request before scaling to zero")


class UpSettings(EngineSettings, ConnectorSettings, PolicySettings, LimitSettings, LogSettings):
    """`baton up`: a whole stack on this machine."""

    model_config = ConfigDict(extra="allow")  # see ConnectorSettings

    prefill: int = Field(1, ge=0, description="prefill workers")
    decode: int = Field(1, ge=0, description="decode workers")
    both: int = Field(0, ge=0, description="workers with both roles")
    host: str = Field("127.0.0.1", description="address that the router listens on")
    http_port: Port = Field(8000, description="REST port; 0 takes a free one")
    grpc_port: Port = Field(50051, description="gRPC port; 0 takes a free one")
    router_processes: int = Field(
        1, ge=1, le=MAX_PROCESSES, description="processes of the router (Linux only), as `baton router --processes`"
    )
    drain_timeout: float = Field(30.0, ge=0, description="seconds that Ctrl-C or SIGTERM waits for answers to end")
    start_timeout: float = Field(120.0, gt=0, description="seconds that the stack may take to become ready")
    max_restarts: int = Field(
        5, ge=0, description="times in ten minutes that a worker or LMCache is started again if it ends; then all ends"
    )
    lmcache_size_gb: float = Field(
        1.0, gt=0, description="lmcache: memory in GiB of the server, which is started if --lmcache-address is unset"
    )
    hints: bool = Field(False, description="when ready, print commands to try, to standard error")


class ClientSettings(TlsSettings):
    """What every command that talks to a running stack needs."""

    router: str = Field("127.0.0.1:50051", description="the router's gRPC address")
    tls: bool = Field(False, description="speak TLS and trust the public CAs; --tls-ca trusts its own instead")
    api_key: str | None = Field(None, description="API key; better given as variable: command lines are seen by others")
    timeout: float | None = Field(
        None, gt=0, description="seconds until the request is given up; the router's limit if unset"
    )


class ChatSettings(ClientSettings):
    """`baton chat`, without the sampling parameters."""

    system: str | None = Field(None, description="system message that the conversation starts with")
    timeline: bool = Field(False, description="print where each answer's time went")


class ChoiceSettings(Settings):
    """`common.choices.Choices`. Unset is the server's to decide, and the server says which values are good."""

    n: int | None = Field(None, description=f"answers to the prompt, at most {MAX_N}; 1 if unset")
    best_of: int | None = Field(
        None, description=f"answers computed, at most {MAX_BEST_OF}: the n with the highest logprob per token are shown"
    )
    use_beam_search: bool | None = Field(
        None, description="the answers are the n best sequences of a beam search of width n"
    )
    length_penalty: float | None = Field(
        None, description="of a beam search: above 0, longer sequences are preferred; 1 if unset"
    )
    early_stopping: bool | None = Field(
        None, description="a beam search ends as soon as n sequences have, and not when no other is likely to be better"
    )


class GenerateSettings(ChoiceSettings, ClientSettings):
    """`baton generate`, without the sampling parameters."""

    timeline: bool = Field(False, description="print where the answer's time went, to standard error")


class DemoSettings(UpSettings):
    """`baton demo`: a stack on free ports, one question, its timeline."""

    http_port: Port = Field(0, description="REST port; 0 takes a free one")
    grpc_port: Port = Field(0, description="gRPC port; 0 takes a free one")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="least severe log line shown"
    )
    max_tokens: Positive = Field(64, description="most tokens of the answer")
