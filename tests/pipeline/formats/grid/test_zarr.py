from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

from pipeline.errors import OutputError
from pipeline.formats.grid import create_map
from pipeline.formats.grid.base import GridHeader
from pipeline.storage.partial import Opening
from tests.pipeline.formats.grid.contract import GridContract, grid, noise, write_whole
from tests.pipeline.formats.image.contract import one_line


class TestContract(GridContract):
    suffixes = (".zarr",)
    reserves = False
    is_folder = True

    def read(self, path: Path) -> NDArray[np.float32]:
        return np.asarray(zarr.open_group(str(path), mode="r")["0"][...])


def test_where_the_map_lies_and_in_what_units(tmp_path: Path) -> None:
    header = grid((7, 11, 13))
    write_whole(tmp_path / "a.zarr", header, noise(header))
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="r")
    assert group.attrs["grid"] == {
        "origin_angstrom": [-4.5, 2.25, 10.0],
        "vectors_angstrom": [[0.5, 0.0, 0.0], [0.0, 0.25, 0.0], [0.0, 0.0, 1.25]],
        "units": "kT/e at 298.15 K",
        "title": "Potential of a test",
    }
    (image,) = group.attrs["ome"]["multiscales"]
    assert [axis["name"] for axis in image["axes"]] == ["x", "y", "z"]
    assert {axis["unit"] for axis in image["axes"]} == {"angstrom"}
    assert image["datasets"][0]["coordinateTransformations"] == [
        {"type": "scale", "scale": [0.5, 0.25, 1.25]},
        {"type": "translation", "translation": [-4.5, 2.25, 10.0]},
    ]
    assert group["0"].metadata.dimension_names == ("x", "y", "z")


def test_steps_that_are_not_at_right_angles_stand_in_the_attribute_alone(tmp_path: Path) -> None:
    vectors = ((0.5, 0.0, 0.0), (0.1, 0.75, 0.0), (0.2, -0.3, 1.0))
    header = GridHeader(shape=(3, 5, 7), origin=(1.0, -2.0, 30.0), vectors=vectors, units="V")
    write_whole(tmp_path / "a.zarr", header, noise(header))
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="r")
    assert group.attrs["grid"]["vectors_angstrom"] == [list(vector) for vector in vectors]
    (steps,) = group.attrs["ome"]["multiscales"][0]["datasets"][0]["coordinateTransformations"]
    assert steps == {"type": "scale", "scale": [1.0, 1.0, 1.0]}


def test_another_maps_partial_is_not_taken_up(tmp_path: Path) -> None:
    writer = create_map(tmp_path / "a.zarr", grid((7, 11, 13)))
    writer.keep()
    with pytest.raises(OutputError) as caught:
        create_map(tmp_path / "a.zarr", grid((7, 11, 12)), Opening.RESUME)
    one_line(caught.value, "a.zarr", "--resume")
