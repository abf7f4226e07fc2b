"""MDAnalysis: the readers' own fields that tell whether a trajectory ends within a frame."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ATOMS, FRAMES = 5, 3


@pytest.fixture
def reader(tmp_path: Path, suffix: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import MDAnalysis
    with warnings.catch_warnings():  # another: MDAnalysis shows its own once it is imported
        warnings.simplefilter("ignore")
        path = tmp_path / f"a{suffix}"
        universe = MDAnalysis.Universe.empty(ATOMS, trajectory=True)
        universe.dimensions = [80, 90, 100, 90, 90, 90]
        with MDAnalysis.Writer(str(path), ATOMS) as writer:
            for _ in range(FRAMES):
                writer.write(universe.atoms)
        opened = MDAnalysis.coordinates.core.reader(str(path))
    yield opened
    opened.close()


@pytest.mark.parametrize("suffix", [".dcd"])
def test_a_dcd_tells_the_sizes_of_its_header_and_frames(reader: Any) -> None:
    dcd = reader._file
    sizes = dcd._header_size, dcd._firstframesize, dcd._framesize
    assert all(isinstance(size, int) and size > 0 for size in sizes)
    assert sizes[0] + sizes[1] + (FRAMES - 1) * sizes[2] == Path(reader.filename).stat().st_size


@pytest.mark.parametrize("suffix", [".xtc"])
def test_offsets_are_kept_beside_the_trajectory_under_this_name(reader: Any) -> None:
    """That file is copied beside the link that MDAnalysis is given."""
    path = Path(reader.filename)
    assert path.with_name(f".{path.name}_offsets.npz").is_file()
    np.testing.assert_equal(len(reader), FRAMES)


@pytest.mark.parametrize("suffix", [".dcd", ".xtc", ".trr"])
def test_other_readers_fields_are_not_taken_for_these(reader: Any, suffix: str) -> None:
    assert hasattr(getattr(reader, "_file", None), "_framesize") == (suffix == ".dcd")
