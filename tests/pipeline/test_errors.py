"""How messages say things."""

from __future__ import annotations

import pytest

from pipeline.errors import counted


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, "chunk"), "0 chunks"),
        ((1, "chunk"), "1 chunk"),
        ((2, "chunk"), "2 chunks"),
        ((12_345, "unfinished job"), "12,345 unfinished jobs"),
        ((1, "axis", "axes"), "1 axis"),
        ((3, "axis", "axes"), "3 axes"),
    ],
)
def test_one_of_a_thing_is_no_plural(arguments, said):
    assert counted(*arguments) == said
