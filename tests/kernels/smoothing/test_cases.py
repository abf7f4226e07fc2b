"""Every case, to the last bit and within its tolerance of the real number; and the oracle's border rules."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from scipy import ndimage

from kernels.smoothing.borders import BORDER_MODES, OUTSIDE, border_indices
from kernels.smoothing.cases import Case, cases

NUMPY_PAD = {"reflect": "symmetric", "mirror": "reflect", "nearest": "edge", "wrap": "wrap"}


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    case.check(case.apply(case.image(), workers=1))


@pytest.mark.parametrize("spoil", [np.nan, 1.0])
def test_the_check_notices_one_wrong_element(spoil: float) -> None:
    case = Case(shape=(5, 7), dtype="float32", axes=(0, 1), sizes=(3, 3), modes=("reflect",) * 2)
    result = case.apply(case.image())
    result[3, 4] += spoil
    with pytest.raises(AssertionError):
        case.check(result)


@pytest.mark.parametrize("mode", NUMPY_PAD)
@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_border_indices_agree_with_numpy_pad(mode: str, length: int) -> None:
    reach = 3 * length + 2
    padded = np.pad(np.arange(length), reach, mode=NUMPY_PAD[mode])
    assert_array_equal(border_indices(np.arange(-reach, length + reach), length, mode), padded)


@pytest.mark.parametrize("mode", BORDER_MODES)
@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_border_indices_agree_with_scipy(mode: str, length: int) -> None:
    """A correlation with a single far tap shows SciPy's samples beyond the edge."""
    line = np.arange(10.0, 10.0 + length)
    for reach in (1, 2, length):
        tap = np.zeros(2 * reach + 1)
        tap[-1] = 1
        seen = ndimage.correlate1d(line, tap, mode=mode, cval=-7.0)
        at = border_indices(np.arange(length) + reach, length, mode)
        assert_array_equal(np.where(at == OUTSIDE, -7.0, line[at]), seen)


def test_border_indices_refuse_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match="border mode must be one of reflect"):
        border_indices([0], 3, "circular")
