"""Reads from a PTX module, for each kernel, its hand-written assembly and its shared memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_FUNCTION = re.compile(
    r"^(?:\.(?:visible|weak) )*\.(?:entry|func) +(?:\([^)]*\) *)?(\w+)([^;{]*\n\{\n.*?^\}|[^;{]*;)",
    re.MULTILINE | re.DOTALL,
)
_CALL = re.compile(r"\bcall(?:\.uni)?\s*(?:\([^)]*\),\s*)?(\w+)")
_BY_HAND = re.compile(r"// begin inline asm\n(.*?)// end inline asm", re.DOTALL)
_REGISTER = re.compile(r"%([a-z]+)\d+")
_SHARED = re.compile(r"\.shared \.align \d+ \.b(\d+) (\w+)(?:\[(\d+)\])?;")
_STATIC = re.compile(r"\b_Z\w+")  # of a function


@dataclass(frozen=True, kw_only=True)
class Function:
    """A kernel with everything that it calls."""

    by_hand: frozenset[str]  # statements of inline assembly, their registers without numbers
    shared_bytes: int  # static, each variable rounded up to 16 bytes


def functions(ptx: str) -> dict[str, Function]:
    """Every function of a module, by its mangled name."""
    bodies = {found[1]: found[2] for found in _FUNCTION.finditer(ptx)}  # a declaration comes before its body
    sizes = {name: int(bits) // 8 * int(count or 1) for bits, name, count in _SHARED.findall(ptx)}
    calls = {name: set(_CALL.findall(body)) & bodies.keys() for name, body in bodies.items()}
    shared = {name: set(_STATIC.findall(body)) & sizes.keys() for name, body in bodies.items()}
    by_hand = {name: {_REGISTER.sub(r"%\1", text) for text in _BY_HAND.findall(body)} for name, body in bodies.items()}
    read = {}
    for name in bodies:
        reached = _reached(name, calls)
        used = set().union(*(shared[each] for each in reached))
        read[name] = Function(
            by_hand=frozenset().union(*(by_hand[each] for each in reached)),
            shared_bytes=sum(-(-sizes[each] // 16) * 16 for each in used),
        )
    return read


def _reached(name: str, calls: Mapping[str, Iterable[str]]) -> set[str]:
    reached, waiting = set(), [name]
    while waiting:
        each = waiting.pop()
        if each not in reached:
            reached.add(each)
            waiting += calls[each]
    return reached


def representatives(lowered: Mapping[str, str], read: Mapping[str, Function]) -> tuple[str, ...]:
    """Expressions that cover each template and each statement of inline assembly.

    lowered : mangled names by expression
    """
    chosen, met = [], set()
    for expression, name in lowered.items():
        new = {expression.partition("<")[0], *read[name].by_hand} - met
        if new:
            chosen.append(expression)
            met |= new
    return tuple(chosen)
