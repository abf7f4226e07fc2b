from __future__ import annotations

import math

import pytest
from scipy import constants

from pipeline.workloads.coulomb.units import UNITS, Units, in_words, per_e_per_angstrom


@pytest.mark.parametrize(
    ("units", "temperature", "expected"),
    [
        # As printed in the literature: Coulomb's constant in CHARMM-like units, and the Bjerrum length in vacuum.
        ("e/A", 298.15, 1.0),
        ("V", 298.15, 14.3996455),
        ("mV", 298.15, 14399.6455),
        ("kcal/mol/e", 298.15, 332.06371),
        ("kT/e", 298.15, 560.45932),
        ("kT/e", 298.0, 560.74143),
        ("kT/e", 300.0, 557.00316),
    ],
)
def test_published_numbers(units: Units, temperature: float, expected: float) -> None:
    assert math.isclose(per_e_per_angstrom(units, temperature), expected, rel_tol=2e-8)


def test_against_scipys_constants() -> None:
    volt = constants.e / (4 * math.pi * constants.epsilon_0 * constants.angstrom)
    # SciPy has newer values than CODATA 2018: they part in the tenth digit.
    assert math.isclose(per_e_per_angstrom("V"), volt, rel_tol=2e-9)
    assert math.isclose(per_e_per_angstrom("kT/e", 310), volt * constants.e / (constants.k * 310), rel_tol=2e-9)
    molar = volt * constants.e * constants.N_A / (1000 * constants.calorie)
    assert math.isclose(per_e_per_angstrom("kcal/mol/e"), molar, rel_tol=2e-9)


def test_ways_around_agree() -> None:
    assert per_e_per_angstrom("mV") == 1000 * per_e_per_angstrom("V")
    thermal_volt = 8.617333262e-5 * 298.15  # k in eV/K
    assert math.isclose(per_e_per_angstrom("kT/e") * thermal_volt, per_e_per_angstrom("V"), rel_tol=1e-9)
    assert math.isclose(per_e_per_angstrom("V") * 23.060547830619, per_e_per_angstrom("kcal/mol/e"), rel_tol=1e-9)
    assert math.isclose(per_e_per_angstrom("kT/e", 600), per_e_per_angstrom("kT/e", 300) / 2, rel_tol=1e-15)


def test_only_kt_depends_on_the_temperature() -> None:
    for units in UNITS:
        same = per_e_per_angstrom(units, 250) == per_e_per_angstrom(units, 350)
        assert same == (units != "kT/e")
        assert in_words(units, 250) == ("kT/e at 250 K" if units == "kT/e" else units)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_temperature(temperature: float) -> None:
    for units in UNITS:
        with pytest.raises(ValueError, match="temperature"):
            per_e_per_angstrom(units, temperature)
