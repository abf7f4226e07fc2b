"""How Numba compiles functions of the CPU bodies: cached on disk, and again when any of their sources changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from importlib import import_module
from typing import Any

import numba
from numba.core import event, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.runtime import rtsys
from numba.core.types.containers import BaseTuple
from numba.core.types.misc import unliteral
from numba.np.numpy_support import as_dtype

from kernels.runtime import compiling
from kernels.runtime.compiled import machine_code

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

# Several threads may load CPU bodies at once, when they first need them, and Numba's setting is global.
_setting = threading.Lock()


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


class Dispatcher(CPUDispatcher):  # type: ignore[misc]
    """A function as Python calls it; other compiled functions are given its `callee`."""

    def __init__(self, function: Any) -> None:
        super().__init__(function, targetoptions=_OPTIONS.copy())
        with _own_folder() as chosen, suppress(RuntimeError):  # "no locator available": no writable folder
            self._cache = _MendingCache(function)
            self._cache.chosen = chosen

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

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        _name, _kind, (self.code, _bitcode) = payload[0]
        return super().rebuild(target_context, payload)


class _MendingCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache, except that it replaces files truncated by a crash or a full disk, and that its key includes the
    constants and the callees of a function, since they are compiled in and may come from other files. It also keeps the
    machine code for `machine_code.load`.
    """

    _impl_class = _Result
    chosen = ""  # the setting for its folder

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            rtsys.initialize(target_context)  # all that loaded code needs; Numba would fill the compiler's tables too
            found = self._load_overload(sig, target_context)
            if found is not None:
                self._store(found, found.library._shared_module, self._impl.code)
            return found
        except Exception:  # unpickling damaged bytes can raise anything
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        self._store(data, data.library._final_module, data.library._get_compiled_object())
        with suppress(OSError):  # a full disk; or another process has just removed the folder, long unused
            super().save_overload(sig, data)

    def _store(self, result: Any, module: Any, code: bytes) -> None:
        """Keep machine code that needs nothing of Numba's but its entry point, to be loaded without Numba."""
        kinds, described = [_kind(each) for each in result.signature.args], result.fndesc
        if None in kinds or result.environment.consts or result.reload_init or result.library.has_dynamic_globals:
            return
        named = [each.name for each in (*module.functions, *module.global_variables) if each.is_declaration]
        needed = [name for name in named if not name.startswith("llvm.")]
        entry = described.llvm_cpython_wrapper_name
        machine_code.store(self._py_func, kinds, self.chosen, entry, described.env_name, needed, code)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), *sorted(machine_code.compiled_in(self._py_func)))


@contextmanager
def _own_folder() -> Iterator[str]:
    """Caches in a folder named after all CPU sources."""
    with _setting:
        chosen = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(machine_code.folder(chosen))
        try:
            yield chosen
        finally:
            numba.config.CACHE_DIR = chosen


def type_of(value: Any) -> Any:
    """The type of a function that compiled functions call."""
    typing = cpu_target.typing_context
    typing.refresh()  # if it has just been made
    return typing.resolve_value_type(value)


def _kind(type_: Any) -> Any:
    """As `machine_code.kind_of`, of values of a type."""
    if type(type_) is types.Array:
        return as_dtype(type_.dtype).str, type_.ndim, type_.layout, type_.mutable
    if isinstance(type_, BaseTuple):
        kinds = tuple(map(_kind, type_.types))
        return None if None in kinds else (machine_code.name_of(getattr(type_, "instance_class", tuple)), *kinds)
    is_number = isinstance(type_, types.Number | types.Boolean) and not isinstance(type_, types.Literal)
    return as_dtype(type_).str if is_number else None
