"""What Numba compiled in one process is called in another without Numba, and only if nothing of it has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kernels.runtime.compiled import compiler, machine_code

MODULE = """
from typing import NamedTuple
import numpy as np
from kernels.runtime.compiled import c_function, compiled, intrinsic, ir, types
from others import MORE, inner

absolute = c_function("labs", "int64")

class Pair(NamedTuple):
    first: object
    second: int

@intrinsic
def one(context):
    def generate(context, builder, signature, given):
        return ir.Constant(ir.IntType(64), 1)
    return types.int64(), generate

@compiled
def add(array, pair, scale):
    for i in range(len(array)):
        array[i] += pair[0][i] * scale + inner(pair[1]) + one() + MORE
    return absolute(-len(array)), scale

@compiled
def doubled(array):
    return 2 * array
"""
OTHERS = "from kernels.runtime.compiled import compiled\nMORE = {}\n@compiled\ndef inner(x):\n    return 10 * x\n"
CALLS = """
import sys, numpy as np, functions
array = np.zeros(3)
found = functions.add(array, functions.Pair(np.arange(3), 2), 0.5)
print(*array, *found, "numba" in sys.modules, end=" ")
if len(sys.argv) > 1:
    strided = np.zeros(6)[::2]
    functions.add(strided, functions.Pair(np.arange(3, dtype=np.int8), np.int64(2)), True)
    print(*strided, *functions.doubled(array), "numba" in sys.modules)
"""


def call(folder: Path, *options: str) -> str:
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "PYTHONDONTWRITEBYTECODE": "1",  # Python dates its cache to the second
    }
    done = subprocess.run(
        [sys.executable, "-c", CALLS, *options],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


def test_another_process_calls_it_without_numba(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(MODULE)
    others = tmp_path / "others.py"
    others.write_text(OTHERS.format(3))
    expected = "24.0 24.5 25.0 3 0.5 "
    assert call(tmp_path) == expected + "True"
    rest = " 24.0 25.0 26.0 48.0 49.0 50.0 True"  # other kinds of arguments
    assert call(tmp_path, "more") == expected + "False" + rest
    for file in (tmp_path / "cache").rglob("*.code"):
        file.write_bytes(file.read_bytes()[:-1])
    assert call(tmp_path) == expected + "True", "damaged code is loaded by Numba"
    assert call(tmp_path) == expected + "False"
    others.write_text(OTHERS.format(4))
    assert call(tmp_path) == "25.0 25.5 26.0 3 0.5 True", "the constant of another file has changed"


class Two(NamedTuple):
    first: Any
    second: Any


ARRAY = np.zeros((4, 6), np.float32)
READ_ONLY = ARRAY.copy()
READ_ONLY.flags.writeable = False
KNOWN = [
    *(np.zeros(3, kind) for kind in "?bBhHiIlLefdFD"),
    ARRAY, ARRAY.T, ARRAY[:, ::2], ARRAY[:1], ARRAY[:0], ARRAY[0, 0, ...], READ_ONLY,
    np.zeros(9, np.uint8)[1:].view(np.float64), 5, -5, 1 << 40, True, 1.5, np.float32(1), np.uint64(1), np.bool_(1),
    (), (1, 2), (1, 2.0, ARRAY), Two(1, 2), Two(1, (ARRAY,)), (Two(1, 2), Two(3, 4)),
]  # fmt: skip
UNKNOWN = [
    1 << 63, -(1 << 63), None, "text", b"text", 1j, (1, None), [1], np.zeros(3, "M8[s]"), np.zeros(3, "i4,f4"), int,
    np.datetime64(1, "s"), np.zeros(3, "S4"), np.ma.zeros(3), ...,
]  # fmt: skip


@pytest.mark.parametrize("value", KNOWN, ids=lambda value: repr(value)[:24])
def test_arguments_have_the_kinds_of_their_types(value: Any) -> None:
    assert machine_code.kind_of(value) == compiler._kind(compiler.numba.typeof(value))
    assert machine_code.kind_of(value) is not None


def test_values_that_numba_tells_apart_have_different_kinds() -> None:
    by_kind: dict[Any, set[Any]] = {}
    for value in KNOWN:
        by_kind.setdefault(machine_code.kind_of(value), set()).add(compiler.numba.typeof(value))
    assert all(len(types) == 1 for types in by_kind.values())


@pytest.mark.parametrize("value", UNKNOWN, ids=lambda value: repr(value)[:24])
def test_other_arguments_are_left_to_numba(value: Any) -> None:
    assert machine_code.kind_of(value) is None


def test_a_closure_and_a_function_without_a_file_are_left_to_numba() -> None:
    number = 5

    def closure() -> int:
        return number

    made: dict[str, Any] = {}
    exec("def without_file(): return 1", made)
    for function in (closure, made["without_file"]):
        assert machine_code.load(function, ()) is None


def test_code_of_older_versions_is_removed_from_our_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path))
    own, older, elsewhere = machine_code.folder(), tmp_path / "numba" / ("0" * 16), tmp_path / "theirs" / ("0" * 16)
    for each in (own, older, elsewhere):
        each.mkdir(parents=True)
        os.utime(each, (1, 1))
    machine_code.folder()  # used now
    for chosen in (str(tmp_path / "theirs"), ""):
        machine_code.store(call, ("<i8",), chosen, "entry", "environment", (), b"code")
    assert [own.exists(), older.exists(), elsewhere.exists()] == [True, False, True]
    assert len([*own.iterdir()]) == 1
