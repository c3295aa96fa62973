"""The settings that `common.sampling` declares: a flag, a variable and a YAML key for each sampling parameter.

Unset is the server's to decide, and the server says which values are good.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, cast

from pydantic import BaseModel, BeforeValidator, Field, create_model

from common.config import Settings, comma_separated
from common.sampling import Parameter, SamplingOptions, TypeForm, parameters


class Metavar(str):
    """What `--help` shows for the value of the field that it annotates."""


def sampling_options(settings: BaseModel) -> SamplingOptions:
    """What was set, and nothing else."""
    values = {name: getattr(settings, name) for name in parameters()}
    return cast("SamplingOptions", {name: value for name, value in values.items() if value is not None})


def _setting(parameter: Parameter) -> tuple[object, object]:
    """(annotation, field) for `create_model`."""
    words = parameter.help
    if isinstance(parameter.default, int | float) and not isinstance(parameter.default, bool):
        words += f"; {parameter.default:g} if unset"
    return _as_typed(parameter.type) | None, Field(None, description=words)


def _as_typed(kind: TypeForm) -> TypeForm:
    """`kind` as it is written on a command line or in a variable; YAML may also hold the value itself."""
    read: tuple[Callable[[str], object], str]
    if kind == tuple[str, ...]:
        read = (lambda text: (text,)), "TEXT"
    elif kind == tuple[int, ...]:
        read = comma_separated, "INT,INT"
    elif kind == dict[int, float]:
        read = _pairs, "INT=NUMBER,..."
    elif kind in (int, float, bool, str) or kind == int | None:
        return kind
    else:
        read = json.loads, "JSON"
    parse, metavar = read
    parsed = BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)
    return cast("TypeForm", Annotated[kind, parsed, Metavar(metavar)])


def _pairs(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("Input should be ID=NUMBER, more of them after commas")
    return {key.strip(): value.strip() for key, _, value in pairs}


SAMPLING_SETTINGS: type[Settings] = create_model(
    "SamplingSettings",
    __base__=Settings,
    **{name: _setting(parameter) for name, parameter in parameters().items()},  # type: ignore[call-overload]
)
