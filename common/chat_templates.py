"""Which chat templates a model's files hold, as the transformers library chooses them, and whether they compile.

Routers render them, workers only say early that one is broken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

FOLDER = "additional_chat_templates/"  # of further templates, each in a file of its own
DEFAULT = "default"
TOOL_USE = "tool_use"  # a model's other template, for conversations with tools


@dataclass(slots=True, frozen=True)
class TemplateSource:
    file: str  # where it is
    text: str


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the name that jinja2 looks for, as it declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """With the blocks that model publishers write their templates for."""
    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )


def template_sources(files: Mapping[str, bytes]) -> dict[str, TemplateSource]:
    """Templates by name, `DEFAULT` and others, from files of a model directory. Files of their own replace what
    tokenizer_config.json says. Raises `ValueError` for a file that is no text or no JSON."""
    found = {}
    for file, content in files.items():
        if file == "chat_template.jinja":
            found[DEFAULT] = TemplateSource(file, content.decode())
        elif file.startswith(FOLDER):
            found[file.removeprefix(FOLDER).removesuffix(".jinja")] = TemplateSource(file, content.decode())
    if found:
        return found
    for file in ("tokenizer_config.json", "chat_template.json"):
        given = json.loads(files.get(file, b"{}")).get("chat_template")
        if isinstance(given, str) and given:
            return {DEFAULT: TemplateSource(file, given)}
        if isinstance(given, list):
            return {str(one["name"]): TemplateSource(file, str(one["template"])) for one in given}
    return {}


def template_error(files: Mapping[str, bytes]) -> str:
    """The first template that cannot be compiled, with the reason in one line; empty if all of them can."""
    try:
        for name, source in template_sources(files).items():
            if name not in (DEFAULT, TOOL_USE):  # nobody renders it
                continue
            try:
                environment().from_string(source.text)
            except (jinja2.TemplateError, RecursionError) as error:
                return compile_error(source, error)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"the chat template cannot be read: {error}"
    return ""


def compile_error(source: TemplateSource, error: BaseException) -> str:
    line = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return f"the chat template of {source.file} cannot be compiled{line}: {str(error) or type(error).__name__}"
