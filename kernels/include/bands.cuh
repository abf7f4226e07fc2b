// Walking down bands of an image of [planes, rows, columns, channels]: each thread of a block has four neighbouring columns
// (samples of a row, channels counted), and the block goes down its band ROWS rows at a time.
#pragma once

#include "borders.cuh"
#include "packed.cuh"

constexpr int ROWS = 8;
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

// Where a thread's four columns come from.
struct Columns {
    int first, source[4];
    bool whole;  // one vector load from `first` brings them all
};

template <int CHANNELS>
__device__ inline Columns columns_at(int first, const Picture& picture) {
    Columns columns;
    columns.first = first;
    columns.whole = picture.aligned_in && first >= 0 && first + 4 <= picture.row_samples;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int sample = first + j, shifted = sample + 1024 * CHANNELS;  // never negative
        const int from = border_index(shifted / CHANNELS - 1024, picture.columns, picture.mode_x);
        columns.source[j] = from < 0 ? -1 : from * CHANNELS + shifted % CHANNELS;
    }
    return columns;
}

// The thread's columns in COUNT rows from `position` on. All threads of a warp call this, for the same rows.
template <int COUNT, typename Sample>
__device__ inline void load_rows(Packed<Sample>* rows, const Sample* plane, int position, const Columns& columns,
                                 const Picture& picture) {
    const bool inside = position >= 0 && position + COUNT <= picture.rows;
    int mine = position + static_cast<int>(threadIdx.x) % 32;  // each lane looks up a row for all
    if (!inside) mine = border_index(mine, picture.rows, picture.mode_y);
    if (inside && columns.whole) {
        const Sample* from = plane + position * (long long)picture.row_samples + columns.first;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) rows[i] = load_packed(from + i * (long long)picture.row_samples);
    }
    if (__all_sync(~0u, inside && columns.whole)) return;
    // At the edges every load is made, wherever it must not count from sample 0, so that none waits for another.
    int row[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) row[i] = __shfl_sync(~0u, mine, i);
    if (inside && columns.whole) return;
    Sample samples[COUNT][4];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const Sample* line = plane + max(row[i], 0) * (long long)picture.row_samples;
#pragma unroll
        for (int j = 0; j < 4; ++j) samples[i][j] = __ldg(line + max(columns.source[j], 0));
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            put(rows[i], j, row[i] < 0 || columns.source[j] < 0 ? picture.fill : bits_of(samples[i][j]));
}

template <typename Sample>
__device__ inline void prefetch_rows(const Sample* plane, int position, const Columns& columns, const Picture& picture) {
    if (position < 0 || position + ROWS > picture.rows || !columns.whole) return;
    const Sample* from = plane + position * (long long)picture.row_samples + columns.first;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i * (long long)picture.row_samples));
}
