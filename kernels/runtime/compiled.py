"""Numba-compiled functions of the CPU bodies: cached on disk, and compiled again when any of their sources changes."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numba.np.linalg
from numba.core import event
from numba.core.caching import FunctionCache
from numba.core.registry import CPUDispatcher
from numba.core.types.misc import unliteral

from kernels.runtime import compiling
from kernels.runtime.binaries import cache_folder
from kernels.runtime.operations import FOLDER


def _no_blas() -> None:
    raise ImportError("not needed")


# On import, Numba looks for SciPy's BLAS, which takes a third of every start and serves matrix products that we do not
# compile. Only Numba's own lookup is replaced: other threads may be importing SciPy, which needs the BLAS.
if "scipy.linalg" not in sys.modules:
    _find = numba.np.linalg.ensure_blas
    numba.np.linalg.ensure_blas = _no_blas
    try:
        import numba.np.arraymath
    finally:
        numba.np.linalg.ensure_blas = _find


class _Counted(event.Listener):  # type: ignore[misc]
    """Counts the functions that Numba compiles; those loaded from the cache raise no event."""

    def on_start(self, begun: Any) -> None:
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


class _Body(CPUDispatcher):  # type: ignore[misc]
    """A function with its cache."""

    is_called_from_python: bool

    def __init__(self, function: Any) -> None:
        wrapper = {"no_cpython_wrapper": not self.is_called_from_python, "no_cfunc_wrapper": True}
        super().__init__(function, targetoptions={"nopython": True, "nogil": True, "error_model": "numpy", **wrapper})
        with _own_folder(), suppress(RuntimeError):  # "no locator available": no writable folder
            self._cache = _MendingCache(function, self.is_called_from_python)


class _Callee(_Body):
    """A function as other compiled functions call it: without the code that converts Python's arguments, often half of
    all, and once for all integers, where Numba would compile it again for each constant that is passed.
    """

    is_called_from_python = False

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return super().get_call_template(map(unliteral, args), {name: unliteral(kws[name]) for name in kws})


class _Compiled(_Body):
    """A function as Python calls it; as `callee` for Numba."""

    is_called_from_python = True

    @cached_property
    def callee(self) -> _Callee:
        return _Callee(self.py_func)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return self.callee.get_call_template(args, kws)

    def get_overload(self, sig: Any) -> Any:
        return self.callee.get_overload(sig)


class _MendingCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache, except that it replaces files truncated by a crash or a full disk, and that its key includes who
    calls the function, and the constants that it uses from other files, since they are compiled in.
    """

    def __init__(self, function: Any, is_called_from_python: bool) -> None:
        super().__init__(function)
        self._is_called_from_python = is_called_from_python

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # unpickling damaged bytes can raise anything
            with suppress(OSError):
                self.flush()
            return None

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        constants = sorted(_constants(self._py_func))
        return (*super()._index_key(sig, codegen), self._is_called_from_python, *constants)


def _constants(function: Any) -> set[tuple[str, str]]:
    """Names and values of the constants in a function and in the compiled functions that it calls."""
    found, met, waiting = set(), {function}, [function]
    while waiting:
        each = waiting.pop()
        for name in each.__code__.co_names:
            value = each.__globals__.get(name)
            if isinstance(value, (int, float, str, tuple)):
                found.add((name, repr(value)))
            called = getattr(value, "py_func", None)
            if called is not None and called not in met:
                met.add(called)
                waiting.append(called)
    return found


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
