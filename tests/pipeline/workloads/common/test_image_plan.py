"""What a plan announces to the reader of its image: each block of the file is decoded once."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr

from pipeline.formats.image import Storage, open_image
from pipeline.formats.image.zarr.reader import ZarrReader
from pipeline.workloads import JobSpec
from pipeline.workloads.common.halo import read_with_borders
from pipeline.workloads.common.image_plan import grown, plan_image
from pipeline.workloads.protocol import Budget
from pipeline.workloads.smoothing import SmoothingParameters
from tests.pipeline.formats.image.decoded_tiles import decoded_tiles

SHAPE = (5, 170, 330)
BLOCK = 32
BLOCKS = 5 * 6 * 11


@pytest.mark.parametrize("planes", [0, 1])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("suffix", ["zarr", "tif"])
def test_each_block_is_decoded_once_however_many_chunks_touch_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    threads: int,
    planes: int,
) -> None:
    """`planes`: of the halo before and after."""
    path, array = tmp_path / f"a.{suffix}", np.random.default_rng(1).integers(0, 999, SHAPE).astype(np.uint16)
    if suffix == "zarr":
        zarr.create_array(path, shape=SHAPE, dtype="u2", chunks=(1, BLOCK, BLOCK))[:] = array
    else:
        tifffile.imwrite(path, array, tile=(BLOCK, BLOCK), compression="zlib", photometric="minisblack")
    decoded: Counter[Any] = decoded_tiles(monkeypatch)
    decode = ZarrReader._decode

    def counted(self: ZarrReader, place: Any, memory: Any) -> Any:
        decoded[place] += 1
        return decode(self, place, memory)

    monkeypatch.setattr(ZarrReader, "_decode", counted)
    spec = JobSpec(workload="smooth", input=path, output=tmp_path / "out.zarr", parameters=SmoothingParameters())
    with open_image(path) as reader, ThreadPoolExecutor(threads) as pool:
        halo = [(planes, planes), (4, 3), (3, 5)]
        budget = Budget(budget_bytes=40_000, target_bytes=40_000)
        plan = plan_image(reader, spec, budget, halo, header=reader.header, storage=Storage(chunks=(BLOCK,)))
        assert len(plan.chunks) > 20
        if threads == 1:  # several may be any number of chunks apart
            # Two rows of blocks, or two planes, and those in work: the least recently used would go too soon.
            reader.hold_at_most([80_000, 330_000][planes])

        def check(chunk: Any) -> None:
            region = grown(chunk.region, chunk.halo)
            out = np.empty(region.shape, np.uint16)
            read_with_borders(reader, region, "reflect", 0, out)
            inside = tuple(slice(before, n - after) for (before, after), n in zip(chunk.halo, out.shape, strict=True))
            np.testing.assert_array_equal(out[inside], array[chunk.region.slices])

        list(pool.map(check, plan.chunks))
    assert set(decoded.values()) == {1}
    assert len(decoded) == BLOCKS


@pytest.mark.parametrize(("budget_bytes", "levels", "rows"), [(800_000, 1, 256), (120_000, 1, 32), (120_000, 2, 32)])
def test_a_plan_is_cut_along_shards_or_else_along_their_chunks(
    tmp_path: Path, budget_bytes: int, levels: int, rows: int
) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_array(path, shape=(500, 640), dtype="u2", chunks=(BLOCK, BLOCK))
    spec = JobSpec(workload="smooth", input=path, output=tmp_path / "out.zarr", parameters=SmoothingParameters())
    with open_image(path) as reader:
        budget = Budget(budget_bytes=budget_bytes, target_bytes=budget_bytes)
        storage = Storage(chunks=(BLOCK,), shards=(256,), levels=levels)
        plan = plan_image(reader, spec, budget, [(1, 1), (1, 1)], header=reader.header, storage=storage)
    height, width = plan.chunks[0].region.shape
    assert height % rows == 0
    assert height < 256 or rows == 256
    assert width == 640
