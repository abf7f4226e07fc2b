"""How a large problem's samples arise from its images, a group of coils at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.sense import GroupedMaps, gridded, namespace, sense_normal
from kernels.sense.coil_groups import groups_of, streamed
from kernels.sense.reconstruction import Transform
from pipeline.workloads.mri.reconstruction.image import Geometry
from pipeline.workloads.mri.source.images import Trajectory


class Encoding(Protocol):
    """How samples of all coils arise from images (n, *matrix): the sums over coils are one rank's.

    points, weights : of the samples of all images together, (m, dimensions) on the host and (m,) on the device
    transforms      : of each image, for the audit
    """

    @property
    def points(self) -> NDArray[np.float64]: ...

    @property
    def weights(self) -> Any: ...

    @property
    def transforms(self) -> tuple[Transform, ...]: ...

    def right(self, samples: Sequence[NDArray[Any]], maps: GroupedMaps) -> Any:
        """Σ_c E_c^H W s_c. samples: of each group of coils (coils, m), on the host."""

    def normal(self, maps: GroupedMaps) -> Callable[[Any], Any]:
        """Σ_c E_c^H W E_c."""


class Times:
    """The `Encoding` of images that have nothing but their coils in common, each with samples of its own."""

    def __init__(
        self, trajectories: Sequence[Trajectory], geometries: Sequence[Geometry], transforms: Sequence[Transform]
    ) -> None:
        self.transforms = tuple(transforms)
        self.points = np.concatenate([each.points for each in trajectories])
        self._geometries = geometries
        self._xp = namespace(geometries[0].weights)
        self.weights = self._xp.concatenate([each.weights for each in geometries])
        ends = np.cumsum([0, *(len(each.points) for each in trajectories)])
        self._parts = [slice(*pair) for pair in pairwise(ends)]

    def right(self, samples: Sequence[NDArray[Any]], maps: GroupedMaps) -> Any:
        found = []
        for part, geometry, transform in zip(self._parts, self._geometries, self.transforms, strict=True):
            own = [np.ascontiguousarray(group[:, part]) for group in samples]
            found.append(gridded(transform, streamed(self._xp, own), maps, geometry.weights)[None])
        return found[0] if len(found) == 1 else self._xp.concatenate(found)

    def normal(self, maps: GroupedMaps) -> Callable[[Any], Any]:
        both = list(zip(self._geometries, self.transforms, strict=True))
        if any(geometry.toeplitz is None for geometry, _ in both):
            each = [sense_normal(transform, maps, geometry.weights) for geometry, transform in both]
            return lambda series: self._xp.stack([one(image) for one, image in zip(each, series, strict=True)])

        def normal(series: Any) -> Any:
            total = self._xp.empty_like(series)
            for number, (_, group) in enumerate(groups_of(maps)):
                for geometry, image, into in zip(self._geometries, series, total, strict=True):
                    geometry.toeplitz.apply_sense(image, group, into, add=number > 0)  # type: ignore[union-attr]
            return total

        return normal
