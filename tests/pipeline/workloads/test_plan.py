"""Plans without the chunks that are done already."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.formats.image.base import Region
from pipeline.workloads import ArraySpec, Chunk, Plan


def plan_of(count, read_bytes=None):
    spec = ArraySpec((10,), np.dtype(np.uint16))
    chunks = tuple(
        Chunk(index=n, region=Region((n,), (n + 1,)), halo=((0, 0),), inputs=(spec,), outputs=(spec,), work=1)
        for n in range(count)
    )
    return Plan(chunks=chunks, read_bytes=read_bytes)


@pytest.mark.parametrize(("read_bytes", "whole", "half"), [(None, 160, 80), (4000, 4000, 2000)])
def test_what_is_left_reads_its_share(read_bytes, whole, half):
    plan = plan_of(8, read_bytes)
    left = plan.without({0, 2, 4, 6})
    assert (plan.input_bytes, left.input_bytes) == (whole, half)
    assert [chunk.index for chunk in left.chunks] == [1, 3, 5, 7]


def test_nothing_done_is_the_plan_itself_and_nothing_left_is_none():
    plan = plan_of(3, 7)
    assert plan.without(set()) is plan
    assert plan.without({0, 1, 2}) is None
