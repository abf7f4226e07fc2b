// tiles: the sum within a cutoff in production. A warp computes 4 × 4 × 8 points, a lane four of them: two in each half.
//
// Lanes list the columns of cells within reach of the tile, one each; the columns' atoms (contiguous, since cells run along
// z) are distributed over the lanes. Each lane tests one atom against the boxes of the tile's two halves and queues it if it
// hits: one queue for hits of both halves, one for the lower, one for the upper. A point thus computes the atoms near its
// own 4 × 4 × 4 box, 1.3 times the useful pairs at 0.5 Å and 12 Å, while most atoms are loaded once for four points a lane.
//
// The order in which a point sums its atoms depends only on the tile and the sorted atoms: tiles are counted from the whole
// grid's origin, and a tile visits the same complete cells whichever part of the grid is computed.
#pragma once

#include "cuda/cells.cuh"
#include "cuda/terms.cuh"

constexpr int WARPS = 4, RESIDENT = 32;  // of a block: 2 × 2 tiles, neighbours in x and y; of a multiprocessor
constexpr int TILE = 4;  // points of a half along each axis
constexpr int FULL = 96, QUEUE = FULL + 32;
constexpr int HALF_FULL = 32, HALF_QUEUE = HALF_FULL + 32;
constexpr int UNROLL = 4;
constexpr int ATOM = sizeof(float4);
constexpr float MARGIN = 1.00002f;  // of the box tests, squared; the terms are exact zeros beyond the cutoff

// A warp's part of shared memory, addressed by 32-bit addresses throughout: the compiler would convert pointers anew at
// every access.
struct Queues {
    float4 both[QUEUE], lower[HALF_QUEUE], upper[HALF_QUEUE];
    int after[32], shift[32];  // of the listed columns: atoms up to its end; from that count to an index of the arrays
};
constexpr unsigned LOWER = QUEUE * ATOM, UPPER = LOWER + HALF_QUEUE * ATOM, AFTER = UPPER + HALF_QUEUE * ATOM;
constexpr unsigned SHIFT_OF = AFTER + 32 * sizeof(int);

__device__ inline float4 shared_atom(unsigned address) {
    float4 atom;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(atom.x), "=f"(atom.y), "=f"(atom.z), "=f"(atom.w)
                 : "r"(address)
                 : "memory");
    return atom;
}

__device__ inline void put_shared_atom(unsigned address, const float4& atom) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(atom.x), "f"(atom.y), "f"(atom.z),
                 "f"(atom.w)
                 : "memory");
}

__device__ inline int shared_int(unsigned address) {
    int value;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ inline void put_shared_int(unsigned address, int value) {
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ inline unsigned lanes_before() {
    unsigned mask;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
    return mask;
}

__device__ inline float gap(float distance, float half) { return fmaxf(fabsf(distance) - half, 0.0f); }

struct Lane {
    float x, y, z[2][2], sum[2][2];  // of its points, relative to the tile's anchor; [half][point]
};

// Adds the atoms of a queue, in whole groups of UNROLL, to the points of the halves FROM … TO - 1, and moves the rest to
// the front; the last time the queue is padded with atoms of zero charge.
template <int SCHEME, bool BY_DISTANCE, int FROM, int TO>
__device__ inline void drain(Lane& lane, unsigned queue, int& count, bool last, const Points& points) {
    const int number = threadIdx.x % 32;
    if (last) {
        const int missing = -count & (UNROLL - 1);
        if (number < missing) put_shared_atom(queue + (count + number) * ATOM, make_float4(100.0f, 100.0f, 100.0f, 0));
        count += missing;
    }
    __syncwarp();
    const int rest = count % UNROLL;
    const unsigned end = queue + (count - rest) * ATOM;
#pragma unroll 1
    for (unsigned at = queue; at != end; at += UNROLL * ATOM)
#pragma unroll
        for (int a = 0; a < UNROLL; ++a) {
            const float4 atom = shared_atom(at + a * ATOM);
            const float across = across_of(lane.x, lane.y, atom, points.softening);
#pragma unroll
            for (int half = FROM; half < TO; ++half)
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    add_term<SCHEME, BY_DISTANCE>(lane.sum[half][k], lane.z[half][k] - atom.z, across, atom.w, points.split);
        }
    __syncwarp();
    if (number < rest) put_shared_atom(queue + number * ATOM, shared_atom(end + number * ATOM));
    __syncwarp();
    count = rest;
}

// A tile's position, in units of the cutoff.
struct Tile {
    int corner[3];                 // first point, in the whole grid
    double centre[3], half[3];     // of the box of its points
    int first_column[2], columns[2];
};

// Lists those of 32 columns, starting at `base`, that hold atoms near the tile; returns the number of these atoms.
__device__ inline int list_columns(unsigned queues, int base, const Tile& tile, const int* __restrict__ starts,
                                   const Cells& cells) {
    const int column = base + static_cast<int>(threadIdx.x) % 32;
    int begin = 0, count = 0;
    if (column < tile.columns[0] * tile.columns[1]) {
        const int cx = tile.first_column[0] + column / tile.columns[1], cy = tile.first_column[1] + column % tile.columns[1];
        const float gx = gap(static_cast<float>((cells.first[0] + cx + 0.5) * cells.edge[0] - tile.centre[0]),
                             static_cast<float>(0.5 * cells.edge[0] + tile.half[0]));
        const float gy = gap(static_cast<float>((cells.first[1] + cy + 0.5) * cells.edge[1] - tile.centre[1]),
                             static_cast<float>(0.5 * cells.edge[1] + tile.half[1]));
        const float left = MARGIN - gx * gx - gy * gy;
        if (left > 0) {
            const double reach = sqrtf(left) + tile.half[2];
            const int z0 = static_cast<int>(floor((tile.centre[2] - reach) * cells.per_edge[2])) - cells.first[2];
            const int z1 = static_cast<int>(floor((tile.centre[2] + reach) * cells.per_edge[2])) - cells.first[2];
            const int* of = starts + (cx * cells.shape[1] + cy) * cells.shape[2];
            begin = __ldg(of + z0);
            count = __ldg(of + z1 + 1) - begin;
        }
    }
    const unsigned listed = __ballot_sync(~0u, count > 0);
    int after = count;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, after, step);
        if (static_cast<int>(threadIdx.x) % 32 >= step) after += other;
    }
    if (count > 0) {
        const unsigned place = __popc(listed & lanes_before()) * sizeof(int);
        put_shared_int(queues + AFTER + place, after);
        put_shared_int(queues + SHIFT_OF + place, begin - (after - count));
    }
    __syncwarp();
    return __shfl_sync(~0u, after, 31);
}

// The warp's tile; false if it has no point in this part of the grid.
__device__ inline bool find_tile(Tile& tile, const Points& points, const Cells& cells) {
    const int warp = threadIdx.x / 32;
    const int size[3] = {TILE, TILE, 2 * TILE}, tiles_a_block[3] = {2, 2, 1}, mine[3] = {warp / 2, warp % 2, 0};
    unsigned rest = blockIdx.x;
    bool any = true;
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
        const int span = size[axis] * tiles_a_block[axis], first = points.first[axis] / span;
        const int end = points.first[axis] + points.shape[axis], blocks = (end - 1) / span - first + 1;
        tile.corner[axis] = (first + static_cast<int>(rest % blocks)) * span + mine[axis] * size[axis];
        rest /= blocks;
        any = any && tile.corner[axis] < end && tile.corner[axis] + size[axis] > points.first[axis];
        tile.half[axis] = 0.5 * (size[axis] - 1) * points.step[axis];
        tile.centre[axis] = tile.corner[axis] * points.step[axis] + tile.half[axis];
    }
#pragma unroll
    for (int axis = 0; axis < 2; ++axis) {
        const double reach = tile.half[axis] + MARGIN;
        tile.first_column[axis] = static_cast<int>(floor((tile.centre[axis] - reach) * cells.per_edge[axis])) - cells.first[axis];
        const int last = static_cast<int>(floor((tile.centre[axis] + reach) * cells.per_edge[axis])) - cells.first[axis];
        tile.columns[axis] = last - tile.first_column[axis] + 1;
    }
    return any;
}

// Here `cells` is in units of the cutoff throughout.
template <int SCHEME, bool BY_DISTANCE>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT / WARPS)
tiles(const float4* __restrict__ high, const float4* __restrict__ low, const int* __restrict__ starts,
      float* __restrict__ map, const __grid_constant__ Points points, const __grid_constant__ Cells cells) {
    __shared__ Queues shared[WARPS];
    unsigned both_queue = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + threadIdx.x / 32 * sizeof(Queues);
    asm volatile("" : "+r"(both_queue));
    const unsigned lower_queue = both_queue + LOWER, upper_queue = both_queue + UPPER;
    Tile tile;
    if (!find_tile(tile, points, cells)) return;

    // The anchor is a float near the centre: differences from it are exact, and small near the tile.
    float anchor[3], box[3];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
        anchor[axis] = static_cast<float>(tile.centre[axis]);
        const double extent = axis == 2 ? 0.5 * (TILE - 1) * points.step[2] : tile.half[axis];
        box[axis] = static_cast<float>(extent + fabs(tile.centre[axis] - anchor[axis]));
        asm volatile("" : "+f"(anchor[axis]), "+f"(box[axis]));  // keeps the compiler from recomputing them in the loop
    }
    const float middle = static_cast<float>(0.5 * TILE * points.step[2]);  // offset of the halves' centres
    const int number = threadIdx.x % 32, i = number / 8, j = number / 2 % 4, k = number % 2 * 2;
    Lane lane;
    lane.x = static_cast<float>((tile.corner[0] + i) * points.step[0] - anchor[0]);
    lane.y = static_cast<float>((tile.corner[1] + j) * points.step[1] - anchor[1]);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        lane.z[n / 2][n % 2] = static_cast<float>((tile.corner[2] + k + n % 2 + n / 2 * TILE) * points.step[2] - anchor[2]);
        lane.sum[n / 2][n % 2] = 0;
    }

    int both = 0, lower = 0, upper = 0;
    for (int base = 0; base < tile.columns[0] * tile.columns[1]; base += 32) {
        const int total = list_columns(both_queue, base, tile, starts, cells);
        unsigned column = both_queue + AFTER;
        for (int n = number; n < total + number; n += 32) {
            const int mine = min(n, total - 1);
            while (mine >= shared_int(column)) column += sizeof(int);
            const int at = mine + shared_int(column + (SHIFT_OF - AFTER));
            const float4 coarse = __ldg(high + at), fine = __ldg(low + at);
            const float4 atom = make_float4((coarse.x - anchor[0]) + fine.x, (coarse.y - anchor[1]) + fine.y,
                                            (coarse.z - anchor[2]) + fine.z, coarse.w);
            const float gx = gap(atom.x, box[0]), gy = gap(atom.y, box[1]);
            const float left = n < total ? MARGIN - fmaf(gx, gx, gy * gy) : -1.0f;
            const float down = gap(atom.z + middle, box[2]), up = gap(atom.z - middle, box[2]);
            const bool down_hit = down * down <= left, up_hit = up * up <= left;
            const unsigned down_hits = __ballot_sync(~0u, down_hit), up_hits = __ballot_sync(~0u, up_hit);
            const unsigned twice = down_hits & up_hits;
            const unsigned alike = down_hit == up_hit ? twice : (down_hit ? down_hits : up_hits) & ~twice;
            const unsigned end = down_hit == up_hit ? both_queue + both * ATOM
                                                    : down_hit ? lower_queue + lower * ATOM : upper_queue + upper * ATOM;
            if (down_hit || up_hit) put_shared_atom(end + __popc(alike & lanes_before()) * ATOM, atom);
            both += __popc(twice), lower += __popc(down_hits & ~twice), upper += __popc(up_hits & ~twice);
            if (both > FULL) drain<SCHEME, BY_DISTANCE, 0, 2>(lane, both_queue, both, false, points);
            if (max(lower, upper) > HALF_FULL) {
                drain<SCHEME, BY_DISTANCE, 0, 1>(lane, lower_queue, lower, false, points);
                drain<SCHEME, BY_DISTANCE, 1, 2>(lane, upper_queue, upper, false, points);
            }
        }
        __syncwarp();
    }
    drain<SCHEME, BY_DISTANCE, 0, 2>(lane, both_queue, both, true, points);
    drain<SCHEME, BY_DISTANCE, 0, 1>(lane, lower_queue, lower, true, points);
    drain<SCHEME, BY_DISTANCE, 1, 2>(lane, upper_queue, upper, true, points);

    const int px = tile.corner[0] + i - points.first[0], py = tile.corner[1] + j - points.first[1];
    if (px < 0 || px >= points.shape[0] || py < 0 || py >= points.shape[1]) return;
    float* to = map + (px * static_cast<long long>(points.shape[1]) + py) * points.shape[2];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const int pz = tile.corner[2] + k + n % 2 + n / 2 * TILE - points.first[2];
        if (pz >= 0 && pz < points.shape[2]) to[pz] = lane.sum[n / 2][n % 2] * points.scale;
    }
}
