"""Numba-compiled functions of the CPU bodies: cached on disk, and compiled again when any of their sources changes."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar, cast

import numba
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys
from numba.core.types.misc import unliteral

from kernels.runtime import compiling
from kernels.runtime.binaries import cache_folder
from kernels.runtime.operations import FOLDER

# It registers types. Later, in a thread's first call, that would break other threads' look-ups, which take no lock.
import_module("numba.experimental.function_type")


def _no_blas() -> None:
    raise ImportError("not needed")


@cache
def _import_array_functions() -> None:
    """On import, they look for SciPy's BLAS, which takes longer than Numba itself and serves matrix products that we do
    not compile. Only Numba's own lookup is replaced: other threads may be importing SciPy, which needs the BLAS."""
    linalg: Any = import_module("numba.np.linalg")
    find = linalg.ensure_blas
    if "scipy.linalg" not in sys.modules:
        linalg.ensure_blas = _no_blas
    try:
        import numba.np.arraymath  # noqa: F401
    finally:
        linalg.ensure_blas = find


class _Counted(event.Listener):  # type: ignore[misc]
    """Counts the functions that Numba compiles; those loaded from the cache raise no event."""

    def on_start(self, begun: Any) -> None:
        _import_array_functions()
        compiling.begin()

    def on_end(self, ended: Any) -> None:
        compiling.end()


event.register("numba:compile", _Counted())

Function = TypeVar("Function", bound=Callable[..., Any])
# Several threads may load CPU bodies at once, when they first need them, and Numba's setting is global.
_setting = threading.Lock()


def compiled(function: Function) -> Function:
    """Machine code that runs without the GIL, with IEEE arithmetic (no fastmath).

    Cached in NUMBA_CACHE_DIR or the user's cache folder; if neither is writable, each process compiles it again.
    """
    return cast("Function", _Compiled(function))


class _CalleeLibrary(JITCodeLibrary):  # type: ignore[misc]
    """LLVM code that is optimised and compiled only as part of its callers, never by itself."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # there is no machine code

    @property
    def codegen(self) -> _CalleeLibrary:
        return self  # for `set_env`

    def set_env(self, name: str, environment: Any) -> None:
        """Only machine code has an environment, and only code that calls Python reads it."""


class _CalleeCompiler(Compiler):  # type: ignore[misc]
    def __init__(self, typing: Any, target: Any, _library: None, *rest: Any) -> None:
        super().__init__(typing, target, _CalleeLibrary(target.codegen(), "callee"), *rest)


_OPTIONS = {"nopython": True, "nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


class _Callee(CPUDispatcher):  # type: ignore[misc]
    """A function as other compiled functions call it. Numba would also compile it by itself, with code that converts
    Python's arguments, and again for each constant that is passed, which would more than double the time to compile.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(
            function, targetoptions=_OPTIONS | {"no_cpython_wrapper": True}, pipeline_class=_CalleeCompiler
        )

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return super().get_call_template(map(unliteral, args), {name: unliteral(kws[name]) for name in kws})


class _Compiled(CPUDispatcher):  # type: ignore[misc]
    """A function as Python calls it; other compiled functions are given its `callee`."""

    def __init__(self, function: Any) -> None:
        super().__init__(function, targetoptions=_OPTIONS.copy())
        with _own_folder(), suppress(RuntimeError):  # "no locator available": no writable folder
            self._cache = _MendingCache(function)

    @cached_property
    def callee(self) -> _Callee:
        return _Callee(self.py_func)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return self.callee.get_call_template(args, kws)

    def get_overload(self, sig: Any) -> Any:
        return self.callee.get_overload(sig)


class _Result(CompileResultCacheImpl):  # type: ignore[misc]
    """Leaves out the environments of callees (see `_CalleeLibrary`), for which loading would import Numba's modules."""

    def reduce(self, result: Any) -> Any:
        *kept, _environments = super().reduce(result)
        return (*kept, ())


class _MendingCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache, except that it replaces files truncated by a crash or a full disk, and that its key includes the
    constants and the callees of a function, since they are compiled in and may come from other files.
    """

    _impl_class = _Result

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            rtsys.initialize(target_context)  # all that loaded code needs; Numba would fill the compiler's tables too
            return self._load_overload(sig, target_context)
        except Exception:  # unpickling damaged bytes can raise anything
            with suppress(OSError):
                self.flush()
            return None

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), *sorted(_compiled_in(self._py_func)))


def _compiled_in(function: Any) -> set[tuple[str, str]]:
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


@contextmanager
def _own_folder() -> Iterator[None]:
    """Caches in a folder named after all CPU sources: Numba checks only a function's own file, but ours call others."""
    with _setting:
        chosen = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(Path(chosen or cache_folder("numba")) / _sources_digest())
        try:
            yield
        finally:
            numba.config.CACHE_DIR = chosen


@cache
def _sources_digest() -> str:
    sources = sorted({*FOLDER.rglob("cpu*.py"), *FOLDER.rglob("cpu/*.py")})
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:16]
