"""In which order the regions of a plan touch the blocks of a file: against going through all of them."""

from __future__ import annotations

import itertools

import pytest

from pipeline.formats.image.base import Region, Schedule

LENGTHS = (3, 37, 53)


@pytest.mark.parametrize("extents", [(1, 11, 53), (2, 7, 13), (3, 37, 5)])
@pytest.mark.parametrize("blocks", [(1, 8, 16), (2, 37, 3)])
@pytest.mark.parametrize("halo", [0, 1, 9])
def test_uses_the_next_one_and_the_part_for_the_rest_are_those_of_the_regions_in_order(extents, blocks, halo):
    spans = [
        [(max(start - halo, 0), min(start + extent + halo, length)) for start in range(0, length, extent)]
        for length, extent in zip(LENGTHS, extents, strict=True)
    ]
    schedule = Schedule(spans, blocks, LENGTHS)
    regions = [Region(*zip(*each, strict=True)) for each in itertools.product(*spans)]
    places = [schedule.place(region) for region in regions]
    if halo < min(extents):  # else regions may be equal
        assert places == sorted(set(places))
    counts = [-(-length // block) for length, block in zip(LENGTHS, blocks, strict=True)]
    order = list(itertools.product(*(range(len(each)) for each in spans)))
    for block in itertools.product(*map(range, counts)):
        touching = [
            place
            for place, region in zip(order, regions, strict=True)
            if all(
                a < (n + 1) * size and b > n * size
                for a, b, n, size in zip(region.start, region.stop, block, blocks, strict=True)
            )
        ]
        assert schedule.uses(block) == len(touching)
        for after in [(-1, -1, -1), *order]:
            further = [place for place in touching if place > after]
            assert schedule.next_use(block, after) == next(iter(further), None)
            boxes = [
                [
                    (max(a - n * size, 0), min(b - n * size, size))
                    for (a, b), n, size in zip(each, block, blocks, strict=True)
                ]
                for each in ([spans[axis][at] for axis, at in enumerate(place)] for place in further)
            ]
            bounds = [(min(a for a, _ in each), max(b for _, b in each)) for each in zip(*boxes, strict=True)]
            assert schedule.part(block, after) == tuple(slice(*each) for each in bounds or [(None, 0)] * 3)


def test_a_region_that_is_not_of_the_plan_comes_before_all_others():
    schedule = Schedule([[(0, 5), (3, 9)], [(0, 7)]], (2, 2), (9, 7))
    assert schedule.place(Region((3, 0), (9, 7))) == (1, 0)
    assert schedule.place(Region((3, 1), (9, 7))) == (1, -1) < (1, 0)
    assert schedule.next_use((4, 3), ()) == (1, 0)
