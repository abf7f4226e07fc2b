"""Extension of Griffe: aligned lines "name : meaning" of docstrings become lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

_FIELD = re.compile(r"^(\w[\w.]*(?:, \w+)*) +: (.*)$")


class FieldLists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    lines: list[str] = []
    listed = False
    for line in text.splitlines():
        if field := _FIELD.match(line):
            lines += ([] if listed else [""]) + [f"- `{field.group(1)}`: {field.group(2)}"]
            listed = True
        elif listed and line.startswith(" "):
            lines.append(f"    {line.strip()}")
        else:
            lines += [""] * (listed and bool(line)) + [line]
            listed = False
    return "\n".join(lines)
