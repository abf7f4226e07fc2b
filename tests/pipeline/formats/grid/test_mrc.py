from __future__ import annotations

import io
from pathlib import Path

import gridData
import mrcfile
import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.errors import OutputError
from pipeline.formats.grid import create_map
from pipeline.formats.grid.base import GridHeader
from tests.pipeline.formats.grid.contract import GridContract, field, grid, noise, places, write_whole
from tests.pipeline.formats.image.contract import one_line

SHEARED = ((0.5, 0.0, 0.0), (0.1, 0.75, 0.0), (0.2, -0.3, 1.0))


def values_of(mrc: mrcfile.mrcfile.MrcFile) -> NDArray[np.float32]:
    """[x, y, z]: by what the header says of columns, rows and sections."""
    order = [int(mrc.header.maps), int(mrc.header.mapr), int(mrc.header.mapc)]
    return np.asarray(mrc.data).transpose(np.argsort(order))


class TestContract(GridContract):
    suffixes = (".mrc", ".map", ".ccp4")

    def read(self, path: Path) -> NDArray[np.float32]:
        report = io.StringIO()
        with mrcfile.open(path) as mrc:
            assert mrc.validate(report), report.getvalue()
            assert mrc.is_volume()
            return values_of(mrc).copy()


@pytest.mark.parametrize("suffix", [".mrc", ".map", ".ccp4"])
def test_griddataformats_finds_every_value_where_it_lies(tmp_path: Path, suffix: str) -> None:
    header = grid((7, 11, 13))
    write_whole(tmp_path / f"a{suffix}", header, field(header))
    found = gridData.Grid(str(tmp_path / f"a{suffix}"), file_format="MRC")
    np.testing.assert_allclose(found.origin, header.origin, atol=1e-5)
    np.testing.assert_allclose(found.delta, header.spacing, rtol=1e-6)
    x, y, z = np.meshgrid(*found.midpoints, indexing="ij")
    np.testing.assert_allclose(found.grid, x - 3 * y + 0.125 * z, rtol=1e-5)


@pytest.mark.parametrize("suffix", [".mrc", ".map", ".ccp4"])
def test_the_header_word_by_word(tmp_path: Path, suffix: str) -> None:
    header = grid((7, 11, 13))
    values = noise(header)
    write_whole(tmp_path / f"a{suffix}", header, values)
    raw = (tmp_path / f"a{suffix}").read_bytes()
    integers, floats = np.frombuffer(raw[:1024], "<i4"), np.frombuffer(raw[:1024], "<f4")
    assert integers[0:4].tolist() == [13, 11, 7, 2]  # columns along z, rows along y, sections along x; float32
    assert integers[7:10].tolist() == [7, 11, 13]  # along x, y, z
    assert floats[10:16].tolist() == [3.5, 2.75, 16.25, 90, 90, 90]
    assert integers[16:19].tolist() == [3, 2, 1]
    assert floats[19:21].tolist() == [values.min(), values.max()]
    assert integers[22:24].tolist() == [1, 0]
    assert integers[24] == 0  # no skew
    assert integers[27] == 20141
    assert raw[208:216] == b"MAP DD\0\0"
    assert integers[55] == 2
    assert raw[224:304].decode().rstrip() == "Potential of a test (kT/e at 298.15 K)"
    # The start is told once: readers that know both words add them up.
    assert integers[4:7].tolist() == [8, 9, -9]
    assert floats[49:52].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(np.frombuffer(raw[1024:], "<f4").reshape(7, 11, 13), values)


@pytest.mark.parametrize("origin", [(-4.4, 2.25, 10.0), (0.0, 0.0, 1000.0), (1e12, 0.0, 0.0)])
def test_a_start_that_is_no_whole_number_of_steps_or_far_away(
    tmp_path: Path, origin: tuple[float, float, float]
) -> None:
    header = GridHeader.orthogonal((7, 11, 13), origin, (0.5, 0.25, 1.25), units="V")
    write_whole(tmp_path / "a.mrc", header, noise(header))
    found = gridData.Grid(str(tmp_path / "a.mrc"))
    np.testing.assert_allclose(found.origin, origin, rtol=1e-7)
    np.testing.assert_array_equal(found.grid, noise(header))
    with mrcfile.open(tmp_path / "a.mrc") as mrc:
        assert (int(mrc.header.nxstart), int(mrc.header.nystart), int(mrc.header.nzstart)) == (0, 0, 0)


def test_a_cell_that_is_not_at_right_angles(tmp_path: Path) -> None:
    header = GridHeader(shape=(3, 5, 7), origin=(1.03, -2.0, 30.0), vectors=SHEARED, units="V")
    write_whole(tmp_path / "a.mrc", header, field(header))
    with mrcfile.open(tmp_path / "a.mrc") as mrc:
        a, b, c = (float(mrc.header.cella[axis]) for axis in "xyz")
        alpha, beta, gamma = (np.radians(float(mrc.header.cellb[name])) for name in ("alpha", "beta", "gamma"))
        across = (np.cos(alpha) - np.cos(beta) * np.cos(gamma)) / np.sin(gamma)
        up = np.sqrt(1 - np.cos(beta) ** 2 - across**2)
        cell = [[a, 0, 0], [b * np.cos(gamma), b * np.sin(gamma), 0], [c * np.cos(beta), c * across, c * up]]
        steps = np.array(cell) / np.array([[mrc.header.mx], [mrc.header.my], [mrc.header.mz]])
        assert (mrc.header.nxstart, mrc.header.nystart, mrc.header.nzstart) == (0, 0, 0)
        origin = [float(mrc.header.origin[axis]) for axis in "xyz"]
        index = np.moveaxis(np.indices((3, 5, 7)), 0, -1)
        np.testing.assert_allclose(origin + index @ steps, places(header), atol=1e-5)
        np.testing.assert_array_equal(values_of(mrc), field(header))


@pytest.mark.parametrize(
    "values",
    [
        np.full((3, 5, 7), 1e6, np.float32) + np.random.default_rng(1).standard_normal((3, 5, 7)).astype(np.float32),
        np.full((3, 5, 7), -4.25, np.float32),
        np.zeros((120, 110, 101), np.float32) + np.arange(101, dtype=np.float32),  # several blocks
    ],
    ids=["far from zero", "constant", "several blocks"],
)
def test_the_statistics_in_the_header(tmp_path: Path, values: NDArray[np.float32]) -> None:
    x, y, z = values.shape
    write_whole(tmp_path / "a.mrc", grid((x, y, z)), values)
    with mrcfile.open(tmp_path / "a.mrc") as mrc:
        exact = values.astype(np.longdouble)
        assert mrc.header.dmin == values.min()
        assert mrc.header.dmax == values.max()
        np.testing.assert_allclose(mrc.header.dmean, float(exact.mean()), rtol=1e-6)
        np.testing.assert_allclose(mrc.header.rms, float(exact.std()), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, -1])
def test_values_that_are_not_finite_are_kept_and_the_statistics_called_unknown(
    tmp_path: Path, value: float, place: int
) -> None:
    values = noise(grid((3, 5, 7)))
    values.reshape(-1)[place] = value
    write_whole(tmp_path / "a.mrc", grid((3, 5, 7)), values)
    with mrcfile.open(tmp_path / "a.mrc") as mrc:
        assert mrc.header.dmax < mrc.header.dmin
        assert mrc.header.dmean < min(mrc.header.dmin, mrc.header.dmax)
        assert mrc.header.rms < 0
        np.testing.assert_array_equal(values_of(mrc), values)


def test_extreme_values_overflow_nothing(tmp_path: Path) -> None:
    values = np.full((3, 5, 7), np.finfo(np.float32).max, np.float32)
    values[1] = -values[1]
    write_whole(tmp_path / "a.mrc", grid((3, 5, 7)), values)
    with mrcfile.open(tmp_path / "a.mrc") as mrc:
        np.testing.assert_allclose(mrc.header.rms, 3.2e38, rtol=0.01)


@pytest.mark.parametrize(
    ("name", "origin", "vectors", "words"),
    [
        ("a.mrc", (0, 0, 0), ((0, 1, 0), (1, 0, 0), (0, 0, 1)), ("first step along x", ".dx")),
        ("a.map", (0, 0, 0), ((1, 0.1, 0), (0, 1, 0), (0, 0, 1)), ("first step along x",)),
        ("a.mrc", (0, 0, 0), ((-1, 0, 0), (0, 1, 0), (0, 0, 1)), ("first step along x",)),
        ("a.ccp4", (0.3, 0, 0), ((1, 0, 0), (0, 1, 0), (0, 0, 1)), ("whole steps", ".mrc")),
        ("a.map", (0, 0, 21), ((1, 0, 0), (0, 1, 0), (0, 0, 1)), ("ten times", ".mrc")),
        ("a.ccp4", (1e10, 0, 0), ((1, 0, 0), (0, 1, 0), (0, 0, 1)), ("whole steps", ".mrc")),
    ],
)
def test_grids_that_the_format_cannot_hold(tmp_path: Path, name: str, origin, vectors, words) -> None:  # type: ignore[no-untyped-def]
    header = GridHeader(shape=(2, 2, 2), origin=origin, vectors=vectors, units="V")
    with pytest.raises(OutputError) as caught:
        create_map(tmp_path / name, header)
    one_line(caught.value, name, *words)
    assert list(tmp_path.iterdir()) == []
