"""Guided text in REST bodies: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_...`, and `guided`.

At most one of them. Schemas and structural tags are objects, or texts of such.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec import UNSET, Raw

from common.errors import InvalidArgumentError
from common.guided import MAX_GRAMMAR_CHARS, Guided, json_text
from router.api.rest.openai.body_types import AnswerBody, Body, GivenRaw, is_given, refuse_if_asked

MAX_SCHEMA_BYTES = 4 * MAX_GRAMMAR_CHARS  # as the client wrote it, with its white space


class GuidedBody(Body, kw_only=True):
    """The same fields as in gRPC; schema and structural tag are objects or texts."""

    json_schema: GivenRaw = UNSET
    json_object: bool = False
    regex: str = ""
    choice: list[str] | None = None
    grammar: str = ""
    structural_tag: GivenRaw = UNSET


class StructuredOutputs(Body, kw_only=True):
    json: GivenRaw = UNSET
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: GivenRaw = UNSET

    # How vLLM's compiler of grammars may go about it. Its clients write out what holds if nothing is said.
    disable_fallback: bool | None = None  # there is one compiler
    disable_any_whitespace: GivenRaw = UNSET
    disable_additional_properties: GivenRaw = UNSET
    whitespace_pattern: GivenRaw = UNSET

    unsupported: ClassVar[tuple[str, ...]] = (
        "disable_any_whitespace",
        "disable_additional_properties",
        "whitespace_pattern",
    )

    def form(self) -> Guided | None:
        """None if it asks for none: all of its fields are as vLLM's clients write out what they leave unset. Raises
        `InvalidArgumentError`."""
        refuse_if_asked(self, self.unsupported, where="structured_outputs")
        plain = (self.json_object or None, self.regex, self.choice, self.grammar)
        if plain == (None,) * 4 and not (is_given(self.json) or is_given(self.structural_tag)):
            return None
        return Guided(
            json_schema=schema_text(self.json, "structured_outputs.json"),
            json_object=bool(self.json_object),
            regex=self.regex or "",
            choice=tuple(self.choice or ()),
            grammar=self.grammar or "",
            structural_tag=schema_text(self.structural_tag, "structured_outputs.structural_tag"),
        )


class NamedSchema(Body, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: GivenRaw = UNSET
    strict: bool | None = None  # every schema is kept to the letter


class ResponseFormat(Body, kw_only=True):
    type: str
    json_schema: NamedSchema | None = None
    format: GivenRaw = UNSET  # of a structural tag; of the older shape, the next two
    structures: GivenRaw = UNSET
    triggers: GivenRaw = UNSET


class GuidedFields(AnswerBody, kw_only=True):
    """Says in which form the answer has to be."""

    response_format: ResponseFormat | None = None
    guided: GuidedBody | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: GivenRaw = UNSET
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def form(self) -> tuple[str, Guided] | None:
        """(the client's name for it, the form of the answer); None for any text. Raises `InvalidArgumentError`."""
        asked: list[tuple[str, Guided]] = []
        if self.response_format is not None and (guided := _of_response_format(self.response_format)):
            asked.append(("response_format", guided))
        if (given := self.guided) is not None:
            asked.append(
                (
                    "guided",
                    Guided(
                        json_schema=schema_text(given.json_schema, "guided.json_schema"),
                        json_object=given.json_object,
                        regex=given.regex,
                        choice=tuple(given.choice or ()),
                        grammar=given.grammar,
                        structural_tag=schema_text(given.structural_tag, "guided.structural_tag"),
                    ),
                )
            )
        if self.structured_outputs is not None and (guided := self.structured_outputs.form()):
            asked.append(("structured_outputs", guided))
        if is_given(self.guided_json):
            asked.append(("guided_json", Guided(json_schema=schema_text(self.guided_json, "guided_json"))))
        if self.guided_regex is not None:
            asked.append(("guided_regex", Guided(regex=self.guided_regex)))
        if self.guided_choice is not None:
            asked.append(("guided_choice", Guided(choice=tuple(self.guided_choice))))
        if self.guided_grammar is not None:
            asked.append(("guided_grammar", Guided(grammar=self.guided_grammar)))
        for name, guided in asked:
            if name.startswith("guided_") and not guided.kinds:
                raise InvalidArgumentError(name, "must not be empty")
        if len(asked) > 1:
            raise InvalidArgumentError(asked[1][0], f"cannot be together with {asked[0][0]}: both give the text a form")
        return asked[0] if asked else None


def _of_response_format(given: ResponseFormat) -> Guided | None:
    """None for plain text."""
    if given.type != "json_schema" and given.json_schema is not None:
        raise InvalidArgumentError("response_format.json_schema", 'is only for type "json_schema"')
    is_tag = given.type == "structural_tag"
    names = ("format", "structures", "triggers")
    parts = {name: schema_text(getattr(given, name), f"response_format.{name}") for name in names}
    for name, text in parts.items():
        if not is_tag and text:
            raise InvalidArgumentError(f"response_format.{name}", 'is only for type "structural_tag"')
    match given.type:
        case "text":
            return None
        case "json_object":
            return Guided(json_object=True)
        case "json_schema":
            name = "response_format.json_schema.schema"
            schema = "" if given.json_schema is None else schema_text(given.json_schema.schema, name)
            if not schema:
                raise InvalidArgumentError(name, "is required")
            return Guided(json_schema=schema)
        case "structural_tag":
            tag = ", ".join(f'"{name}": {text}' for name, text in parts.items() if text)
            return Guided(structural_tag=f'{{"type": "structural_tag", {tag}}}')
        case _:
            kinds = "text, json_object, json_schema, structural_tag"
            raise InvalidArgumentError("response_format.type", f"must be one of {kinds}, not {given.type!r}")


def schema_text(given: GivenRaw, name: str) -> str:
    """JSON text of a schema or tag: the object as it came, or what a string holds; empty if there is none.

    Raises `InvalidArgumentError` for the field `name` if the value cannot be read, or is too long to be looked at.
    """
    if not isinstance(given, Raw):
        return ""
    if (size := memoryview(given).nbytes) > MAX_SCHEMA_BYTES:
        raise InvalidArgumentError(name, f"must have at most {MAX_SCHEMA_BYTES} bytes, not {size}")
    try:
        value = msgspec.json.decode(given)
        if value is None:
            return ""
        return value if isinstance(value, str) else json_text(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(name, f"cannot be read: {error}") from error
    except RecursionError as error:
        raise InvalidArgumentError(name, "is nested too deeply") from error
