// Rank filters: the sample of a given rank among those of the window around each place, as kernels/rank/__init__.py
// defines it.
//
// Arrays are C-contiguous, [planes, three axes, inner]; the windows lie along the axes. Border modes are numbered in
// borders.cuh.
//
// Floors of N samples of b bytes with w samples in a window, on a device with bandwidth B with C minima or maxima
// of samples a second (two at once if they have at most 16 bits: 29 T/s measured on an H200):
//   bytes       2 N b / B    each sample is read once and written once
//   operations  m N / C      m: minima and maxima of a result: of medians of 3 × 3, 5 × 5 and 7 × 7 about 9, 28 and 60
//
// Kernels, naive to fast:
//   rank_gather (gather.cuh)     one thread per result, by bisection of the keys: each step counts the window's samples
//   rank_ordered (ordered.cuh)   a moving window over the sorted samples of a tile: cost grows with the window's surface
//   rank_bitsets (bitsets.cuh)   boxes of medium size: bits over the sorted samples of a tile, at a cost that hardly grows with
//                                the window
//   median_tile (tile.cuh)       medians of squares of 9 to 15, by networks in registers, tiles within tiles
//   median_square (square.cuh)   medians of 3 × 3, 5 × 5 and 7 × 7, by networks in registers that neighbours share
//   median_rows (rows.cuh)       those of 3 × 3, if rows are aligned: one pass down rows of registers
//   median_cube (cube.cuh)       medians of 3 × 3 × 3 and 5 × 5 × 5, likewise
//   extreme_box, extreme_strip   minima and maxima of boxes of two axes in one pass over memory, at a cost that does not grow
//                                with the window (extremes/box.cuh, extremes/strip.cuh)
//   extreme_slabs                those of windows of odd numbers of up to 101 rows and columns, and openings of them in one pass, by
//                                a block (extremes/slabs.cuh)
//   extreme_down and _along       those of many rows, an axis a pass (extremes/sweeps.cuh)
//   extreme_rows                 those along rows of pixels with channels, if windows are wide (extremes/words.cuh)

#include "cuda/bitsets.cuh"
#include "cuda/cube.cuh"
#include "cuda/extremes/box.cuh"
#include "cuda/extremes/slabs.cuh"
#include "cuda/extremes/strip.cuh"
#include "cuda/extremes/sweeps.cuh"
#include "cuda/gather.cuh"
#include "cuda/ordered.cuh"
#include "cuda/rows.cuh"
#include "cuda/square.cuh"
#include "cuda/tile.cuh"
