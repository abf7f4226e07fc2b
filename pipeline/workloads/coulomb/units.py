"""Units of electrostatic potential. Kernels compute in e/Å: the sum of charge over distance, without a constant.

Constants: CODATA 2018 (https://physics.nist.gov/cuu/Constants), of which e, k and N_A are exact by definition; the
calorie is the thermochemical one, 4.184 J.
"""

from __future__ import annotations

import math
from typing import Literal

Units = Literal["kT/e", "kcal/mol/e", "V", "mV", "e/A"]

UNITS: tuple[Units, ...] = ("kT/e", "kcal/mol/e", "V", "mV", "e/A")
DEFAULT_TEMPERATURE_KELVIN = 298.15

ELEMENTARY_CHARGE_COULOMB = 1.602176634e-19
BOLTZMANN_JOULE_PER_KELVIN = 1.380649e-23
AVOGADRO_PER_MOLE = 6.02214076e23
VACUUM_PERMITTIVITY_FARAD_PER_METRE = 8.8541878128e-12
CALORIE_JOULE = 4.184
ANGSTROM_METRE = 1e-10

# The potential of one elementary charge at a distance of one angstrom in vacuum: 14.3996 V.
VOLT_PER_E_PER_ANGSTROM = ELEMENTARY_CHARGE_COULOMB / (
    4 * math.pi * VACUUM_PERMITTIVITY_FARAD_PER_METRE * ANGSTROM_METRE
)


def per_e_per_angstrom(units: Units, temperature_kelvin: float = DEFAULT_TEMPERATURE_KELVIN) -> float:
    """How many of `units` one e/Å is. The temperature is used by kT/e alone, and must be finite and positive."""
    if not (math.isfinite(temperature_kelvin) and temperature_kelvin > 0):
        raise ValueError(f"a temperature of {temperature_kelvin} K; it must be finite and above 0")
    joule_per_charge = VOLT_PER_E_PER_ANGSTROM * ELEMENTARY_CHARGE_COULOMB
    return {
        "e/A": 1.0,
        "V": VOLT_PER_E_PER_ANGSTROM,
        "mV": 1e3 * VOLT_PER_E_PER_ANGSTROM,
        "kcal/mol/e": joule_per_charge * AVOGADRO_PER_MOLE / (1e3 * CALORIE_JOULE),
        "kT/e": joule_per_charge / (BOLTZMANN_JOULE_PER_KELVIN * temperature_kelvin),
    }[units]


def in_words(units: Units, temperature_kelvin: float = DEFAULT_TEMPERATURE_KELVIN) -> str:
    """The units as written in a map's header, with the temperature if they depend on it."""
    return f"{units} at {temperature_kelvin:g} K" if units == "kT/e" else units
