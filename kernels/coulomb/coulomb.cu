// Electrostatic potential of point charges on a regular grid; the contract is in kernels/coulomb/__init__.py.
//
// The map is float32 [x, y, z], z fastest. Atoms are [n][4] of x, y, z in angstrom and q in e, float or double; positions
// are taken relative to the whole grid's origin in float64 before rounding to float32. A grid may be a part of another:
// `first` is the index of its first point in the whole.
//
// Floors for P points and A atoms, N of them near a point, on a device with R inverse roots a second:
//   direct sum     P A / R
//   within cutoff  P N / R; at 0.1 atoms/Å3 and 12 Å, N = 724
//
// Direct sum, naive to fast (cuda/direct.cuh):
//   direct_scatter    a thread an atom, atomic additions to every point
//   direct_gather     a thread a point
//   direct_coarsened  a thread eight points of a row: neighbours, then spread out so that a warp stores whole sectors
//   direct_constant   atoms from constant memory
//   direct_tiles      atoms staged relative to a compact tile of points, sums of 128 atoms added with compensation
// Within a cutoff, naive to fast:
//   regions_slots     regions of 8 × 8 × 8 points, bins of eight slots filled by the host, or by fill_slots; the CPU, or
//                     add_overflow, sums what does not fit
//   regions_sorted    atoms sorted by cell: count_atoms, sum_cells, scan_cells, place_atoms, sort_cells (cuda/cells.cuh)
//   tiles             a warp 4 × 4 × 8 points; each lane tests an atom, only hits are computed (cuda/tiles.cuh)
// After either, exclude_points zeroes the points too close to an atom.
// Sources: Stone et al., J. Comput. Chem. 28 (2007); Rodrigues et al., "GPU acceleration of cutoff pair potentials" (2008).

#include "cuda/direct.cuh"

#include "cuda/cells.cuh"
#include "cuda/regions.cuh"
#include "cuda/tiles.cuh"
