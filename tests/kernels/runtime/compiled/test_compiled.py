"""Compiled functions that several threads load at once, while other threads import other modules."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kernels.runtime.compiled import compiled, compiler, machine_code

# While Numba imports the module that would look for the BLAS, another thread imports it from SciPy.
BESIDE_SCIPY = """
import builtins, threading

def load():
    import scipy.linalg.cython_blas
    print("found")

def beside(name, *others, alone=builtins.__import__):
    if name == "numba.np.arraymath":
        builtins.__import__ = alone
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    return alone(name, *others)

from kernels.runtime.compiled import compiled
builtins.__import__ = beside
compiled(lambda x: x + 1)(1)
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout


def test_scipy_is_not_loaded_with_numba() -> None:
    assert run("import sys, kernels.runtime.compiled.compiler; print('scipy.linalg' in sys.modules)") == "False\n"


def test_another_thread_finds_the_blas_meanwhile() -> None:
    assert run(BESIDE_SCIPY) == "found\n"


def test_the_first_call_registers_no_types() -> None:
    """Numba looks for an argument's type without a lock, which fails if another thread's first call registers one."""
    code = "import kernels.runtime.compiled.compiler\nfrom kernels.runtime.compiled import compiled\n"
    code += "from numba.core.typing.typeof import typeof_impl\n"
    code += "known = set(typeof_impl.registry)\n@compiled\ndef more(x):\n    return x + 1\n"
    code += "print(more(1), set(typeof_impl.registry) - known)"
    assert run(code) == "2 set()\n"


def test_what_comes_from_another_file_and_changes_is_compiled_anew(tmp_path: Path, monkeypatch: Any) -> None:
    """Numba dates its cache by the function's own file, and compiles constants and callees into the code."""
    monkeypatch.setattr(compiler.numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python dates its cache to the second
    header = "from kernels.runtime.compiled import compiled\n"
    own = "from others_of_it import TWO, inner\n@compiled\ndef outer():\n    return TWO * inner()\n"
    (tmp_path / "functions_of_it.py").write_text(header + own)
    header += "from numba import types\nfrom numba.extending import intrinsic\n"
    told = []
    for one, two, sign in ((1, 2, ""), (3, 2, ""), (3, 5, ""), (3, 5, "-"), (4, 5, "-"), (4, 5, "-")):
        other = f"ONE, TWO = {min(one, 3)}, {two}\n@intrinsic\ndef more(context):\n"
        other += "    def generate(context, builder, signature, given):\n"
        other += f"        return context.get_constant(types.int64, {one // 4})\n    return types.int64(), generate\n"
        other += f"@compiled\ndef inner():\n    return {sign}(ONE + more())\n"
        (tmp_path / "others_of_it.py").write_text(header + other)
        outer = import_module("functions_of_it").outer  # with a new look at the disk, as in another process
        told.append((outer(), sum(outer.dispatcher.stats.cache_hits.values())))
        for name in ("functions_of_it", "others_of_it"):
            del sys.modules[name]
    expected = [(2, 0), (6, 0), (15, 0), (-15, 0), (-20, 0), (-20, 1)]
    assert told == expected, "what has not changed is not compiled anew"


def test_a_callee_is_compiled_once_for_all_integers_and_has_no_code_for_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler.numba.config, "CACHE_DIR", str(tmp_path))  # empty: loaded code cannot be inspected

    @compiled
    def inner(x: int, y: int) -> int:
        return 10 * x + y

    @compiled
    def outer(x: int) -> int:
        return inner(1, 2) + inner(x, 3) + inner(y=4, x=x)

    assert (outer(5), inner(6, 7)) == (12 + 53 + 54, 67)
    dispatcher: Any = inner.dispatcher  # type: ignore[attr-defined]
    callee: Any = dispatcher.callee
    assert [str(sig) for sig in callee.signatures] == ["(int64, int64)"]
    llvm = {
        name: function.inspect_llvm().popitem()[1] for name, function in (("inner", dispatcher), ("callee", callee))
    }
    assert ["_ZN7cpython" in llvm[name] for name in ("inner", "callee")] == [True, False]


def test_what_a_callee_raises_comes_to_python(tmp_path: Path) -> None:
    """Also from code that was loaded by Numba, without its compiler, or without Numba."""
    code = "import numpy as np\nfrom kernels.runtime.compiled import compiled\n"
    code += (
        "@compiled\ndef inner(x):\n    if x > 1:\n        raise ValueError('too many')\n    return np.empty(x).size\n"
    )
    code += "@compiled\ndef outer(x):\n    return inner(x) + 1\n"
    (tmp_path / "raising.py").write_text(code)
    calls = "import raising, sys; print(raising.outer(1), 'numba' in sys.modules)\n"
    calls += "try:\n    raising.outer(2)\nexcept ValueError as exc:\n    print(exc)\n"
    calls += "print({'numba.np.arrayobj', 'numba.np.npyimpl'} & set(sys.modules) == set())\n"
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    with_numba = "import kernels.runtime.compiled.compiler\n"
    for before, is_loaded, is_small in (("", True, False), ("", False, True), (with_numba, True, True)):
        done = subprocess.run(
            [sys.executable, "-c", before + calls], capture_output=True, text=True, env=environment, check=True
        )
        assert done.stdout == f"2 {is_loaded}\ntoo many\n{is_small}\n"


def test_threads_that_load_at_once_keep_to_one_folder() -> None:
    """Numba's cache folder is a global setting: a thread must not take another's value for the user's."""

    def plus_one(x: int) -> int:
        return x + 1

    found = []
    other = threading.Thread(target=lambda: found.append(compiler.Dispatcher(plus_one)))
    with compiler._own_folder():
        other.start()
        other.join(0.2)  # it waits, or is done by then
    other.join()
    digest = machine_code.sources_digest()
    assert Path(found[0]._cache.cache_path).parts.count(digest) == 1
    assert digest not in str(compiler.numba.config.CACHE_DIR)
    assert found[0](1) == 2
