"""Chunks cover the output exactly once, fit the budget, and re-read no more than they must."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.workloads.common.tiling import ACCEPTED_COST, CUT_PENALTY, UNALIGNED_PENALTY, Tiling, best_tiling

MIB = 1 << 20
no_halo = (0, 0)


@st.composite
def images(draw):
    ndim = draw(st.integers(1, 6))
    shape = tuple(draw(st.lists(st.integers(1, 23 if ndim < 5 else 5), min_size=ndim, max_size=ndim)))
    reach = st.tuples(st.integers(0, 5), st.integers(0, 5))
    channel_axis = draw(st.sampled_from([None, 0, ndim - 1])) if ndim > 1 else None
    halo = [no_halo if axis == channel_axis else draw(reach) for axis in range(ndim)]
    grain = tuple(draw(st.integers(1, n)) for n in shape)
    return shape, halo, channel_axis, grain


@settings(max_examples=200, deadline=None)
@given(images(), st.frozensets(st.integers(0, 3)), st.integers(1, 4000), st.integers(1, 4000))
def test_regions_cover_the_output_once_within_the_budget(image, padded, budget, target):
    shape, halo, channel_axis, grain = image
    asked = {"whole": () if channel_axis is None else (channel_axis,), "grain": grain, "padded": padded}
    tiling = best_tiling(shape, halo, 2, **asked, budget_bytes=budget, target_bytes=target)
    if tiling is None:
        each = enumerate(zip(shape, halo, strict=True))
        smallest = 2 * np.prod([1 + sum(h) if n > 1 or axis in padded else 1 for axis, (n, h) in each])
        channels = shape[channel_axis] if channel_axis is not None else 1
        assert budget < smallest * channels + 2 * channels
        return
    covered = np.zeros(shape, int)
    regions = list(tiling.regions())
    for region in regions:
        covered[region.slices] += 1
        assert all(0 <= a < b <= n for a, b, n in zip(region.start, region.stop, shape, strict=True))
    assert (covered == 1).all()
    assert tiling.count == len(regions)
    assert [region.start for region in regions] == sorted(region.start for region in regions)
    cut = [extent < n for extent, n in zip(tiling.extents, shape, strict=True)]
    read = tuple(h if cut[axis] or axis in padded else no_halo for axis, h in enumerate(halo))
    assert tiling.chunk_halo == read
    samples = np.prod([n + sum(h) for n, h in zip(tiling.extents, read, strict=True)]) + np.prod(tiling.extents)
    assert 2 * samples <= budget
    assert channel_axis is None or not cut[channel_axis]


@settings(max_examples=100, deadline=None)
@given(images(), st.integers(1, 300), st.integers(0, 9000))
def test_chunks_grow_from_the_target_until_they_cost_little(image, target, more):
    shape, halo, channel_axis, grain = image
    asked = {"whole": () if channel_axis is None else (channel_axis,), "grain": grain}
    limits = [target]
    while limits[-1] < target + more:
        limits.append(min(2 * limits[-1], target + more))
    alone = [best_tiling(shape, halo, 1, **asked, budget_bytes=limit, target_bytes=limit) for limit in limits]
    found = [tiling for tiling in alone if tiling is not None]
    cheap = [tiling for tiling in found if tiling.cost <= ACCEPTED_COST]
    expected = cheap[0] if cheap else min(found, key=lambda tiling: tiling.cost, default=None)
    assert best_tiling(shape, halo, 1, **asked, budget_bytes=target + more, target_bytes=target) == expected


@pytest.mark.parametrize(
    ("extents", "grain", "cost"),
    [
        ((10, 100), (5, 64), 1.2),  # no end of the uncut axis parts a block
        ((10, 100), (4, 64), 1.2 * UNALIGNED_PENALTY),
        ((8, 50), (4, 25), 1.35 * CUT_PENALTY),
        ((8, 50), (4, 20), 1.35 * CUT_PENALTY * UNALIGNED_PENALTY),
        ((8, 50), (5, 20), 1.35 * CUT_PENALTY * UNALIGNED_PENALTY**2),
    ],
)
def test_cuts_and_parted_blocks_cost(extents, grain, cost):
    tiling = Tiling(shape=(100, 100), extents=extents, halo=((1, 1), (2, 2)), grain=grain)
    assert tiling.cost == pytest.approx(cost)


@pytest.mark.parametrize(
    ("shape", "reach", "grain", "budget", "extents"),
    [
        ((9,), 0, None, 18, (9,)),
        ((9,), 4, None, 18, (9,)),  # an uncut axis needs no halo
        ((9,), 0, None, 17, (5,)),
        ((9,), 0, None, 6, (3,)),
        ((9,), 0, None, 1, None),
        ((9,), 0, (4,), 8, (4,)),
        ((9,), 0, (4,), 7, (3,)),
        ((1, 100), 0, None, 100, (1, 50)),
    ],
)
def test_what_just_fits(shape, reach, grain, budget, extents):
    halo = [(reach, reach)] * len(shape)
    tiling = best_tiling(shape, halo, 1, grain=grain, budget_bytes=budget, target_bytes=budget)
    assert extents == (tiling and tiling.extents)


def test_a_cost_that_is_just_accepted():
    asked = {"budget_bytes": 1000, "target_bytes": 47}
    assert best_tiling((40,), [(7, 0)], 1, **asked).extents == (20,)
    assert best_tiling((40,), [(8, 0)], 1, **asked).extents == (40,)


def test_same_job_and_budget_give_the_same_plan():
    asked = {"whole": (2,), "budget_bytes": 64 * MIB, "target_bytes": 4 * MIB}
    halo = [(15, 15), (15, 15), no_halo]
    assert best_tiling((9973, 7919, 3), halo, 2, **asked) == best_tiling((9973, 7919, 3), halo, 2, **asked)


def test_full_rows_where_they_fit():
    tiling = best_tiling(
        (20_000, 20_000, 3), [(1, 1), (1, 1), no_halo], 2, whole=(2,), budget_bytes=64 * MIB, target_bytes=8 * MIB
    )
    assert tiling.extents[1:] == (20_000, 3)
    assert tiling.rereads < 1.1


def test_a_wide_halo_grows_the_chunk_past_the_target():
    tiling = best_tiling(
        (20_000, 20_000, 3),
        [(127, 127), (127, 127), no_halo],
        2,
        whole=(2,),
        budget_bytes=256 * MIB,
        target_bytes=4 * MIB,
    )
    assert tiling.rereads < 1.3


def test_rows_longer_than_the_budget_are_cut():
    tiling = best_tiling((100, 50_000_000), [(1, 1), (1, 1)], 2, budget_bytes=8 * MIB, target_bytes=4 * MIB)
    assert tiling.is_cut(1)
    assert tiling.rereads < 1.5


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_none_where_nothing_fits(ndim):
    assert best_tiling((9,) * ndim, [(4, 4)] * ndim, 8, budget_bytes=8, target_bytes=8) is None


def test_cuts_follow_the_blocks_of_the_file():
    tiling = best_tiling(
        (20_000, 20_000, 3),
        [(1, 1), (1, 1), no_halo],
        2,
        whole=(2,),
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
        grain=(20_000, 20_000),
        budget_bytes=MIB,
        target_bytes=MIB,
    )
    assert 2 * (tiling.input_samples() + tiling.output_samples()) <= MIB
