// Rank filters: the sample of a given rank among those of the window around each place, as kernels/rank/__init__.py
// defines it.
//
// Arrays are C-contiguous, [planes, three axes, inner]; the windows lie along the axes. Border modes are numbered in
// borders.cuh.
//
// Floors of N samples of b bytes with w samples in a window, on a device with bandwidth B that compares and exchanges C
// samples a second (packed in pairs if they have 16 bits, in fours of 8 bits):
//   bytes       2 N b / B    each sample is read once and written once
//   operations  c N / C      c: compare-exchanges of a result; a median of 3 × 3, 5 × 5, 7 × 7 takes about 7, 36, 90 if
//                            neighbours share what they have sorted
//
// Kernels, naive to fast:
//   rank_gather   one thread per result: its key bit by bit from the highest, #include "cuda/gather.cuh"
#include "cuda/ordered.cuh"
#include "cuda/square.cuh"
