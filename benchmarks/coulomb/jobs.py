"""Potential maps as whole jobs, from file to file: a trajectory over one and several devices, and a very large grid.

Trajectory: 1,000 generated frames of 92,001 atoms of water at 1 Å, and the time in which one process decodes the file.
Grid: 545 × 801 × 929 points (405 M) of a million atoms, in every binary format, with the peak host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import Options
from kernels.coulomb.cases import water_box

WATERS, SIDE = 30_667, 97.1
LARGE, LARGE_ATOMS = (545, 801, 929), 1_000_000
COMMAND = (sys.executable, "-c", "from pipeline.cli import main; main()")
MIB = 1 << 20


def make_trajectory(folder: Path, frames: int, suffix: str) -> tuple[Path, Path]:
    """water.pqr and water.dcd or .xtc: every frame moves each atom a little."""
    import MDAnalysis

    atoms = water_box(SIDE, 3 * WATERS, seed=5)
    topology, trajectory = folder / "water.pqr", folder / f"water.{suffix}"
    lines = [
        f"ATOM {n} O WAT {n // 3 + 1} {x:.3f} {y:.3f} {z:.3f} {q:.4f} 1.5\n" for n, (x, y, z, q) in enumerate(atoms, 1)
    ]
    topology.write_text("".join(lines))
    rng = np.random.default_rng(7)
    noise = rng.normal(0, 0.3, (2 * len(atoms), 3)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        universe = MDAnalysis.Universe.empty(len(atoms), trajectory=True)
        universe.dimensions = [SIDE, SIDE, SIDE, 90, 90, 90]
        with MDAnalysis.Writer(str(trajectory), len(atoms)) as writer:
            for _ in range(frames):
                first = int(rng.integers(len(atoms)))
                universe.atoms.positions = atoms[:, :3] + noise[first : first + len(atoms)]
                writer.write(universe.atoms)
    return topology, trajectory


def decoding_seconds(topology: Path, trajectory: Path, frames: int) -> float:
    """One process that only reads frames."""
    from pipeline.formats.charges import open_point_charges

    with open_point_charges(topology, trajectory=trajectory) as opened:
        opened.frame(0)
        began = time.perf_counter()
        for number in range(frames):
            opened.frame(number)
        return time.perf_counter() - began


def run(*arguments: Any) -> tuple[float, dict[str, Any]]:
    """Runs the command; returns its wall time in seconds and the receipt."""
    began = time.perf_counter()
    done = subprocess.run(
        [*COMMAND, "run", "coulomb", *map(str, arguments), "--json"], check=False, capture_output=True, text=True
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stderr)
    receipt: dict[str, Any] = json.loads(done.stdout)
    return seconds, receipt


def seconds_of(*arguments: Any) -> float:
    """Runs the command; returns its wall time in seconds."""
    began = time.perf_counter()
    subprocess.run([*COMMAND, *map(str, arguments)], check=True, capture_output=True)
    return time.perf_counter() - began


def show(title: str, seconds: float, receipt: dict[str, Any]) -> None:
    stages = ", ".join(f"{name} {stage['seconds']:.2f}" for name, stage in receipt["stages"].items())
    print(f"{title}: {seconds:.2f} s in all, {receipt['wall_seconds']:.2f} s in the pipeline ({stages})", flush=True)


def trajectory(options: argparse.Namespace, folder: Path) -> None:
    topology, frames = make_trajectory(folder, options.frames, options.format)
    some = min(options.frames, 100)
    each = decoding_seconds(topology, frames, some) / some
    mib = frames.stat().st_size / MIB
    print(
        f"{options.frames} frames × {3 * WATERS} atoms in {frames.name} ({mib:.0f} MiB): one process decodes "
        f"{1 / each:.0f} frames/s, all in {each * options.frames:.2f} s",
        flush=True,
    )
    first: bytes | None = None
    for device in options.devices.split(","):
        output = folder / f"{device.replace(':', '')}.npy"
        settings = ("--device", device, *(("--workers", options.workers) if options.workers else ()))
        found = run(topology, output, "--trajectory", frames, "--spacing", 1, "--memory", options.memory, *settings)
        content = output.read_bytes()
        first = first or content
        show(f"{found[1]['device']['name']}, {'same bits' if content == first else 'OTHER BITS'}", *found)


def grid(options: argparse.Namespace, folder: Path) -> None:
    shape = tuple(count // options.shrink for count in LARGE)
    side = np.array(shape) * 0.5
    rng = np.random.default_rng(3)
    atoms = np.empty((LARGE_ATOMS // options.shrink**3, 4), np.float32)
    atoms[:, :3] = rng.uniform(0, side, (len(atoms), 3))
    atoms[:, 3] = np.resize(np.array([-0.834, 0.417, 0.417], np.float32), len(atoms))
    source = folder / "atoms.npy"
    np.save(source, atoms)
    points = ",".join(map(str, shape))
    print(f"starting and stopping the program: {seconds_of('run', 'coulomb', '--help'):.2f} s", flush=True)
    for device in options.devices.split(","):
        settings = ("--origin", "0,0,0", "--shape", points, "--device", device, "--memory", options.memory)
        planned = seconds_of("run", "coulomb", source, folder / "large.npy", *settings, "--dry-run")
        print(f"the plan alone, on {device}: {planned:.2f} s", flush=True)
        for suffix in options.formats.split(","):
            output = folder / f"large.{suffix}"
            found = run(source, output, *settings)
            # Peak of the largest child so far: an upper bound for this format.
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            show(f"{points} points of {len(atoms)} atoms, {device}, .{suffix}, at most {peak:.0f} MiB", *found)
            subprocess.run(["rm", "-rf", str(output)], check=True)


def main() -> None:
    parser = Options("coulomb/jobs", __doc__)
    parser.add_argument("what", choices=("trajectory", "grid"))
    parser.add_argument("--folder", type=Path, help="folder for the files; default: a temporary folder in memory")
    parser.add_argument("--devices", default="cpu", help="devices, separated by commas: cuda:0,all")
    parser.add_argument("--workers", type=int, help="processes on the CPU")
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--format", choices=("dcd", "xtc"), default="dcd")
    parser.add_argument("--formats", default="npy,mrc,zarr")
    parser.add_argument("--memory", default="2GiB", help="--memory of millrace run [default: 2GiB]")
    parser.add_argument("--shrink", type=int, default=1, help="divide the large grid's sides by this")
    options = parser.parse_args()
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=options.folder or in_memory) as folder:
        (trajectory if options.what == "trajectory" else grid)(options, Path(folder))


if __name__ == "__main__":
    main()
