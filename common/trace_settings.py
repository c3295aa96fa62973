"""Whether a process traces, and where its spans go: its settings, and OpenTelemetry's own variables.

Nothing of OpenTelemetry is imported unless a collector is named.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from common.config import TraceSettings
from common.errors import ConfigError

if TYPE_CHECKING:
    from common.trace_export import TraceExport

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_MISSING = "needs OpenTelemetry: pip install 'baton-serve[otel]'"


def make_trace_export(
    settings: TraceSettings,
    service: str,
    instance: str = "",
    sample: float | None = None,
    environ: Mapping[str, str] = os.environ,
) -> TraceExport | None:
    """None if nothing is traced: no collector is named, or `OTEL_SDK_DISABLED` or `OTEL_TRACES_EXPORTER=none` say so.

    Raises `ConfigError` if a setting names a collector and OpenTelemetry is not installed. If only a variable does,
    which clusters set for every pod, that is a warning.
    """
    endpoint = settings.trace_endpoint
    if endpoint is None and not any(environ.get(name) for name in ENDPOINTS):
        return None
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    named = next((environ[name] for name in PROTOCOLS if environ.get(name)), "grpc")
    protocol = settings.trace_protocol or named
    try:
        from common.trace_export import TraceExport, grpc_exporter, http_exporter

        make = grpc_exporter if protocol == "grpc" else http_exporter
        made = TraceExport(make(endpoint), service, instance, sample)
    except ImportError:
        if endpoint is not None:
            raise ConfigError("trace_endpoint", _MISSING) from None
        log.warning("a collector is named by variables, and nothing is traced", extra={"reason": f"it {_MISSING}"})
        return None
    log.info("requests are traced", extra={"endpoint": endpoint or "as OTEL_* variables say", "protocol": protocol})
    return made
