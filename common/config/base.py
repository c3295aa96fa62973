"""What settings are made of, and what several processes have in common."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from common.logs import LogFormat


def comma_separated(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def bracketed(address: object) -> object:
    """`fd00::1:80` as `[fd00::1]:80`: so Kubernetes writes `$(POD_IP):80` on IPv6. What follows the last colon is the
    port: nothing that is read so goes without one."""
    if isinstance(address, str):
        host, _, port = address.rpartition(":")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return address
        return f"[{host}]:{port}"
    return address


Address = Annotated[str, BeforeValidator(bracketed)]  # of one host, with a port
Addresses = Annotated[tuple[str, ...], BeforeValidator(comma_separated)]
Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(gt=0)]


class Settings(BaseModel):
    """Base of all settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), validate_default=True)


class LogSettings(Settings):
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log line shown")
    log_format: LogFormat = Field("text", description="text, or json (one object per line)")


class TraceSettings(Settings):
    """Where spans of requests go (docs/tracing.md)."""

    trace_endpoint: str | None = Field(
        None,
        pattern="^https?://",
        description="OpenTelemetry collector (OTLP) that spans of requests go to, as http://host:4317; if unset as "
        "OTEL_EXPORTER_OTLP_ENDPOINT says, and none without it",
    )
    trace_protocol: Literal["grpc", "http/protobuf"] | None = Field(
        None, description="how; as OTEL_EXPORTER_OTLP_PROTOCOL says if unset, or else grpc"
    )


class MetricsSettings(Settings):
    """What Prometheus reads (docs/metrics.md)."""

    metrics_aliases: Literal["none", "vllm"] = Field(
        "none", description="vllm: /metrics has its values under vLLM's names, too, for dashboards and autoscalers"
    )


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
