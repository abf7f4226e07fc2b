"""The HTTP API as its OpenAPI document describes it, prepared for people: on the service's page and in the manual.

Texts are Markdown of three kinds: code between backticks, links to objects, and paragraphs.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup, escape

_JOB = "5f0c2b9a1d3e"
_MOST = 1e15  # a larger bound is only SQLite's
_VALUES = {"string": "name", "integer": 1, "number": 1, "boolean": True, "null": None}


@dataclass(frozen=True, kw_only=True)
class Field:
    """A parameter, or a field of an object. where: path, query, header, or "" in an object; kind: its type."""

    name: str
    where: str
    kind: str
    text: str
    required: bool


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A request. body, answer: their types, or ""; refusals: statuses; curl: a command that makes it."""

    id: str
    tag: str
    method: str
    path: str
    text: str
    parameters: tuple[Field, ...]
    body: str
    answer: str
    refusals: tuple[int, ...]
    curl: str


@dataclass(frozen=True, kw_only=True)
class Object:
    """An object in bodies and answers. values: the words that it can be, if it is a word."""

    name: str
    text: str
    values: tuple[str, ...]
    fields: tuple[Field, ...]


def operations(document: Mapping[str, Any]) -> Iterator[Operation]:
    """Every request that the document describes."""
    for path, methods in document["paths"].items():
        for method, found in methods.items():
            answers = {int(status): each for status, each in found["responses"].items()}
            good = [f"{status} {_kind(_content(each))}".strip() for status, each in answers.items() if status < 400]
            yield Operation(
                id=found["operationId"], tag=found["tags"][0], method=method.upper(), path=path,
                text=found.get("description") or found["summary"], curl=_curl(document, path, method, found),
                parameters=tuple(
                    _field(each["name"], each["in"], each["schema"], each.get("description"), each["required"])
                    for each in found.get("parameters", ())
                ),
                body=_kind(_content(found["requestBody"])) if "requestBody" in found else "",
                answer=", ".join(good), refusals=tuple(sorted(status for status in answers if status >= 400)),
            )  # fmt: skip


def objects(document: Mapping[str, Any]) -> Iterator[Object]:
    """Every object that requests and answers are made of."""
    for name, schema in document["components"]["schemas"].items():
        needed = schema.get("required", ())
        yield Object(
            name=name, text=schema.get("description", ""), values=tuple(map(str, schema.get("enum", ()))),
            fields=tuple(
                _field(field, "", each, each.get("description"), field in needed)
                for field, each in schema.get("properties", {}).items()
            ),
        )  # fmt: skip


def marked(text: str) -> Markup:
    """A text as HTML. Lines within a paragraph are joined, except before "name : "."""
    joined = re.sub(r"(?<!\n)\n(?!\n|\w+ +: )", " ", text.strip())
    coded = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(joined)))
    return Markup(re.sub(r"\[(\w+)\]\(#(\w+)\)", r'<a href="#\2">\1</a>', coded))


def _field(name: str, where: str, schema: Mapping[str, Any], text: str | None, required: bool) -> Field:
    kind = _kind(schema)
    if where:  # a parameter is left out rather than null
        kind = kind.removesuffix(" or null")
    return Field(name=name, where=where, kind=kind, text=text or "", required=required)


def _content(part: Mapping[str, Any]) -> Mapping[str, Any]:
    kinds: list[Mapping[str, Any]] = list(part.get("content", {}).values())
    return kinds[0].get("schema", {}) if kinds else {}


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema in a few words; objects that have a name link to it."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [
        f"{word} {schema[key]:,.0f}"
        for key, word in (("minimum", "from"), ("maximum", "to"))
        if abs(schema.get(key, _MOST)) < _MOST
    ]
    default = f", default `{json.dumps(schema['default'])}`" if schema.get("default") is not None else ""
    return " ".join([str(schema.get("type", "any")), *bounds]) + default


def _curl(document: Mapping[str, Any], path: str, method: str, operation: Mapping[str, Any]) -> str:
    """A command that makes the request, with only what it needs."""
    kinds = next(each.get("content", {}) for status, each in operation["responses"].items() if int(status) < 400)
    needed = [each for each in operation.get("parameters", ()) if each["required"] and each["in"] == "query"]
    query = urlencode({each["name"]: _example(document, each["schema"]) for each in needed})
    parts = [f'curl "$MILLRACE_URL{path.replace("{job}", _JOB)}{"?" if query else ""}{query}"']
    if operation.get("security"):
        parts.append('-H "Authorization: Bearer $MILLRACE_TOKEN"')
    if "requestBody" in operation:
        body = _example(document, _content(operation["requestBody"]))
        parts += ['-H "Content-Type: application/json"', f"-d {shlex.quote(json.dumps(body))}"]
    elif method != "get":
        parts.append(f"-X {method.upper()}")
    if "text/event-stream" in kinds:
        parts.append("--no-buffer")
    elif "json" not in next(iter(kinds)) and "text/plain" not in kinds:
        parts.append("--remote-name --remote-header-name")
    return " \\\n  ".join(parts)


def _example(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Any:
    """A value that fits; of an object its required fields, or the first."""
    if "$ref" in schema:
        return _example(document, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    for key in ("examples", "enum", "anyOf"):
        if key in schema:
            return _example(document, schema[key][0]) if key == "anyOf" else schema[key][0]
    if schema["type"] == "array":
        return [_example(document, schema["items"])]
    if schema["type"] == "object":
        fields = schema.get("properties", {})
        return {name: _example(document, fields[name]) for name in schema.get("required") or list(fields)[:1]}
    return _VALUES[schema["type"]]
