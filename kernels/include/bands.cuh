// Images of [planes, rows, columns, channels] cut into tiles of columns (samples of a row, channels counted) and bands of
// rows, one of each to a block, which goes down its band some rows at a time.
#pragma once

#include "borders.cuh"
#include "packed.cuh"

constexpr int SECTOR_BYTES = 32;  // memory is written in these: blocks write whole ones (2 to 3 % on an H200)

struct Picture {
    int planes, rows, out_rows, band_rows, bands, tiles, columns, row_samples, out_row_samples;
    int centre_y, centre_x;  // input position, in samples, of output 0's centre ("valid" moves it)
    int mode_y, mode_x;
    int aligned_in, aligned_out;  // whether whole vectors can be loaded and stored
    unsigned fill;                // the sample beyond the edge in mode CONSTANT
};

struct Place {
    int tile, band;
    long long plane;
};

// Which part of the images a block filters. Tiles at the left and right edge take longest, so all of those come first: a
// device that is done with them last would stand idle but for a few blocks.
__device__ inline Place place_of(unsigned block, const Picture& picture) {
    const unsigned edges = min(picture.tiles, 2), outer = edges * picture.bands * picture.planes;
    const bool at_edge = block < outer;
    const unsigned across = at_edge ? edges : picture.tiles - edges, rest = at_edge ? block : block - outer;
    const int tile = static_cast<int>(rest % across) + (at_edge ? 0 : 1), row = rest / across;
    return {at_edge && tile == 1 ? picture.tiles - 1 : tile, row % picture.bands, row / picture.bands};
}
