// Sorting atoms, and their periodic images, into cells counted from the grid's origin (see cells.py).
//
// Counting and placing use integer atomics in arbitrary order; sort_cells then restores the input order within each cell.
// The result is therefore the same in every run, and for every part of a grid.
#pragma once

#include "cuda/direct.cuh"
#include "cuda/terms.cuh"

struct Cells {
    double origin[3];                // of the whole grid, angstrom
    double matrix[9], inverse[9];    // periodic cell: rows are its vectors
    double edge[3], per_edge[3];     // of a cell to sort into, angstrom, and their reciprocals
    double low[3], high[3];          // box, relative to the origin, that selects atoms
    double unit;                     // of sorted positions, angstrom
    long long atoms;
    int first[3], shape[3];
    int images, periodic, scheme;
};

// Position of an atom's image relative to the origin, in angstrom; false if it lies outside the box.
template <typename Real>
__device__ inline bool image_position(double (&at)[3], const Real* __restrict__ atom, const int* __restrict__ multiple,
                                      const Cells& cells) {
#pragma unroll
    for (int i = 0; i < 3; ++i) at[i] = atom[i] - cells.origin[i];
    if (cells.periodic) {
        double steps[3];
#pragma unroll
        for (int j = 0; j < 3; ++j)
            steps[j] = multiple[j] - floor(at[0] * cells.inverse[j] + at[1] * cells.inverse[3 + j] + at[2] * cells.inverse[6 + j]);
#pragma unroll
        for (int j = 0; j < 3; ++j)
            at[j] += steps[0] * cells.matrix[j] + steps[1] * cells.matrix[3 + j] + steps[2] * cells.matrix[6 + j];
    }
    return at[0] >= cells.low[0] && at[0] <= cells.high[0] && at[1] >= cells.low[1] && at[1] <= cells.high[1] &&
           at[2] >= cells.low[2] && at[2] <= cells.high[2];
}

// Index of the cell that a position lies in, or -1 outside. Every cell holds all of its atoms, whichever part of a grid the
// cells surround.
__device__ inline int cell_of(const double (&at)[3], const Cells& cells) {
    int cell = 0;
    bool inside = true;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const int place = static_cast<int>(floor(at[i] * cells.per_edge[i])) - cells.first[i];
        inside = inside && place >= 0 && place < cells.shape[i];
        cell = cell * cells.shape[i] + place;
    }
    return inside ? cell : -1;
}

// Atoms in each cell; uncharged ones contribute nothing and are skipped.
template <typename Real>
__global__ void count_atoms(const Real* __restrict__ atoms, const int* __restrict__ multiples, int* __restrict__ counts,
                            Cells cells) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= cells.atoms || atoms[4 * i + 3] == 0) return;
    for (int image = 0; image < cells.images; ++image) {
        double at[3];
        if (!image_position(at, atoms + 4 * i, multiples + 3 * image, cells)) continue;
        const int cell = cell_of(at, cells);
        if (cell >= 0) atomicAdd(counts + cell, 1);
    }
}

constexpr int SCAN_THREADS = 1024, SCAN_EACH = 4, SCANNED = SCAN_THREADS * SCAN_EACH;

__device__ inline int block_sum_before(int mine, int& total) {  // exclusive prefix sum over the block
    __shared__ int sums[SCAN_THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = mine;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        int whole = sums[lane];
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, whole, step);
            if (lane >= step) whole += other;
        }
        sums[lane] = whole;
    }
    __syncthreads();
    total = sums[SCAN_THREADS / 32 - 1];
    const int before = (warp == 0 ? 0 : sums[warp - 1]) + sum - mine;
    __syncthreads();
    return before;
}

// Atoms in each run of SCANNED cells.
__global__ void __launch_bounds__(SCAN_THREADS)
sum_cells(const int* __restrict__ counts, int* __restrict__ sums, int cells) {
    int mine = 0, total;
    for (int k = 0; k < SCAN_EACH; ++k) {
        const long long i = blockIdx.x * static_cast<long long>(SCANNED) + k * SCAN_THREADS + threadIdx.x;
        if (i < cells) mine += counts[i];
    }
    block_sum_before(mine, total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// starts[i] = atoms in cells before i, i = 0 … cells.
__global__ void __launch_bounds__(SCAN_THREADS)
scan_cells(const int* __restrict__ counts, const int* __restrict__ sums, int* __restrict__ starts, int cells) {
    int mine = 0, base, total;
    for (int i = threadIdx.x; i < blockIdx.x; i += SCAN_THREADS) mine += sums[i];
    block_sum_before(mine, base);
    const long long first = blockIdx.x * static_cast<long long>(SCANNED) + threadIdx.x * SCAN_EACH;
    int count[SCAN_EACH];
    mine = 0;
#pragma unroll
    for (int k = 0; k < SCAN_EACH; ++k) {
        count[k] = first + k < cells ? counts[first + k] : 0;
        mine += count[k];
    }
    int before = base + block_sum_before(mine, total);
#pragma unroll
    for (int k = 0; k < SCAN_EACH; ++k) {
        if (first + k <= cells) starts[first + k] = before;
        before += count[k];
    }
}

// Each atom's key into its cell, in any order; counts return to zero.
template <typename Real>
__global__ void place_atoms(const Real* __restrict__ atoms, const int* __restrict__ multiples, int* __restrict__ counts,
                            const int* __restrict__ starts, long long* __restrict__ keys, Cells cells) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= cells.atoms || atoms[4 * i + 3] == 0) return;
    for (int image = 0; image < cells.images; ++image) {
        double at[3];
        if (!image_position(at, atoms + 4 * i, multiples + 3 * image, cells)) continue;
        const int cell = cell_of(at, cells);
        if (cell < 0) continue;
        keys[starts[cell] + atomicSub(counts + cell, 1) - 1] = i * cells.images + image;
    }
}

// Each atom to its final place, by rank of its key within the cell. A position is a pair of floats with twice the digits,
// so that atoms near a tile stay precise relative to the tile.
template <typename Real>
__global__ void sort_cells(const Real* __restrict__ atoms, const int* __restrict__ multiples,
                           const int* __restrict__ starts, const long long* __restrict__ keys, float4* __restrict__ high,
                           float4* __restrict__ low, Cells cells) {
    const int slot = blockIdx.x * blockDim.x + threadIdx.x;
    if (slot >= starts[cells.shape[0] * cells.shape[1] * cells.shape[2]]) return;
    const long long key = keys[slot];
    const Real* atom = atoms + key / cells.images * 4;
    double at[3];
    image_position(at, atom, multiples + key % cells.images * 3, cells);
    const int cell = cell_of(at, cells);
    int rank = 0;
    for (int other = starts[cell]; other < starts[cell + 1]; ++other) rank += keys[other] < key;
    float upper[3], lower[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        at[i] /= cells.unit;
        upper[i] = static_cast<float>(at[i]);
        lower[i] = static_cast<float>(at[i] - upper[i]);
    }
    const int to = starts[cell] + rank;
    high[to] = make_float4(upper[0], upper[1], upper[2], prepared_charge(atom[3], cells.scheme));
    low[to] = make_float4(lower[0], lower[1], lower[2], 0);
}

// Zeroes the points closer than `radius` to an atom, in float64 like the CPU: a warp an atom.
template <typename Real>
__global__ void exclude_points(const Real* __restrict__ atoms, const int* __restrict__ multiples, float* __restrict__ map,
                               Cells cells, Points points, double radius) {
    const long long i = (blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x) / 32;
    if (i >= cells.atoms) return;
    for (int image = 0; image < cells.images; ++image) {
        double at[3];
        if (!image_position(at, atoms + 4 * i, multiples + 3 * image, cells)) continue;
        int begin[3], count[3];
        for (int axis = 0; axis < 3; ++axis) {
            const double first = floor((at[axis] - radius) / points.step[axis]) - points.first[axis];
            const double last = ceil((at[axis] + radius) / points.step[axis]) - points.first[axis];
            begin[axis] = static_cast<int>(fmax(first, 0.0));
            count[axis] = static_cast<int>(fmin(last, points.shape[axis] - 1.0)) - begin[axis] + 1;
        }
        if (count[0] <= 0 || count[1] <= 0 || count[2] <= 0) continue;
        const long long total = static_cast<long long>(count[0]) * count[1] * count[2];
        for (long long n = threadIdx.x % 32; n < total; n += 32) {
            const int x = begin[0] + static_cast<int>(n / count[2] / count[1]);
            const int y = begin[1] + static_cast<int>(n / count[2] % count[1]), z = begin[2] + static_cast<int>(n % count[2]);
            const double dx = (points.first[0] + x) * points.step[0] - at[0];
            const double dy = (points.first[1] + y) * points.step[1] - at[1];
            const double dz = (points.first[2] + z) * points.step[2] - at[2];
            if (dx * dx + dy * dy + dz * dz < radius * radius)
                map[(x * static_cast<long long>(points.shape[1]) + y) * points.shape[2] + z] = 0;
        }
    }
}
