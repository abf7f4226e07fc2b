"""Numba: its function cache, how it looks for BLAS, and its code generator's helpers."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numba.np.linalg
import pytest
from numba import _dynfunc, _helperlib
from numba.core import cgutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult
from numba.core.registry import CPUDispatcher
from numba.core.runtime import _nrt_python, rtsys

from kernels.runtime.compiled import compiler


def plain(value: int) -> int:
    return value + 1


def test_arraymath_asks_ensure_blas_and_takes_an_import_error_for_no_blas() -> None:
    """Otherwise every start loads SciPy, or fails."""
    code = "import sys; from kernels.runtime.compiled import compiled; compiled(lambda x: x + 1)(1); "
    code += "import numba.np.arraymath as m; print('scipy.linalg' in sys.modules, m._HAVE_BLAS)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert list(inspect.signature(numba.np.linalg.ensure_blas).parameters) == []


def test_a_dispatcher_loads_through_its_cache_attribute() -> None:
    """`compiled` puts a cache of its own there."""
    asked: list[Any] = []

    class Cache:
        def load_overload(self, sig: Any, target_context: Any) -> None:
            asked.append((sig, target_context))

        def save_overload(self, sig: Any, data: Any) -> None:
            asked.append((sig, data))

    body = numba.njit(plain)
    assert hasattr(body, "_cache")
    body._cache = Cache()
    assert body(1) == 2
    assert len(asked) == 2  # asked for, compiled, and handed over to be kept


def test_the_index_key_tells_the_functions_that_the_cache_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compiled` adds the constants of other files to the key, from the function that the cache holds."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    asked: list[tuple[Any, ...]] = []

    class Cache(FunctionCache):
        def _index_key(self, sig: Any, codegen: Any) -> Any:
            asked.append(super()._index_key(sig, codegen))
            return asked[-1]

    body = numba.njit(plain)
    body._cache = cache = Cache(plain)
    body(1)
    assert cache._py_func is plain
    assert len(asked) == 2  # as it loads, and as it saves
    assert all(isinstance(key, tuple) for key in asked)


def test_a_result_is_kept_with_its_environments_last_and_loaded_without_tables() -> None:
    """`compiled` leaves them out, and calls the second half of `load_overload` alone."""
    assert [*inspect.signature(CompileResult._rebuild).parameters][-1] == "referenced_envs"
    assert FunctionCache._impl_class is CompileResultCacheImpl
    assert list(inspect.signature(FunctionCache._load_overload).parameters) == ["self", "sig", "target_context"]
    assert list(inspect.signature(rtsys.initialize).parameters) == ["ctx"]


def test_extension_modules_have_the_symbols_of_machine_code_and_make_functions_of_it() -> None:
    """`machine_code` loads them without the rest."""
    for module in (_dynfunc, _helperlib, _nrt_python):
        assert all(isinstance(address, int) for address in module.c_helpers.values())
    assert {"unpickle", "gil_ensure"} <= {*_helperlib.c_helpers}
    assert "adapt_ndarray_from_python" in _nrt_python.c_helpers
    assert callable(_dynfunc.make_function)
    assert isinstance(_dynfunc.Environment, type)
    body = numba.njit(plain)
    body(1)
    (result,) = body.overloads.values()
    library = result.library
    assert library.has_dynamic_globals is False
    assert {each.name for each in library._final_module.functions} >= {result.fndesc.llvm_cpython_wrapper_name}
    assert hasattr(library, "_shared_module")
    assert callable(library._get_compiled_object)
    assert result.fndesc.env_name in {each.name for each in library._final_module.global_variables}


def test_files_are_kept_where_cache_dir_pointed_when_the_cache_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    body: Any = compiler.Dispatcher(plain)
    assert Path(body._cache.cache_path).is_relative_to(tmp_path)
    body(1)
    assert len(list(tmp_path.rglob("*.nbi"))) == 1
    body._cache.flush()  # empties the index: what is damaged is compiled anew


def test_a_compiled_function_asks_another_for_a_template_and_an_overload() -> None:
    """`compiled` answers both with a function that has no code for Python."""
    asked = []

    class Called(CPUDispatcher):
        def get_call_template(self, args: Any, kws: Any) -> Any:
            asked.append("template")
            return super().get_call_template(args, kws)

        def get_overload(self, sig: Any) -> Any:
            asked.append("overload")
            return super().get_overload(sig)

    called = Called(plain, targetoptions={"nopython": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True})

    @numba.njit
    def calling(value: int) -> int:
        return called(value)

    assert calling(1) == 2
    assert set(asked) == {"template", "overload"}


def test_a_compiler_takes_a_library_that_leaves_out_what_it_overrides() -> None:
    """`compiled` compiles callees into a library without machine code."""
    assert list(inspect.signature(Compiler).parameters)[:3] == ["typingctx", "targetctx", "library"]
    for name in ("_optimize_final_module", "_finalize_final_module", "get_pointer_to_function"):
        assert inspect.isfunction(getattr(JITCodeLibrary, name))
    assert isinstance(JITCodeLibrary.codegen, property)
    assert JITCodeLibrary._finalized is False


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("alloca_once_value", ["builder", "value"]),
        ("for_range", ["builder", "count"]),
        ("for_range_slice", ["builder", "start", "stop", "step"]),
        ("get_or_insert_function", ["module", "fnty", "name"]),
    ],
)
def test_cgutils_takes_what_the_cpu_bodies_give_it(name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(cgutils, name)).parameters)[: len(parameters)] == parameters
