"""Mutation testing with mutmut's operators: which small changes of a module does no test notice?

mutmut's own runner leaves out decorated functions (all of Numba's) and what tests start as processes of their own.
Here each mutant is written into a copy of the tree. A process forked from one that has collected the tests already
is given the changed function, runs the tests that reach the changed line, quickest first, and stops at the first that
fails. If a function cannot be exchanged, since Numba compiles it or its defaults change, pytest starts anew.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import gc
import inspect
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
from itertools import chain, islice
from pathlib import Path
from types import CodeType, FunctionType
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
        """The tests of a line, quickest first; all of them for a line that cannot be traced, such as a compiled one."""
        return sorted(self.tests_of_line.get(line) or self.seconds, key=lambda test: self.seconds.get(test, 0.0))


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
        if code in seen or code.count("strict=True") != source.count("strict=True"):  # an assertion
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


def functions_of(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """The code of each function by its name and line, nested ones and methods too."""
    found: dict[tuple[str, int], CodeType] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & inspect.CO_OPTIMIZED:
                found[inner.co_qualname, inner.co_firstlineno] = inner
            found |= functions_of(inner)
    return found


def runs_once(code: CodeType) -> list[object]:
    """What a module and its classes do when they are imported, such as computing the defaults of parameters."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType) and not each.co_flags & inspect.CO_OPTIMIZED]
    constants = [each for each in code.co_consts if not isinstance(each, CodeType)]
    return [code.co_code, code.co_names, repr(constants), *(runs_once(each) for each in inner)]


def can_be_exchanged(mutant: Mutant) -> bool:
    """Whether giving the functions of a process the mutant's code is the same as importing it."""
    source = (_ROOT / mutant.module).read_text()
    before, after = (compile(each, mutant.module, "exec") for each in (source, mutant.code))
    return "@compiled" not in source and runs_once(before) == runs_once(after)


def exchange(mutant: Mutant, path: Path) -> None:
    """Give the functions of this process the mutant's code."""
    changed = functions_of(compile(mutant.code, str(path), "exec"))
    gc.unfreeze()
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename == str(path):
            each.__code__ = changed[each.__code__.co_qualname, each.__code__.co_firstlineno]
        elif isinstance(each, functools._lru_cache_wrapper):
            each.cache_clear()


def is_noticed(
    mutant: Mutant, folder: Path, reach: Reach, number: int, run: Callable[[list[str]], int] | None = None
) -> bool:
    """`run`: runs tests in a forked process; default: a pytest of their own."""
    tests = reach.tests(mutant.line)
    target = folder / mutant.module
    original = target.read_bytes()
    target.write_text(mutant.code)
    stamp = 1_000_000_000 + number  # no two mutants have one time, by which compiled files are told apart
    os.utime(target, (stamp, stamp))
    limit_s = 20 + 5 * sum(reach.seconds.get(test, 0.0) for test in tests)
    try:
        run = run or (lambda tests: int(pytest.main([*_OPTIONS, *tests])))
        return in_a_child(folder, functools.partial(run, tests), limit_s) != 0
    finally:
        target.write_bytes(original)


class Judge:
    """A pytest plugin that, instead of running the collected tests, runs those of each mutant in a fork."""

    def __init__(self, folder: Path, numbered: list[tuple[int, Mutant]], reach: dict[str, Reach]) -> None:
        self.folder, self.numbered, self.reach = folder, numbered, reach

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        parent = os.getppid()
        for number, mutant in self.numbered:
            if os.getppid() != parent:  # interrupted
                break
            run = functools.partial(self.run, session, items, mutant)
            noticed = is_noticed(mutant, self.folder, self.reach[mutant.module], number, run)
            with (self.folder / "outcome.txt").open("a") as file:
                print(json.dumps([number, noticed]), file=file)
        return True

    def run(self, session: pytest.Session, items: dict[str, pytest.Item], mutant: Mutant, tests: list[str]) -> int:
        exchange(mutant, self.folder / mutant.module)
        ordered = [items[test] for test in tests if test in items]
        for item, following in zip(ordered, [*ordered[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return 1
        return 0


def judged(
    folder: Path, numbered: list[tuple[int, Mutant]], reach: dict[str, Reach], tests: list[str]
) -> Iterator[tuple[int, bool]]:
    """The number of each mutant, and whether it is noticed, as they are tried in a process of their own."""
    into, shown = folder / "outcome.txt", 0
    into.touch()
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(
            in_a_child,
            folder,
            lambda: int(pytest.main([*_OPTIONS, *tests], plugins=[Judge(folder, numbered, reach)])),
            86400,
        )
        while True:
            over = run.done()
            for line in (lines := into.read_text().splitlines())[shown:]:
                yield tuple(json.loads(line))
            shown = len(lines)
            if over:
                return
            time.sleep(0.5)


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
        folders = [copy_of_the_tree(Path(scratch) / str(n)) for n in range(options.processes)]
        reach = trace(folders[0], options.modules, tests)
        tried = [each for module in options.modules for each in mutants(module)][:: options.every]
        if options.again:
            left = {name for name, noticed in json.loads(options.again.read_text()).items() if not noticed}
            tried = [each for each in tried if each.name in left]
        print(f"{len(tried)} mutants, {len(next(iter(reach.values())).seconds)} tests", flush=True)
        numbered = list(enumerate(tried))
        outcome: dict[int, bool] = {}

        def judge(n: int) -> None:
            folder, mine = folders[n], numbered[n :: options.processes]
            quick = [each for each in mine if can_be_exchanged(each[1])]
            anew = ((k, is_noticed(m, folder, reach[m.module], k)) for k, m in mine if not can_be_exchanged(m))
            for number, noticed in chain(judged(folder, quick, reach, tests) if quick else (), anew):
                outcome[number] = noticed
                if not noticed:
                    print(f"{tried[number].module}:{tried[number].line}: {tried[number].change}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps({tried[k].name: v for k, v in outcome.items()}, indent=1))

        with ThreadPoolExecutor(options.processes) as pool:
            list(pool.map(judge, range(options.processes)))
    for module in options.modules:
        of_module = [noticed for number, noticed in outcome.items() if tried[number].module == module]
        if of_module:
            print(f"{module}: {sum(of_module)} of {len(of_module)} noticed ({sum(of_module) / len(of_module):.0%})")


if __name__ == "__main__":
    main()
