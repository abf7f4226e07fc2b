"""Compilations are counted while they run, and only those."""

from __future__ import annotations

import pytest

from kernels.runtime import compiling, launch
from kernels.runtime.compiled import compiled


def test_numba_compiles_once_and_the_cache_compiles_nothing(monkeypatch):
    steps = []
    monkeypatch.setattr(compiling, "begin", lambda: steps.append(1))
    monkeypatch.setattr(compiling, "end", lambda: steps.append(-1))

    def twice(value):
        return value + value

    body = compiled(twice)
    body.dispatcher._cache.flush()
    assert (body(2), body(3)) == (4, 6)
    assert steps == [1, -1]
    assert compiled(twice)(5) == 10  # from the cache on disk
    assert steps == [1, -1]


def test_nvrtc_compiles_within_it(monkeypatch):
    seen = []

    def refuse(*_):
        seen.append(compiling.under_way())
        raise launch.KernelCompileError("it does not compile")

    monkeypatch.setattr(launch, "compile_for", refuse)
    monkeypatch.setattr(launch.binaries, "read", lambda key: None)
    monkeypatch.setattr(launch, "_nvrtc", lambda: type("Nvrtc", (), {"getVersion": staticmethod(lambda: (13, 0))}))
    with pytest.raises(launch.KernelCompileError):
        launch.cached_binary("transpose", "nothing", "sm_90")
    assert (seen, compiling.under_way()) == ([True], False)


def test_numba_leaves_the_terminal_alone():
    """With colorama, which MkDocs brings, the first error message of its colours would replace sys.stdout."""
    from numba.core import errors

    assert type(errors.termcolor()).__name__ == "NOPColorScheme"
