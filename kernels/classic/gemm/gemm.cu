// Matrix products C = A B and C = A Aᵀ; the contract is in kernels/classic/gemm/__init__.py.
//
// A is float [m][k], B float [k][n], C float [m][n], all contiguous, rows first. Any sizes; k = 0 gives zeros.
//
// Floors on a device that moves W bytes and does F fused multiply-adds a second:
//   operations  m n k / F             (H200: 28.4 T/s measured; with tensor cores some hundred)
//   bytes       4 (m k + k n + m n) / W
// From about 100 on every side the operations decide; the steps bring each number read closer to the unit that uses it.
//
// C = A B, naive to fast:
//   naive             one thread per number of C, everything from global memory             (tiles.cuh)
//   tiles             tiles of A and B in shared memory: square, then rectangular
//   coarsened         a thread eight rows of a column: numbers of B stay in a register
//   volkov            a thread sixteen rows; B straight from global memory to registers, A alone is shared
//   double_buffered   a thread 8 × 8; the next tile is in flight while this one is used  (outer.cuh)
//   tensor            tensor cores, numbers as one TF32 or as two, three products each    (tensor.cuh)
// C = A Aᵀ, where one of the two tiles has to be turned (tiles.cuh):
//   gram_naive        one thread per number of C: neighbours read rows that lie far apart
//   gram_tiles        the tile is transposed while it is copied to shared memory, without and with a padded row
// Sources: NVIDIA, CUDA C++ Best Practices Guide, "Shared Memory"; Volkov and Demmel, "Benchmarking GPUs to tune dense
// linear algebra", SC 2008; Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022.

#include "tiles.cuh"

#include "outer.cuh"
#include "tensor.cuh"
