"""Where a `$ref` leads: `$id`, `id`, `$anchor` and JSON pointers, inside one document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from common.json_schema.plain import UnkeptError

# Keywords whose values hold schemas. What stands elsewhere, as in `const`, is data.
_SCHEMA = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
]
_LIST = ["allOf", "anyOf", "oneOf", "prefixItems", "items"]
_MAPPING = ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"]

DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07", "2019-09")  # older than 2020-12, the one that is meant
DRAFT_6, DRAFT_7, DRAFT_2019 = 2, 3, 4


@dataclass(slots=True, frozen=True)
class Location:
    """Where a schema stands. `resource`: the place of the schema with an id that it belongs to."""

    path: tuple[str, ...] = ()
    resource: tuple[str, ...] = ()
    base: str = ""
    draft: int = len(DRAFTS)  # index in `DRAFTS`, or after them all

    def __str__(self) -> str:
        return "/".join(["#", *map(step, self.path)])

    def __truediv__(self, part: str | int) -> Location:
        return replace(self, path=(*self.path, str(part)))


class Document:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._locations: dict[str, list[Location]] = {}  # by URI; of several, the nearest is meant
        self._anchors: dict[tuple[tuple[str, ...], str], Location] = {}
        self._index()

    def _index(self) -> None:
        waiting: list[tuple[Any, Location]] = [(self._root, Location())]
        while waiting:
            schema, location = waiting.pop()
            if not isinstance(schema, dict):
                continue
            location = self.at(schema, location)
            if location.path == location.resource:
                self._locations.setdefault(location.base, []).append(location)
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := schema.get(name), str):
                    self._anchors[location.resource, anchor] = location
            if (id_ := _id(schema, location.draft)).startswith("#"):
                self._anchors[location.resource, id_[1:]] = location
            waiting += [(inner, place_) for inner, place_ in _inside(schema, location)]

    def at(self, schema: dict[str, Any], location: Location) -> Location:
        """`location` of `schema`, with the resource that the schema begins, if it does."""
        if isinstance(name := schema.get("$schema"), str):
            draft = next((number for number, draft in enumerate(DRAFTS) if draft in name), len(DRAFTS))
            location = replace(location, draft=draft)
        id_ = _id(schema, location.draft)
        if not id_ or id_.startswith("#"):
            return location
        return replace(location, resource=location.path, base=urldefrag(urljoin(location.base, id_)).url)

    def resolve(self, reference: str, location: Location) -> tuple[Any, Location]:
        """The schema that `reference`, which stands at `location`, leads to. Raises `UnkeptError`."""
        uri, fragment = urldefrag(reference)
        resource = Location(location.resource, location.resource, location.base)
        if uri:
            uri = urldefrag(urljoin(location.base, uri)).url
            if uri != location.base or not self._locations.get(uri):
                found = self._locations.get(uri)
                if not found:
                    raise UnkeptError("$ref", str(location), f"{reference!r} is not in this schema")
                resource = max(found, key=lambda one: _num_common(one.path, location.path))
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if (anchor := self._anchors.get((resource.path, fragment))) is None:
                raise UnkeptError("$ref", str(location), f"there is no anchor {fragment!r}")
            return self._walk(Location(), anchor.path, reference, location)
        steps = tuple(one.replace("~1", "/").replace("~0", "~") for one in fragment.split("/")[1:] if fragment)
        if steps == ("",):
            steps = ()
        return self._walk(Location(), (*resource.path, *steps), reference, location)

    def _walk(self, begin: Location, path: tuple[str, ...], reference: str, location: Location) -> tuple[Any, Location]:
        value, at = self._root, begin
        if isinstance(value, dict):
            at = self.at(value, at)
        for name in path:
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                raise UnkeptError("$ref", str(location), f"{reference!r} leads nowhere")
            at = at / name
            if isinstance(value, dict):
                at = self.at(value, at)
        return value, at


def step(name: str) -> str:
    """A key in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _id(schema: dict[str, Any], draft: int) -> str:
    """Empty if it has none."""
    names = ("$id", "id") if draft < DRAFT_6 else ("$id",)
    return next((schema[name] for name in names if isinstance(schema.get(name), str)), "")


def _inside(schema: dict[str, Any], location: Location) -> Iterator[tuple[Any, Location]]:
    for name in _SCHEMA:
        if name in schema:
            yield schema[name], location / name
    for name in _LIST:
        if isinstance(schema.get(name), list):
            for index, inner in enumerate(schema[name]):
                yield inner, location / name / index
    for name in _MAPPING:
        if isinstance(schema.get(name), dict):
            for key, inner in schema[name].items():
                yield inner, location / name / key


def _num_common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
