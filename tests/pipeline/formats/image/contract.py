"""What every image format must do, run against each of them: `class TestTiff(FormatContract)` with a list of cases."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import InputError, OutputError, StorageError
from pipeline.formats.image import FIRST_BYTES
from pipeline.formats.image.base import ImageFormat, ImageHeader, Region
from pipeline.formats.image.metadata import Calibration
from pipeline.storage.partial import Opening

SHAPES = {"YX": (37, 53), "YXS": (31, 43, 3), "ZYX": (5, 29, 23), "ZYXS": (3, 19, 17, 3)} | {
    "CYX": (2, 31, 23),
    "TCZYX": (2, 3, 2, 13, 11),
    "TCZYXS": (2, 3, 2, 11, 13, 3),
}
DTYPES = ("uint8", "uint16", "int16", "float32", "float64")
EXAMPLES = 20 if settings().derandomize else settings().max_examples
QUICK = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True, kw_only=True)
class Case:
    """An image that the format must be able to store."""

    suffix: str
    axes: str
    dtype: str
    channels: int = 3
    maxval: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def header(self) -> ImageHeader:
        shape = (*SHAPES[self.axes][:-1], self.channels) if "S" in self.axes else SHAPES[self.axes]
        return ImageHeader(
            shape=shape,
            axes=self.axes,
            dtype=np.dtype(self.dtype),
            maxval=self.maxval,
            metadata=self.metadata,
            calibration=self.calibration,
        )

    def __str__(self) -> str:
        return f"{self.suffix.lstrip('.')}-{self.axes}{self.channels if 'S' in self.axes else ''}-{self.dtype}"


def samples(header: ImageHeader, seed: int = 1) -> NDArray[Any]:
    """Random bits over the whole range; for floats also infinities, NaN and zeros of both signs."""
    rng = np.random.default_rng(seed)
    if header.dtype.kind == "f":
        array = rng.standard_normal(header.shape).astype(header.dtype)
        array.reshape(-1)[:5] = (np.nan, np.inf, -np.inf, -0.0, np.finfo(header.dtype).smallest_subnormal)
        return array
    if header.dtype.kind == "b":
        return rng.integers(0, 2, header.shape).astype(bool)
    limits = np.iinfo(header.dtype)
    highest = limits.max if header.maxval is None else header.maxval
    return rng.integers(limits.min, highest, size=header.shape, dtype=header.dtype, endpoint=True)


def assert_same_bits(actual: NDArray[Any], expected: NDArray[Any]) -> None:
    """Equal in shape, dtype and every byte (so NaN equals NaN, and -0.0 is not 0.0)."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.ascontiguousarray(actual).reshape(-1).view(np.uint8),
        np.ascontiguousarray(expected).reshape(-1).view(np.uint8),
    )


def read_whole(form: ImageFormat, path: Path) -> NDArray[Any]:
    with form.open(path) as reader:
        out = np.empty(reader.header.shape, reader.header.dtype)
        reader.read(Region.whole(out.shape), out)
    return out


def write_whole(form: ImageFormat, path: Path, header: ImageHeader, array: NDArray[Any]) -> None:
    writer = form.create(path, header)
    writer.write(Region.whole(header.shape), array)
    writer.publish()


def regions_of(shape: tuple[int, ...]) -> st.SearchStrategy[Region]:
    """Any box inside the image, at least one sample long on each axis; often the whole of an axis, or nearly so."""

    def spans_of(n: int) -> st.SearchStrategy[tuple[int, int]]:
        somewhere = st.tuples(st.integers(0, n - 1), st.integers(1, n))
        nearly_all = st.tuples(st.integers(0, min(2, n - 1)), st.integers(max(1, n - 2), n))
        return st.one_of(st.just((0, n)), nearly_all, somewhere).map(_span)

    return st.tuples(*map(spans_of, shape)).map(lambda s: Region(tuple(a for a, _ in s), tuple(b for _, b in s)))


def _span(ends: tuple[int, int]) -> tuple[int, int]:
    start, stop = ends
    return (start, stop) if start < stop else (stop - 1, start + 1)


def tiles_of(form: ImageFormat, header: ImageHeader) -> list[Region]:
    """A cut of the image into disjoint regions: the format's own blocks, or else uneven ones."""
    shape = header.shape
    steps = form.block_shape(header) or tuple(max(1, n // 3 + 1) for n in shape)
    starts = [range(0, n, step) for n, step in zip(shape, steps, strict=True)]
    return [
        Region(corner, tuple(min(c + step, n) for c, step, n in zip(corner, steps, shape, strict=True)))
        for corner in itertools.product(*starts)
    ]


def one_line(message: object, *names: str) -> None:
    """An error message is one line and names what it is about."""
    text = str(message)
    assert text.strip()
    assert "\n" not in text
    for name in names:
        assert name in text


@contextmanager
def input_error(path: Path, *words: str) -> Iterator[None]:
    """The block must fail with an InputError of one line that names the file and says these words."""
    with pytest.raises(InputError) as caught:
        yield
    one_line(caught.value, path.name, *words)


class FormatContract:
    """Subclasses name the format, what it stores, and what it refuses; every test below then runs for them."""

    format: ClassVar[ImageFormat]
    cases: ClassVar[Sequence[Case]]
    refused: ClassVar[Sequence[Case]] = ()
    # A format that is a folder has no bytes to cut or corrupt here; its own tests do that.
    is_folder: ClassVar[bool] = False
    # Whether `create` claims the whole space, so that a full disk is found before any work.
    reserves: ClassVar[bool] = True
    # Bytes at the start of a file that hold its header, to be cut at every length and corrupted.
    header_bytes: ClassVar[int] = 256

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=str)
        if "refused_case" in metafunc.fixturenames:
            metafunc.parametrize("refused_case", self.refused, ids=str)

    # Round trips

    def test_what_is_written_is_read(self, case: Case, tmp_path: Path) -> None:
        path, array = tmp_path / f"image{case.suffix}", samples(case.header)
        assert self.format.refusal(case.header, path) is None
        write_whole(self.format, path, case.header, array)
        with self.format.open(path) as reader:
            assert reader.path == path
            assert (reader.header.shape, reader.header.axes) == (case.header.shape, case.header.axes)
            assert reader.header.dtype == case.header.dtype
            assert reader.header.dtype.isnative
            if case.maxval is not None:
                assert reader.header.maxval == case.maxval
        assert_same_bits(read_whole(self.format, path), array)

    def test_a_file_is_recognised_by_its_first_bytes(self, case: Case, tmp_path: Path) -> None:
        path = tmp_path / f"image{case.suffix}"
        write_whole(self.format, path, case.header, samples(case.header))
        assert self.format.recognises(path, b"" if path.is_dir() else path.read_bytes()[:FIRST_BYTES])

    def test_the_header_written_again_gives_the_same_header(self, case: Case, tmp_path: Path) -> None:
        first, second = tmp_path / f"first{case.suffix}", tmp_path / f"second{case.suffix}"
        write_whole(self.format, first, case.header, samples(case.header))
        with self.format.open(first) as reader:
            header = reader.header
        write_whole(self.format, second, header, samples(case.header))
        with self.format.open(second) as reader:
            assert reader.header == header

    def test_any_region_equals_the_slice_of_the_whole(self, case: Case, tmp_path: Path) -> None:
        path, array = tmp_path / f"image{case.suffix}", samples(case.header)
        write_whole(self.format, path, case.header, array)
        with self.format.open(path) as reader:

            @QUICK
            @given(regions_of(array.shape))
            def check(region: Region) -> None:
                out = np.empty(region.shape, reader.header.dtype)
                reader.read(region, out)
                assert_same_bits(out, array[region.slices])

            check()

    def test_regions_are_read_by_several_threads_at_once(self, case: Case, tmp_path: Path) -> None:
        path, array = tmp_path / f"image{case.suffix}", samples(case.header)
        write_whole(self.format, path, case.header, array)
        with self.format.open(path) as reader, ThreadPoolExecutor(4) as threads:

            def check(row: int) -> None:
                axis = case.axes.index("Y")
                start = tuple(row if a == axis else 0 for a in range(len(array.shape)))
                region = Region(start, tuple(row + 1 if a == axis else n for a, n in enumerate(array.shape)))
                out = np.empty(region.shape, reader.header.dtype)
                reader.read(region, out)
                assert_same_bits(out, array[region.slices])

            list(threads.map(check, range(array.shape[case.axes.index("Y")])))

    def test_regions_are_written_in_any_order_by_several_threads(self, case: Case, tmp_path: Path) -> None:
        path, array = tmp_path / f"image{case.suffix}", samples(case.header)
        writer = self.format.create(path, case.header)
        tiles = tiles_of(self.format, case.header)
        random.Random(7).shuffle(tiles)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda tile: writer.write(tile, np.ascontiguousarray(array[tile.slices])), tiles))
        writer.publish()
        assert_same_bits(read_whole(self.format, path), array)

    def test_the_callers_samples_are_left_as_they_were(self, case: Case, tmp_path: Path) -> None:
        array = samples(case.header)
        kept = array.copy()
        array.flags.writeable = False
        write_whole(self.format, tmp_path / f"image{case.suffix}", case.header, array)
        assert_same_bits(array, kept)

    def test_arrays_that_do_not_fit_the_region_are_refused(self, case: Case, tmp_path: Path) -> None:
        path, array = tmp_path / f"image{case.suffix}", samples(case.header)
        write_whole(self.format, path, case.header, array)
        whole = Region.whole(array.shape)
        beyond = Region(whole.start, (array.shape[0] + 1, *array.shape[1:]))
        other_dtype = np.dtype("uint16" if case.dtype != "uint16" else "uint8")
        wrong = (
            (whole, np.empty(array[1:].shape, array.dtype)),
            (whole, np.empty(array.shape, other_dtype)),
            (beyond, np.empty(beyond.shape, array.dtype)),
        )
        strided = np.empty((*array.shape, 2), array.dtype)[..., 0]
        writer = self.format.create(tmp_path / f"other{case.suffix}", case.header)
        with self.format.open(path) as reader:
            if reader.any_strides:
                reader.read(whole, strided)
                np.testing.assert_array_equal(strided, array)
            for region, misfit in (*wrong, (whole, strided))[: -1 if reader.any_strides else None]:
                with pytest.raises(ValueError):  # noqa: PT011 - a mistake of the caller's, not a user's message
                    reader.read(region, misfit)
            for region, misfit in (*wrong, (whole, strided)):
                with pytest.raises(ValueError):  # noqa: PT011
                    writer.write(region, misfit)
        writer.discard()

    # Publishing

    def test_nothing_stands_under_the_final_name_until_publish(self, case: Case, tmp_path: Path) -> None:
        path, array = tmp_path / f"image{case.suffix}", samples(case.header)
        writer = self.format.create(path, case.header)
        writer.write(Region.whole(array.shape), array)
        assert not path.exists()
        assert (tmp_path / f"{path.name}.partial").exists()
        writer.publish()
        assert [found.name for found in tmp_path.iterdir()] == [path.name]
        writer.discard()
        assert_same_bits(read_whole(self.format, path), array)

    def test_discard_leaves_nothing_and_the_old_output_intact(self, case: Case, tmp_path: Path) -> None:
        path, old, new = tmp_path / f"image{case.suffix}", samples(case.header, 1), samples(case.header, 2)
        write_whole(self.format, path, case.header, old)
        writer = self.format.create(path, case.header)
        writer.write(Region.whole(new.shape), new)
        assert_same_bits(read_whole(self.format, path), old)
        writer.discard()
        writer.discard()
        assert [found.name for found in tmp_path.iterdir()] == [path.name]
        assert_same_bits(read_whole(self.format, path), old)

    def test_publish_replaces_the_old_output(self, case: Case, tmp_path: Path) -> None:
        path, old, new = tmp_path / f"image{case.suffix}", samples(case.header, 1), samples(case.header, 2)
        write_whole(self.format, path, case.header, old)
        write_whole(self.format, path, case.header, new)
        assert [found.name for found in tmp_path.iterdir()] == [path.name]
        assert_same_bits(read_whole(self.format, path), new)

    def test_what_is_written_is_durable_before_it_has_its_name(
        self, case: Case, tmp_path: Path, steps: list[str]
    ) -> None:
        path, array = tmp_path / f"image{case.suffix}", samples(case.header)
        writer = self.format.create(path, case.header)
        writer.write(Region.whole(array.shape), array)
        steps.clear()
        writer.flush()
        assert len(steps) == 1
        assert steps[0].startswith("sync all" if self.is_folder else f"sync {path.name}.")
        steps.clear()
        writer.publish(lambda: steps.append("sealed"))
        synced = "sync all" if self.is_folder else f"sync {path.name}.partial"
        assert steps == [synced, "sealed", f"rename {path.name}", f"sync {tmp_path.name}"]

    def test_the_file_that_a_link_names_is_replaced_and_the_link_stays(self, case: Case, tmp_path: Path) -> None:
        named, real, array = (
            tmp_path / f"image{case.suffix}",
            tmp_path / "disk" / f"real{case.suffix}",
            samples(case.header),
        )
        real.parent.mkdir()
        write_whole(self.format, real, case.header, samples(case.header, 2))
        named.symlink_to(real)
        write_whole(self.format, named, case.header, array)
        assert named.is_symlink()
        assert_same_bits(read_whole(self.format, real), array)
        assert {found.name for found in tmp_path.iterdir()} == {"disk", named.name}
        assert [found.name for found in real.parent.iterdir()] == [real.name]

    @pytest.mark.parametrize("mode", [0o600, 0o640, 0o400, 0o666])
    def test_who_may_read_the_older_result_may_read_the_newer_one_while_it_is_made(
        self, mode: int, tmp_path: Path
    ) -> None:
        case = self.cases[0]
        path, array = tmp_path / f"image{case.suffix}", samples(case.header)
        write_whole(self.format, path, case.header, array)
        enter = 0o111 if self.is_folder else 0
        path.chmod(mode | enter)
        writer = self.format.create(path, case.header)
        made = {found.stat().st_mode & 0o777 for found in tmp_path.iterdir() if found != path}
        assert made == {mode | 0o600 | enter}  # its owner's workers write to it by its name
        writer.write(Region.whole(array.shape), array)
        writer.publish()
        assert path.stat().st_mode & 0o777 == mode | enter

    def test_what_an_interrupted_run_left_is_replaced(self, case: Case, tmp_path: Path) -> None:
        path, array = tmp_path / f"image{case.suffix}", samples(case.header)
        left = tmp_path / f"{path.name}.partial"
        if self.is_folder:
            left.mkdir()
            (left / "junk").write_bytes(b"\xff" * 100_000)
        else:
            left.write_bytes(b"\xff" * 100_000)
        write_whole(self.format, path, case.header, array)
        assert [found.name for found in tmp_path.iterdir()] == [path.name]
        assert_same_bits(read_whole(self.format, path), array)

    def test_a_second_writer_of_the_same_output_is_refused(self, tmp_path: Path) -> None:
        case = self.cases[0]
        path = tmp_path / f"image{case.suffix}"
        writer = self.format.create(path, case.header)
        with pytest.raises(OutputError) as caught:
            self.format.create(path, case.header)
        one_line(caught.value, path.name)
        writer.write(Region.whole(case.header.shape), samples(case.header))
        writer.publish()
        assert_same_bits(read_whole(self.format, path), samples(case.header))

    # Sharing and resuming

    def test_others_join_to_write_their_share(self, case: Case, tmp_path: Path) -> None:
        path, array = tmp_path / f"image{case.suffix}", samples(case.header)
        owner = self.format.create(path, case.header)
        joined = self.format.create(path, case.header, Opening.JOIN)
        for number, tile in enumerate(tiles_of(self.format, case.header)):
            (owner, joined)[number % 2].write(tile, np.ascontiguousarray(array[tile.slices]))
        joined.flush()
        with pytest.raises(ValueError):  # noqa: PT011 - only the owner publishes
            joined.publish()
        joined.discard()
        joined.discard()
        owner.flush()
        owner.publish()
        assert [found.name for found in tmp_path.iterdir()] == [path.name]
        assert_same_bits(read_whole(self.format, path), array)

    def test_what_was_kept_is_resumed(self, case: Case, tmp_path: Path) -> None:
        path, array = tmp_path / f"image{case.suffix}", samples(case.header)
        tiles = tiles_of(self.format, case.header)
        for opening, share in ((Opening.NEW, tiles[::2]), (Opening.RESUME, tiles[1::2])):
            writer = self.format.create(path, case.header, opening)
            for tile in share:
                writer.write(tile, np.ascontiguousarray(array[tile.slices]))
            writer.keep()
            writer.discard()
            assert not path.exists()
        writer = self.format.create(path, case.header, Opening.RESUME)
        writer.publish()
        writer.keep()
        assert [found.name for found in tmp_path.iterdir()] == [path.name]
        assert_same_bits(read_whole(self.format, path), array)

    @pytest.mark.parametrize("opening", [Opening.RESUME, Opening.JOIN])
    def test_nothing_to_resume_or_join_is_an_output_error(self, opening: Opening, tmp_path: Path) -> None:
        path = tmp_path / f"image{self.cases[0].suffix}"
        with pytest.raises(OutputError) as caught:
            self.format.create(path, self.cases[0].header, opening)
        one_line(caught.value, path.name, "--resume" if opening is Opening.RESUME else "under the same path")
        assert list(tmp_path.iterdir()) == []

    def test_a_cut_off_worker_cannot_touch_a_new_run(self, tmp_path: Path) -> None:
        case = self.cases[0]
        path, array = tmp_path / f"image{case.suffix}", samples(case.header)
        self.format.create(path, case.header).keep()
        cut_off = self.format.create(path, case.header, Opening.JOIN)
        writer = self.format.create(path, case.header)
        writer.write(Region.whole(array.shape), array)
        with pytest.raises(OutputError, match="was removed or replaced") if self.is_folder else nullcontext():
            cut_off.write(Region.whole(array.shape), np.zeros_like(array))
        cut_off.discard()
        writer.publish()
        assert_same_bits(read_whole(self.format, path), array)

    # Refusals

    def test_what_cannot_be_stored_is_refused_in_one_line(self, refused_case: Case, tmp_path: Path) -> None:
        path = tmp_path / f"image{refused_case.suffix}"
        reason = self.format.refusal(refused_case.header, path)
        assert reason is not None
        one_line(reason, path.name)

    def test_a_missing_folder_is_an_output_error(self, tmp_path: Path) -> None:
        path = tmp_path / "absent" / f"image{self.cases[0].suffix}"
        with pytest.raises(OutputError) as caught:
            self.format.create(path, self.cases[0].header)
        one_line(caught.value, str(path.parent))

    def test_a_folder_of_other_things_is_never_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / f"image{self.cases[0].suffix}"
        path.mkdir()
        (path / "precious").write_text("kept")
        with pytest.raises(OutputError) as caught:
            self.format.create(path, self.cases[0].header)
        one_line(caught.value, path.name)
        assert (path / "precious").read_text() == "kept"
        assert [found.name for found in tmp_path.iterdir()] == [path.name]

    def test_a_full_disk_is_found_before_any_work(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if not self.reserves:
            return

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.posix_fallocate", full)
        path = tmp_path / f"image{self.cases[0].suffix}"
        with pytest.raises(StorageError) as caught:
            self.format.create(path, self.cases[0].header)
        one_line(caught.value, f"{path.name}:", "no space", "needed", "free")
        assert list(tmp_path.iterdir()) == []

    # Files that are absent, cut or corrupt

    def test_a_missing_file_is_an_input_error(self, tmp_path: Path) -> None:
        path = tmp_path / f"absent{self.cases[0].suffix}"
        with input_error(path):
            self.format.open(path)

    def test_a_file_cut_at_any_length_is_an_input_error(self, case: Case, tmp_path: Path) -> None:
        if self.is_folder:
            return
        cut = tmp_path / f"cut{case.suffix}"
        write_whole(self.format, cut, case.header, samples(case.header))
        whole = cut.stat().st_size
        lengths = {*range(min(self.header_bytes, whole)), whole // 2, whole - 1}
        for length in sorted(lengths, reverse=True):  # to write anew each time would wait for the disk
            os.truncate(cut, length)
            with input_error(cut):
                read_whole(self.format, cut)

    def test_a_corrupt_header_is_an_input_error_or_an_image(self, case: Case, tmp_path: Path) -> None:
        if self.is_folder:
            return
        path, bad = tmp_path / f"image{case.suffix}", tmp_path / f"bad{case.suffix}"
        write_whole(self.format, path, case.header, samples(case.header))
        whole = path.read_bytes()
        changes = st.dictionaries(
            st.integers(0, min(self.header_bytes, len(whole)) - 1), st.integers(0, 255), min_size=1, max_size=6
        )

        @QUICK
        @given(changes)
        def check(changed: dict[int, int]) -> None:
            data = bytearray(whole)
            for position, value in changed.items():
                data[position] = value
            bad.unlink(missing_ok=True)  # to write over it would wait for the disk
            bad.write_bytes(data)
            try:
                # The header may promise no more than such a file can hold, so reading it all needs little memory.
                with self.format.open(bad) as reader:
                    assert reader.header.nbytes <= 1100 * len(whole)
                read_whole(self.format, bad)
            except InputError as error:
                one_line(error, bad.name)

        check()
