"""Machine code of functions that Numba compiled in an earlier process, called without Numba, whose import takes 0.2 s.

A file of the cache is the object code of one function for arguments of certain kinds. LLVM loads it; its entry point
for Python, which Numba generates, converts the arguments and needs the symbols of three extension modules of Numba's.
These are loaded by themselves: each registers nothing but its symbols.

Code that is missing, damaged, or made for another processor, version or source is left to Numba, which stores it anew.
"""

from __future__ import annotations

import builtins
import ctypes
import hashlib
import importlib.util
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

import numpy as np

from kernels.runtime.binaries import cache_folder, mark_used, remove_unused
from kernels.runtime.operations import FOLDER

__all__ = ["compiled_in", "folder", "kind_of", "load", "sources_digest", "store"]

_DIGEST_BYTES = 32


def folder(chosen: str = "") -> Path:
    """Named after all CPU sources: Numba checks only a function's own file, but ours call others. `chosen`: instead of
    NUMBA_CACHE_DIR or the user's cache folder."""
    found = Path(chosen or os.environ.get("NUMBA_CACHE_DIR") or cache_folder("numba")) / sources_digest()
    mark_used(found)
    return found


@cache
def sources_digest() -> str:
    sources = sorted({*FOLDER.rglob("cpu*.py"), *FOLDER.rglob("cpu/*.py")})
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def compiled_in(function: Any) -> set[tuple[str, str]]:
    """Names and values of the constants in a function and in the compiled functions that it calls, and their code."""
    found, met, waiting = set(), {function}, [function]
    while waiting:
        each = waiting.pop()
        for name in each.__code__.co_names:
            value = each.__globals__.get(name)
            if isinstance(value, (int, float, str, tuple)):
                found.add((name, repr(value)))
            called = getattr(value, "py_func", None) or getattr(value, "_defn", None)  # of an intrinsic
            if called is not None and called not in met:
                met.add(called)
                waiting.append(called)
                found.add((called.__qualname__, _digest(called.__code__)))
    return found


def _digest(code: CodeType) -> str:
    values = [_digest(value) if isinstance(value, CodeType) else value for value in code.co_consts]
    return hashlib.sha256(repr((code.co_code, values, code.co_names)).encode()).hexdigest()[:16]


def kind_of(value: Any) -> Any:
    """All that Numba distinguishes arguments by; None if Numba must look itself."""
    kind = type(value)
    if kind is np.ndarray:
        flags = value.flags
        layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
        return (value.dtype.str, value.ndim, layout, flags.writeable) if _is_number(value) else None
    if kind is int:
        return "<i8" if value.bit_length() < 64 else None
    if kind is bool or kind is float:
        return "|b1" if kind is bool else "<f8"
    if isinstance(value, tuple):
        kinds = tuple(map(kind_of, value))
        return None if None in kinds else (name_of(kind), *kinds)
    return value.dtype.str if isinstance(value, np.generic) and _is_number(value) else None


def _is_number(value: Any) -> bool:
    return value.dtype.kind in "biufc"


def name_of(kind: type) -> str:
    """The name of a kind of tuples."""
    return f"{kind.__module__}.{kind.__qualname__}"


def store(
    function: Any, kinds: Sequence[Any], chosen: str, entry: str, environment: str, needed: Sequence[str], code: bytes
) -> None:
    """Keep a function's object code for arguments of these kinds.

    entry, environment : symbols of the entry point for Python, and of the pointer to its environment
    needed             : symbols that the code refers to
    """
    with suppress(OSError):  # with a read-only home, Numba loads or compiles it each time
        path = _path(function, kinds, chosen)
        if path is None or path.exists():
            return
        data = pickle.dumps((entry, environment, list(needed), code))
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".code-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        if path.parent.parent == cache_folder("numba"):
            remove_unused(cache_folder("numba"))


def load(function: Any, kinds: Sequence[Any]) -> Callable[..., Any] | None:
    """The function for arguments of these kinds; None if it is not in the cache. By one thread at a time."""
    if None in kinds:
        return None
    try:
        path = _path(function, kinds, "")
        if path is None:
            return None
        data = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
        with suppress(OSError):
            path.unlink()
        return None
    entry, environment, needed, code = pickle.loads(data[_DIGEST_BYTES:])
    binding, dynfunc = _llvm()
    # One engine each: object code of two processes may use one name for two functions.
    target = binding.Target.from_triple(binding.get_process_triple()).create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)  # it finds the process's symbols
    if not all(map(binding.address_of_symbol, needed)):  # LLVM would end the process
        return None
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    found = dynfunc.Environment(function.__globals__)
    if at := engine.get_global_value_address(environment):
        ctypes.c_void_p.from_address(at).value = id(found)
    module, address = sys.modules[function.__module__], engine.get_function_address(entry)
    engine.detach()  # never freed: threads that are not Python's may wait in the code as the process ends
    name, description = function.__name__, function.__doc__ or ""
    return cast("Callable[..., Any]", dynfunc.make_function(module, name, description, address, found, ()))


def _path(function: Any, kinds: Sequence[Any], chosen: str) -> Path | None:
    """The file of the code; None for closures and functions without a source file, whose code is not kept."""
    code = function.__code__
    try:
        stamp = os.stat(code.co_filename)  # noqa: PTH116 - a name
    except OSError:
        return None
    if function.__closure__ or function.__module__ not in sys.modules:
        return None
    parts = (
        code.co_filename, stamp.st_mtime_ns, stamp.st_size, function.__module__, function.__qualname__, _digest(code),
        sorted(compiled_in(function)), tuple(kinds), _platform(),
    )  # fmt: skip
    return folder(chosen) / f"{function.__name__}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.code"


@cache
def _platform() -> tuple[Any, ...]:
    import llvmlite
    from llvmlite import binding

    stamp = (_numba() / "_version.py").stat()
    options = sorted(
        item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] != "NUMBA_CACHE_DIR"
    )
    processor = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    return (*processor, sys.version, llvmlite.__version__, str(_numba()), stamp.st_mtime_ns, stamp.st_size, options)


@cache
def _numba() -> Path:
    spec = importlib.util.find_spec("numba")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def _llvm() -> tuple[Any, Any]:
    """LLVM with the symbols that Numba's code refers to, as Numba adds them, and the module that makes functions."""
    from llvmlite import binding

    helpers, dynfunc, runtime = map(_extension, ("_helperlib", "_dynfunc", "core.runtime._nrt_python"))
    symbols = {"_Py_NoneStruct": id(None)}
    for each in (helpers, dynfunc):
        symbols |= {f"numba_{name}": address for name, address in each.c_helpers.items()}
    symbols |= {name if name[0] == "_" else f"NRT_{name}": address for name, address in runtime.c_helpers.items()}
    raised = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)]
    symbols |= {f"PyExc_{kind.__name__}": id(kind) for kind in raised}
    for name, address in symbols.items():
        binding.add_symbol(name, address)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding, dynfunc


def _extension(name: str) -> Any:
    """An extension module of Numba's, which Numba will find if it is imported after all."""
    full = f"numba.{name}"
    found: ModuleType | None = sys.modules.get(full)
    if found is None:
        path = _numba().joinpath(*name.split(".")).with_suffix(EXTENSION_SUFFIXES[0])
        spec = importlib.util.spec_from_file_location(full, path)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        sys.modules[full] = found
    return found
