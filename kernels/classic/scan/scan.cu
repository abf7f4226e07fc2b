// Prefix sums; the contract is in kernels/classic/scan/__init__.py.
//
// `values` and `out` hold n values of type T. Inclusive: out[i] = values[0] + … + values[i]; exclusive: without values[i],
// from 0; segmented: from the last i' <= i with heads[i'] != 0. Floors: 2 n sizeof(T) bytes (and n of heads) over the
// bandwidth of a copy; n - 1 additions.
//
// One section per block, totals scanned in the same way and added (4 n values moved), naive to fast:
//   scan_kogge_stone      log2(n) rounds, two barriers each, n log2(n) additions
//   scan_double_buffered  two buffers in turn: one barrier per round
//   scan_brent_kung       up and down a tree: 2 n additions, two values per thread
//   scan_three_phase      one run per thread, then a scan of the runs' ends: n additions, few rounds
//   add_totals            second step of all of these
// Over blocks:
//   sum_tiles, scan_tiles       totals first, so that a section is read twice but written once (3 n values moved)
//   scan_single_pass            tiles publish their totals while their values are on the chip, and wait for their prefix
//                               (2 n values moved)
// Sources: Kogge and Stone (1973); Brent and Kung (1982); Harris, Sengupta and Owens, GPU Gems 3, chapter 39 (2007);
// Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back" (NVIDIA, 2016).

constexpr int THREADS = 256;

#include "carry.cuh"
#include "sections.cuh"
#include "tiles.cuh"
