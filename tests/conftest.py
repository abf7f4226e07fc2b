"""Leaves out the tests that need a CUDA device if none answers, as the header says. Those that run share the GPUs with
what other processes test at the time. Those marked multi_gpu make do with one GPU (tests/gpu_ranks.py)."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# On small matrices OpenBLAS's threads mostly wait for each other, and busily, which takes up to ten times the CPU time.
# Before NumPy is imported, and for all processes that tests start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from pipeline.storage.objects import ObjectPath
from tests import commands
from tests.object_server import Proxy, S3Server, use_environment

# The same examples in every run, so that a change is judged by what it changes; by night, new ones are searched.
settings.register_profile("same", derandomize=True)
settings.register_profile("random", derandomize=False, max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
_LOCKS = {
    what: Path(tempfile.gettempdir()) / f"millrace-tests-{os.getuid()}.{what}" for what in ("gpus", "queue", "room")
}
_folders = itertools.count()
# In the environment; see scripts/sanitize.
_FEWEST, _BARE_MEMORY = "MILLRACE_TEST_FEWEST_LAUNCHES", "MILLRACE_TEST_BARE_MEMORY"
_ONLY_IMPORTED = "MILLRACE_TEST_ONLY_IMPORTED"  # see scripts/test
_GPU_MARKS = ("gpu", "multi_gpu")
_ALL_MARKED = re.compile(r"^pytestmark = \[?pytest\.mark\.(multi_)?gpu\b", re.MULTILINE)


@cache
def _cuda_devices() -> tuple[int, str]:
    """How many CUDA devices answer, and why there are no more."""
    try:
        from cupy_backends.cuda.api import runtime
    except ImportError as exc:
        return 0, f"CuPy cannot be imported: {exc}"
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as exc:
        return 0, str(exc)
    return count, f"{count} CUDA device(s)"


def pytest_report_header() -> str:
    count, reason = _cuda_devices()
    return reason if count else f"tests marked gpu are left out, scripts/gpu-test runs them: {reason}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Files of nothing but such tests are not even read."""
    if collection_path.suffix == ".py" and _cuda_devices()[0] == 0:
        return bool(_ALL_MARKED.search(collection_path.read_text())) or None
    return None


def pytest_pycollect_makeitem(name: str, obj: object) -> list[pytest.Item] | None:
    """Without a GPU, no tests are made of functions that need one. For bytecode (scripts/test) only those of Hypothesis
    are made: if there are any, it looks for constants in all modules, and keeps them on disk."""
    if not name.lower().startswith("test"):
        return None
    if _ONLY_IMPORTED in os.environ:
        return None if hasattr(obj, "hypothesis") else []
    marks = getattr(obj, "pytestmark", [])
    needs_a_gpu = isinstance(marks, list) and any(mark.name in _GPU_MARKS for mark in marks)
    return [] if needs_a_gpu and _cuda_devices()[0] == 0 else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _FEWEST in os.environ:
        items[:] = _fewest(items)
    if _cuda_devices()[0] == 0:  # as skipped tests they would hide what else was skipped
        config.hook.pytest_deselected(items=[item for item in items if _needs_a_gpu(item)])
        items[:] = [item for item in items if not _needs_a_gpu(item)]
    # pytest-xdist gives each process a run of tests at first.
    if processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        each = -(-len(items) // processes)
        items[:] = itertools.chain.from_iterable(_spread(items[at : at + each]) for at in range(0, len(items), each))


def _spread(run: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Slow tests between those of other files, over the first three quarters: processes do not all wait at once, and
    none runs on alone in the end."""

    def by_file(*, slow: bool) -> list[list[pytest.Item]]:
        chosen = (item for item in run if (item.get_closest_marker("slow") is not None) is slow)
        return [list(tests) for _, tests in itertools.groupby(chosen, key=lambda item: item.path)]

    slow, quick = by_file(slow=True), by_file(slow=False)
    taken = 0
    for number, tests in enumerate(quick, 1):
        yield from tests
        due = min(len(slow), -(-4 * number * len(slow) // (3 * len(quick))))
        yield from itertools.chain.from_iterable(slow[taken:due])
        taken = due
    yield from itertools.chain.from_iterable(slow[taken:])


# What thousands of tests are made of is there to the end: a search for garbage would go through it again and again.
gc.disable()


def pytest_collection_finish() -> None:
    commands.keep_environment()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # Numba's compiler makes much, and little garbage
    gc.enable()


def _fewest(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of every kernel test's cases two of each kind, of middling size: looking for races makes each very long."""
    groups: dict[object, list[pytest.Item]] = {}
    for item in items:
        # That file leaves out launches by itself.
        alone = item.path.name == "test_cuda_entries.py"
        which = item if alone else (item.path, getattr(item, "originalname", item.name))
        groups.setdefault((which, *map(_kind, _parameters(item))), []).append(item)
    kept = set()
    for group in groups.values():
        group.sort(key=lambda item: sum(case.bytes() for case in _parameters(item) if hasattr(case, "bytes")))
        kept |= {id(group[place]) for place in (len(group) // 2, len(group) * 3 // 4)}
    return [item for item in items if id(item) in kept]


def _parameters(item: pytest.Item) -> Iterable[Any]:
    return getattr(getattr(item, "callspec", None), "params", {}).values()


def _kind(parameter: Any) -> object:
    """What of a test's parameter decides which kernels run: of a case names, switches and dimensions, not sizes."""
    if isinstance(parameter, str | bool | None):
        return parameter
    if isinstance(parameter, tuple):
        return len(parameter)
    if dataclasses.is_dataclass(parameter):
        return tuple(_kind(value) for name, value in vars(parameter).items() if name != "content")
    return type(parameter)


def _needs_a_gpu(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in _GPU_MARKS)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not named after the test, as pytest's own is: else a message that holds the path would contain the test's words,
    and every look for one of them would succeed. Numbered here: pytest would list all earlier ones for each."""
    return tmp_path_factory.mktemp(f"t{next(_folders)}", numbered=False)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ObjectPath:
    """A new prefix of the bucket `open` of a real server, with the environment of a user who may write."""
    use_environment(monkeypatch, s3_server.environment())
    return ObjectPath.of(f"s3://open/{tmp_path.name}-{os.getpid()}")


@pytest.fixture
def proxy(s3: ObjectPath, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Before the server of `s3`, which is reached through it from now on."""
    made = Proxy(s3_server.port)
    use_environment(monkeypatch, s3_server.environment(port=made.port))
    yield made
    made.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test marked `alone` waits until no other uses the GPUs, one marked `large` until no other such test does.
    pytest-timeout's clock starts afterwards, so a test may wait longer than it may run."""
    if not _needs_a_gpu(item):
        return (yield)
    with _LOCKS["room"].open("a") as room, _LOCKS["gpus"].open("a") as gpus:
        if item.get_closest_marker("large"):
            fcntl.flock(room, fcntl.LOCK_EX)
        with _LOCKS["queue"].open("a") as queue:  # later tests stay behind the one that waits to be alone
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(gpus, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _BARE_MEMORY in os.environ and _needs_a_gpu(item):
        import cupy

        cupy.cuda.set_allocator(lambda size: cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Each test on a GPU frees the memory that CuPy would keep for later. All other tests would pay for a fixture."""
    try:
        return (yield)
    finally:
        if (used := sys.modules.get("cupy")) and _needs_a_gpu(item):
            used.get_default_memory_pool().free_all_blocks()
            used.get_default_pinned_memory_pool().free_all_blocks()
