// Images of [planes, rows, columns, channels] divided into tiles of columns (samples of a row, including channels) and bands
// of rows. A block goes down one band of one tile, some rows at a time.
#pragma once

#include "borders.cuh"
#include "packed.cuh"

constexpr int SECTOR_BYTES = 32;  // unit of writes to memory; writing whole ones gains 2 to 3 % on an H200

struct Picture {
    int planes, rows, out_rows, bands, tiles, columns, row_samples, out_row_samples;
    int centre_y, centre_x;  // input position, in samples, of output 0's centre ("valid" moves it)
    int mode_y, mode_x;
    int aligned_in, aligned_out;  // whether whole vectors can be loaded and stored
    unsigned fill;                // the sample beyond the edge in mode CONSTANT
};

// A line cut into pieces, one a block (kernels/smoothing/cuda/block_partition.py): runs of equal pieces, the longest first.
// Run i ends before piece `last`[i]; its pieces are `more`[i] positions longer than those of the next run.
struct BlockPartition {
    static constexpr int RUNS = 8;
    int last[RUNS], more[RUNS];
    __device__ int begin(int piece) const {
        int begin = 0;
#pragma unroll
        for (int run = 0; run < RUNS; ++run) begin += min(piece, last[run]) * more[run];
        return begin;
    }
};

struct Place {
    int tile, band;
    long long plane;
};

// The part of the images that a block filters. Tiles at the left and right edge take longest, so they all come first: if
// they came last, most of the device would be idle at the end. The last bands, which have fewer rows, come last.
__device__ inline Place place_of(unsigned block, const Picture& picture) {
    const unsigned edges = min(picture.tiles, 2), outer = edges * picture.bands * picture.planes;
    const bool at_edge = block < outer;
    const unsigned across = at_edge ? edges : picture.tiles - edges, rest = at_edge ? block : block - outer;
    const int tile = static_cast<int>(rest % across) + (at_edge ? 0 : 1), row = rest / across;
    return {at_edge && tile == 1 ? picture.tiles - 1 : tile, row / picture.planes, row % picture.planes};
}

// The same for blocks that walk along strips of rows, a band each. Neighbouring strips run at the same time, so that the
// halos they share are in L2. The last strip comes first, since those at the edges take longest.
__device__ inline Place place_in_strips(unsigned block, const Picture& picture) {
    const unsigned band = (block + picture.bands - 1) % picture.bands, rest = block / picture.bands;
    return {static_cast<int>(rest / picture.planes), static_cast<int>(band), rest % picture.planes};
}
