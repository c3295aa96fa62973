"""Where settings come from: flag over environment variable over YAML file over default.

Values from all sources meet as `{field: value}` and are validated once, by the pydantic class of the command. Whatever
is wrong is named as its source spells it: `--num-blocks`, `BATON_NUM_BLOCKS`, or `num_blocks in baton.yaml`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from pydantic import ConfigDict, Field, ValidationError

from baton.sampling_settings import SAMPLING_SETTINGS
from common.config import (
    AutoscalerSettings,
    ChatSettings,
    ClientSettings,
    ConnectorSettings,
    DemoSettings,
    EngineSettings,
    GenerateSettings,
    PolicySettings,
    RouterSettings,
    Settings,
    SimulateSettings,
    TuneSettings,
    UpSettings,
    WorkerSettings,
)
from common.errors import ConfigError
from kv_store.registry import connectors_in_words, settings_classes, stack_settings_classes, stores_in_words
from router.policy.registry import policies_in_words

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

PREFIX = "BATON_"
CONFIG_VARIABLE = "BATON_CONFIG"

S = TypeVar("S", bound=Settings)


class NamedPolicies(PolicySettings):
    """`--policy`, with the policies that there are in its help."""

    policy: str = Field(
        PolicySettings.model_fields["policy"].default, description=f"who gets a request: {policies_in_words()}"
    )


class NamedConnectors(ConnectorSettings):
    """`--connector` and `--store`, with the connectors that there are in their help."""

    connector: str = Field(
        ConnectorSettings.model_fields["connector"].default,
        description=f"how KV blocks move: {connectors_in_words()}",
    )
    store: str = Field(
        ConnectorSettings.model_fields["store"].default,
        description=f"{ConnectorSettings.model_fields['store'].description}: {stores_in_words()}",
    )


class RouterCommandSettings(NamedPolicies, RouterSettings):
    """A class with a name, since the processes of a router are given their settings pickled."""


class ProfileSettings(ClientSettings, EngineSettings):
    """`baton profile`: of an engine of its own, or of a router that leads to a running worker."""


def with_connectors(settings_class: type[S]) -> type[S]:
    """`settings_class` with the fields of every connector's own settings, and no others."""
    return _with_fields(settings_class, *reversed(settings_classes()), NamedConnectors)


def _with_fields(settings_class: type[S], *more: type[Settings]) -> type[S]:
    namespace = {
        "__module__": settings_class.__module__,
        "__doc__": settings_class.__doc__,
        "model_config": ConfigDict(extra="forbid"),
    }
    return cast("type[S]", type(settings_class.__name__, (*more, settings_class), namespace))


UP_SETTINGS = with_connectors(_with_fields(UpSettings, *stack_settings_classes(), NamedPolicies))
DEMO_SETTINGS = with_connectors(_with_fields(DemoSettings, *stack_settings_classes(), NamedPolicies))
WORKER_SETTINGS = with_connectors(WorkerSettings)
CHAT_SETTINGS = _with_fields(ChatSettings, SAMPLING_SETTINGS)
SIMULATE_SETTINGS = _with_fields(SimulateSettings, NamedPolicies)
TUNE_SETTINGS = _with_fields(TuneSettings, NamedPolicies)
GENERATE_SETTINGS = _with_fields(GenerateSettings, SAMPLING_SETTINGS)
SETTINGS: dict[str, type[Settings]] = {
    "up": UP_SETTINGS,
    "prefill": WORKER_SETTINGS,
    "decode": WORKER_SETTINGS,
    "worker": WORKER_SETTINGS,
    "router": RouterCommandSettings,
    "autoscaler": AutoscalerSettings,
    "chat": CHAT_SETTINGS,
    "generate": GENERATE_SETTINGS,
    "status": ClientSettings,
    "trace": ClientSettings,
    "top": ClientSettings,
    "admin": ClientSettings,
    "models": ClientSettings,
    "demo": DEMO_SETTINGS,
    "doctor": UP_SETTINGS,
    "profile": ProfileSettings,
    "replay": EngineSettings,
    "simulate": SIMULATE_SETTINGS,
    "tune": TUNE_SETTINGS,
}
"""Every command and what configures it."""

# Kubernetes puts BATON_ROUTER_SERVICE_HOST, BATON_ROUTER_PORT=tcp://... and the like into every pod beside a Service
# whose name starts with "baton". Nobody wrote these, so nobody is told off for them.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_SERVICE_URL = re.compile(r"^(tcp|udp|sctp)://")


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def env_name(field: str) -> str:
    return PREFIX + field.upper()


def load(
    settings_class: type[S],
    flags: Mapping[str, object],
    *,
    environ: Mapping[str, str] = os.environ,
    config: str | None = None,
    spelled: Callable[[str], str] = flag_name,
) -> S:
    """The validated settings of one command.

    `flags` holds only what was given on the command line, or by a program: `spelled` says how a field is written there.
    `config` is a YAML file; `BATON_CONFIG` if None.
    Raises ConfigError for an unknown variable or key and for a bad value.
    """
    check_environment(environ)
    path = config_path(config, environ)
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    if path is not None:
        for key, value in read_yaml(path, settings_class).items():
            values[key], sources[key] = value, f"{key} in {path}"
    for field in settings_class.model_fields:
        name = env_name(field)
        if name in environ and not _is_service_link(name, environ[name]):
            values[field], sources[field] = environ[name], name
    for field, value in flags.items():
        values[field], sources[field] = value, spelled(field)
    try:
        return settings_class(**values)
    except ValidationError as error:
        found = error.errors()
        source, reason = _explain(found[0], sources)
        more = "".join("; {}: {}".format(*_explain(one, sources)) for one in found[1:])
        raise ConfigError(source, reason + more) from error


def config_path(config: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The YAML file that settings come from; None if there is none."""
    return config if config is not None else environ.get(CONFIG_VARIABLE) or None


def check_environment(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a `BATON_*` variable that no command has."""
    known = {env_name(field) for settings in SETTINGS.values() for field in settings.model_fields} | {CONFIG_VARIABLE}
    for name, value in environ.items():
        if name.startswith(PREFIX) and name not in known and not _is_service_link(name, value):
            raise ConfigError(name, f"no such setting{did_you_mean(name, known)}")


def given_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The settings that variables give, by field. Raises ConfigError for a `BATON_*` variable that no command has."""
    check_environment(environ)
    fields = {field for settings in SETTINGS.values() for field in settings.model_fields}
    found = {field: env_name(field) for field in sorted(fields)}
    return {
        field: environ[name]
        for field, name in found.items()
        if name in environ and not _is_service_link(name, environ[name])
    }


def read_yaml(path: str, settings_class: type[Settings]) -> dict[str, object]:
    """The settings in a YAML file: one mapping from field names to values. Raises ConfigError."""
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--config", f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError("--config", f"{path} must hold one mapping of settings, not a {type(document).__name__}")
    for key in document:
        if key not in settings_class.model_fields:
            raise ConfigError(f"{key} in {path}", f"no such setting{_hint(str(key), settings_class)}")
    return document


def to_flags(settings: Settings) -> list[str]:
    """Command line that gives these settings; what equals its default is left out."""
    flags: list[str] = []
    for field, info in type(settings).model_fields.items():
        value: object = getattr(settings, field)
        if value is None or value == info.get_default(call_default_factory=True, validated_data={}):
            continue
        name = flag_name(field)
        if isinstance(value, bool):
            flags.append(name if value else name.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            flags.append(f"{name}={','.join(map(str, value))}")
        else:
            flags.append(f"{name}={value}")
    return flags


def did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


def _hint(key: str, settings_class: type[Settings]) -> str:
    owners = [command for command, settings in SETTINGS.items() if key in settings.model_fields]
    if owners:
        return f" of this command (it is one of baton {', '.join(owners)})"
    return did_you_mean(key, settings_class.model_fields)


def _explain(error: ErrorDetails, sources: Mapping[str, str]) -> tuple[str, str]:
    field = str(error["loc"][0]) if error["loc"] else "settings"
    message = error["msg"].removeprefix("Input ").removeprefix("Value error, ")
    given = error["input"]
    hint = ""
    if error["type"] == "literal_error" and isinstance(given, str):
        hint = did_you_mean(given, re.findall(r"'([^']+)'", error["ctx"]["expected"]))
    return sources.get(field, field), f"{message}, not {given!r}{hint}"


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.search(name) or _SERVICE_URL.match(value))
