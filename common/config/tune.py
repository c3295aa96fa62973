"""Settings of a search for settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from common.config.base import Positive, Settings, comma_separated
from common.config.router import PolicySettings, RouterSettings
from common.config.simulate import SimulateSettings, TrafficSettings
from common.config.worker import ModelSettings

MAX_WORKERS = 1000


def _as_in(settings_class: type[Settings], name: str) -> Any:
    """The same default, bounds and help."""
    return settings_class.model_fields[name]


class TuneSettings(TrafficSettings, PolicySettings):
    """`baton tune`. What it searches stays as it is if it is given: `model_fields_set` says so."""

    requests: Positive = Field(
        300,
        description="how many one simulation plays; as many others, of another seed or from later in the trace, check "
        "what was found",
    )
    goodput: Annotated[tuple[str, ...], BeforeValidator(comma_separated)] = _as_in(SimulateSettings, "goodput")
    slo_ttft_ms: float | None = _as_in(RouterSettings, "slo_ttft_ms")
    slo_tpot_ms: float | None = _as_in(RouterSettings, "slo_tpot_ms")
    load: float | None = Field(
        None,
        gt=0,
        description="times the traffic's rate at which settings are compared; if unset 1, or as much more as it takes "
        "until the best of them miss targets",
    )
    workers: int = Field(4, ge=1, le=MAX_WORKERS, description="of the fleet, whose roles are searched")
    prefill: int | None = Field(None, ge=0, description="prefill workers; roles are not searched if any is given")
    decode: int | None = Field(None, ge=0, description="decode workers, likewise")
    both: int | None = Field(None, ge=0, description="workers with both roles, likewise")
    minutes: float = Field(
        10.0, gt=0, description="that simulations may take together; what was found by then is told. Without --confirm"
    )
    confirm: bool = Field(
        False,
        description="serve the traffic with each of the best three, by `baton up` on this machine: with the model if "
        "--times was measured here, else with simulated devices",
    )
    confirm_seconds: float = Field(60.0, gt=0, description="of the traffic that each of them serves")
    out: str = Field(
        "tuned", description="folder for up.yaml, worker.yaml, router.yaml, values.yaml (of the chart) and report.html"
    )
    times: str = _as_in(SimulateSettings, "times")
    prefill_times: str | None = _as_in(SimulateSettings, "prefill_times")
    decode_times: str | None = _as_in(SimulateSettings, "decode_times")
    kv_token_bytes: Positive | None = _as_in(SimulateSettings, "kv_token_bytes")
    block_size: Positive = _as_in(SimulateSettings, "block_size")
    num_blocks: Positive | None = _as_in(SimulateSettings, "num_blocks")
    max_model_len: Positive = _as_in(SimulateSettings, "max_model_len")
    max_num_seqs: Positive = _as_in(SimulateSettings, "max_num_seqs")
    max_num_batched_tokens: Positive = _as_in(SimulateSettings, "max_num_batched_tokens")
    chunk_size: Positive = _as_in(SimulateSettings, "chunk_size")
    announce: Literal["chunk", "end"] = _as_in(SimulateSettings, "announce")
    queue_policy: str = _as_in(SimulateSettings, "queue_policy")
    slo_late: Literal["refuse", "best-effort"] = _as_in(SimulateSettings, "slo_late")
    enable_prefix_caching: bool = _as_in(SimulateSettings, "enable_prefix_caching")
    lend_blocks: bool = _as_in(SimulateSettings, "lend_blocks")
    bandwidth: float = _as_in(SimulateSettings, "bandwidth")
    link_latency: float = _as_in(SimulateSettings, "link_latency")
    message_latency: float = _as_in(SimulateSettings, "message_latency")
    host_time: float = _as_in(SimulateSettings, "host_time")
    host_request_time: float = _as_in(SimulateSettings, "host_request_time")
    router_times: bool = _as_in(SimulateSettings, "router_times")
    leap: bool = Field(True, description="make many equal decode steps at once: faster, and within 1 % of the same")
    model: str = _as_in(ModelSettings, "model")
    cache_dir: str = _as_in(ModelSettings, "cache_dir")
