// Histograms; the contract is in kernels/classic/histogram/__init__.py.
//
// `values` holds n samples of `channels` interleaved channels. `counts` [channels, bins] has 64 bits and must be zero
// initially. Floors: n sizeof(sample) bytes over the bandwidth of reading; one increment per sample, of which the atomic
// units of a multiprocessor's shared memory do at most one per bank and clock.
//
// Samples of 8 and 16 bits, a bin a value, naive to fast:
//   histogram_sections   one thread per section of neighbours, atomics in device memory
//   histogram_strided    neighbouring threads, neighbouring samples
//   histogram_shared     a private histogram per block in shared memory
//   histogram_copies     one per warp
//   histogram_runs       equal neighbours are counted in a register first; 16 bytes per load
//   histogram_lanes      one per lane, each in its own bank: no conflicts for any data
//   histogram_halves     16-bit samples: 16-bit counters, so that shared memory holds twice as many bins
// Floats between edges:
//   histogram_edges      edges and counters in shared memory; histogram_edges_global if they do not fit
// Source: Kirk and Hwu, "Programming massively parallel processors", chapter on parallel histograms.

#include "atomics.cuh"
#include "edges.cuh"
