"""Settings of a model, of its engine, of how KV moves, and of the worker that has all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from common.config.base import (
    Address,
    HealthSettings,
    LogSettings,
    MetricsSettings,
    Port,
    Positive,
    Settings,
    TlsSettings,
    TraceSettings,
    comma_separated,
)

DEFAULT_MODEL = "smollm2-135m-instruct"


def default_cache_dir() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "baton")


class ModelSettings(Settings):
    model: str = Field(
        DEFAULT_MODEL,
        description=f"{DEFAULT_MODEL} (embedded), a model directory or GGUF file on disk, or org/name on a hub",
    )
    served_model_name: str | None = Field(None, description="name that clients use; the model's own if unset")
    cache_dir: str = Field(
        default_factory=default_cache_dir, description="where converted models are kept, and models of time"
    )


class EngineSettings(ModelSettings):
    """What one engine process needs."""

    dtype: Literal["auto", "bfloat16", "float32", "float16"] = Field(
        "auto",
        description="of weights, activations and KV; auto: the model's own, or float32 on a CPU that is slow in it",
    )
    device: str = Field(
        "auto",
        description="cpu, cuda, cuda:N, or simulated: no weights, and steps take the time that --simulated-time says; "
        "auto: a CUDA device if there is one, else cpu",
    )
    simulated_time: str = Field(
        "h100-8b",
        description="of --device simulated: a file that baton profile wrote, or h100-8b, 4xh100-70b or xeon-135m, "
        "which are computed from data sheets",
    )
    kernels: Literal["auto", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16", "torch"] = Field(
        "auto", description="instruction set of the CPU kernels; auto: the best that this CPU has; torch: none"
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="of weights, when they are loaded; refused on CUDA and where the CPU kernels do not run"
    )
    block_size: Positive = Field(16, description="tokens per KV block")
    num_blocks: Positive | None = Field(None, description="KV blocks; from --kv-cache-memory-gb if unset")
    kv_cache_memory_gb: float | None = Field(
        None, gt=0, description="KV cache size in GiB; if unset 1 on CPU, --memory-utilization on CUDA"
    )
    memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a CUDA device's memory that may be used")
    enforce_eager: bool = Field(
        False, description="never replay recorded CUDA graphs, which decode steps take where FlashInfer is"
    )
    cascade_attention: Literal["auto", "off"] = Field(
        "off",
        description="auto: decode steps read KV blocks that several requests share once for all of them, where "
        "FlashInfer attends and enough is saved; no answer changes (docs/gpu.md)",
    )
    run_ahead: bool = Field(
        False,
        description="begin a step of decodes before the one before it has ended, on a thread of its own, so that the "
        "device need not wait for the engine between steps; no answer changes (docs/architecture.md)",
    )
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
        "ngram (as the text went on where its last tokens stood before), a smaller model, as --model names one, or a "
        "directory with Medusa or EAGLE heads of the model",
    )
    speculation_tokens: Positive = Field(8, description="most tokens of one guess")
    queue_policy: Literal["auto", "fcfs", "priority", "slo"] = Field(
        "auto",
        description="who is next. fcfs: who came first, and priorities are refused; priority: one step of it is worth "
        "10 seconds of waiting; slo: who has the least time left to meet its latency targets "
        "(docs/latency-targets.md); auto: fcfs, and as slo while requests with targets are here",
    )
    slo_late: Literal["refuse", "best-effort"] = Field(
        "best-effort",
        description="with --queue-policy auto or slo, what becomes of a waiting request that cannot meet its latency "
        "targets any more, or that would make several others late",
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
    tensor_parallel_size: Positive = Field(
        1,
        description="processes that compute the model together, each with a part of every layer (docs/ranks.md); "
        "CPU only",
    )
    pipeline_parallel_size: Positive = Field(
        1,
        description="stages that compute the model together, each with some of its layers and "
        "--tensor-parallel-size processes (docs/ranks.md); CPU only",
    )
    expert_parallel_size: Positive = Field(
        1,
        description="as many as --tensor-parallel-size: of a mixture of experts each of those processes has some "
        "experts whole; 1: a part of every expert (docs/ranks.md)",
    )
    data_parallel_size: Positive = Field(
        1,
        description="processes that compute a mixture of experts together, each with all of it but the experts, of "
        "which each has some; each step's requests are dealt out to them (docs/ranks.md); CPU only",
    )
    num_hosts: Positive = Field(
        1,
        description="hosts (pods) that compute the model together, each with as many of the --tensor-parallel-size "
        "ranks; all are given the same flags but --host-index (docs/ranks.md)",
    )
    host_index: int | None = Field(
        None,
        ge=0,
        description="which of the --num-hosts this is; only host 0 serves. LWS_WORKER_INDEX if unset, which "
        "LeaderWorkerSet sets",
    )
    ranks_address: Address = Field(
        "",
        description="host:port at which rank 0 waits for the ranks of other hosts, and they find it; port 50065 of "
        "LWS_LEADER_ADDRESS if unset",
    )
    ranks_secret_file: str | None = Field(
        None, description="file with a secret of 16 bytes or more, by which ranks of several hosts know each other"
    )
    ranks_timeout: float = Field(
        600.0, gt=0, description="seconds that ranks of several hosts wait for each other when they start"
    )
    num_threads: Positive | None = Field(
        None, description="compute threads, of all ranks together; the pinned cores' number if unset"
    )
    cpu_cores: Annotated[tuple[int, ...], BeforeValidator(comma_separated)] = Field(
        (), description="cores that the engine process is pinned to, as 0,1; none pinned if empty"
    )

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return self.data_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def flag_of_ranks(self) -> str:
        """The flag that asks for several of them, for messages."""
        if self.data_parallel_size > 1:
            return "--data-parallel-size"
        return "--tensor-parallel-size" if self.pipeline_parallel_size == 1 else "--pipeline-parallel-size"

    @property
    def takes_priorities(self) -> bool:
        """Whether a request may have another priority than 0."""
        return self.queue_policy in ("priority", "slo")


class ConnectorSettings(Settings):
    """What all connectors share. Further fields are those of single connectors, which each has a class for in its own
    package: they are carried along here unread, by name. `kv_store.registry` knows those classes; `baton.settings` puts
    them together, so that a command knows every flag and refuses unknown ones."""

    model_config = ConfigDict(extra="allow")

    connector: str = Field("shared_storage", description="how KV blocks move")
    store: str = Field("", description="keeps computed KV for all workers, beside a connector that is no store")
    transfer_timeout_s: float = Field(10.0, gt=0, description="a KV block's transfer fails after this many seconds")
    verify_checksums: bool = Field(False, description="verify KV that moves from peer to peer (stores always do)")
    lend_blocks: bool = Field(
        True, description="decode workers lend prefill workers the blocks of a prompt that these lack (nixl)"
    )


class WorkerSettings(
    EngineSettings, ConnectorSettings, TlsSettings, HealthSettings, TraceSettings, MetricsSettings, LogSettings
):
    """`baton prefill`, `baton decode` and `baton worker`."""

    model_config = ConfigDict(extra="allow")  # see ConnectorSettings

    listen: str = Field("127.0.0.1:50061", description="gRPC address; port 0 takes a free one")
    advertise: Address | None = Field(None, description="address by which others reach this worker; --listen if unset")
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
    start_role: Literal["both", "prefill", "decode"] = Field(
        "both", description="of baton worker: of which role it takes work at first (docs/roles.md)"
    )
    pin_role: bool = Field(False, description="of baton worker: no planner changes that role")
    role_handover: float = Field(
        10.0,
        ge=0,
        description="seconds that answers may go on at a worker that takes prompts alone from now on; then they are "
        "handed over",
    )
    metrics_port: Port | None = Field(None, description="port of Prometheus' /metrics over HTTP; off if unset")
    record_steps: str = Field(
        "", description="file that the engine's first steps are written to, with the KV that they read (baton replay)"
    )
    record_num_steps: Positive = Field(100, description="how many steps --record-steps writes")
    step_trace: str = Field(
        "", description="file that each step's sizes, predicted and measured time are written to (baton profile --from)"
    )
