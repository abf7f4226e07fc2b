"""Workloads of installed packages: found by their entry points; a broken one is named and harms no other."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from pipeline.errors import ParameterError
from pipeline.workloads import registry, unusable, workload_named, workloads
from tests.images import read_image, write_image
from tests.pipeline.cluster.processes import run
from tests.pipeline.workloads.packages import BUILT_IN, install

OPERATOR = """
from pipeline import image_operator
@image_operator
def {name}(block, *, by: int = 1):
    "Add a number."
    return block + block.dtype.type(by)
"""
WORKLOAD = """
from pipeline.workloads import Parameters
class Lazy:
    name, summary, unit, Parameters = "lazy", "Does nothing.", "pixels", Parameters
    def check_output(self, path): pass
    def open(self, spec): raise NotImplementedError
class Greedy(Lazy):
    name = "greedy"
    class Parameters(Parameters):
        memory: int = 3
lazy = Lazy()
"""


@pytest.fixture
def offered(tmp_path, monkeypatch, own_settings):
    """Installs packages for this process and for those that it starts."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    caches = (registry._offered, registry._installed)
    before = set(sys.modules)

    def clear():
        for cache in caches:
            cache.cache_clear()
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
                del sys.modules[name]

    def offer(package, source, **points):
        install(tmp_path, package, source, **points)
        clear()

    clear()
    yield offer
    monkeypatch.undo()
    clear()


def test_without_packages_there_are_those_built_in(offered):
    assert list(workloads()) == BUILT_IN
    assert unusable() == []
    with pytest.raises(KeyError):
        workload_named("absent")


def test_an_operator_a_workload_and_a_class_of_such(offered):
    offered("plus", OPERATOR.format(name="plus"), plus="plus:plus")
    offered("lazies", WORKLOAD, lazy="lazies:Lazy")
    assert list(workloads()) == sorted([*BUILT_IN, "lazy", "plus"])
    assert workload_named("plus").summary == "Add a number."
    assert workload_named("lazy") is workload_named("lazy")
    assert unusable() == []


@pytest.mark.parametrize(
    ("source", "point", "said"),
    [
        ("import absent_module", "it", "ModuleNotFoundError: No module named 'absent_module'"),
        ("raise ValueError('two\\nlines')", "it", "ValueError: two lines"),
        ("raise SystemExit(3)", "it", "SystemExit: 3"),
        ("", "it", "AttributeError: "),
        ("def it(block): return block", "it", "function is no workload, it has no name; decorate it"),
        (OPERATOR.format(name="other"), "other", "entry point is called it and the workload other"),
        (OPERATOR.format(name="it") + "it.Parameters = int", "it", "Parameters must be a subclass"),
        (
            "from pipeline import image_operator\n@image_operator\ndef it(block, *, a): pass", "it",
            "TypeError: operator it: parameter a has no annotation",
        ),
    ],
)  # fmt: skip
def test_one_that_cannot_be_used_is_named_and_harms_no_other(offered, source, point, said):
    offered("broken", source, it=f"broken:{point}")
    offered("plus", OPERATOR.format(name="plus"), plus="plus:plus")
    assert list(workloads()) == sorted([*BUILT_IN, "plus"])
    (line,) = unusable()
    assert line.startswith("workload it of the package broken cannot be used: ")
    assert said in line
    assert "\n" not in line
    with pytest.raises(ParameterError) as refused:
        workload_named("it")
    assert str(refused.value) == line


def test_parameters_called_like_options_of_every_workload(offered):
    offered("lazies", WORKLOAD, greedy="lazies:Greedy")
    (line,) = unusable()
    assert "its parameter memory is called like an option" in line


def test_two_packages_with_one_name_are_both_named(offered):
    offered("one", OPERATOR.format(name="plus"), plus="one:plus")
    offered("two", OPERATOR.format(name="plus"), plus="two:plus")
    assert list(workloads()) == BUILT_IN
    assert unusable() == ["workload plus is offered by one and by two: uninstall or rename one of them"]


@pytest.mark.parametrize("name", ["smooth", "median", "map"])
def test_the_built_in_one_stays(offered, name):
    before = workload_named(name)
    offered("one", OPERATOR.format(name=name), **{name: f"one:{name}"})
    assert workload_named(name) is before
    assert unusable() == [f"workload {name} is offered by one and by Millrace itself: uninstall or rename one of them"]


def test_a_built_in_one_is_found_without_a_look_at_packages(monkeypatch):
    monkeypatch.setattr(registry, "_offered", None)
    assert workload_named("smooth").name == "smooth"


def test_the_command_runs_them_and_names_those_that_it_cannot(offered, tmp_path, millrace, monkeypatch):
    monkeypatch.chdir(tmp_path)
    offered("plus", OPERATOR.format(name="plus"), plus="plus:plus")
    offered("broken", "import absent_module", it="broken:it")
    samples = write_and_give(tmp_path)
    code, out, err = millrace("run", "--help")
    assert code == 0
    assert "Add a number" in out
    assert "  map " in out
    line = "millrace: workload it of the package broken cannot be used: ModuleNotFoundError: No module named"
    assert err == f"{line} 'absent_module'\n"
    code, out, err = millrace("run", "it", "in.npy", "out.npy")
    assert (code, out) == (2, "")
    assert err.startswith("millrace: workload it of the package broken cannot be used: ")
    code, out, err = millrace("run", "plus", "--help")
    assert code == 0
    assert "--by N" in out
    assert "[default: 1]" in out
    assert millrace("run", "plus", "in.npy", "out.npy", "--by", 3, "--quiet") == (0, "", "")
    np.testing.assert_array_equal(read_image(tmp_path / "out.npy"), samples + 3)
    assert millrace("run", "plus", "in.npy", "out.npy", "--by", "x")[0] == 2


# Plain functions

FUNCTIONS = """
import os, numpy as np
from pipeline import image_operator
def mean(block, radius=1, *, scale=1.0, label=None, xp):
    assert label in (None, "a text", [1, 2])
    padded = xp.pad(block.astype(xp.float32), radius)
    rows = sum(xp.roll(padded, by, 0) for by in range(-radius, radius + 1)) / (2 * radius + 1)
    return (scale * rows)[radius : radius + block.shape[0], radius : radius + block.shape[1]]
def failing(block):
    raise OverflowError("too much")
def deadly(block):
    os._exit(3)
@image_operator(halo=lambda asked: asked.radius)
def wide(block, *, radius: int = 1):
    return np.maximum(block, radius)
number = 3
"""


def write_and_give(folder):
    samples = np.random.default_rng(3).integers(0, 200, (90, 71)).astype(np.uint8)
    write_image(folder / "in.npy", samples, "YX")
    return samples


@pytest.fixture
def functions(tmp_path, monkeypatch, own_settings):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "mine" / "broken.py").write_text("def")
    yield write_and_give(tmp_path)
    for name in ("mine", "mine.functions"):
        sys.modules.pop(name, None)


def mapped(name, *options):
    return ("run", "map", "in.npy", "out.npy", "--function", name, "--device", "cpu", *options)


MEAN = mapped("mine.functions:mean", "--halo", "2,0", "--dtype", "float32", "--param", "radius=2")


@pytest.mark.parametrize("workers", [(), ("--workers", 2)])
def test_a_plain_function_of_this_folder(functions, tmp_path, workers):
    options = ("--param", "scale=0.5", "--mode", "wrap", "--chunk-bytes", "5KB", *workers)
    for label in ("a text", "[1, 2]"):
        code, _, err = run(*MEAN, *options, "--param", f"label={label}", cwd=tmp_path)
        assert (code, err) == (0, "")
        rows = sum(np.roll(functions.astype(np.float32), by, 0) for by in range(-2, 3)) / 5
        np.testing.assert_allclose(read_image(tmp_path / "out.npy"), 0.5 * rows, rtol=1e-6)


def test_a_function_of_scipy_and_an_operator(functions, tmp_path, millrace):
    code, _, err = millrace(*mapped("scipy.ndimage:maximum_filter", "--halo", 1, "--param", "size=3", "--axes", "YX"))
    assert (code, err) == (0, "")
    assert (read_image(tmp_path / "out.npy") >= functions).all()
    code, _, err = millrace(*mapped("mine.functions:wide", "--param", "radius=50"))
    assert (code, err) == (0, "")
    np.testing.assert_array_equal(read_image(tmp_path / "out.npy"), np.maximum(functions, 50))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (mapped("mine.absent:mean"), "--function mine.absent:mean: ModuleNotFoundError: "),
        (mapped("mine.functions:absent"), "--function mine.functions:absent: AttributeError: "),
        (mapped("mine.functions"), "name it as package.module:function"),
        (mapped("mine.functions:number"), "is int, which cannot be called"),
        (mapped("mine.functions:mean", "--param", "size=3"), "--param: mine.functions:mean has got an unexpected"),
        (mapped("mine.functions:mean", "--param", "radius"), "--param: must be NAME=VALUE"),
        (mapped("mine.functions:wide", "--halo", "3"), "--halo: the operator mine.functions:wide declares its own"),
        (mapped("mine.functions:wide", "--param", "size=3"), "--param size: there is no such parameter\n"),
        (mapped("mine.functions:wide", "--param", "radius=a"), "--param radius: must be a whole number; got 'a'\n"),
        (mapped("mine.broken:f"), "SyntaxError: invalid syntax (broken.py, line 1); correct the module"),
        (("run", "map", "in.npy", "out.npy"), "--function: is required"),
        (mapped("mine.functions:mean", "--halo", "1,2,3"), "its halo is (1.0, 2.0, 3.0)"),
        (mapped("mine.functions:mean", "--scheduler", "tcp://127.0.0.1:1"), "map runs on this machine alone"),
    ],
)
def test_what_cannot_be_mapped_is_the_users_to_mend(functions, millrace, arguments, said):
    code, out, err = millrace(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("workers", [(), ("--workers", 2)])
def test_an_exception_fails_the_job_in_one_line(functions, tmp_path, workers):
    code, out, err = run(*mapped("mine.functions:failing", *workers), cwd=tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("millrace: operator mine.functions:failing: OverflowError: too much (")
    assert f"{tmp_path}/mine/functions.py:10, samples (0, 0) to (" in err
    assert err.count("\n") == 1


def test_the_traceback_is_there_for_who_asks(functions, millrace, monkeypatch):
    monkeypatch.setenv("MILLRACE_DEBUG", "1")
    code, _, err = millrace(*mapped("mine.functions:failing"))
    assert code == 1
    assert 'raise OverflowError("too much")' in err


def test_a_function_that_kills_its_workers_fails_after_three_deaths(functions, tmp_path):
    code, out, err = run(*mapped("mine.functions:deadly", "--workers", 2), cwd=tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("millrace: mine.functions:deadly: chunks 0 to 0 took down 3 workers of the local cluster")
    assert err.count("\n") == 1
