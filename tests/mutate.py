"""Mutation testing with mutmut's operators: which small changes of a module does no test notice?

mutmut's own runner leaves out decorated functions (all of Numba's) and what tests start as processes of their own.
Here each mutant is written into a copy of the tree. A forked process, which has the libraries loaded already, runs
the tests that reach the changed line, quickest first, and stops at the first that fails.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import libcst as cst
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

_ROOT = Path(__file__).resolve().parent.parent
_LIBRARIES = (
    "numpy scipy.ndimage numba zarr tifffile h5py imagecodecs dask distributed fastapi hypothesis pydantic rich"
)
_OPTIONS = [
    "-x",
    "-q",
    "--no-header",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "no:randomly",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
]


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    code: str = field(repr=False)
    change: str

    @property
    def name(self) -> str:
        return f"{self.module}: {self.change}"


@dataclass
class Reach:
    """Which tests run which lines of a module, and how long each test takes."""

    tests_of_line: dict[int, set[str]]
    seconds: dict[str, float]

    def tests(self, line: int) -> list[str]:
        """The tests of a line, quickest first; of a line that cannot be traced, such as a compiled one, all that reach
        the module."""
        found = self.tests_of_line.get(line) or set().union(*self.tests_of_line.values())
        return sorted(found or self.seconds, key=lambda test: self.seconds.get(test, 0.0))


class _Mutations(cst.CSTVisitor):
    """Collects (node, mutated node, line) of function bodies. The wording of errors is not behaviour; docstrings,
    annotations and decorators are left too."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, cst.CSTNode, int]] = []
        self._functions = self._raises = self._line = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Decorator):
            return False
        if isinstance(node, cst.BaseExpression | cst.BaseStatement | cst.BaseSmallStatement):
            self._line = self.get_metadata(PositionProvider, node).start.line
        self._functions += isinstance(node, cst.FunctionDef)
        self._raises += isinstance(node, cst.Raise)
        wording = self._raises and isinstance(node, cst.BaseString | cst.FormattedString)
        if self._functions and not wording and not isinstance(node, cst.Param):
            for kind, operator in mutation_operators:
                if isinstance(node, kind):
                    wanted = 1 if isinstance(node, cst.BaseString) else None  # the others only change its case
                    self.found.extend((node, mutated, self._line) for mutated in islice(operator(node), wanted))
        return not wording

    def on_leave(self, original_node: cst.CSTNode) -> None:
        self._functions -= isinstance(original_node, cst.FunctionDef)
        self._raises -= isinstance(original_node, cst.Raise)


def mutants(module: str) -> Iterator[Mutant]:
    source = (_ROOT / module).read_text()
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    visitor = _Mutations()
    wrapper.visit(visitor)
    lines, seen = source.splitlines(), {source}
    for node, mutated, line in visitor.found:
        code = wrapper.module.deep_replace(node, mutated).code  # type: ignore[attr-defined]
        if code in seen:
            continue
        seen.add(code)
        changed = [each for each in difflib.ndiff(lines, code.splitlines()) if each[0] in "+-"]
        yield Mutant(module, line, code, " | ".join(" ".join(each.split()) for each in changed))


def copy_of_the_tree(folder: Path) -> Path:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=_ROOT, stdout=-1, check=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (_ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_ROOT / name, folder / name)
    return folder


def in_a_child(folder: Path, call: Callable[[], int], limit_s: float) -> int | None:
    """The exit code of `call` in a process of its own in `folder`; None if it passed the time limit."""
    if (child := os.fork()) == 0:
        try:
            os.setsid()
            os.chdir(folder)
            with (folder / "output.txt").open("wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            sys.path.insert(0, str(folder))
            os.environ["PYTHONPATH"] = str(folder)
            os._exit(call())
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(70)
    end = time.monotonic() + limit_s
    done, status = 0, 0
    while not done and time.monotonic() < end:
        time.sleep(0.02)
        done, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests started, too
    if not done:
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(status)


class _Tracer:
    """A pytest plugin that notes which test runs which line."""

    def __init__(self, modules: list[str]) -> None:
        import coverage

        self.seconds: dict[str, float] = {}
        self.coverage = coverage.Coverage(data_file=None, include=[str(Path.cwd() / each) for each in modules])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        started = time.monotonic()
        self.coverage.switch_context(item.nodeid)
        result = yield
        self.coverage.switch_context("")
        self.seconds[item.nodeid] = time.monotonic() - started
        return result


def trace(folder: Path, modules: list[str], tests: list[str]) -> dict[str, Reach]:
    into = folder / "reach.json"

    def run() -> int:
        tracer = _Tracer(modules)
        tracer.coverage.start()
        code = pytest.main([*_OPTIONS, *tests], plugins=[tracer])
        tracer.coverage.stop()
        data = tracer.coverage.get_data()
        lines = {each: data.contexts_by_lineno(str(folder / each)) for each in modules}
        into.write_text(json.dumps([tracer.seconds, lines]))
        return int(code)

    if code := in_a_child(folder, run, 3600):
        print((folder / "output.txt").read_text(errors="replace")[-4000:])
        sys.exit(f"mutate: the tests fail before anything is changed (pytest's exit code {code})")
    seconds, lines = json.loads(into.read_text())
    return {
        module: Reach({int(n): set(each) - {""} for n, each in of_module.items()}, seconds)
        for module, of_module in lines.items()
    }


def is_noticed(mutant: Mutant, folder: Path, reach: Reach, stamp: int) -> bool:
    tests = reach.tests(mutant.line)
    target = folder / mutant.module
    original = target.read_bytes()
    target.write_text(mutant.code)
    os.utime(target, (stamp, stamp))  # no two mutants have one time, by which compiled files are told apart
    limit_s = 20 + 5 * sum(reach.seconds.get(test, 0.0) for test in tests)
    try:
        return in_a_child(folder, lambda: int(pytest.main([*_OPTIONS, *tests])), limit_s) != 0
    finally:
        target.write_bytes(original)


def tests_beside(module: str) -> list[str]:
    """The tests that mirror a module: its own file, or its folder."""
    path = Path("tests") / module
    own = path.with_name(f"test_{path.name}")
    folder = next(each for each in (path.with_suffix(""), *path.parents) if (_ROOT / each).is_dir())
    return [str(own if (_ROOT / own).is_file() else folder)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="+", metavar="MODULE.py", help="modules to change, by their path")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="tests to run (default: those beside each module)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N", help="mutants tested at a time")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="try one mutant in K")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome of each mutant to FILE")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only those that such a file lists as unnoticed")
    options = parser.parse_args()
    tests = options.tests or sorted({each for module in options.modules for each in tests_beside(module)})
    for library in _LIBRARIES.split():
        __import__(library)

    with tempfile.TemporaryDirectory(prefix="millrace-mutate-") as scratch:
        folders: SimpleQueue[Path] = SimpleQueue()
        for n in range(options.processes):
            folders.put(copy_of_the_tree(Path(scratch) / str(n)))
        first = folders.get()
        reach = trace(first, options.modules, tests)
        folders.put(first)
        tried = [each for module in options.modules for each in mutants(module)][:: options.every]
        if options.again:
            left = {name for name, noticed in json.loads(options.again.read_text()).items() if not noticed}
            tried = [each for each in tried if each.name in left]
        print(f"{len(tried)} mutants, {len(next(iter(reach.values())).seconds)} tests", flush=True)

        def judge(number: int, mutant: Mutant) -> bool:
            folder = folders.get()
            try:
                noticed = is_noticed(mutant, folder, reach[mutant.module], 1_000_000_000 + number)
            finally:
                folders.put(folder)
            if not noticed:
                print(f"{mutant.module}:{mutant.line}: {mutant.change}", flush=True)
            return noticed

        with ThreadPoolExecutor(options.processes) as pool:
            outcome = list(pool.map(judge, range(len(tried)), tried))
    for module in options.modules:
        of_module = [noticed for mutant, noticed in zip(tried, outcome, strict=True) if mutant.module == module]
        if of_module:
            print(f"{module}: {sum(of_module)} of {len(of_module)} noticed ({sum(of_module) / len(of_module):.0%})")
    if options.json:
        options.json.write_text(
            json.dumps({m.name: noticed for m, noticed in zip(tried, outcome, strict=True)}, indent=1)
        )


if __name__ == "__main__":
    main()
