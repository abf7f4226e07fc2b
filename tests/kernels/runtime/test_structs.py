"""Every struct that kernels take by value has the same layout in Python and in CUDA. No GPU: NVRTC alone.

A mirror is a ctypes.Structure whose docstring names its twin, in C++: "struct Weights<float> of smoothing.cu".
Its fields have the names of the twin's.
"""

from __future__ import annotations

import ctypes
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import kernels
from kernels.runtime import binaries, operations
from kernels.runtime.launch import KernelCompileError, compile_for

TWIN = re.compile(r"\bstruct ([\w:]+(?:<[^>]*>)?) of [\w/]+\.cuh?\b")
NOT_MIRRORS = ("kernels.runtime.pdl",)  # the CUDA driver's own structs: NVRTC does not have cuda.h


def _structures(of: Any = ctypes.Structure) -> Iterator[type[ctypes.Structure]]:
    for each in of.__subclasses__():
        if each.__module__.startswith("kernels.") and each.__module__ not in NOT_MIRRORS:
            yield each
        yield from _structures(each)


def _mirrors(operation: str) -> list[type[ctypes.Structure]]:
    for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
        import_module(module.name)
    package = operations.package_of(operation) + "."
    return [each for each in _structures() if each.__module__.startswith(package)]


def _assertions(mirror: type[ctypes.Structure]) -> Iterator[str]:
    """static_asserts that the C++ twin has this size, and each field its place and size."""
    found = TWIN.search(mirror.__doc__ or "")
    assert found, f"{mirror.__module__}.{mirror.__name__} names no twin in its docstring: struct NAME of FILE.cuh"
    twin = found[1]
    yield f'static_assert(sizeof({twin}) == {ctypes.sizeof(mirror)}, "size of {mirror.__name__}");'
    for name, *_ in mirror._fields_:
        field, says = getattr(mirror, name), f"{mirror.__name__}.{name}"
        yield f'static_assert(__builtin_offsetof({twin}, {name}) == {field.offset}, "offset of {says}");'
        yield f'static_assert(sizeof({twin}::{name}) == {field.size}, "size of {says}");'


def _check(mirrors: list[type[ctypes.Structure]], operation: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    source = binaries.source_path(operation)
    asserting = folder / "structs.cu"
    lines = (f'#include "{source.name}"', *(line for mirror in mirrors for line in _assertions(mirror)))
    asserting.write_text("\n".join(lines) + "\n", encoding="utf-8")
    patch.setattr(binaries, "source_path", lambda _operation: asserting)
    compile_for(operation, "compute_90", (), (f"-I{source.parent}", "-dlto"))  # checked, without code


def test_every_mirror_belongs_to_an_operation() -> None:
    found = [mirror for operation in operations.names() for mirror in _mirrors(operation)]
    assert set(found) == set(_structures())


@pytest.mark.parametrize("operation", operations.names())
def test_structs_are_laid_out_as_their_twins(operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(_mirrors(operation), operation, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("columns", "rows"), "offset of Swapped.columns"),
        (("rows",), "size of Swapped"),
        (("rows", "lines"), "lines"),
    ],
)
def test_a_difference_is_noticed(
    fields: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Swapped(ctypes.Structure):
        """struct Image of images.cuh."""

        _fields_ = tuple((name, ctypes.c_int) for name in fields)

    with pytest.raises(KernelCompileError, match=message):
        _check([Swapped], "convolution", tmp_path, monkeypatch)


def test_a_structure_without_a_twin_is_noticed() -> None:
    class Lonely(ctypes.Structure):
        """Some numbers."""

    with pytest.raises(AssertionError, match="Lonely names no twin"):
        list(_assertions(Lonely))
