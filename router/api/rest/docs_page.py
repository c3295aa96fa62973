"""`/docs`: the OpenAPI page for people. One file of HTML that asks for nothing: it works without the internet."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
summary { cursor: pointer; padding: .4rem 0; } h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td, th { border: 1px solid #8886; padding: .25rem .5rem; text-align: left;
 vertical-align: top; } code { font-family: ui-monospace, monospace; } .get { color: #07723c; }
.post { color: #0550ae; } @media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; }
.get { color: #6fdd8b; } .post { color: #79c0ff; } a { color: #79c0ff; } }
"""


def docs_page(page: Mapping[str, Any]) -> str:
    """`page` is the OpenAPI page."""
    schemas = page.get("components", {}).get("schemas", {})
    operations = [
        _operation(path, method, operation)
        for path, methods in page["paths"].items()
        for method, operation in methods.items()
    ]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>{html.escape(page['info']['title'])}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(page['info']['title'])}</h1>",
        "<p>For programs, this page is at <a href='openapi.json'>openapi.json</a>. "
        "Errors are <code>{&quot;error&quot;: {message, type, param, code}}</code>, and Anthropic's at its own paths. "
        "A router that has API keys asks for <code>Authorization: Bearer KEY</code>.</p>",
        *operations,
        "<h2>Bodies and answers</h2>",
        *(_schema(name, schema) for name, schema in schemas.items()),
        "</body></html>",
    ]
    return "\n".join(parts)


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    body = ""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        body = f" · body: {_type(content['schema'])}"
    names = [html.escape(one["name"]) for one in operation.get("parameters", ()) if one["in"] == "query"]
    query = f" · query: <code>{', '.join(names)}</code>" if names else ""
    return (
        f"<p><b class='{method}'>{method.upper()}</b> <code>{html.escape(path)}</code> "
        f"{html.escape(operation.get('summary', ''))}{query}{body}</p>"
    )


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{html.escape(field)}</code>{' *' if field in required else ''}</td><td>{_type(value)}</td>"
        f"<td>{html.escape(_help(value))}</td></tr>"
        for field, value in schema.get("properties", {}).items()
    ]
    table = "<table><tr><th>field (* required)</th><th>type</th><th></th></tr>" + "".join(rows) + "</table>"
    return f"<details id='{html.escape(name)}'><summary><code>{html.escape(name)}</code></summary>{table}</details>"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = html.escape(str(schema["$ref"]).rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    if schema.get("type") == "array" and isinstance(schema.get("items"), Mapping):
        return f"list of {_type(schema['items'])}"
    if "enum" in schema:
        return html.escape(" | ".join(json.dumps(one) for one in schema["enum"]))
    return html.escape(str(schema.get("type", "any JSON")))


def _help(schema: Mapping[str, Any]) -> str:
    texts = [one.get("description", "") for one in (schema, *schema.get("anyOf", ()))]
    return next((text for text in texts if text), "")
