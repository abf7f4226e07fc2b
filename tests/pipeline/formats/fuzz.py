"""Damages small files of every format at random, and reads each in a child process with bounds on memory and time.

A reader must return, or raise an error of Millrace's in one line: other exceptions, crashes, hangs and memory that the
file does not justify are faults. Each fault's file is kept, with the seed that makes it again.

python -m tests.pipeline.formats.fuzz [--seconds 60] [--seed 0] [FORMAT…]     or with --cases N: N files of each format
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import MillraceError
from pipeline.formats.grid import create_map, open_map
from pipeline.formats.grid.base import GridHeader
from pipeline.formats.image import open_image
from pipeline.formats.image.base import ImageReader, Region, Storage
from pipeline.formats.series import series_format_for_output
from pipeline.formats.series.base import SeriesHeader
from pipeline.formats.slices import Cut, describe, draw
from pipeline.workloads import Budget, JobSpec, workload_named
from tests.images import write_image

# Modules that readers import when they need them: imported by the parent, so that not every child does.
LATE = (
    "pipeline.formats.image.tiff.together", "pipeline.workloads.coulomb", "pipeline.workloads.mri.source.images",
    "pipeline.formats.kspace.ismrmrd", "openmm.app", "zarr",
)  # fmt: skip
# Of a child, above what it has as it starts; the files have a few kilobytes.
MOST_BYTES = 512 << 20
MOST_S = 60.0  # the first to read a format compiles its loops
# Values at which arithmetic on sizes goes wrong.
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF)
WORDS = (b"-1", b"0", b"nan", b"inf", b"1e999", b"99999999999999999999", b"null", b"{}", b"[]", b'""', b"\n", b"\0")


@dataclass(frozen=True)
class Kind:
    """Files of one format. `make` writes a good one into a folder and returns its path; `read` reads any."""

    make: Callable[[Path], Path]
    read: Callable[[Path], None]


def image(suffix: str, shape: tuple[int, ...] = (23, 17, 3), dtype: type = np.uint16, **options: Any) -> Kind:
    def make(folder: Path) -> Path:
        samples = (np.arange(np.prod(shape)) % 251).reshape(shape).astype(dtype)
        path = folder / f"in{suffix}"
        if not options or "storage" in options:
            return write_image(path, samples, "YXS" if len(shape) == 3 else "YX", **options)
        import tifffile

        tifffile.imwrite(path, samples, photometric="rgb" if shape[-1] == 3 else "minisblack", **options)
        return path

    return Kind(make, lambda path: read_whole(open_image(path)))


def zarr_array(**options: Any) -> Kind:
    """An array by zarr-python, with these options of `zarr.create_array`."""

    def make(folder: Path) -> Path:
        import zarr

        array = zarr.create_array(folder / "in.zarr", shape=(23, 17), dtype="u2", chunks=(8, 8), **options)
        array[:] = (np.arange(23 * 17) % 251).reshape(23, 17)
        return folder / "in.zarr"

    return Kind(make, lambda path: read_whole(open_image(path)))


def read_whole(reader: ImageReader) -> None:
    with reader:
        shape = tuple(min(extent, 64) for extent in reader.header.shape)  # a header may promise terabytes
        reader.read(Region((0,) * len(shape), shape), np.empty(shape, reader.header.dtype))


GRID = GridHeader.orthogonal((7, 5, 6), (0.0, 1.0, 2.0), 0.5, units="kT/e")
SERIES = SeriesHeader(shape=(2, 3, 8, 5), dtype=np.dtype(np.complex64), is_volume=True, voxel_mm=(1.0, 1.0, 2.0))
REAL_SERIES = SeriesHeader(shape=(2, 3, 8, 5), dtype=np.dtype(np.float32), is_volume=True, voxel_mm=(1.0, 1.0, 2.0))


def grid(suffix: str) -> Kind:
    def make(folder: Path) -> Path:
        writer = create_map(folder / f"in{suffix}", GRID)
        writer.write(Region.whole(GRID.shape), np.linspace(-3, 5, 210, dtype=np.float32).reshape(GRID.shape))
        writer.publish()
        return folder / f"in{suffix}"

    return Kind(make, lambda path: read_whole(open_map(path, GRID)))


def series(suffix: str, header: SeriesHeader) -> Kind:
    form = series_format_for_output(Path(f"in{suffix}"))

    def make(folder: Path) -> Path:
        writer = form.create(folder / f"in{suffix}", header)
        writer.write(Region.whole(header.shape), np.ones(header.shape, header.dtype))
        writer.publish()
        return folder / f"in{suffix}"

    return Kind(make, lambda path: read_whole(form.open(path, header)))


def job(workload: str, output: str, make: Callable[[Path], Path], **parameters: Callable[[Path], Any]) -> Kind:
    """Input of a job: opened, planned, and the first chunk read. `parameters`: by the input's path."""

    def read(path: Path) -> None:
        kind = workload_named(workload)
        given = {name: value(path) for name, value in parameters.items()}
        spec = JobSpec(
            workload=workload, input=path, output=path.parent / f"made-of-it{output}",
            parameters=kind.Parameters(**given),
        )  # fmt: skip
        opened = kind.open(spec)
        try:
            chunk = opened.plan(Budget(budget_bytes=32 << 20, target_bytes=4 << 20)).chunks[0]
            opened.read(chunk, [np.empty(each.shape, each.dtype) for each in chunk.inputs])
        finally:
            opened.close()

    return Kind(make, read)


def looked_at(kind: Kind) -> Kind:
    """A picture of it, as the service draws it."""
    return Kind(kind.make, lambda path: draw(path, Cut(size=16, plane=describe(path).plane[::-1])) and None)


def make_pqr(folder: Path) -> Path:
    lines = [f"ATOM {n} N MET {n} {n / 3:.3f} 1.000 {-n / 2:.3f} 0.{n:04d} 1.5000\n" for n in range(1, 60)]
    (folder / "in.pqr").write_text("CRYST1 90 90 90 90 90 90\n" + "".join(lines) + "END\n")
    return folder / "in.pqr"


def make_charges(suffix: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        atoms = np.random.default_rng(1).normal(size=(50, 4))
        if suffix == ".npy":
            np.save(folder / "in.npy", atoms)
        else:
            np.savez_compressed(folder / "in.npz", xyz=atoms[:, :3], q=atoms[:, 3], cell=[90.0, 90.0, 90.0])
        return folder / f"in{suffix}"

    return make


def make_kspace(suffix: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        from tests.pipeline.formats.kspace.raw_mri import write_cfl
        from tests.pipeline.workloads.mri.mri_jobs import scan, write_h5, write_npz

        if suffix == ".npz":
            return write_npz(folder / "in.npz")
        if suffix == ".h5":
            return write_h5(folder / "in.h5", spokes=12)
        kspace, points = scan(12)
        write_cfl(folder / "traj.cfl", np.moveaxis(np.concatenate([points, 0 * points[..., :1]], -1), -1, 0))
        return write_cfl(folder / "in.cfl", np.moveaxis(kspace, 0, -1)[None].transpose(0, 2, 1, 3))

    return make


def make_topology(folder: Path) -> Path:
    from tests.pipeline.formats.charges.test_mdanalysis import psf_text, written

    (folder / "in.psf").write_text(psf_text())
    written(folder / "moves.dcd")
    return folder / "in.psf"


def make_moves(suffix: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        from tests.pipeline.formats.charges.test_mdanalysis import written

        places = np.random.default_rng(1).normal(0, 9, (3, 20, 1, 3)) + np.random.default_rng(2).normal(size=(20, 3, 3))
        written(folder / f"moves{suffix}", places.reshape(3, 60, 3)[:, :59].astype(np.float32))
        return make_pqr(folder)

    return make


KINDS = {
    "npy": image(".npy"),
    "png": image(".png"),
    "pgm": image(".pgm", (23, 17)),
    "ppm": image(".ppm"),
    "pam": image(".pam"),
    "tiff": image(".tif"),
    "tiff-deflate": image(".tif", compression="zlib", tile=(16, 16)),
    "tiff-lzw": image(".tif", compression="lzw", predictor=True, rowsperstrip=5),
    "tiff-zstd": image(".tif", (2, 23, 17), np.float32, compression="zstd"),
    "tiff-overviews": image(".tif", storage=Storage(levels=3)),
    "tiff-sub-ifds": image(".ome.tif", storage=Storage(levels=3, compression="zstd")),
    "zarr": image(".zarr"),
    "zarr-sharded": zarr_array(shards=(16, 16)),  # Zstandard, and the index with a checksum
    "zarr-gzip": zarr_array(compressors=[{"name": "gzip", "configuration": {"level": 1}}, {"name": "crc32c"}]),
    "zarr-v2": zarr_array(zarr_format=2),
    "opendx": grid(".dx"),
    "mrc": grid(".mrc"),
    "cube": grid(".cube"),
    "zarr-map": grid(".zarr"),
    "nifti": series(".nii", SERIES),
    "nifti-real": series(".nii", REAL_SERIES),
    "cfl-series": series(".cfl", SERIES),
    "pqr": job("coulomb", ".dx", make_pqr),
    "charges-npy": job("coulomb", ".dx", make_charges(".npy")),
    "charges-npz": job("coulomb", ".dx", make_charges(".npz")),
    "psf-dcd": job(
        "coulomb", ".dx", make_topology, trajectory=lambda path: path.parent / "moves.dcd", combine=lambda _: "avg"
    ),
    "pqr-xtc": job("coulomb", ".dx", make_moves(".xtc"), trajectory=lambda path: path.parent / "moves.xtc"),
    "pqr-trr": job("coulomb", ".dx", make_moves(".trr"), trajectory=lambda path: path.parent / "moves.trr"),
    "ismrmrd": job("mri", ".nii", make_kspace(".h5")),
    "kspace-npz": job("mri", ".nii", make_kspace(".npz")),
    "bart": job("mri", ".nii", make_kspace(".cfl"), trajectory=lambda path: path.parent / "traj.cfl"),
}
KINDS |= {
    f"view-{name}": looked_at(KINDS[name])
    for name in ("npy", "png", "tiff-deflate", "zarr", "opendx", "mrc", "cube", "zarr-map", "nifti", "cfl-series")
} | {"view-nifti-gz": looked_at(series(".nii.gz", REAL_SERIES)), "view-opendx-gz": looked_at(grid(".dx.gz"))}


def damage(good: bytes, rng: random.Random) -> bytes:
    """The content with one to four faults."""
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.randrange(len(data) + 1)
        if rng.random() < 0.6:
            place = min(place, rng.randrange(1024))  # headers decide most
        match rng.randrange(8):
            case 0:
                del data[place:]
            case 1:
                data[place : place + 1] = bytes([rng.randrange(256)])
            case 2:
                size = rng.choice((1, 2, 4, 8))
                value = (rng.choice(EXTREMES) & (1 << 8 * size) - 1).to_bytes(size, rng.choice(("little", "big")))
                data[place : place + size] = value
            case 3:
                data[place : place + rng.choice((1, 4, 100))] = rng.choice(WORDS)
            case 4:
                del data[place : place + rng.choice((1, 3, 64))]
            case 5:
                data[place:place] = rng.randbytes(rng.choice((1, 7, 300)))
            case 6:
                start = rng.randrange(len(data) + 1)
                data[place:place] = data[start : start + rng.choice((8, 64, 1000))]
            case 7 if data:
                data[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
    return bytes(data)


def fault_of(read: Callable[[Path], None], path: Path) -> str | None:
    """What was wrong about reading it, in a child; None if nothing was."""
    out, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        _read_bounded(read, path, told)
    os.close(told)
    ready, _, _ = select.select([out], [], [], MOST_S)
    if not ready:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(out, "rb") as pipe:
        said = pipe.read().decode(errors="replace") if ready else ""
    _, status = os.waitpid(child, 0)
    if not ready:
        return f"no answer within {MOST_S:g} s"
    if os.WIFSIGNALED(status):
        return f"{signal.Signals(os.WTERMSIG(status)).name}"
    return said.removeprefix("ok") or None


def _read_bounded(read: Callable[[Path], None], path: Path, told: int) -> None:
    """Does not return."""
    said = b"ok"
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        status = Path("/proc/self/status").read_text(encoding="ascii")
        most = (int(status.split("VmData:")[1].split()[0]) << 10) + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            read(path)
        except MillraceError as error:
            if "\n" in str(error) or not any(name in str(error) for name in ("in.", "traj.", "moves.")):
                said = f"the message {error} is not one line that names the file".encode()
        except BaseException:
            said = traceback.format_exc().encode()
    finally:
        os.write(told, said[:60_000])
        os._exit(0)


def fuzz(name: str, folder: Path, seeds: range, until: float) -> tuple[int, dict[int, str]]:
    """The number of files read, and the faults by seed; `until`: on the monotonic clock."""
    kind, good = KINDS[name], folder / f"{name}-good"
    good.mkdir()
    path = kind.make(good)
    fault = fault_of(kind.read, path)
    assert fault is None, f"{name}: a good file: {fault}"
    files = sorted(each for each in good.rglob("*") if each.is_file())
    count, faults = 0, {}
    for seed in seeds:
        if time.monotonic() > until:
            break
        rng, bad = random.Random(f"{name}-{seed}"), folder / f"{name}-{seed}"
        shutil.copytree(good, bad)
        chosen = bad / rng.choice(files).relative_to(good)
        chosen.write_bytes(damage(chosen.read_bytes(), rng))
        count += 1
        fault = fault_of(kind.read, bad / path.relative_to(good))
        if fault is None:
            shutil.rmtree(bad)
        else:
            faults[seed] = fault
    return count, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=", ".join(KINDS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each format")
    parser.add_argument("--cases", type=int, help="files of each format, whatever time they take")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in LATE:
        import_module(name)
    gc.collect()
    gc.freeze()  # else a search for garbage in a child would copy what it shares with its parent
    folder = Path(tempfile.mkdtemp(prefix="millrace-fuzz-"))
    total, found = 0, 0
    for name in options.formats or KINDS:
        last = options.seed + (options.cases or 10**9)
        until = float("inf") if options.cases else time.monotonic() + options.seconds
        count, faults = fuzz(name, folder, range(options.seed, last), until)
        total, found = total + count, found + len(faults)
        print(f"{name:14} {count:7,} files, {len(faults)} faults", flush=True)
        for seed, fault in faults.items():
            print(f"  {folder / name}-{seed}: {fault.strip().splitlines()[-1][:200]}", flush=True)
            if os.environ.get("MILLRACE_DEBUG"):
                print(fault)
    print(f"{total:,} files, {found} faults")
    if not found:
        shutil.rmtree(folder)
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
