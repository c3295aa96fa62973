"""Settings of a whole stack on one machine."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from common.config.base import LogSettings, Port, Positive
from common.config.router import (
    MAX_PROCESSES,
    BatchSettings,
    LimitSettings,
    ObserveSettings,
    PolicySettings,
    ResponseSettings,
    WebSettings,
)
from common.config.worker import ConnectorSettings, EngineSettings


class UpSettings(
    EngineSettings,
    ConnectorSettings,
    PolicySettings,
    LimitSettings,
    WebSettings,
    BatchSettings,
    ResponseSettings,
    ObserveSettings,
    LogSettings,
):
    """`baton up`: a whole stack on this machine."""

    model_config = ConfigDict(extra="allow")  # see ConnectorSettings

    slo_late: Literal["refuse", "best-effort"] = Field(
        "best-effort",
        description="what becomes of a request that cannot meet its latency targets: at the router, as its workers "
        "predict it, and with --queue-policy auto or slo while it waits at a worker",
    )
    prefill: int = Field(1, ge=0, description="prefill workers")
    decode: int = Field(1, ge=0, description="decode workers")
    both: int = Field(0, ge=0, description="workers with both roles")
    host: str = Field("127.0.0.1", description="address that the router listens on")
    http_port: Port = Field(8000, description="REST port; 0 takes a free one")
    uds: str | None = Field(None, description="path of a unix socket for REST, in place of --host and --http-port")
    grpc_port: Port = Field(50051, description="gRPC port; 0 takes a free one")
    router_processes: int = Field(
        1, ge=1, le=MAX_PROCESSES, description="processes of the router (Linux only), as `baton router --processes`"
    )
    drain_timeout: float = Field(30.0, ge=0, description="seconds that Ctrl-C or SIGTERM waits for answers to end")
    start_timeout: float = Field(120.0, gt=0, description="seconds that the stack may take to become ready")
    max_restarts: int = Field(
        5,
        ge=0,
        description="times in ten minutes that a worker, router or LMCache is started again if it ends; then all ends",
    )
    hints: bool = Field(False, description="when ready, print commands to try, to standard error")


class DemoSettings(UpSettings):
    """`baton demo`: a stack on free ports, one question, its timeline."""

    http_port: Port = Field(0, description="REST port; 0 takes a free one")
    grpc_port: Port = Field(0, description="gRPC port; 0 takes a free one")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="least severe log line shown"
    )
    max_tokens: Positive = Field(64, description="most tokens of the answer")
