"""A pytest plugin (`-p tests.router.nested_parameters`) that declares sampling parameters of nested types.

It adds them where a contributor would: to `SamplingParams` and to types.proto. Everything that is imported later takes
them from there. So it needs a process of its own, and runs before any conftest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from pydantic import Field

from common import sampling
from common.sampling import Integer, Number, SamplingParams, Text, TypeForm

Type = descriptor_pb2.FieldDescriptorProto


@dataclass(slots=True, frozen=True, kw_only=True)
class Rule:
    name: Text = ""
    sizes: tuple[Integer, ...] = ()
    weights: dict[Text, Number] = field(default_factory=dict)


@dataclass(slots=True, frozen=True, kw_only=True)
class Plan:
    rule: Rule | None = None
    rules: tuple[Rule, ...] = ()


@dataclass(slots=True, frozen=True, kw_only=True)
class WithNested(SamplingParams):
    __pydantic_config__ = SamplingParams.__pydantic_config__

    plan: Annotated[Plan | None, Field(description="a dataclass of dataclasses")] = None
    rules: Annotated[tuple[Rule, ...], Field(description="a list of dataclasses")] = ()
    named_rules: Annotated[dict[str, Rule], Field(description="a mapping to dataclasses")] = field(default_factory=dict)


RULE = Rule(name="r", sizes=(1, 2), weights={"a": 0.5})
VALUES: dict[str, tuple[TypeForm, object]] = {
    "plan": (Plan | None, Plan(rule=RULE, rules=(Rule(name="s"), RULE))),
    "rules": (tuple[Rule, ...], (RULE, Rule(sizes=(3,)))),
    "named_rules": (dict[str, Rule], {"one": RULE, "two": Rule(name="t")}),
}
EXAMPLES: tuple[tuple[TypeForm, object, str], ...] = tuple(
    (kind, value, json.dumps(msgspec.to_builtins(value))) for kind, value in VALUES.values()
)
"""As in `tests.router.test_every_parameter`."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    default = descriptor_pool.Default()
    setattr(descriptor_pool, "Default", lambda: _Pool(default))  # noqa: B010 (it stands for another class)
    sampling.SamplingParams = WithNested  # type: ignore[misc]
    sampling.SamplingOptions.__annotations__ |= dict.fromkeys(VALUES, object)


class _Pool:
    """Where generated code registers itself."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def AddSerializedFile(self, data: bytes) -> Any:  # noqa: N802
        file = descriptor_pb2.FileDescriptorProto.FromString(data)
        if file.name == "baton/v1/types.proto":
            _declare(file)
        return self._pool.AddSerializedFile(file.SerializeToString())


def _declare(file: descriptor_pb2.FileDescriptorProto) -> None:
    rule = file.message_type.add(name="Rule")
    _add(rule, 1, "name", Type.TYPE_STRING)
    _add(rule, 2, "sizes", Type.TYPE_INT32, is_list=True)
    _add_map(rule, 3, "weights", Type.TYPE_FLOAT)
    plan = file.message_type.add(name="Plan")
    _add(plan, 1, "rule", "Rule")
    _add(plan, 2, "rules", "Rule", is_list=True)
    params = next(one for one in file.message_type if one.name == "SamplingParams")
    _add(params, 1001, "plan", "Plan")
    _add(params, 1002, "rules", "Rule", is_list=True)
    _add_map(params, 1003, "named_rules", "Rule")


def _add(
    message: descriptor_pb2.DescriptorProto, number: int, name: str, kind: str | int, *, is_list: bool = False
) -> None:
    """`kind` is a scalar type, or the name of a message."""
    label = Type.LABEL_REPEATED if is_list else Type.LABEL_OPTIONAL
    one = message.field.add(name=name, number=number, label=label, json_name=name)
    if isinstance(kind, str):
        one.type, one.type_name = Type.TYPE_MESSAGE, f".baton.v1.{kind}"
    else:
        one.type = kind  # type: ignore[assignment]


def _add_map(message: descriptor_pb2.DescriptorProto, number: int, name: str, kind: str | int) -> None:
    """From texts to `kind`."""
    entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
    entry.options.map_entry = True
    _add(entry, 1, "key", Type.TYPE_STRING)
    _add(entry, 2, "value", kind)
    _add(message, number, name, f"{message.name}.{entry.name}", is_list=True)
