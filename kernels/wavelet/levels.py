"""Which axes each level of a wavelet transform halves."""

from __future__ import annotations

from dataclasses import dataclass

COARSEST = 16  # samples of an axis that a further level must leave


@dataclass(frozen=True)
class Level:
    """size: of the region that is transformed, three axes; axes: those that are halved; last: the coarsest level."""

    size: tuple[int, int, int]
    axes: tuple[int, ...]
    last: bool

    @property
    def half(self) -> tuple[int, int, int]:
        """The size of the approximation."""
        x, y, z = (-(-n // 2) if axis in self.axes else n for axis, n in enumerate(self.size))
        return x, y, z


def levels_of(shape: tuple[int, int, int]) -> tuple[Level, ...]:
    """The levels of an image of three axes, finest first."""
    found: list[Level] = []
    size = shape
    while True:
        axes = tuple(axis for axis, n in enumerate(size) if n > 1 and (not found or -(-n // 2) >= COARSEST))
        if not axes:
            break
        found.append(Level(size, axes, False))
        size = found[-1].half
    return (*found[:-1], Level(found[-1].size, found[-1].axes, True)) if found else ()
