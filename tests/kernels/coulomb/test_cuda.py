"""Potential maps on a CUDA device: every variant against the definition; bits that depend only on the input."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels.coulomb import SCHEMES, Grid, Scheme, cutoff, direct, potential, reaching
from kernels.coulomb.cases import CELLS, Case, Expected, cases, check, image_vectors, in_slabs, made_atoms, water_box
from kernels.coulomb.cuda import potential as on_cuda
from kernels.coulomb.cuda import variants_of
from kernels.coulomb.ladder import ladders
from tests.kernels.coulomb.real_inputs import molecule

pytestmark = pytest.mark.gpu

# The kernels before production take coordinates from the grid's origin, not from a tile: 20 Å are held to 1e-6 Å.
LADDER_SLACK = 12
PRODUCTION = ("tiles", "direct_tiles")
GRID = Grid(origin=(1.0, -2.0, 3.0), spacing=(0.5, 0.45, 0.55), shape=(43, 37, 53))
KINDS = [*product(SCHEMES[:-1], CELLS), ("direct", "free")]


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def scheme_of(name: str, **options: Any) -> Scheme:
    return Scheme(name=name, cutoff_angstrom=5.0, **options)


def poisoned(cupy: Any, grid: Grid) -> Any:
    return cupy.full(grid.shape, cupy.nan, cupy.float32)


@pytest.mark.sanitize("coulomb")
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_variant_gives_the_definition(cupy: Any, case: Case) -> None:
    expected, atoms = case.exact(), cupy.asarray(case.atoms())
    case.check(cupy.asnumpy(case.apply(atoms, out=poisoned(cupy, case.grid))), expected)
    for name in variants_of(case.scheme):
        if case.content == "far" and name not in PRODUCTION:
            continue  # far: the order of additions by chance costs the others more
        out = poisoned(cupy, case.grid)
        on_cuda(atoms, case.grid, case.scheme, CELLS[case.cell], out, variant=name)
        case.check(cupy.asnumpy(out), expected, slack=1 if name in PRODUCTION else LADDER_SLACK)


@pytest.mark.parametrize(("name", "cell"), KINDS)
@pytest.mark.parametrize("first", [(0, 0, 0), (3, 5, 9)])
def test_slabs_have_the_bits_of_the_whole(cupy: Any, name: str, cell: str, first: tuple[int, int, int]) -> None:
    scheme = scheme_of(name, exclude_radius_angstrom=0.4)
    case = Case(grid=replace(GRID, first=first), scheme=scheme, cell=cell, count=900)
    atoms = cupy.asarray(case.atoms())
    whole = case.apply(atoms).get()
    for cuts in ((1, 2, 11), (7, 30), (8, 16, 40)):
        parts = [part.get() for part in in_slabs(case, cuts, atoms)]
        np.testing.assert_array_equal(np.concatenate(parts), whole, strict=True)


@pytest.mark.parametrize(("name", "cell"), KINDS)
def test_any_part_has_the_bits_of_the_whole(cupy: Any, name: str, cell: str) -> None:
    atoms = cupy.asarray(made_atoms("water", 1500, GRID))
    scheme, periodic = scheme_of(name), CELLS[cell]
    whole = potential(atoms, GRID, scheme, cell=periodic).get()
    rng = np.random.default_rng(7)
    for _ in range(12):
        begin = [int(rng.integers(0, n)) for n in GRID.shape]
        shape = tuple(int(rng.integers(1, n - b + 1)) for n, b in zip(GRID.shape, begin, strict=True))
        part = replace(GRID, first=tuple(begin), shape=shape)
        window = tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))
        np.testing.assert_array_equal(potential(atoms, part, scheme, cell=periodic).get(), whole[window], strict=True)


@pytest.mark.parametrize(("name", "cell"), KINDS)
def test_the_atoms_that_reach_a_part_are_enough_for_it(cupy: Any, name: str, cell: str) -> None:
    scheme, periodic = scheme_of(name, exclude_radius_angstrom=0.7), CELLS[cell]
    atoms = made_atoms("outside" if periodic else "water", 1500, GRID)
    for begin, end in ((0, 3), (17, 18), (33, 43)):
        part = GRID.slab(begin, end)
        few = cupy.asarray(atoms[reaching(atoms, part, scheme, periodic)])
        all_of_them = potential(cupy.asarray(atoms), part, scheme, cell=periodic).get()
        np.testing.assert_array_equal(potential(few, part, scheme, cell=periodic).get(), all_of_them, strict=True)


def test_the_ladders_end_with_what_is_in_production() -> None:
    for ladder, scheme in zip(ladders(), (Scheme(name="direct"), Scheme()), strict=True):
        assert ladder.variants == tuple(variants_of(scheme))
        assert ladder.variants[-1] in PRODUCTION
        assert ladder.roots > 1e9
        for name in ladder.variants[-2:]:
            ladder.prepare(name)()


@pytest.mark.parametrize("name", SCHEMES)
def test_every_run_gives_the_same_bits(cupy: Any, name: str) -> None:
    atoms = cupy.asarray(water_box(60, 20_000))
    grid = Grid(origin=(0, 0, 0), spacing=(0.5, 0.5, 0.5), shape=(67, 120, 121))
    first = potential(atoms, grid, Scheme(name=name)).get()
    for _ in range(5):
        np.testing.assert_array_equal(potential(atoms, grid, Scheme(name=name)).get(), first, strict=True)


@pytest.mark.parametrize(
    ("name", "by_distance"), [each for each in product(SCHEMES, (False, True)) if each != ("split", True)]
)
def test_the_cpu_and_cuda_agree(cupy: Any, name: str, by_distance: bool) -> None:
    atoms = water_box(31, 2979).astype(np.float64)
    grid = Grid(origin=(0.3, 0.1, -0.4), spacing=(0.5, 0.5, 0.5), shape=(61, 59, 67))
    scheme = Scheme(name=name, distance_dependent=by_distance, exclude_radius_angstrom=1.0)
    on_cpu = potential(atoms, grid, scheme).astype(np.float64)
    on_device = potential(cupy.asarray(atoms), grid, scheme).get()
    np.testing.assert_array_equal(on_device == 0, on_cpu == 0)
    differs = np.abs(on_device - on_cpu) > 1e-5 * np.abs(on_cpu).max()
    # "truncate": of 1e8 pairs a few lie so near the cutoff (a relative 1e-7) that rounding decides: 5 on an H200.
    assert differs.mean() <= (1e-4 if name == "truncate" else 0)
    assert np.linalg.norm((on_device - on_cpu)[~differs]) <= 2e-6 * np.linalg.norm(on_cpu)


def definition_on_device(cupy: Any, atoms: Any, grid: Grid, scheme: Scheme, cell: Any) -> Expected:
    """`cases.exact` for many atoms: float64 sums by whole-array arithmetic."""
    axes = [cupy.asarray(axis) for axis in grid.axes()]
    values, sizes, doubtful = (cupy.zeros(grid.shape) for _ in range(3))
    nearest = cupy.full(grid.shape, cupy.inf)
    reach = np.inf if scheme.name == "direct" else scheme.cutoff_angstrom
    pair = cupy.ElementwiseKernel(
        "T x, T y, T z, raw T atom, int64 count, T cutoff, int32 kind, raw T split",
        "T value, T size, T doubtful, T nearest",
        """
        value = size = doubtful = 0; nearest = 1e300;
        for (long long i = 0; i < count; ++i) {
            const T dx = x - atom[4 * i], dy = y - atom[4 * i + 1], dz = z - atom[4 * i + 2], q = atom[4 * i + 3];
            const T square = dx * dx + dy * dy + dz * dz, r = sqrt(square + 1e-8), rho2 = r / cutoff * r / cutoff;
            nearest = min(nearest, sqrt(square));
            const T large = abs(q) / r * (1 + 0.2 / r);
            if (kind == 2 && abs(square / (cutoff * cutoff) - 1) < 2e-6) doubtful += large;
            if (square > cutoff * cutoff) continue;
            size += large;
            if (kind == 0) value += q / r * (1 - rho2) * (1 - rho2);
            else if (kind == 1) value += q * (1 / r - (1.875 - 1.25 * rho2 + 0.375 * rho2 * rho2) / cutoff);
            else if (kind == 3) {
                T series = 0;
                for (int k = 7; k >= 0; --k) series = series * (1 - rho2) + split[k];
                value += q * (1 / r - series / cutoff);
            } else value += q / r;
        }
        """,
        "definition",
    )
    low, high = (np.array([axis[end] for axis in grid.axes()]) for end in (0, -1))
    kind, cut = SCHEMES.index(scheme.name), 1e150 if scheme.name == "direct" else scheme.cutoff_angstrom
    split = cupy.asarray(scheme.split or (0.0,) * 8)
    for shift in image_vectors(cell, atoms, grid, min(reach, 1e3)):
        moved = atoms.copy()
        moved[:, :3] += shift
        moved = moved[((moved[:, :3] >= low - reach) & (moved[:, :3] <= high + reach)).all(1)]
        if len(moved):
            found = pair(
                axes[0][:, None, None], axes[1][:, None], axes[2], cupy.asarray(moved), len(moved), cut, kind, split
            )
            values += found[0]
            sizes += found[1]
            doubtful += found[2]
            nearest = cupy.minimum(nearest, found[3])
    return Expected(values=values.get(), sizes=sizes.get(), doubtful=doubtful.get(), nearest=nearest.get())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["1a63.pqr", "actin_dimer.pqr", "watbox_sl40.pqr"])
def test_whole_maps_of_real_molecules(cupy: Any, name: str, scheme: str) -> None:
    atoms = molecule(name).atoms
    grid = molecule(name).grid()
    result = potential(cupy.asarray(atoms), grid, Scheme(name=scheme)).get()
    check(result, definition_on_device(cupy, atoms, grid, Scheme(name=scheme), None), Scheme(name=scheme), name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("scheme", SCHEMES[:-1])
def test_a_third_of_the_map_of_a_periodic_cell_of_60_60_90_degrees(cupy: Any, scheme: str) -> None:
    found = molecule("adk_oplsaa.tpr")
    grid = found.grid().slab(60, 110)
    result = potential(cupy.asarray(found.atoms), grid, Scheme(name=scheme), cell=found.cell).get()
    expected = definition_on_device(cupy, found.atoms, grid, Scheme(name=scheme), found.cell)
    check(result, expected, Scheme(name=scheme), scheme)


def test_many_atoms_in_one_cell(cupy: Any) -> None:
    grid = Grid(origin=(0, 0, 0), spacing=(0.5, 0.5, 0.5), shape=(9, 11, 13))
    atoms = water_box(0.5, 20_001).astype(np.float64)
    atoms[:, :3] += 1.75
    one, total = atoms[:1].copy(), cutoff(atoms, grid)
    assert np.isfinite(total).all()
    one[0, 3] = 1
    scale = np.abs(cutoff(one, grid)).max() * 20_001
    np.testing.assert_allclose(cutoff(cupy.asarray(atoms), grid).get(), total, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("variant", PRODUCTION)
def test_work_is_ordered_on_the_stream_given(cupy: Any, variant: str) -> None:
    """Atoms arrive just before and are overwritten just after, on the same stream: only the right order passes."""
    grid = Grid(origin=(0, 0, 0), spacing=(0.5, 0.5, 0.5), shape=(97, 96, 95))
    scheme = Scheme(name="shift" if variant == "tiles" else "direct")
    values = water_box(48, 10_000)
    stream = cupy.cuda.Stream(non_blocking=True)
    pinned = cupy.cuda.alloc_pinned_memory(values.nbytes)
    host = np.frombuffer(pinned, values.dtype, values.size).reshape(values.shape)
    host[...] = values
    atoms, out = cupy.zeros(values.shape, values.dtype), cupy.zeros(grid.shape, cupy.float32)
    potential(atoms, grid, scheme, out=out, stream=stream)  # compiled before it is timed against copies
    stream.synchronize()
    for _ in range(5):
        atoms.set(host, stream=stream)
        potential(atoms, grid, scheme, out=out, stream=stream)
        with stream:
            atoms.fill(0)
    stream.synchronize()
    np.testing.assert_array_equal(out.get(), potential(cupy.asarray(values), grid, scheme).get(), strict=True)


def test_many_threads_at_once(cupy: Any) -> None:
    grid = Grid(origin=(0, 0, 0), spacing=(0.5, 0.5, 0.5), shape=(41, 43, 45))
    sets = [water_box(22, 1000 + 7 * n, seed=n) for n in range(8)]
    expected = [(cutoff(cupy.asarray(atoms), grid).get(), direct(cupy.asarray(atoms), grid).get()) for atoms in sets]
    ready = threading.Barrier(8)

    def worker(atoms: Any) -> Any:
        ready.wait(60)
        with cupy.cuda.Stream(non_blocking=True):
            on_device = cupy.asarray(atoms)
            return [(cutoff(on_device, grid).get(), direct(on_device, grid).get()) for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        for right, results in zip(expected, pool.map(worker, sets), strict=True):
            for result in results:
                np.testing.assert_array_equal(result, right, strict=True)


def test_a_variant_that_does_not_apply_is_refused(cupy: Any) -> None:
    atoms = cupy.asarray(made_atoms("random", 5, GRID))
    with pytest.raises(ValueError, match="'tiles' cannot compute the scheme 'direct'"):
        on_cuda(atoms, GRID, Scheme(name="direct"), None, None, variant="tiles")


@pytest.mark.large
def test_maps_of_more_points_than_two_to_the_31(cupy: Any) -> None:
    """Indices beyond 2³¹ must not wrap around; the last slab, computed alone, is the expected result."""
    grid = Grid(origin=(0, 0, 0), spacing=(0.5, 0.5, 0.5), shape=(1027, 1447, 1449))
    free, _total = cupy.cuda.runtime.memGetInfo()
    assert free > 5 * grid.size, "this test needs 11 GB of device memory"
    atoms = cupy.asarray(made_atoms("random", 2000, grid.slab(1000, 1027)))
    for scheme in (Scheme(), Scheme(name="direct", exclude_radius_angstrom=2.0)):
        few = atoms if scheme.name == "shift" else atoms[:40]
        whole = potential(few, grid, scheme)
        np.testing.assert_array_equal(
            whole[1013:].get(), potential(few, grid.slab(1013, 1027), scheme).get(), strict=True
        )
        np.testing.assert_array_equal(whole[:2].get(), potential(few, grid.slab(0, 2), scheme).get(), strict=True)
        del whole
        cupy.get_default_memory_pool().free_all_blocks()
