"""The sampling parameters as fields of bodies, by all their names, in the bodies and in the page about them."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, TypeVar, cast

import msgspec

from common.sampling import FieldName, Parameter, json_schemas, parameters
from router.api.rest.openai.body_types import Body

BodyT = TypeVar("BodyT", bound=Body)
JsonSchema = dict[str, Any]

_PARAMETERS = [(name, parameter.is_texts) for name, parameter in parameters().items()]
ALIASES_OF = {name: parameter.rest_aliases for name, parameter in parameters().items()}
ALIASES = [(name, alias) for name, parameter in parameters().items() for alias in parameter.rest_aliases]


def with_sampling(body: type[BodyT]) -> type[BodyT]:
    """`body` with a field for each sampling parameter that it does not declare itself, and for their other names."""
    fields: list[tuple[str, object, None]] = []
    for name, parameter in parameters().items():
        kind = parameter.type | str | None if parameter.is_texts else parameter.type | None
        fields += [(one, kind, None) for one in _names(name, parameter) if one not in body.__struct_fields__]
    made = msgspec.defstruct(
        body.__name__, fields, bases=(body,), module=body.__module__, kw_only=True, forbid_unknown_fields=True
    )
    return cast("type[BodyT]", made)


def parameters_in(body: Body, field_name: FieldName = str, renamed: Collection[str] = frozenset()) -> dict[str, object]:
    """The sampling parameters that the client set in `body`. `field_name`: the field that has the value of one that is
    among the `renamed`."""
    given = {}
    for name, is_texts in _PARAMETERS:
        value = getattr(body, field_name(name) if name in renamed else name)
        if value is not None:
            given[name] = (value,) if is_texts and isinstance(value, str) else value
    return given


@functools.cache
def schemas(bodies: tuple[type[Body], ...]) -> tuple[tuple[JsonSchema, ...], dict[str, JsonSchema]]:
    """(a reference to each body's JSON Schema, all schemas by name), sampling parameters with help and bounds."""
    reference = "#/components/schemas/{name}"
    references, components = msgspec.json.schema_components(bodies, ref_template=reference)
    sampling, inner = json_schemas(reference.format(name="{model}"))
    for body in bodies:
        properties, own = components[body.__name__]["properties"], getattr(body.__base__, "__struct_fields__", ())
        for name, parameter in parameters().items():
            plain = [{"type": "string"}, {"type": "null"}] if parameter.is_texts else [{"type": "null"}]
            for one in _names(name, parameter):
                if one in properties and one not in own:
                    properties[one] = {"anyOf": [sampling[name], *plain]}
                elif one in properties:
                    properties[one].get("anyOf", [properties[one]])[0]["description"] = parameter.help
    return references, {**components, **inner}


def _names(name: str, parameter: Parameter) -> tuple[str, ...]:
    return (name, *parameter.rest_aliases)
