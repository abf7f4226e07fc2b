from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.formats.image import contiguous
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.storage.partial import PartialFile
from pipeline.storage.positional import PositionalFile
from tests.pipeline.formats.image.contract import QUICK, assert_same_bits, one_line, regions_of, samples

OFFSET = 37


@pytest.fixture(params=[(0, 1 << 18), (30, 504), (1 << 14, 1 << 18)], ids=["runs", "both", "wider"])
def block_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way through: runs alone, runs and wider reads in many small blocks, wider reads alone."""
    gap_bytes, scratch_bytes = request.param
    monkeypatch.setattr(contiguous, "GAP_BYTES", gap_bytes)
    monkeypatch.setattr(contiguous, "SCRATCH_BYTES", scratch_bytes)


@pytest.mark.usefixtures("block_sizes")
@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", ">f8"])
@pytest.mark.parametrize("shape", [(1, 997), (41, 53), (101, 5), (13, 11, 3), (3, 7, 11, 2), (211,)])
def test_any_region_in_and_out(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    check_regions(dtype, shape, tmp_path)


@pytest.mark.parametrize("dtype", ["u1", ">u2", "<f8"])
@pytest.mark.parametrize("shape", [(1, 997), (41, 53), (3, 7, 11, 2)])
def test_any_region_of_a_file_in_memory(dtype: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contiguous, "PART_BYTES", 100)
    monkeypatch.setattr("os.pwrite", None)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        check_regions(dtype, shape, Path(folder))


def check_regions(dtype: str, shape: tuple[int, ...], folder: Path) -> None:
    stored = ContiguousSamples(shape=shape, dtype=np.dtype(dtype), offset=OFFSET)
    native = stored.dtype.newbyteorder("=")
    image = samples(ImageHeader(shape=shape, axes="", dtype=native))
    assert stored.nbytes == image.nbytes
    file = PartialFile(folder / "a", OFFSET + image.nbytes)

    @QUICK
    @given(regions_of(shape), st.integers(0, 2**32))
    def check(region: Region, seed: int) -> None:
        # What the region holds is replaced by other samples; nothing else may change.
        image[region.slices] = np.random.default_rng(seed).integers(0, 256, region.shape).astype(native)
        stored.write(file, region, np.ascontiguousarray(image[region.slices]))
        everything = bytearray(OFFSET + image.nbytes)
        file.read_at(0, memoryview(everything))
        assert bytes(everything) == bytes(OFFSET) + image.astype(stored.dtype).tobytes()
        out = np.empty(region.shape, native)
        stored.read(file, region, out)
        assert_same_bits(out, image[region.slices])

    stored.write(file, Region.whole(shape), image)
    check()
    file.discard()


def test_threads_share_a_large_region_of_a_file_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[range] = []
    monkeypatch.setattr(contiguous, "for_each", lambda work, rows: shared.append(rows) or list(map(work, rows)))
    stored = ContiguousSamples(shape=(1, 5, 1 << 21), dtype=np.dtype(np.uint16), offset=OFFSET)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = PartialFile(Path(folder, "a"), OFFSET + stored.nbytes)
        stored.write(file, Region.whole(stored.shape), np.ones(stored.shape, np.uint16))
        file.discard()
    assert shared == [range(0, 5, 2)]


def test_offsets_beyond_32_and_53_bits(tmp_path: Path) -> None:
    stored = ContiguousSamples(shape=(1 << 31, 1 << 20), dtype=np.dtype(">u2"), offset=11)

    class Asked:
        offsets: tuple[int, ...] = ()

        def read_runs(self, runs: Iterable[tuple[int, memoryview]]) -> None:
            self.offsets += tuple(offset for offset, _ in runs)

    asked: Any = Asked()
    stored.read(asked, Region(((1 << 31) - 1, 3), (1 << 31, 5)), np.empty((1, 2), np.uint16))
    assert asked.offsets == (11 + 2 * (((1 << 31) - 1) * (1 << 20) + 3),)


def test_a_short_read_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(range(200)))
    file = PositionalFile(tmp_path / "a")
    preadv = os.preadv

    def by_sevens(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:7]], offset)

    monkeypatch.setattr("os.preadv", by_sevens)
    into = bytearray(150)
    file.read_at(33, memoryview(into))
    assert bytes(into) == bytes(range(33, 183))
    file.close()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(1000))
    file = PositionalFile(path)
    os.truncate(path, 640)
    stored = ContiguousSamples(shape=(10, 100), dtype=np.dtype(np.uint8), offset=0)
    for region in (Region((0, 0), (10, 100)), Region((0, 3), (10, 5))):
        with pytest.raises(InputError) as caught:
            stored.read(file, region, np.empty(region.shape, np.uint8))
        one_line(caught.value, str(path), "truncated", "byte 640")
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.head(1)
