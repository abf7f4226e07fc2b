"""Functions compiled by Numba for the CPU. Numba is imported when one is compiled: what an earlier process compiled is
loaded without it (see machine_code.py)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cached_property, update_wrapper
from importlib import import_module
from typing import Any, TypeVar, cast

from kernels.runtime.compiled import machine_code

__all__ = ["c_function", "carray", "cgutils", "compiled", "intrinsic", "ir", "types"]

Function = TypeVar("Function", bound=Callable[..., Any])
_loading = threading.RLock()


def compiled(function: Function) -> Function:
    """Machine code that runs without the GIL, with IEEE arithmetic (no fastmath).

    Cached in NUMBA_CACHE_DIR or the user's cache folder; if neither is writable, each process compiles it again.
    """
    return cast("Function", _Compiled(function))


class _Compiled:
    """A function as Python calls it, and as other compiled functions do."""

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self.py_func = function
        self._loaded: dict[Any, Callable[..., Any]] = {}  # by the arguments' kinds

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if named or "numba" in sys.modules:
            return self.dispatcher(*arguments, **named)
        kinds = tuple(map(machine_code.kind_of, arguments))
        found = self._loaded.get(kinds)
        if found is None:
            with _loading:
                found = self._loaded.get(kinds) or machine_code.load(self.py_func, kinds)
                self._loaded[kinds] = found = found or self.dispatcher
        return found(*arguments)

    @cached_property
    def dispatcher(self) -> Any:
        """The function as Numba has it."""
        return import_module("kernels.runtime.compiled.compiler").Dispatcher(self.py_func)

    @property
    def callee(self) -> Any:
        return self.dispatcher.callee

    @property
    def _numba_type_(self) -> Any:
        return self.dispatcher._numba_type_


class _Later:
    """What compiled functions use, made when one of them is compiled."""

    def __init__(self, make: Callable[[], Any], defined: Any = None) -> None:
        self._make = make
        self._defn = defined  # changes of it change the key in the cache

    @cached_property
    def _numba_type_(self) -> Any:
        return import_module("kernels.runtime.compiled.compiler").type_of(self._make())


class _Module:
    """A module that is imported when something of it is used."""

    py_func = _defn = None  # see `machine_code.compiled_in`

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


# For functions that generate instructions, which run when something is compiled.
cgutils: Any = _Module("numba.core.cgutils")
ir: Any = _Module("llvmlite.ir")
types: Any = _Module("numba.core.types")
# For compiled functions.
carray: Any = _Later(lambda: import_module("numba").carray)


def intrinsic(function: Callable[..., Any], *, prefer_literal: bool = False) -> Any:
    """As numba.extending.intrinsic."""
    return _Later(lambda: import_module("numba.extending").intrinsic(prefer_literal=prefer_literal)(function), function)


def c_function(name: str, *arguments: str, returns: str = "int64") -> Any:
    """A function of the C library, for compiled functions, with the names of Numba's types."""

    def make() -> Any:
        result, *given = (getattr(types, each) for each in (returns, *arguments))
        return types.ExternalFunction(name, result(*given))

    return _Later(make)
