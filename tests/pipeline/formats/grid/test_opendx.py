from __future__ import annotations

import gzip
import re
from pathlib import Path

import gridData
import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.errors import OutputError
from pipeline.formats.grid import create_map
from pipeline.formats.grid.base import GridHeader
from pipeline.formats.image.base import Region
from tests.pipeline.formats.grid.contract import GridContract, field, grid, noise, places, write_whole
from tests.pipeline.formats.image.contract import one_line

SHEARED = ((0.5, 0.0, 0.0), (0.1, 0.75, 0.0), (0.2, -0.3, 1.0))
NUMBER = r"(?:\d\.\d{7}e[+-]\d\d|-\d\.\d{6}e[+-]\d\d)"


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """By Python's own conversion to and from text: 8 digits, 7 of negative numbers."""
    texts = [f"{value:.6e}" if np.signbit(value) else f"{value:.7e}" for value in values.reshape(-1).tolist()]
    return np.array(texts, np.float32).reshape(values.shape)


class TestDx(GridContract):
    suffixes = (".dx",)

    def read(self, path: Path) -> NDArray[np.float32]:
        return np.asarray(gridData.Grid(str(path)).grid, np.float32)

    def stored(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return rounded(values)


class TestDxGz(TestDx):
    suffixes = (".dx.gz", ".DX.GZ")
    beside = (".partial", ".samples.partial")

    def read(self, path: Path) -> NDArray[np.float32]:
        link = path.with_name("link.dx.gz")  # GridDataFormats wants small letters
        link.symlink_to(path)
        try:
            return super().read(link)
        finally:
            link.unlink()


@pytest.mark.parametrize("suffix", [".dx", ".dx.gz"])
def test_griddataformats_finds_every_value_where_it_lies(tmp_path: Path, suffix: str) -> None:
    header = grid((7, 11, 13))
    write_whole(tmp_path / f"a{suffix}", header, field(header))
    found = gridData.Grid(str(tmp_path / f"a{suffix}"))
    np.testing.assert_array_equal(found.origin, header.origin)
    np.testing.assert_array_equal(found.delta, header.spacing)
    x, y, z = np.meshgrid(*found.midpoints, indexing="ij")
    np.testing.assert_allclose(found.grid, x - 3 * y + 0.125 * z, rtol=1e-6)


def test_the_steps_are_written_in_full(tmp_path: Path) -> None:
    spacing = (1 / 3, 0.1 + 0.2, 1e-7 / 3)
    origin = (-1000 / 3, 1e-17 / 3, 12345678.9012345678)
    header = GridHeader.orthogonal((2, 3, 2), origin, spacing, units="V")
    write_whole(tmp_path / "a.dx", header, noise(header))
    found = gridData.OpenDX.field(0)
    found.read(str(tmp_path / "a.dx"))
    np.testing.assert_array_equal(found["positions"].delta, np.diag(spacing))
    np.testing.assert_allclose(found["positions"].origin, origin, rtol=1e-12)


def test_steps_that_are_not_at_right_angles(tmp_path: Path) -> None:
    header = GridHeader(shape=(3, 4, 5), origin=(1.0, 2.0, 3.0), vectors=SHEARED, units="V")
    write_whole(tmp_path / "a.dx", header, field(header))
    steps = re.findall(r"^delta (\S+) (\S+) (\S+)$", (tmp_path / "a.dx").read_text(), re.MULTILINE)
    np.testing.assert_array_equal(np.array(steps, float), SHEARED)
    index = np.moveaxis(np.indices((3, 4, 5)), 0, -1)
    np.testing.assert_allclose(places(header), [1, 2, 3] + index @ np.array(steps, float), rtol=1e-15)


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 1), (3, 2, 6), (2, 2, 2)])
def test_every_line_is_as_the_strictest_readers_want_it(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    header = grid(shape)
    write_whole(tmp_path / "a.dx", header, noise(header))
    text = (tmp_path / "a.dx").read_bytes().decode("ascii")
    lines = text.splitlines()
    assert text.endswith("\n")
    assert "  " not in text
    assert not any(line != line.strip() or len(line) > 80 for line in lines)
    counts = " ".join(map(str, shape))
    nx, ny, nz = shape
    items = nx * ny * nz
    assert lines[0] == "# Potential of a test (kT/e at 298.15 K)"
    while lines[0].startswith("#"):
        lines.pop(0)
    assert lines[:7] == [
        f"object 1 class gridpositions counts {counts}",
        "origin -4.5 2.25 10.0",
        "delta 0.5 0 0",
        "delta 0 0.25 0",
        "delta 0 0 1.25",
        f"object 2 class gridconnections counts {counts}",
        f"object 3 class array type double rank 0 items {items} data follows",
    ]
    rows, rest = lines[7 : 7 + -(-items // 3)], lines[7 + -(-items // 3) :]
    assert all(re.fullmatch(rf"{NUMBER}(?: {NUMBER}){{2}}", row) for row in rows[:-1])
    assert re.fullmatch(rf"{NUMBER}(?: {NUMBER}){{{(items - 1) % 3}}}", rows[-1])
    assert rest[0] == 'attribute "dep" string "positions"'
    assert rest[1] == 'object "regular positions regular connections" class field'
    assert rest[2:] == [
        f'component "{name}" value {n}' for n, name in enumerate(("positions", "connections", "data"), 1)
    ]


@pytest.mark.parametrize("value", [-1000 / 3, 1e300 / 3, -1e-300 / 3, -123456789012345680.0])
def test_the_origin_fits_the_twenty_characters_that_pymol_reads(tmp_path: Path, value: float) -> None:
    header = GridHeader.orthogonal((1, 1, 1), (value, 0, 0), 1.0, units="V")
    write_whole(tmp_path / "a.dx", header, noise(header))
    found = re.search(r"^origin (\S+) 0 0$", (tmp_path / "a.dx").read_text(), re.MULTILINE)
    assert found is not None
    assert len(found[1]) <= 20
    assert abs(float(found[1]) - value) <= 1e-12 * abs(value)


def test_a_title_cannot_break_the_header(tmp_path: Path) -> None:
    header = GridHeader.orthogonal((2, 1, 1), (0, 0, 0), 1.0, units='e/Å"', title="a\nobject 9\r" + "é" * 200)
    write_whole(tmp_path / "a.dx", header, noise(header))
    assert (tmp_path / "a.dx").read_text().splitlines()[2].startswith("object 1 class")
    assert gridData.Grid(str(tmp_path / "a.dx")).grid.shape == (2, 1, 1)


def test_compressed_files_are_the_same_whenever_they_are_made(tmp_path: Path) -> None:
    header = grid((41, 79, 97))  # more than one band of text
    values = noise(header)
    write_whole(tmp_path / "a.dx", header, values)
    for name in ("a.dx.gz", "b.dx.gz"):
        write_whole(tmp_path / name, header, values)
    first = (tmp_path / "a.dx.gz").read_bytes()
    assert first == (tmp_path / "b.dx.gz").read_bytes()
    assert first[:10] == b"\x1f\x8b\x08\x00\0\0\0\0\x04\xff"  # no name, no time
    assert gzip.decompress(first) == (tmp_path / "a.dx").read_bytes()


@pytest.mark.parametrize("suffix", [".dx", ".dx.gz", ".cube"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named_by_its_point(tmp_path: Path, suffix: str, value: float) -> None:
    path, header = tmp_path / f"a{suffix}", grid((7, 11, 13))
    values = noise(header)
    values[5, 2, 11] = value
    writer = create_map(path, header)
    with pytest.raises(OutputError) as caught:
        writer.write(Region((4, 2, 1), (7, 9, 13)), np.ascontiguousarray(values[4:7, 2:9, 1:13]))
    one_line(caught.value, path.name, "(5, 2, 11)", ".npy")
    writer.discard()
    assert list(tmp_path.iterdir()) == []
