"""The `millrace kernels` command; measurements are replaced by made-up results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import kernels
import kernels.runtime.measure
from kernels.runtime.measure import DeviceFacts, LadderResult, Occupancy, Rung
from pipeline.cli import kernels as kernels_command
from pipeline.engine.devices import discovery

Millrace = Callable[..., tuple[int, str, str]]


DEVICE = DeviceFacts(
    model="A <made> device", driver="13.0", multiprocessors=132, l2_bytes=60 << 20, measured="2026-11-21T12:00:00",
    limits={"copy": 4.2e12, "read": 4.5e12, "fma": 28e12, "roots": 4.1e12},
)  # fmt: skip


def made_rung(name: str, seconds: float, fraction: float, bound: Any = "memory", *, library: bool = False) -> Rung:
    occupancy = Occupancy(
        kernel="k<int>", registers=40, shared_bytes=16384, threads=256, active_warps=48, most_warps=64
    )
    return Rung(
        name=name, summary=f"{name} & more", seconds=seconds, spread=(seconds, seconds), bytes_per_s=1e9 / seconds,
        flops_per_s=1e8 / seconds, fraction=fraction, bound=bound, occupancy=None if library else occupancy, calls=10,
    )  # fmt: skip


def made_result(operation: str, **changes: Any) -> LadderResult:
    rungs = (
        made_rung("copy", 0.2, 1.0),
        made_rung("naive", 1.0, 0.02, "latency"),
        made_rung("shared", 0.99, 0.03, "latency"),
        made_rung("padded", 0.25, 0.9),
    )
    values: dict[str, Any] = {
        "operation": operation, "ladder": "uint32, 5 × 7", "limit": "copy", "limit_per_s": 4.2e12, "bytes": 10**9,
        "flops": 10**8, "bound_rung": "copy", "rungs": rungs, "failures": {},
        "libraries": (made_rung("CuPy", 0.3, 0.7, library=True),),
    }  # fmt: skip
    return LadderResult(**{**values, **changes})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A fake GPU with made-up measurements; returns the requested operations."""
    asked: list[str] = []

    def measure(operations: list[str]) -> Iterator[Any]:
        asked.extend(operations)
        yield DEVICE
        yield from (made_result(operation) for operation in operations)

    monkeypatch.setattr(discovery, "usable_gpus", lambda: [0])
    monkeypatch.setattr(kernels.runtime.measure, "measure", measure)
    return asked


def test_every_operation_is_listed_with_its_rungs(millrace: Millrace) -> None:
    code, out, err = millrace("kernels")
    assert (code, err) == (0, "")
    for name in kernels.names():
        assert re.search(rf"^{name} +\w", out, re.MULTILINE), name
    assert "kogge_stone · double_buffered · brent_kung · three_phase · hierarchical · single_pass" in out


def test_without_a_gpu_one_line_names_the_way_out(millrace: Millrace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_driver_version", lambda: None)
    for arguments in (("scan",), ("--all",), ("scan", "--json")):
        code, out, err = millrace("kernels", "bench", *arguments)
        assert (code, out) == (2, "")
        assert err == (
            "millrace: kernels bench needs a GPU: no NVIDIA driver answers on this machine (libcuda.so.1); "
            "millrace devices lists the devices found\n"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name one operation, or pass --all"),
        (("scan", "--all"), "name one operation, or pass --all"),
        (("scans",), "no operation named 'scans'; there are "),
        (("scan", "--plot", "a.png"), "--plot a.png: the file is SVG; name it *.svg"),
        (("scan", "--report", "a"), "--report a: the file is HTML; name it *.html"),
        (("scan", "--report", "no/such/a.html"), "no/such does not exist; make it first"),
    ],
)
def test_mistakes_are_one_line(
    millrace: Millrace, measured: list[str], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = millrace("kernels", "bench", *arguments)
    assert (code, out, err.count("\n"), measured) == (2, "", 1, [])
    assert message in err


def test_a_ladder_as_a_table(millrace: Millrace, measured: list[str]) -> None:
    code, out, err = millrace("kernels", "bench", "scan")
    assert (code, err, measured) == (0, "", ["scan"])
    assert "A <made> device, CUDA driver 13.0" in out
    assert "limits: copy 4,200 GB/s, read 4,500 GB/s, fma 28,000 GFMA/s, roots 4,100 Groots/s" in out
    (padded,) = (line for line in out.splitlines() if line.startswith("  padded"))
    assert padded.split() == ["padded", "250.0000", "4", "0.4", "0.900", "48/64", "40", "16384", "memory"]
    assert "does not pay here: shared is as fast as naive (within 2 %)" in out
    assert "copy" in out
    assert "(upper bound)" in out


def test_json(millrace: Millrace, measured: list[str]) -> None:
    code, out, _err = millrace("kernels", "bench", "scan", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["device"]["limits"]["copy"] == 4.2e12
    assert [rung["name"] for rung in found["ladders"][0]["rungs"]] == ["copy", "naive", "shared", "padded"]
    assert found["ladders"][0]["rungs"][1]["occupancy"]["active_warps"] == 48


def test_a_plot_is_a_picture_with_every_rung(millrace: Millrace, measured: list[str], tmp_path: Path) -> None:
    code, _out, _err = millrace("kernels", "bench", "scan", "--plot", tmp_path / "scan.svg")
    assert code == 0
    root = ElementTree.fromstring((tmp_path / "scan.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    bars = root.findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(bars) == 5
    width = float(root.attrib["width"])
    assert all(0 < float(bar.attrib["x"]) + float(bar.attrib["width"]) < width for bar in bars)
    words = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"copy", "naive", "shared", "padded", "CuPy"} <= set(words)


class Page(HTMLParser):
    """Collects the references of a page and checks that its tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.references += [value for name, value in attributes if name in ("href", "src", "xlink:href", "data")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_report_is_one_page_that_asks_nothing_of_the_network(
    millrace: Millrace, measured: list[str], tmp_path: Path
) -> None:
    code, _out, _err = millrace("kernels", "bench", "--all", "--report", tmp_path / "out.html")
    assert code == 0
    assert {"transpose", "reduce", "scan", "histogram", "smoothing"} <= set(measured)
    text = (tmp_path / "out.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.references
    assert all(reference.startswith("#") for reference in page.references)
    assert "url(" not in text
    assert "@import" not in text
    said = " ".join(page.words)
    for operation in measured:
        assert f'<h2 id="{operation}">' in text
    assert "A <made> device" in said
    assert "Steps that do not pay on this card" in said
    assert said.count("shared is as fast as naive (within 2 %)") == 2 * len(measured)


def test_what_could_not_be_measured_is_told_and_the_exit_code_says_so(
    millrace: Millrace, measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(operations: list[str]) -> Iterator[Any]:
        yield DEVICE
        yield made_result("scan", rungs=(), libraries=(), failures={"single_pass": "OutOfMemoryError: no <room>"})

    monkeypatch.setattr(kernels.runtime.measure, "measure", measure)
    code, out, err = millrace("kernels", "bench", "scan", "--report", tmp_path / "a.html", "--plot", tmp_path / "a.svg")
    assert code == 1
    assert "single_pass: not measured: OutOfMemoryError: no <room>" in out
    assert "1 rung could not be measured; the first: scan (uint32, 5 × 7): single_pass" in err
    assert "single_pass was not measured: OutOfMemoryError: no &lt;room&gt;" in (tmp_path / "a.html").read_text()
    ElementTree.fromstring((tmp_path / "a.svg").read_text())


def test_a_library_that_is_missing_is_no_error(
    millrace: Millrace, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(operations: list[str]) -> Iterator[Any]:
        yield DEVICE
        yield made_result("scan", missing={"libraries": "ImportError: none"})

    monkeypatch.setattr(kernels.runtime.measure, "measure", measure)
    code, out, err = millrace("kernels", "bench", "scan")
    assert (code, err) == (0, "")
    assert "libraries: not measured: ImportError: none" in out


def test_operations_without_a_ladder_are_left_out(
    millrace: Millrace, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.runtime.measure, "ladders_of", lambda name: () if name != "reduce" else ("one",))
    assert millrace("kernels", "bench", "--all")[0] == 0
    assert measured == ["reduce"]
    code, _out, err = millrace("kernels", "bench", "coulomb")
    assert (code, err) == (2, "millrace: kernels bench: coulomb has no ladder to measure\n")


@pytest.mark.gpu
@pytest.mark.alone
def test_a_real_ladder(millrace: Millrace, tmp_path: Path) -> None:
    code, out, err = millrace("kernels", "bench", "transpose", "--json", "--report", tmp_path / "out.html")
    assert code == 0, err
    ladders = json.loads(out)["ladders"]
    (first, *_others) = ladders
    fractions = {rung["name"]: rung["fraction"] for rung in first["rungs"]}
    assert set(fractions) == {"copy", "naive", "shared", "padded", "coarsened", "shapes", "vectors"}
    assert fractions["naive"] < fractions["vectors"] < 1.1
    assert first["libraries"]
    assert kernels_command.operation_lines()
