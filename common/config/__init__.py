"""Every setting of every process, validated. Flags, `BATON_*` variables and YAML keys are all made from these fields.

A field's name is its YAML key; `--num-blocks` and `BATON_NUM_BLOCKS` are the same setting. Descriptions are the help
texts. Defaults that depend on the machine or model are None here and decided where the machine or model is known.
"""

from __future__ import annotations

from common.config.autoscaler import AutoscalerSettings
from common.config.base import (
    Addresses,
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
from common.config.client import ChatSettings, ChoiceSettings, ClientSettings, GenerateSettings
from common.config.router import (
    MAX_PROCESSES,
    BatchSettings,
    EndpointPickerSettings,
    LimitSettings,
    ObserveSettings,
    PolicySettings,
    ResponseSettings,
    RouterSettings,
    WebSettings,
)
from common.config.simulate import SimulateSettings, TrafficSettings
from common.config.stack import DemoSettings, UpSettings
from common.config.tune import TuneSettings
from common.config.worker import (
    DEFAULT_MODEL,
    ConnectorSettings,
    EngineSettings,
    ModelSettings,
    WorkerSettings,
    default_cache_dir,
)

__all__ = [
    "DEFAULT_MODEL",
    "MAX_PROCESSES",
    "Addresses",
    "AutoscalerSettings",
    "BatchSettings",
    "ChatSettings",
    "ChoiceSettings",
    "ClientSettings",
    "ConnectorSettings",
    "DemoSettings",
    "EndpointPickerSettings",
    "EngineSettings",
    "GenerateSettings",
    "HealthSettings",
    "LimitSettings",
    "LogSettings",
    "MetricsSettings",
    "ModelSettings",
    "ObserveSettings",
    "PolicySettings",
    "Port",
    "Positive",
    "ResponseSettings",
    "RouterSettings",
    "Settings",
    "SimulateSettings",
    "TlsSettings",
    "TraceSettings",
    "TrafficSettings",
    "TuneSettings",
    "UpSettings",
    "WebSettings",
    "WorkerSettings",
    "comma_separated",
    "default_cache_dir",
]
