"""Click commands made from settings classes: one flag for each field, with its type, default, variable and help."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Generic, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from baton.sampling_settings import SAMPLING_SETTINGS, Metavar
from baton.settings import CONFIG_VARIABLE, config_path, env_name, flag_name, load
from common.config import (
    AutoscalerSettings,
    BatchSettings,
    ChatSettings,
    ChoiceSettings,
    ClientSettings,
    ConnectorSettings,
    DemoSettings,
    EndpointPickerSettings,
    EngineSettings,
    GenerateSettings,
    HealthSettings,
    LimitSettings,
    LogSettings,
    MetricsSettings,
    ModelSettings,
    ObserveSettings,
    PolicySettings,
    ResponseSettings,
    RouterSettings,
    Settings,
    SimulateSettings,
    TlsSettings,
    TraceSettings,
    TrafficSettings,
    TuneSettings,
    UpSettings,
    WebSettings,
    WorkerSettings,
)
from common.errors import BatonError, ConfigError
from kv_store.registry import settings_classes, stack_settings_classes

GROUPS: dict[type[Settings], str] = {
    DemoSettings: "Demo",
    UpSettings: "Stack",
    WorkerSettings: "Network and life cycle",
    RouterSettings: "Workers and network",
    AutoscalerSettings: "Signals, planner and Kubernetes",
    ChatSettings: "Conversation",
    GenerateSettings: "Output",
    ChoiceSettings: "Several answers",
    ClientSettings: "Router",
    SAMPLING_SETTINGS: "Sampling",
    TrafficSettings: "Traffic",
    SimulateSettings: "Simulated fleet",
    TuneSettings: "Search and simulated fleet",
    ModelSettings: "Model",
    EngineSettings: "Engine",
    ConnectorSettings: "KV blocks",
    **dict.fromkeys([*settings_classes(), *stack_settings_classes()], "KV blocks"),
    PolicySettings: "Routing",
    LimitSettings: "Limits",
    WebSettings: "Web pages and proxies",
    BatchSettings: "Batches",
    EndpointPickerSettings: "Gateway",
    ResponseSettings: "Stored responses",
    TlsSettings: "TLS",
    HealthSettings: "Probes",
    TraceSettings: "Traces and logging",
    ObserveSettings: "Traces and logging",
    MetricsSettings: "Traces and logging",
    LogSettings: "Traces and logging",
}
"""Sections of `--help`, in order. A field stands under the class that first declares it."""

S = TypeVar("S", bound=Settings)


def type_word(annotation: object) -> str:
    """What a value looks like, for help: `INT`, `a|b|c`, `TEXT,TEXT`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        metavar = next((one for one in get_args(annotation) if isinstance(one, Metavar)), None)
        return metavar or type_word(get_args(annotation)[0])
    if origin is Literal:
        return "|".join(map(str, get_args(annotation)))
    if origin in (Union, types.UnionType):
        return type_word(next(arg for arg in get_args(annotation) if arg is not type(None)))
    if origin is tuple:
        word = type_word(get_args(annotation)[0])
        return f"{word},{word}"
    return {int: "INT", float: "NUMBER", bool: "BOOL", str: "TEXT"}[annotation]  # type: ignore[index]


class SettingOption(click.Option):
    """The flag of one field. It yields the text as typed, or None; the settings class validates."""

    def __init__(self, field: str, info: FieldInfo, group: str) -> None:
        self.group = group
        default = info.get_default(call_default_factory=True, validated_data={})
        text = f"{info.description}  [{env_name(field)}; default: {_shown(default)}]"
        if info.annotation in (bool, bool | None):
            names = f"{flag_name(field)}/{flag_name('no_' + field)}"
            super().__init__([names, field], default=None, help=text)
        else:
            super().__init__([flag_name(field), field], metavar=type_word(info.annotation), help=text)


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, float):
        return f"{default:g}"
    return "unset" if default is None or default == () else str(default)


def setting_options(settings_class: type[Settings]) -> list[SettingOption]:
    options = []
    for field, info in settings_class.model_fields.items():
        owner = next(one for one in reversed(settings_class.__mro__) if field in getattr(one, "model_fields", ()))
        options.append(SettingOption(field, info, GROUPS[owner]))
    return options


AS_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object.")


class SettingsCommand(click.Command, Generic[S]):
    """A command whose flags are the fields of `settings_class`; `run(settings, **others)` returns the exit code.

    Bad settings are one line and exit code 2; any other BatonError is one line and exit code 1.
    """

    def __init__(
        self,
        name: str,
        settings_class: type[S],
        run: Callable[..., int],
        *,
        about: str,
        examples: Sequence[str],
        params: Sequence[click.Parameter] = (),
        rereads: bool = False,
    ) -> None:
        """`rereads`: `run` gets `file`, what the settings file is called and what reads it again; None without one."""
        config = click.Option(
            ["--config"],
            metavar="FILE",
            help=f"YAML file of settings; `num_blocks: 64` is --num-blocks 64  [{CONFIG_VARIABLE}]",
        )
        help_text = f"{about}\n\n\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)
        super().__init__(
            name,
            help=help_text,
            short_help=about,
            params=[*params, *setting_options(settings_class), config],
            epilog="[NAME] is the environment variable. A flag wins over its variable, that over the YAML file.",
            context_settings={"max_content_width": 100},
        )
        self._settings_class = settings_class
        self._run = run
        self._rereads = rereads

    def invoke(self, ctx: click.Context) -> int:
        others = dict(ctx.params)
        config: str | None = others.pop("config")
        fields = self._settings_class.model_fields
        given = {name: others.pop(name) for name in fields if name in others}
        flags = {name: value for name, value in given.items() if value is not None}
        read = partial(load, self._settings_class, flags, config=config)
        if self._rereads:
            path = config_path(config)
            others["file"] = None if path is None else (path, read)
        try:
            settings = read()
            return self._run(settings, **others)
        except BatonError as error:
            print_error(ctx.command_path, error.message)
            return 2 if isinstance(error, ConfigError) else 1

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ["Options", *GROUPS.values()]}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections[param.group if isinstance(param, SettingOption) else "Options"].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=30)


def print_error(command: str, message: str) -> None:
    print(f"{command}: error: {' '.join(message.split())}", file=sys.stderr)
