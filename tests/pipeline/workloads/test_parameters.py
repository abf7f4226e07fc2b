"""Parameters as they come from Python and JSON, where a number may be given as one."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pipeline.workloads import workloads

GAUSSIAN = {"filter": "gaussian", "sigma": 2}


@pytest.mark.parametrize(
    ("workload", "name", "given", "stands"),
    [
        ("smooth", "axes", 1, ("1",)),
        ("smooth", "axes", [0, 1], ("0", "1")),
        ("smooth", "statistics", True, True),
        ("coulomb", "frames", 7, "7"),
        ("coulomb", "dielectric", 4, "4"),
        ("coulomb", "cell", (100, 100, 120.5), "100,100,120.5"),
        ("mri", "slices", -1, "-1"),
    ],
)
def test_a_number_stands_for_its_text(workload, name, given, stands):
    assert getattr(workloads()[workload].Parameters(**{name: given}), name) == stands


@pytest.mark.parametrize(
    ("workload", "given"),
    [
        ("smooth", {"size": True}),
        ("smooth", {"size": [3, True]}),
        ("smooth", {"cval": False, "mode": "constant"}),
        ("coulomb", {"cutoff": True}),
        ("coulomb", {"spacing": [1, True, 1]}),
        ("coulomb", {"cell": True}),
        ("mri", {"iterations": True}),
        ("mri", {"matrix": True}),
    ],
)
def test_true_and_false_are_no_numbers(workload, given):
    with pytest.raises(ValidationError, match=r"is not (true|false); give a number or text"):
        workloads()[workload].Parameters(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sigma": float("nan")}, "--sigma: sigma must be a number of samples, 0"),
        ({"sigma": (2, -1)}, "--sigma: sigma must be a number of samples, 0"),
        ({"sigma": 1e6}, r"--sigma: a Gaussian of sigma 1e\+06 reaches 4000000 samples"),
        ({"truncate": float("inf")}, "--truncate: "),
        ({"order": 4}, "--order: order must be a whole number, 0 … 3; got 4"),
        ({"order": 1, "sigma": 0}, "--sigma: sigma 0 reaches no neighbour, from which a derivative is computed"),
        ({"order": (0, 1), "nan_policy": "omit"}, "--order and --nan-policy omit: the derivative of a mean"),
        ({"radius": (3, -1)}, "--radius: radius must be a whole number"),
        ({"radius": 1 << 20}, "--radius: a Gaussian of sigma 2 reaches 1048576 samples"),
    ],
)
def test_a_gaussian_that_fits_no_image_is_refused_before_there_is_one(given, said):
    with pytest.raises(ValidationError, match=said):
        workloads()["smooth"].Parameters(**{**GAUSSIAN, **given})
