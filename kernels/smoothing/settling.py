"""What becomes of the sums along one axis of a Gaussian before the next axis, or the result, takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kernels.smoothing.window import Window

# Floats of this size are so far apart that adding one rounds a small number, ties to even.
QUARTERS = 1.5 * 2**21  # to quarters, |number| < 2**20
WHOLES = 1.5 * 2**23  # to whole numbers, |number| < 2**22
MIDDLE = 128  # of the range of uint8: an exact Gaussian keeps samples relative to it from its first axis to its last


@dataclass(frozen=True, kw_only=True)
class Settling:
    """A sum becomes (sum + up) - down, in float32 or float64."""

    up: float
    down: float

    def of(self, total: Any) -> Any:
        """The same for a NumPy scalar, in its type."""
        return (total + type(total)(self.up)) - type(total)(self.down)


UNSETTLED = Settling(up=-0.0, down=0.0)  # adding -0 leaves every number as it is, even 0 and -0


def settlings(windows: Sequence[Window], *, whole: bool) -> list[Settling]:
    """For each axis of a Gaussian: what its sums become.

    windows : sorted by axis, at least two taps each
    whole   : whether the result is of whole numbers
    """
    last, exact = len(windows) - 1, windows[0].exact
    found = []
    for place in range(len(windows)):
        rounds_to_wholes = whole and place == last
        if not (exact or rounds_to_wholes):
            found.append(UNSETTLED)
            continue
        up = WHOLES if rounds_to_wholes else QUARTERS
        taken = MIDDLE * ((place == 0) - (place == last)) if exact else 0
        found.append(Settling(up=up, down=up + taken))
    return found
