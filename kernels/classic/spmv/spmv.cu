// Products y = A x of sparse matrices with vectors; the contract is in kernels/classic/spmv/__init__.py, the formats in
// formats.py.
//
// Value is float or double, for the matrix and both vectors; columns are int; row starts are int or long long (Offset).
//
// Floor for N nonzeros in R rows and C columns on a device that moves W bytes a second, with Value of v bytes, starts of o:
//   bytes  (N (v + 4) + R (o + v) + C v) / W     each number once; the 2 N operations never matter
// x is gathered: if neighbouring rows do not share columns, each nonzero reads a sector of 32 bytes from L2 instead.
//
// Kernels, naive to fast:
//   csr_thread             one thread per row                                                (rows.cuh)
//   csr_lanes              a warp, or some of its lanes, per row
//   ell                    a fixed number of slots per row, slot by slot                     (slots.cuh)
//   coo_atomic             one thread per nonzero, atomic additions
//   coo_segments           one run of sorted nonzeros per warp: segmented sums, no atomics   (segments.cuh)
//   (hybrid                ell, then coo_segments for the rest)
//   jds                    rows sorted by length, one thread per row
//   jds_transposed         the same, diagonal by diagonal
//   merge_tiles            equal numbers of rows plus nonzeros per block                     (merge.cuh)
// Sources: Bell and Garland, "Implementing sparse matrix-vector multiplication on throughput-oriented processors", SC 2009;
// Hwu, Kirk and El Hajj, "Programming Massively Parallel Processors", chapter 14; Merrill and Garland, "Merge-based
// parallel sparse matrix-vector multiplication", SC 2016.

#include "rows.cuh"

#include "merge.cuh"
#include "segments.cuh"
#include "slots.cuh"
