"""Every case on the CPU, against the definition in fractions; any division into parts gives the same totals."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kernels.statistics import DTYPES, MAX_SAMPLES, Totals, partial_shape, summarise
from kernels.statistics.totals import sparse
from tests.kernels.statistics.cases import CONTENTS, Case, cases, made


@pytest.mark.parametrize("case", [*cases()], ids=lambda case: case.name)
def test_the_definition(case):
    image = case.image()
    before = image.tobytes()
    partial = case.apply(image)
    assert partial.shape == partial_shape(case.dtype, case.channels)
    case.check(partial)
    assert image.tobytes() == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("content", CONTENTS)
def test_any_cut_and_order_give_the_same_totals(dtype, content):
    rng = np.random.default_rng(5)
    image = made(content, (23, 17, 3), np.dtype(dtype))
    whole = Totals(dtype, 3)
    whole.add(summarise(image, channel_axis=2))
    for _ in range(3):
        rows = sorted({0, 23, *rng.integers(0, 23, 3).tolist()})
        columns = sorted({0, 17, *rng.integers(0, 17, 3).tolist()})
        parts = [np.ascontiguousarray(image[a:b, c:d]) for a, b in pairwise(rows) for c, d in pairwise(columns)]
        totals, again = Totals(dtype, 3), Totals(dtype, 3)
        for number in rng.permutation(len(parts)):
            partial = summarise(parts[number], channel_axis=2, out=np.full(partial_shape(dtype, 3), -1, np.int64))
            totals.add(partial, parts[number][..., 0].size)
            again.add_sparse(sparse(partial))
        assert totals.describe() == whole.describe() == again.describe()


def test_totals_pass_64_bits():
    totals = Totals("uint16", 1)
    partial = summarise(np.full(1 << 20, 65535, np.uint16))
    for _ in range(3000):
        totals.add(partial)
    (found,) = totals.describe()
    assert totals._words[0][3] > 1 << 63
    assert (found["min"], found["max"], found["mean"], found["standard_deviation"]) == (65535, 65535, 65535.0, 0.0)


def test_numpy_agrees():
    image = np.random.default_rng(1).normal(100, 5, (211, 307)).astype(np.float32)
    totals = Totals(image.dtype, 1)
    totals.add(summarise(image))
    (found,) = totals.describe()
    assert (found["min"], found["max"]) == (float(image.min()), float(image.max()))
    assert found["mean"] == pytest.approx(image.mean(dtype=np.float64), rel=1e-12)
    assert found["standard_deviation"] == pytest.approx(image.std(dtype=np.float64), rel=1e-9)


def test_refusals():
    good = np.zeros((4, 5, 3), np.uint8)
    with pytest.raises(TypeError, match="image has dtype <i4; supported are uint8"):
        summarise(good.astype(np.int32))
    with pytest.raises(TypeError, match="native byte order"):
        summarise(good.astype(">u2"))
    with pytest.raises(ValueError, match="image must be C-contiguous"):
        summarise(good[:, ::2])
    with pytest.raises(ValueError, match="channel_axis 3 is no axis of an image of shape"):
        summarise(good, channel_axis=3)
    with pytest.raises(ValueError, match=r"out must be a C-contiguous ndarray of shape \(3, 260\) and dtype int64"):
        summarise(good, channel_axis=2, out=np.zeros((1, 260), np.int64))
    memory = np.zeros(260 * 8, np.uint8)
    with pytest.raises(ValueError, match="out shares memory with image"):
        summarise(memory[-60:], out=memory.view(np.int64)[None])
    with pytest.raises(ValueError, match=f"summarise at most {MAX_SAMPLES} at once"):
        summarise(Huge())


class Huge:
    """An image larger than any memory."""

    __module__ = "cupy"
    dtype, shape, ndim = np.dtype(np.uint8), (MAX_SAMPLES + 1,), 1
    flags = type("Flags", (), {"c_contiguous": True})


def test_case_names_are_unique():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    assert {case.dtype for case in cases()} == set(DTYPES)
    assert isinstance(next(cases()), Case)
