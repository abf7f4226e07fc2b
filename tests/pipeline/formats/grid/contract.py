"""What every map format must do, run against each of them: `class TestMrc(GridContract)` with its suffixes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import InputError, OutputError
from pipeline.formats.grid import create_map, map_format_for_output, open_map
from pipeline.formats.grid.base import GridHeader
from pipeline.formats.image.base import ImageWriter, Region
from pipeline.storage.partial import Opening
from tests.pipeline.formats.image.contract import QUICK, one_line

SHAPES = ((7, 11, 13), (2, 3, 5), (1, 1, 1), (17, 1, 2), (3, 2, 6), (5, 19, 3))
ORIGIN = (-4.5, 2.25, 10.0)
SPACING = (0.5, 0.25, 1.25)


def grid(shape: tuple[int, int, int]) -> GridHeader:
    """Another spacing along each axis, and an origin away from 0 that is a whole number of steps."""
    return GridHeader.orthogonal(shape, ORIGIN, SPACING, units="kT/e at 298.15 K", title="Potential of a test")


def places(header: GridHeader) -> NDArray[np.float64]:
    """(nx, ny, nz, 3): where each point lies, in angstrom."""
    index = np.moveaxis(np.indices(header.shape), 0, -1)
    return np.array(header.origin) + index @ np.array(header.vectors)


def field(header: GridHeader) -> NDArray[np.float32]:
    """Values that tell where they lie: no two axes, directions or origins can be mistaken for each other."""
    x, y, z = np.moveaxis(places(header), -1, 0)
    return np.ascontiguousarray((x - 3 * y + 0.125 * z).astype(np.float32))


def noise(header: GridHeader, seed: int = 1) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(header.shape) * 10.0 ** rng.integers(-9, 9, header.shape)
    return np.ascontiguousarray(values.astype(np.float32))


def write_whole(path: Path, header: GridHeader, values: NDArray[np.float32]) -> None:
    writer = create_map(path, header)
    writer.write(Region.whole(header.shape), values)
    writer.publish()


def contents(path: Path) -> dict[str, bytes]:
    """Every byte of a file, or of a folder's files."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(found.relative_to(path)): found.read_bytes() for found in path.rglob("*") if found.is_file()}


def boxes(shape: tuple[int, ...], cuts: Sequence[Sequence[int]]) -> list[Region]:
    """The grid cut at these indices along each axis, in a random order."""
    spans = []
    for count, inner in zip(shape, cuts, strict=True):
        ends = sorted({0, count, *(cut % count for cut in inner)})
        spans.append(list(itertools.pairwise(ends)))
    found = [Region(*map(tuple, zip(*corners, strict=True))) for corners in itertools.product(*spans)]
    random.Random(5).shuffle(found)
    return found


class GridContract:
    """Subclasses name the suffixes; every test below then runs for them."""

    suffixes: ClassVar[Sequence[str]]
    # Whether `create` claims the whole space, so that a full disk is found before any work.
    reserves: ClassVar[bool] = True
    is_folder: ClassVar[bool] = False
    # What lies beside the output while it is written.
    beside: ClassVar[Sequence[str]] = (".partial",)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "suffix" in metafunc.fixturenames:
            metafunc.parametrize("suffix", self.suffixes)

    def read(self, path: Path) -> NDArray[np.float32]:
        """The values [x, y, z] as an independent reader has them."""
        raise NotImplementedError

    def stored(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the format keeps of these values."""
        return values

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_what_is_written_is_read(self, suffix: str, shape: tuple[int, int, int], tmp_path: Path) -> None:
        path, header = tmp_path / f"map{suffix}", grid(shape)
        for values in (field(header), noise(header), np.full(shape, -0.0, np.float32)):
            write_whole(path, header, values)
            found = self.read(path)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, self.stored(values))
        assert map_format_for_output(path).refusal(header, path) is None

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_what_is_written_is_read_again_in_any_region(
        self, suffix: str, shape: tuple[int, int, int], tmp_path: Path
    ) -> None:
        path, header = tmp_path / f"map{suffix}", grid(shape)
        values = noise(header)
        values.flat[0] = 0
        write_whole(path, header, values)
        style = map_format_for_output(path).style
        with open_map(path, header) as reader:
            assert reader.header.dtype == (np.float32 if style is None else np.float64)
            for region in boxes(shape, [[1], [2], [3]]):
                found = np.empty(region.shape, reader.header.dtype)
                reader.read(region, found)
                expected = values[region.slices]
                np.testing.assert_array_equal(found.astype(np.float32), self.stored(expected))
                if style is not None:
                    assert (np.abs(found - expected) <= style.half_unit(found) * (1 + 1e-9)).all()

    def test_what_is_no_such_map_is_refused(self, suffix: str, tmp_path: Path) -> None:
        path, header = tmp_path / f"map{suffix}", grid((7, 11, 13))
        with pytest.raises(InputError, match="map"):
            open_map(path, header)
        write_whole(path, grid((3, 2, 6)), noise(grid((3, 2, 6))))
        with pytest.raises(InputError, match="make it again"):
            open_map(path, header)
        if not self.is_folder:
            path.write_bytes(path.read_bytes()[:-100])
            with pytest.raises(InputError, match="again"), open_map(path, grid((3, 2, 6))) as reader:
                reader.read(Region.whole((3, 2, 6)), np.empty((3, 2, 6), reader.header.dtype))

    def test_a_map_is_durable_before_it_has_its_name(self, suffix: str, tmp_path: Path, steps: list[str]) -> None:
        path, header = tmp_path / f"map{suffix}", grid(SHAPES[0])
        writer = create_map(path, header)
        writer.write(Region.whole(header.shape), noise(header))
        steps.clear()
        writer.flush()
        assert steps == ["sync all" if self.is_folder else f"sync {path.name}{self.beside[-1]}"]
        steps.clear()
        writer.publish(lambda: steps.append("sealed"))
        synced = "sync all" if self.is_folder else f"sync {path.name}.partial"
        assert steps == [synced, "sealed", f"rename {path.name}", f"sync {tmp_path.name}"]

    def test_the_file_that_a_link_names_is_replaced_and_the_link_stays(self, suffix: str, tmp_path: Path) -> None:
        named, real, header = tmp_path / f"map{suffix}", tmp_path / f"real{suffix}", grid(SHAPES[0])
        write_whole(real, header, field(header))
        named.symlink_to(real)
        write_whole(named, header, noise(header))
        assert named.is_symlink()
        np.testing.assert_array_equal(self.read(real), self.stored(noise(header)))

    @pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
    def test_the_file_is_as_long_as_promised(self, suffix: str, shape: tuple[int, int, int], tmp_path: Path) -> None:
        path, header = tmp_path / f"map{suffix}", grid(shape)
        write_whole(path, header, noise(header))
        promised = map_format_for_output(path).file_bytes(header)
        if ".gz" not in suffix.lower() and not self.is_folder and suffix != ".npy":
            assert path.stat().st_size == promised
        assert promised >= header.nbytes

    def test_any_cut_into_boxes_gives_the_same_bytes(self, suffix: str, tmp_path: Path) -> None:
        path, again, header = tmp_path / f"map{suffix}", tmp_path / "again" / f"map{suffix}", grid((7, 11, 13))
        values = noise(header)
        again.parent.mkdir()
        write_whole(path, header, values)
        cuts = st.tuples(*[st.lists(st.integers(0, 20), max_size=3)] * 3)

        @QUICK
        @given(cuts)
        def check(cut: tuple[list[int], ...]) -> None:
            writer = create_map(again, header)
            with ThreadPoolExecutor(3) as threads:
                list(threads.map(lambda box: write_box(writer, values, box), boxes(header.shape, cut)))
            writer.publish()
            assert contents(again) == contents(path)

        check()

    def test_slabs_of_whole_blocks_in_any_order(self, suffix: str, tmp_path: Path) -> None:
        path, header = tmp_path / f"map{suffix}", grid((41, 37, 43))
        values = noise(header)
        block = map_format_for_output(path).block_shape(header)
        thickness = 3 if block is None else block[0]
        if block is not None:
            assert block[1:] == header.shape[1:]  # a slab of this thickness holds whole blocks
        slabs = [Region((first, 0, 0), (min(first + thickness, 41), 37, 43)) for first in range(0, 41, thickness)]
        random.Random(3).shuffle(slabs)
        writer = create_map(path, header)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda slab: write_box(writer, values, slab), slabs))
        writer.publish()
        np.testing.assert_array_equal(self.read(path), self.stored(values))

    def test_an_interrupted_map_is_taken_up_again_and_others_join(self, suffix: str, tmp_path: Path) -> None:
        path, header = tmp_path / f"map{suffix}", grid((7, 11, 13))
        values = noise(header)
        slabs = [Region((x, 0, 0), (x + 1, 11, 13)) for x in range(7)]
        writer = create_map(path, header)
        for slab in slabs[:3]:
            write_box(writer, values, slab)
        writer.flush()
        writer.keep()
        assert not path.exists()
        owner = create_map(path, header, Opening.RESUME)
        joined = create_map(path, header, Opening.JOIN)
        for slab in slabs[3:5]:
            write_box(joined, values, slab)
        joined.flush()
        with pytest.raises(ValueError):  # noqa: PT011 - a mistake of the caller's, not a user's message
            joined.publish()
        joined.discard()
        for slab in slabs[5:]:
            write_box(owner, values, slab)
        owner.publish()
        owner.keep()
        np.testing.assert_array_equal(self.read(path), self.stored(values))
        assert [found.name for found in tmp_path.iterdir()] == [path.name]

    def test_the_callers_values_are_left_as_they_were(self, suffix: str, tmp_path: Path) -> None:
        header = grid((7, 11, 13))
        values = noise(header)
        kept = values.copy()
        values.flags.writeable = False
        write_whole(tmp_path / f"map{suffix}", header, values)
        np.testing.assert_array_equal(values, kept)

    def test_values_that_do_not_fit_the_region_are_refused(self, suffix: str, tmp_path: Path) -> None:
        header = grid((5, 3, 2))
        values, whole = noise(header), Region.whole((5, 3, 2))
        writer = create_map(tmp_path / f"map{suffix}", header)
        wrong = (
            (whole, values[1:]),
            (whole, values.astype(np.float64)),
            (whole, values[..., ::-1]),
            (Region((1, 0, 0), (6, 3, 2)), values),
            (Region((0, 0), (5, 3)), values),
        )
        for region, misfit in wrong:
            with pytest.raises(ValueError):  # noqa: PT011
                writer.write(region, misfit)
        writer.write(Region((2, 0, 0), (2, 3, 2)), values[2:2])
        writer.discard()

    # Publishing

    def test_nothing_stands_under_the_final_name_until_publish(self, suffix: str, tmp_path: Path) -> None:
        path, header = tmp_path / f"map{suffix}", grid((5, 3, 2))
        writer = create_map(path, header)
        writer.write(Region.whole(header.shape), noise(header))
        assert {found.name for found in tmp_path.iterdir()} == {path.name + ending for ending in self.beside}
        writer.publish()
        assert [found.name for found in tmp_path.iterdir()] == [path.name]
        writer.discard()
        assert path.exists()

    def test_discard_leaves_nothing_and_the_old_output_intact(self, suffix: str, tmp_path: Path) -> None:
        path, header = tmp_path / f"map{suffix}", grid((5, 3, 2))
        write_whole(path, header, noise(header, 1))
        before = contents(path)
        writer = create_map(path, header)
        writer.write(Region.whole(header.shape), noise(header, 2))
        writer.discard()
        writer.discard()
        assert [found.name for found in tmp_path.iterdir()] == [path.name]
        assert contents(path) == before

    def test_publish_replaces_the_old_output_and_what_was_left(self, suffix: str, tmp_path: Path) -> None:
        path, header = tmp_path / f"map{suffix}", grid((5, 3, 2))
        write_whole(path, header, noise(header, 1))
        for ending in self.beside:
            left = tmp_path / f"{path.name}{ending}"
            left.mkdir() if self.is_folder else left.write_bytes(b"\xff" * 100_000)
        write_whole(path, header, noise(header, 2))
        assert [found.name for found in tmp_path.iterdir()] == [path.name]
        np.testing.assert_array_equal(self.read(path), self.stored(noise(header, 2)))

    def test_a_second_writer_of_the_same_output_is_refused(self, suffix: str, tmp_path: Path) -> None:
        path, header = tmp_path / f"map{suffix}", grid((5, 3, 2))
        writer = create_map(path, header)
        with pytest.raises(OutputError) as caught:
            create_map(path, header)
        one_line(caught.value, path.name)
        writer.discard()

    # Refusals

    def test_a_missing_folder_is_an_output_error(self, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / "absent" / f"map{suffix}"
        with pytest.raises(OutputError) as caught:
            create_map(path, grid((5, 3, 2)))
        one_line(caught.value, str(path.parent))

    def test_a_folder_of_other_things_is_never_replaced(self, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / f"map{suffix}"
        path.mkdir()
        (path / "precious").write_text("kept")
        with pytest.raises(OutputError) as caught:
            create_map(path, grid((5, 3, 2)))
        one_line(caught.value, path.name)
        assert (path / "precious").read_text() == "kept"

    def test_an_enormous_grid_says_what_it_needs_and_leaves_nothing(self, suffix: str, tmp_path: Path) -> None:
        if not self.reserves:
            return
        path, header = tmp_path / f"map{suffix}", grid((100_000, 100_000, 100_000))
        with pytest.raises(OutputError) as caught:
            create_map(path, header)
        one_line(caught.value, path.name, "bytes are needed", "whole disk")
        assert list(tmp_path.iterdir()) == []


def write_box(writer: ImageWriter, values: NDArray[np.float32], box: Region) -> None:
    writer.write(box, np.ascontiguousarray(values[box.slices]))
