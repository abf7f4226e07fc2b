"""Inputs of every kind that are replaced by links after a job's paths were checked."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import InputError
from pipeline.formats.cfl import Cfl
from pipeline.formats.charges import open_point_charges
from pipeline.formats.image import open_image
from pipeline.formats.image.array_reader import file_array
from pipeline.formats.image.base import Region
from pipeline.formats.image.tiff.blocks import _decoders
from pipeline.formats.kspace import open_kspace
from pipeline.formats.numpy_files import archive, mapped_array
from pipeline.formats.slices import open_stack
from pipeline.storage.confinement import Confinement, confine
from tests.images import write_image

FRAMES = np.round(np.random.default_rng(2).uniform(-50, 50, (7, 5, 3)), 2).astype(np.float32)


@pytest.fixture
def root(tmp_path):
    for name in ("root", "outside"):
        (tmp_path / name).mkdir()
    confine(Confinement((tmp_path / "root",)))
    return tmp_path / "root"


def npz(path):
    with archive(path) as found:
        return found["a"]


def write_cfl(path):
    path.with_suffix(".hdr").write_text("# Dimensions\n5 3\n")
    np.arange(15, dtype=np.complex64).tofile(path)


def write_bytes(path):
    path.write_bytes(bytes(24))


KINDS = {
    ".npy": (lambda path: np.save(path, np.arange(7)), mapped_array),
    ".npz": (lambda path: np.savez(path, a=np.arange(7)), npz),
    ".cfl": (write_cfl, lambda path: Cfl(path).array),
    ".bin": (write_bytes, lambda path: file_array(path, np.int64, (3,))),
    ".h5": (write_bytes, open_kspace),
    ".tif": (lambda path: write_image(path, np.ones((13, 17), np.uint8), "YX"), open_image),
    ".mrc": (write_bytes, open_stack),
    ".dx": (write_bytes, open_stack),
    ".dx.gz": (write_bytes, open_stack),
    ".cube": (write_bytes, open_stack),
    ".nii": (write_bytes, open_stack),
    ".nii.gz": (write_bytes, open_stack),
    ".dcm": (write_bytes, open_stack),
    ".pqr": (lambda path: path.write_text("ATOM 1 N MET 1 1.0 2.0 3.0 0.5 1.0\n"), open_point_charges),
}


@pytest.mark.parametrize("suffix", KINDS)
def test_an_input_replaced_by_a_link_is_not_opened(root, suffix):
    write, read = KINDS[suffix]
    for folder in (root, root.parent / "outside"):
        write(folder / f"x{suffix}")
    path = root / f"x{suffix}"
    path.unlink()
    path.symlink_to(root.parent / "outside" / f"x{suffix}")
    with pytest.raises(InputError, match=rf"^{path}: leads out of the service's data roots by a symbolic link"):
        read(path)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".cfl", ".bin"])
def test_libraries_read_what_was_opened(root, suffix, monkeypatch):
    """The file is replaced between its opening and the library's."""
    write, read = KINDS[suffix]
    path, outside = root / f"x{suffix}", root.parent / "outside" / f"x{suffix}"
    write(path)
    outside.touch()
    expected = np.array(read(path))
    opened = np.memmap if suffix in (".cfl", ".bin") else np.load if suffix == ".npz" else np.lib.format.open_memmap

    def swapped(*arguments, **options):
        path.unlink()
        path.symlink_to(outside)
        return opened(*arguments, **options)

    module = np.lib.format if suffix == ".npy" else np
    monkeypatch.setattr(module, opened.__name__, swapped)
    np.testing.assert_array_equal(read(path), expected)
    assert path.is_symlink()


def test_a_tiffs_tags_are_not_read_through_a_link(root, monkeypatch):
    path = root / "x.tif"
    path.symlink_to("/etc/passwd")
    with pytest.raises(InputError, match=rf"^{path}: "):
        _decoders(path, {(): None})


@pytest.mark.parametrize("suffix", [".dcd", ".xtc", ".trr", ".gro", ".pdb"])
def test_a_trajectory_replaced_by_a_link_while_it_is_read(root, suffix):
    pytest.importorskip("MDAnalysis", reason="an optional dependency")
    frames = FRAMES if suffix in (".dcd", ".xtc", ".trr") else FRAMES[:1]
    topology, path, outside = root / "a.psf", root / f"a{suffix}", root.parent / "outside" / f"a{suffix}"
    write_topology(topology)
    write_trajectory(path, frames)
    write_trajectory(outside, frames + 1000)
    with open_point_charges(topology, trajectory=path) as found:
        path.unlink()
        path.symlink_to(outside)
        for number in (len(frames) - 1, 0):
            np.testing.assert_allclose(found.frame(number).coordinates, frames[number], atol=6e-3)
    with pytest.raises(InputError, match=rf"^{path}: leads out of the service's data roots by a symbolic link"):
        open_point_charges(topology, trajectory=path)


def test_messages_about_a_trajectory_name_the_users_path(root):
    pytest.importorskip("MDAnalysis", reason="an optional dependency")
    write_topology(root / "a.psf")
    (root / "a.dcd").write_bytes(b"rubbish" * 100)
    with pytest.raises(InputError, match=rf"{root}/a.dcd") as raised:
        open_point_charges(root / "a.psf", trajectory=root / "a.dcd")
    assert "/proc/" not in str(raised.value)
    assert "millrace-trajectory" not in str(raised.value)


def test_messages_about_a_zarr_name_the_users_path(root):
    path = root / "x.zarr"
    write_image(path, np.ones((13, 17), np.uint8), "YX")
    (path / "0" / "c" / "0" / "0").write_bytes(b"rubbish")
    with pytest.raises(InputError, match=rf"^{path}: chunk 0/0 does not decode") as raised:
        open_image(path).read(Region.whole((13, 17)), np.empty((13, 17), np.uint8))
    assert "/proc/" not in str(raised.value)


def write_topology(path: Path) -> None:
    atoms = "".join(
        f"{n:8d} SYS  {n:<4d} MET  {'CA':<4} C    {n / 8:10.6f} {12.0:13.4f} {0:11d}\n" for n in range(1, 6)
    )
    path.write_text(f"PSF\n\n{1:8d} !NTITLE\n REMARKS made\n\n{5:8d} !NATOM\n{atoms}\n{0:8d} !NBOND: bonds\n\n")


def write_trajectory(path, frames):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import MDAnalysis

        universe = MDAnalysis.Universe.empty(5, trajectory=True)
        with MDAnalysis.Writer(str(path), 5) as writer:
            for frame in frames:
                universe.atoms.positions = frame
                writer.write(universe.atoms)
