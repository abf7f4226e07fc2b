// Matrix products C = A B and C = A Aᵀ; the contract is in kernels/classic/gemm/__init__.py.
//
// A is float [m][k], B float [k][n], C float [m][n], all row-major and contiguous. Any sizes; k = 0 gives zeros.
//
// Floors on a device that moves W bytes and does F fused multiply-adds a second:
//   operations  m n k / F             (H200: 28.4 T/s measured; several hundred with tensor cores)
//   bytes       4 (m k + k n + m n) / W
// From sides of about 100 the operations decide; each step moves the operands closer to the arithmetic units.
//
// C = A B, naive to fast:
//   naive             one thread per number of C, everything from global memory                     (tiles.cuh)
//   tiles             tiles of A and B in shared memory: square, then rectangular
//   coarsened         eight rows of a column per thread: numbers of B stay in a register
//   volkov            sixteen rows per thread; B from global memory to registers, only A in shared memory
//   double_buffered   8 × 8 results per thread; the next tile loads while this one is used          (outer.cuh)
//   tensor            tensor cores, numbers as one TF32, or as two with three products              (tensor.cuh)
// C = A Aᵀ, where one of the two tiles must be transposed (tiles.cuh):
//   gram_naive        one thread per number of C: neighbouring threads read rows that are far apart
//   gram_tiles        the tile is transposed while it is copied to shared memory, with and without padded rows
// Sources: NVIDIA, CUDA C++ Best Practices Guide, "Shared Memory"; Volkov and Demmel, "Benchmarking GPUs to tune dense
// linear algebra", SC 2008; Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022.

#include "tiles.cuh"

#include "outer.cuh"
#include "tensor.cuh"
