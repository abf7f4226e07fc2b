"""Compiling, caching and argument passing, on machines without a GPU: NVRTC alone."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kernels.runtime import binaries, launch, operations, pdl
from kernels.runtime.binaries import Binary

ENTRY = "gauss_gather<float, float, float>"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cuda"


@pytest.fixture(scope="module")
def binary() -> Binary:
    return launch.compile_for("smoothing", "sm_90", (ENTRY,))


def test_a_template_is_instantiated_by_name(binary: Binary) -> None:
    assert binary.code.startswith(b"\x7fELF")
    assert "gauss_gather" in binary.lowered[ENTRY]
    assert binary.lowered[ENTRY].encode() in binary.code


def test_a_cubin_is_whole(binary: Binary) -> None:
    """It ends with its program headers."""
    (start,) = struct.unpack_from("<Q", binary.code, 32)
    size, count = struct.unpack_from("<2H", binary.code, 54)
    assert len(binary.code) == start + size * count


def test_a_device_newer_than_nvrtc_gets_portable_code(binary: Binary) -> None:
    assert launch._newest_supported(90) == "sm_90"
    newest = launch._newest_supported(999)
    assert newest.startswith("compute_")
    assert b".entry" in launch.compile_for("smoothing", newest, (ENTRY,)).code


def test_what_is_cached_is_read_back(binary: Binary, cache_folder: Path) -> None:
    assert binaries.read("key") is None
    binaries.write("key", binary)
    assert binaries.read("key") == Binary(code=binary.code, lowered=binary.lowered, log="")
    assert [path.name for path in cache_folder.iterdir()] == ["key"]


def dated(path: Path, days: float) -> Path:
    os.utime(path, (time.time() - 86_400 * days,) * 2)
    return path


def test_what_is_not_used_for_30_days_is_removed_when_more_is_written(binary: Binary, cache_folder: Path) -> None:
    names = ["a" * 64, "b" * 64, "c" * 64, "." + "d" * 16 + "-killed", "of the user's", "e" * 63]
    for name in names:
        binaries.write(name, binary)
    for name, days in zip(names, (29, 31, 31, 31, 99, 99), strict=True):
        dated(cache_folder / name, days)
    assert binaries.read("c" * 64) is not None, "now it is used"
    binaries.remove_unused.cache_clear()
    binaries.write("key", binary)
    assert {path.name for path in cache_folder.iterdir()} == {"a" * 64, "c" * 64, "of the user's", "e" * 63, "key"}


def test_folders_not_used_are_removed_whole_and_links_not_followed(tmp_path: Path) -> None:
    for name in ("1" * 16, "2" * 16, "kept"):
        (tmp_path / name / "sub").mkdir(parents=True)
        dated(tmp_path / name, 31)
    (tmp_path / ("3" * 16)).symlink_to(tmp_path / "kept")
    os.utime(tmp_path / ("3" * 16), (1, 1), follow_symlinks=False)
    binaries.mark_used(tmp_path / ("2" * 16))
    binaries.remove_unused(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["2" * 16, "kept", "sub", "sub"]


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
def test_a_damaged_cache_counts_as_none(binary: Binary, cache_folder: Path, damage: Callable[[bytes], bytes]) -> None:
    binaries.write("key", binary)
    whole = (cache_folder / "key").read_bytes()
    damaged = damage(whole)
    assert damaged != whole
    (cache_folder / "key").write_bytes(damaged)
    assert binaries.read("key") is None


def test_a_cache_that_cannot_be_written_is_done_without(
    binary: Binary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "file"))
    binaries.write("key", binary)
    assert binaries.read("key") is None


def test_a_failed_write_leaves_nothing_behind(binary: Binary, cache_folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        binaries.write("key", binary)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*cache_folder.iterdir()] == []


def test_the_key_covers_everything_that_goes_into_a_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "FOLDER", tmp_path)
    monkeypatch.setattr(binaries, "INCLUDE", tmp_path / "include")
    (tmp_path / "include").mkdir()
    (tmp_path / "op" / "cuda").mkdir(parents=True)
    source, header = tmp_path / "op" / "op.cu", tmp_path / "include" / "header.cuh"
    source.write_text('#include "header.cuh"\n#include "cuda/first.cuh"\n')
    header.write_text("// one\n")
    (tmp_path / "op" / "cuda" / "first.cuh").write_text('#include "beside.cuh"\n')
    (tmp_path / "op" / "cuda" / "beside.cuh").write_text("// one\n")

    def key(*settings: str) -> str:
        binaries._source_files.cache_clear()
        return binaries.key("op", settings)

    first = key("--std=c++17", "sm_90", "a")
    assert key("--std=c++17", "sm_90", "a") == first
    assert len({first, key("--std=c++20", "sm_90", "a"), key("--std=c++17", "sm_80", "a"), key("--std=c++17")}) == 4
    header.write_text("// two\n")
    second = key("--std=c++17", "sm_90", "a")
    source.write_text(source.read_text() + "\n")
    third = key("--std=c++17", "sm_90", "a")
    (tmp_path / "op" / "cuda" / "beside.cuh").write_text("// two\n")
    assert len({first, second, third, key("--std=c++17", "sm_90", "a")}) == 4
    binaries._source_files.cache_clear()


def test_a_kernel_is_kept_under_its_options_device_compiler_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(binaries, "key", lambda operation, settings: asked.append((operation, *settings)) or "key")
    monkeypatch.setattr(binaries, "read", lambda key: Binary(code=b"", lowered={ENTRY: key}, log=""))
    monkeypatch.setattr(launch, "_attribute", lambda attribute, device: {75: 9, 76: 0}[attribute])
    monkeypatch.setattr(launch, "_driver", Driver)
    monkeypatch.setattr(launch, "_runtime", Driver)
    loaded = launch._load(0, "smoothing", ENTRY)
    assert (loaded.function, loaded._granted_shared_bytes) == ("key", 40 << 10)
    version = str(launch._nvrtc().getVersion())
    assert asked == [("smoothing", *launch.LANGUAGE, "--fmad=false", "sm_90", version, ENTRY)]


class Driver:
    """Loads kernels without a device."""

    CUDADriverError = CUDARuntimeError = RuntimeError

    def setDevice(self, device: int) -> None:
        pass

    def moduleLoadData(self, code: bytes) -> bytes:
        return code

    def moduleGetFunction(self, module: bytes, name: str) -> str:
        return name

    def funcGetAttribute(self, attribute: int, function: str) -> int:
        return {launch.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: 8 << 10}[attribute]


@pytest.mark.parametrize("shared_bytes", [0, 40 << 10, (40 << 10) + 1, 200 << 10])
def test_a_launch_asks_for_shared_memory_if_its_static_and_dynamic_pass_48_kib(
    shared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    driver = SimpleNamespace(
        CUDADriverError=RuntimeError,
        funcSetAttribute=lambda function, attribute, value: calls.append((function, attribute, value)),
        launchKernel=lambda function, *sizes: calls.append((function, sizes[6])),
    )
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    runtime = SimpleNamespace(CUDARuntimeError=OSError, getDevice=lambda: 0, setDevice=lambda device: None)
    monkeypatch.setattr(launch, "_runtime", lambda: runtime)
    kernel = launch.Kernel(ENTRY, 0, 1, 2, static_shared_bytes=8 << 10)
    kernel.launch((1,), (32,), (), shared_bytes=shared_bytes, stream=SimpleNamespace(ptr=0))
    granted = [
        (2, launch.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
        (2, launch.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
    ]
    assert calls == [*(granted if shared_bytes > 40 << 10 else []), (2, shared_bytes)]


def test_the_drivers_structures_are_laid_out_as_cuda_h_has_them() -> None:
    assert (ctypes.sizeof(pdl._Attribute), pdl._Attribute.value.offset) == (72, 8)
    assert (ctypes.sizeof(pdl._Config), pdl._Config.stream.offset) == (56, 32)


@pytest.mark.parametrize(
    ("attributes", "shared_bytes", "blocks"),
    [
        ({81: 228 << 10, 111: 1 << 10}, 227 << 10, 1),  # sm_90: the most that a block can have
        ({81: 228 << 10, 111: 1 << 10}, 56320, 4),
        ({81: 228 << 10, 111: 1 << 10}, 37888, 5),
        ({81: 164 << 10, 111: 1 << 10}, 163 << 10, 1),  # sm_80
        ({81: 64 << 10, 111: 0}, 32 << 10, 2),  # sm_75
    ],
)
def test_blocks_divide_a_multiprocessors_shared_memory(
    attributes: dict[int, int], shared_bytes: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_runtime", lambda: SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setattr(launch, "_attribute", lambda attribute, device: attributes[attribute])
    assert launch.blocks_a_multiprocessor(shared_bytes) == blocks


def test_arguments_that_have_no_size_of_their_own_are_refused() -> None:
    value = ctypes.c_float(1)
    assert launch._value(0, value) is value
    for other in (7, np.zeros(3)):
        kind = type(other).__name__
        with pytest.raises(
            TypeError, match=f"argument 2 of a kernel must be a CuPy array or a ctypes value; got {kind}"
        ):
            launch._value(2, other)


def test_an_array_of_the_device_is_passed_as_its_pointer() -> None:
    array = SimpleNamespace(data=SimpleNamespace(ptr=0x7F1200))
    assert launch._value(0, array).value == 0x7F1200


@pytest.mark.parametrize("given", [None, "mine"])
def test_work_runs_on_the_arrays_device_and_the_stream_given(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[str] = []

    class Context:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *raised: object) -> None:
            entered.append(f"not {self.name}")

    def current() -> Context:
        return Context(f"current of {entered[-1]}")

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(get_current_stream=current)))
    array = SimpleNamespace(device=Context("device"))
    with launch.on_stream(array, given and Context(given)) as stream:
        expected = given or "current of device"
        assert stream.name == expected
        assert entered == ["device", expected]
    assert entered[2:] == [f"not {expected}", "not device"]


def test_sources_are_read_as_utf8_whatever_the_locale():
    program = (
        "from kernels.runtime import binaries, operations, operations; "
        "assert [binaries.key(file.stem, ()) for file in operations.FOLDER.glob('**/*.cu')]"
    )
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=Path(binaries.__file__).parents[2])
