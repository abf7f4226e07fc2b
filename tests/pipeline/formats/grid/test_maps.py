from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import OutputError, ParameterError
from pipeline.formats.grid import GRID_FORMATS, create_map, map_format_for_output
from pipeline.formats.grid.base import GridHeader, readable
from tests.pipeline.formats.grid.contract import GridContract, grid
from tests.pipeline.formats.image.contract import QUICK, one_line


class TestNpy(GridContract):
    suffixes = (".npy",)

    def read(self, path: Path) -> NDArray[np.float32]:
        found = np.load(path)
        assert found.flags.c_contiguous
        return np.asarray(found)


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("a.dx", "OpenDX"),
        ("a.b.DX.gz", "OpenDX"),
        ("a.mrc", "MRC"),
        ("a.MAP", "MRC"),
        ("a.ccp4", "MRC"),
        ("a.cube", "cube"),
        ("a.cub", "cube"),
        ("a.zarr", "Zarr"),
        ("a.npy", "NPY"),
    ],
)
def test_the_suffix_chooses_the_format(name: str, format_name: str) -> None:
    assert map_format_for_output(Path(name)).name == format_name


@pytest.mark.parametrize("name", ["a", "a.tif", "a.gz", "a.npy.gz", "dx", "a.mrc.gz"])
def test_other_names_are_refused_with_those_that_are_not(name: str) -> None:
    with pytest.raises(OutputError) as caught:
        create_map(Path(name), grid((2, 2, 2)))
    one_line(caught.value, name, *(suffix for form in GRID_FORMATS for suffix in form.suffixes))


SPANS = st.tuples(st.floats(-300, 300), st.floats(0, 40))


@QUICK
@given(st.tuples(SPANS, SPANS, SPANS), st.sampled_from([0.5, 1.0, 0.1, 1 / 3, 7.25]))
def test_a_grid_covers_its_box_and_no_more(spans: tuple[tuple[float, float], ...], spacing: float) -> None:
    lowest, highest = np.array([s for s, _ in spans]), np.array([s + length for s, length in spans])
    header = GridHeader.covering(tuple(lowest), tuple(highest), spacing, units="V")
    first = np.array(header.origin)
    last = first + (np.array(header.shape) - 1) @ np.array(header.vectors)
    margin = 1e-8 * spacing
    assert (first <= lowest + margin).all()
    assert (first > lowest - spacing - margin).all()
    assert (last >= highest - margin).all()
    assert (last < highest + spacing + margin).all()
    np.testing.assert_allclose(np.rint(first / spacing) * spacing, first, atol=1e-12)
    assert header.is_orthogonal
    assert header.spacing == (spacing,) * 3


def test_grids_of_neighbouring_boxes_fit_each_other() -> None:
    left = GridHeader.covering((0.05, 0, 0), (3, 3, 3), 0.1, units="V")
    right = GridHeader.covering((1.7, 0.3, -2), (5, 3, 3), 0.1, units="V")
    apart = (np.array(right.origin) - left.origin) / 0.1
    np.testing.assert_allclose(apart, np.rint(apart), atol=1e-9)


@pytest.mark.parametrize("spacing", [0.0, -1.0, np.nan, np.inf, (1.0, 0.0, 1.0)])
def test_a_spacing_that_is_none(spacing: float | tuple[float, float, float]) -> None:
    with pytest.raises(ParameterError) as caught:
        GridHeader.covering((0, 0, 0), (1, 1, 1), spacing, units="V")
    one_line(caught.value, "--spacing")


def test_an_enormous_grid_says_what_it_takes_and_what_would_fit() -> None:
    with pytest.raises(ParameterError) as caught:
        GridHeader.covering((0, 0, 0), (10_000, 10_000, 10_000), 0.1, units="V", limit_bytes=8 << 30)
    one_line(
        caught.value, "100,001 × 100,001 × 100,001", "4,000,120,001,200,004 bytes (3.553 PiB)", "8 GiB", "spacing of"
    )
    fits = float(str(caught.value).split("a spacing of ")[1].split()[0])
    assert GridHeader.covering((0, 0, 0), (10_000,) * 3, fits, units="V", limit_bytes=8 << 30).nbytes > 7 << 30
    with pytest.raises(ParameterError) as caught:
        GridHeader.covering((0, 0, 0), (1e12, 1, 1), 0.1, units="V")
    one_line(caught.value, "10,000,000,000,001", "PiB")
    with pytest.raises(ParameterError) as caught:
        GridHeader.covering((0, 0, 0), (np.inf, 1, 1), 0.1, units="V")
    one_line(caught.value, "not finite")


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (0, 2, 2)},
        {"shape": (2, 2)},
        {"origin": (np.nan, 0, 0)},
        {"vectors": ((1, 0, 0), (0, 1, 0), (1, 1, 0))},
        {"vectors": ((1, 0, 0), (0, np.inf, 0), (0, 0, 1))},
    ],
)
def test_what_is_no_grid(wrong: dict[str, object]) -> None:
    right = {"shape": (2, 2, 2), "origin": (0, 0, 0), "vectors": ((1, 0, 0), (0, 1, 0), (0, 0, 1)), "units": "V"}
    GridHeader(**right)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a grid of|a grid whose"):
        GridHeader(**(right | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1,024 bytes (1 KiB)"), (10**21, "(867.4 EiB)")],
)
def test_sizes_in_words(nbytes: int, text: str) -> None:
    assert readable(nbytes).endswith(text)
