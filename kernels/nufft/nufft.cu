// Non-uniform Fourier transforms; the contract is in kernels/nufft/__init__.py.
//
// Floors for M points, C coils, an image of P pixels on a grid of G cells, kernels of w cells an axis, on a device with
// bandwidth B and R float32 multiply-adds a second:
//   gridding   8 C (M + P) / B, and 2 C M w^d / R; its FFT's passes move what gridding/grid_lines.cuh states. One coil on an
//              H200: 256², 65,536 samples, 1e-3: 0.4 us and 0.1 us (launches take longer); 256 × 256 × 176, 6.8 M: 0.035 ms
//              and 0.05 ms, and 0.23 ms for the passes
//   toeplitz   (8 (2 C + 2) P + 4 K) / B for a kernel of K cells, if the FFTs needed no memory traffic
//   exact      4 M P C operations over the tensor cores' rate with one fp16 term, 12 M P C with three; on the
//              special-function unit, 2 M P C sines and cosines over its rate
//
// Adjoint, naive to fast: zeros or samples -> grid -> FFT -> images
//   spread_points<…, false>  a thread a point and coil, in the trajectory's order: atomic additions anywhere
//   spread_points<…, true>   the same in sorted order: neighbouring threads share cache lines
//   spread_shared            a block a region and coil: additions in shared memory, then one per cell
//   spread_tiles             a warp owns cells and visits the points that reach them, all coils at once: no atomics
//                            (order_samples before it, add_parts after)
//   spread_cells             one coil: a lane owns cells, all lanes visit the same points (add_cells after)
// Forward, naive to fast: images -> grid -> FFT -> samples
//   interpolate_points<…, false>  a thread a point and coil, in the trajectory's order
//   interpolate_points<…, true>   the same in sorted order
//   interpolate_tiles             a region of the grid in shared memory, weights once for all coils (restore_samples after)
//   gather_points, gather_cells   one coil in 2-D, 3-D: a thread a point, a warp a point
// Between images and grid: grid_lines, or pad_images, a library's FFT and crop_images
// Exact: every sample with every pixel; the adjoint, naive to fast
//   exact_scatter          a thread a sample, atomic additions to every point            (exact/pairs.cuh)
//   exact_gather           a thread a point: loop fission (exact_weigh) and interchange
//   exact_registers        the sum in registers
//   exact_constant         samples from constant memory
//   exact_structures       a sample's numbers side by side
//   exact_coarsened<false> eight points a thread
//   exact_coarsened<true>  sines and cosines by the special-function unit
//   exact_staged           samples through shared memory, all in one launch; forward: exact_forward_staged
//   exact_adjoint_product  one matrix product on tensor cores                            (exact/adjoint.cuh)
//   exact_forward_product  the same for the forward transform                            (exact/forward.cuh)
// Normal operator:
//   weigh_coils, multiply, combine_coils       around a library's FFTs of a doubled grid (toeplitz/toeplitz.cuh)
//   mix_coefficients                           instead of multiply: several images mixed by a matrix a cell
//   cross_mixed                                the same between our own FFTs
//   forward_rows, cross_lines, inverse_rows    our own FFTs, which skip zeros and unwanted values (toeplitz/lines.cuh)
// Sources: Barnett, Magland, af Klinteberg (2019); Shih, Wright, Andén, Blaschke, Barnett, "cuFINUFFT: a load-balanced GPU
// library for general-purpose nonuniform FFTs" (2021), for the shared-memory form of the adjoint.

#include "exact/adjoint.cuh"
#include "exact/forward.cuh"
#include "exact/pairs.cuh"

#include "gridding/gridding.cuh"
#include "toeplitz/toeplitz.cuh"
#include "toeplitz/lines.cuh"
