"""Chunks cover the output exactly once, fit the budget, and re-read no more than they must."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.workloads.common.tiling import best_tiling

MIB = 1 << 20
no_halo = (0, 0)


@st.composite
def images(draw):
    ndim = draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.integers(1, 23), min_size=ndim, max_size=ndim)))
    reach = st.tuples(st.integers(0, 5), st.integers(0, 5))
    channel_axis = draw(st.sampled_from([None, ndim - 1])) if ndim > 1 else None
    halo = [no_halo if axis == channel_axis else draw(reach) for axis in range(ndim)]
    grain = tuple(draw(st.integers(1, n)) for n in shape)
    return shape, halo, channel_axis, grain


@settings(max_examples=200, deadline=None)
@given(images(), st.integers(1, 4000), st.integers(1, 4000))
def test_regions_cover_the_output_once_within_the_budget(image, budget, target):
    shape, halo, channel_axis, grain = image
    sizes = {"budget_bytes": budget, "target_bytes": target}
    tiling = best_tiling(shape, halo, 2, channel_axis=channel_axis, grain=grain, **sizes)
    if tiling is None:
        smallest = 2 * np.prod([1 + sum(h) if n > 1 else 1 for n, h in zip(shape, halo, strict=True)])
        channels = shape[channel_axis] if channel_axis is not None else 1
        assert budget < smallest * channels + 2 * channels
        return
    covered = np.zeros(shape, int)
    for region in tiling.regions():
        covered[region.slices] += 1
    assert (covered == 1).all()
    assert 2 * (tiling.input_samples() + tiling.output_samples()) <= budget
    if channel_axis is not None:
        assert not tiling.is_cut(channel_axis)


def test_same_job_and_budget_give_the_same_plan():
    asked = {"channel_axis": 2, "budget_bytes": 64 * MIB, "target_bytes": 4 * MIB}
    halo = [(15, 15), (15, 15), no_halo]
    assert best_tiling((9973, 7919, 3), halo, 2, **asked) == best_tiling((9973, 7919, 3), halo, 2, **asked)


def test_full_rows_where_they_fit():
    tiling = best_tiling(
        (20_000, 20_000, 3), [(1, 1), (1, 1), no_halo], 2, channel_axis=2, budget_bytes=64 * MIB, target_bytes=8 * MIB
    )
    assert tiling.extents[1:] == (20_000, 3)
    assert tiling.rereads < 1.1


def test_a_wide_halo_grows_the_chunk_past_the_target():
    tiling = best_tiling(
        (20_000, 20_000, 3),
        [(127, 127), (127, 127), no_halo],
        2,
        channel_axis=2,
        budget_bytes=256 * MIB,
        target_bytes=4 * MIB,
    )
    assert tiling.rereads < 1.3


def test_rows_longer_than_the_budget_are_cut():
    tiling = best_tiling(
        (100, 50_000_000), [(1, 1), (1, 1)], 2, channel_axis=None, budget_bytes=8 * MIB, target_bytes=4 * MIB
    )
    assert tiling.is_cut(1)
    assert tiling.rereads < 1.5


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_none_where_nothing_fits(ndim):
    assert best_tiling((9,) * ndim, [(4, 4)] * ndim, 8, channel_axis=None, budget_bytes=8, target_bytes=8) is None


def test_cuts_follow_the_blocks_of_the_file():
    tiling = best_tiling(
        (20_000, 20_000, 3),
        [(1, 1), (1, 1), no_halo],
        2,
        channel_axis=2,
        grain=(256, 4096, 1),
        budget_bytes=128 * MIB,
        target_bytes=4 * MIB,
    )
    assert tiling.extents[0] % 256 == 0
    assert tiling.extents[1] % 4096 == 0 or not tiling.is_cut(1)


def test_blocks_that_do_not_fit_are_parted():
    tiling = best_tiling(
        (20_000, 20_000),
        [no_halo, no_halo],
        2,
        channel_axis=None,
        grain=(20_000, 20_000),
        budget_bytes=MIB,
        target_bytes=MIB,
    )
    assert 2 * (tiling.input_samples() + tiling.output_samples()) <= MIB
