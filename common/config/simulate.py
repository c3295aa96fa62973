"""Settings of a simulated fleet and its traffic."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from common.config.autoscaler import AutoscalerSettings
from common.config.base import Positive, Settings, comma_separated
from common.config.router import LimitSettings, PolicySettings
from common.config.stack import UpSettings
from common.config.worker import ConnectorSettings, EngineSettings


def _as_in(settings_class: type[Settings], name: str) -> Any:
    """The same default, bounds and help."""
    return settings_class.model_fields[name]


class TrafficSettings(Settings):
    """Which requests come."""

    trace: str | None = Field(
        None, description="file in Mooncake's format or Azure's; requests are made as --arrivals says if unset"
    )
    speed: float = Field(1.0, gt=0, description="of --trace: 2 plays it in half the time")
    lengths: float = Field(1.0, gt=0, description="of --trace: prompts and answers are so many times as long")
    requests: Positive | None = Field(
        None, description="how many; a trace is played again if it has fewer; if unset the whole trace, else 1000"
    )
    arrivals: Literal["poisson", "gamma", "bursts", "steady", "ramp", "day", "conversations"] = Field(
        "poisson", description="times of requests that are made; conversations: of users who come back"
    )
    rate: float = Field(
        1.0, gt=0, description="requests a second: on average, or at the end of a ramp, or a day's peak"
    )
    burstiness: float = Field(1.0, gt=0, description="of gamma: 1 is poisson, less comes in clusters")
    burst_size: Positive = Field(8, description="of bursts: requests at one moment")
    period: float = Field(3600.0, gt=0, description="of ramp and day: seconds")
    prompt_tokens: Positive = Field(1024, description="of a made prompt, the median; of a conversation's question")
    output_tokens: Positive = Field(128, description="of a made answer, the median")
    length_sigma: float = Field(
        0.0, ge=0, description="standard deviation of the logarithm of both; 0: all are equally long"
    )
    shared_tokens: int = Field(0, ge=0, description="that all made prompts begin with")
    turns: float = Field(5.0, ge=1, description="of a conversation, the mean")
    think_time: float = Field(20.0, gt=0, description="seconds from question to question, the mean")
    seed: int = Field(1, description="of all that is drawn: equal seeds give equal results on every machine")


class SimulateSettings(TrafficSettings, PolicySettings, LimitSettings):
    """`baton simulate`."""

    prefill: int = Field(1, ge=0, description="prefill workers, at the start")
    decode: int = Field(1, ge=0, description="decode workers, at the start")
    both: int = Field(0, ge=0, description="workers with both roles")
    times: str = Field(
        "h100-8b",
        description="how long steps take: a file that baton profile wrote, or h100-8b, 4xh100-70b or xeon-135m, which "
        "are computed from data sheets",
    )
    prefill_times: str | None = Field(None, description="those of prefill workers; --times if unset")
    decode_times: str | None = Field(None, description="those of decode workers; --times if unset")
    kv_token_bytes: Positive | None = Field(
        None, description="of one token's KV; if unset the data sheet's, or 131072 with a file"
    )
    block_size: Positive = _as_in(EngineSettings, "block_size")
    num_blocks: Positive | None = Field(None, description="KV blocks of a worker; what its device holds if unset")
    max_model_len: Positive = Field(131_072, description="prompt and answer tokens")
    max_num_seqs: Positive = _as_in(EngineSettings, "max_num_seqs")
    max_num_batched_tokens: Positive = _as_in(EngineSettings, "max_num_batched_tokens")
    chunk_size: Positive = _as_in(EngineSettings, "chunk_size")
    announce: Literal["chunk", "end"] = _as_in(EngineSettings, "announce")
    queue_policy: Literal["auto", "fcfs", "priority", "slo"] = _as_in(EngineSettings, "queue_policy")
    slo_late: Literal["refuse", "best-effort"] = _as_in(UpSettings, "slo_late")
    enable_prefix_caching: bool = _as_in(EngineSettings, "enable_prefix_caching")
    lend_blocks: bool = _as_in(ConnectorSettings, "lend_blocks")
    bandwidth: float = Field(25.0, gt=0, description="GB/s that a worker sends, and as many that it receives")
    link_latency: float = Field(0.2, ge=0, description="milliseconds of a transfer beside its bytes")
    message_latency: float = Field(0.5, ge=0, description="milliseconds of a message from process to process")
    host_time: float = Field(
        0.0, ge=0, description="milliseconds between two steps, in which the device waits for its engine"
    )
    host_request_time: float = Field(0.0, ge=0, description="milliseconds more of that for each request of a step")
    message_poll: float = Field(
        0.0,
        ge=0,
        description="milliseconds: while a worker computes a step, it looks for messages and for KV that arrived this "
        "often; 0: at once",
    )
    router_times: bool = Field(
        True, description="workers tell how long their steps take, so that the router decides in seconds"
    )
    max_requests: Positive | None = Field(
        None, description="requests in flight that the router takes; more are refused; no limit if unset"
    )
    max_requests_per_key: Positive | None = Field(None, description="those of one tenant; half of them if unset")
    tenants: str | None = Field(
        None, description="whose requests they are, and their shares, as web=3,batch=1; nobody's if unset"
    )
    leap: bool = Field(False, description="make many equal decode steps at once: faster, and within 1 % of the same")
    counted: bool = Field(
        False,
        description="workers count tokens and blocks and have no engine: fastest, for large fleets, by arrival alone",
    )
    autoscale: bool = Field(False, description="let the planner add and remove prefill and decode workers")
    move_roles: bool = Field(
        False, description="all workers have both roles, and what they take follows the load, whatever they begin with"
    )
    role_interval: float = _as_in(AutoscalerSettings, "role_interval")
    role_delay: float = _as_in(AutoscalerSettings, "role_delay")
    role_gain: float = _as_in(AutoscalerSettings, "role_gain")
    startup: float = Field(30.0, ge=0, description="seconds from asking for a worker until it serves")
    prefill_min: int = _as_in(AutoscalerSettings, "prefill_min")
    prefill_max: Positive = _as_in(AutoscalerSettings, "prefill_max")
    decode_min: int = _as_in(AutoscalerSettings, "decode_min")
    decode_max: Positive = _as_in(AutoscalerSettings, "decode_max")
    both_min: int = _as_in(AutoscalerSettings, "both_min")
    both_max: Positive = _as_in(AutoscalerSettings, "both_max")
    target_queued_tokens: float = _as_in(AutoscalerSettings, "target_queued_tokens")
    target_prefill_rate: float | None = _as_in(AutoscalerSettings, "target_prefill_rate")
    target_kv_usage: float = _as_in(AutoscalerSettings, "target_kv_usage")
    target_requests: float = _as_in(AutoscalerSettings, "target_requests")
    planner: Literal["signals", "model"] = Field(
        "signals", description="how --autoscale and --move-roles plan: as --planner of `baton autoscaler`"
    )
    target_ttft_ms: float | None = _as_in(AutoscalerSettings, "target_ttft_ms")
    target_tpot_ms: float | None = _as_in(AutoscalerSettings, "target_tpot_ms")
    target_share: float = _as_in(AutoscalerSettings, "target_share")
    tolerance: float = _as_in(AutoscalerSettings, "tolerance")
    arrival_window: float = _as_in(AutoscalerSettings, "arrival_window")
    scale_up_delay: float = _as_in(AutoscalerSettings, "scale_up_delay")
    scale_down_delay: float = _as_in(AutoscalerSettings, "scale_down_delay")
    idle_timeout: float = _as_in(AutoscalerSettings, "idle_timeout")
    goodput: Annotated[tuple[str, ...], BeforeValidator(comma_separated)] = Field(
        (), description="what a good request keeps, in milliseconds, as ttft:500,tpot:50,e2el:10000"
    )
    sweep: str | None = Field(None, description="fleets to compare, as prefill=1..8,decode=1..8,both=0")
    out: str | None = Field(None, description="HTML page with pictures")
