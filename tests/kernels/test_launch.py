"""Compiling, caching and argument passing, on machines without a GPU: NVRTC alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import launch

ENTRY = "gauss_gather<float, float, float>"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cuda"


@pytest.fixture(scope="module")
def binary() -> launch._Binary:
    return launch._compile("smoothing", (ENTRY,), "sm_90")


def test_a_template_is_instantiated_by_name(binary: launch._Binary) -> None:
    assert binary.code.startswith(b"\x7fELF")
    assert "gauss_gather" in binary.lowered[ENTRY]
    assert binary.lowered[ENTRY].encode() in binary.code


def test_a_device_newer_than_nvrtc_gets_portable_code(binary: launch._Binary) -> None:
    assert launch._newest_supported(90) == "sm_90"
    newest = launch._newest_supported(999)
    assert newest.startswith("compute_")
    assert b".entry" in launch._compile("smoothing", (ENTRY,), newest).code


def test_what_is_cached_is_read_back(binary: launch._Binary, cache_folder: Path) -> None:
    assert launch._read_cached("key") is None
    launch._write_cached("key", binary)
    assert launch._read_cached("key") == launch._Binary(code=binary.code, lowered=binary.lowered, log="")
    assert [path.name for path in cache_folder.iterdir()] == ["key"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        lambda content: b"[]\n" + content,
        lambda content: b"\xff" + content,
    ],
)
def test_a_damaged_cache_counts_as_none(
    binary: launch._Binary, cache_folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    launch._write_cached("key", binary)
    whole = (cache_folder / "key").read_bytes()
    damaged = damage(whole)
    assert damaged != whole
    (cache_folder / "key").write_bytes(damaged)
    assert launch._read_cached("key") is None


def test_a_cache_that_cannot_be_written_is_done_without(
    binary: launch._Binary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "file"))
    launch._write_cached("key", binary)
    assert launch._read_cached("key") is None


def test_the_key_covers_everything_that_goes_into_a_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    monkeypatch.setattr(launch, "INCLUDE", tmp_path / "include")
    monkeypatch.setattr(launch, "_options", lambda operation: ("--std=c++17",))
    (tmp_path / "include").mkdir()
    (tmp_path / "op").mkdir()
    source, header = tmp_path / "op" / "op.cu", tmp_path / "include" / "header.cuh"
    source.write_text('#include "header.cuh"\n')
    header.write_text("// one\n")

    def key(expression: str = "a", architecture: str = "sm_90") -> str:
        launch._source_files.cache_clear()
        return launch._cache_key("op", (expression,), architecture)

    first = key()
    assert key() == first
    assert len({first, key("b"), key("a", "sm_80")}) == 3
    header.write_text("// two\n")
    second = key()
    source.write_text('#include "header.cuh"\n\n')
    third = key()
    monkeypatch.setattr(launch, "_options", lambda operation: ("--std=c++20",))
    assert len({first, second, third, key()}) == 4
    launch._source_files.cache_clear()


def test_arguments_that_have_no_size_of_their_own_are_refused() -> None:
    value = ctypes.c_float(1)
    assert launch._value(0, value) is value
    with pytest.raises(TypeError, match="argument 2 of a kernel must be a CuPy array or a ctypes value; got int"):
        launch._value(2, 7)
