// Non-uniform Fourier transforms; the contract is in kernels/nufft/__init__.py.
//
// Floors for M points, C coils, an image of P pixels on a grid of G cells, kernels of w cells an axis, on a device with
// bandwidth B and R float32 multiply-adds a second:
//   gridding   8 C (M + P) / B, and 2 C M w^d / R; as an FFT it moves 8 C G twice for each of its passes
//   toeplitz   (8 (2 C + 2) P + 4 K) / B for a kernel of K cells, were the FFTs done without memory
//
// Adjoint, naive to fast: zeros or samples -> grid -> FFT -> images
//   spread_points<…, false>  a thread a point and coil, in the trajectory's order: atomic additions anywhere
//   spread_points<…, true>   the same in the sorted order: neighbours meet in cache
//   spread_shared            a block a region and coil: additions in shared memory, then one a cell
//   spread_tiles             a warp owns cells and visits the points that reach them, all coils at once: no atomics
//                            (order_samples before it, add_parts after)
// Forward, naive to fast: images -> grid -> FFT -> samples
//   interpolate_points<…, false>  a thread a point and coil, in the trajectory's order
//   interpolate_points<…, true>   the same in the sorted order
//   interpolate_tiles             a region of the grid in shared memory, weights once for all coils (restore_samples after)
// Exact, by the sum itself: exact.cuh has its floors and its list.
// Normal operator:
//   weigh_coils, multiply, combine_coils       around a library's FFTs of a doubled grid (toeplitz.cuh)
//   forward_rows, cross_lines, inverse_rows    our own FFTs, which move only what is wanted (toeplitz_lines.cuh)
// Sources: Barnett, Magland, af Klinteberg (2019); Shih, Wright, Andén, Blaschke, Barnett, "cuFINUFFT: a load-balanced GPU
// library for general-purpose nonuniform FFTs" (2021), for the shared-memory form of the adjoint.

#include "exact/exact.cuh"

#include "gridding/gridding.cuh"
#include "toeplitz/toeplitz.cuh"
#include "toeplitz/lines.cuh"
