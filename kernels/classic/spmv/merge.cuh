// Merge-based product of a CSR matrix. Row ends and nonzeros form one list of steps: add a nonzero, or finish a row. Equal
// parts of the list give every block equal work for any row lengths. Floor: see spmv.cu.
#pragma once

#include "segments.cuh"

constexpr int STEPS = 8, TILE_STEPS = THREADS * STEPS;

// The number of rows before a step: the first row r with r + (its end) >= step. A warp tests 32 rows at a time, which needs
// few dependent reads.
template <typename Offset>
__device__ inline int rows_before(const Offset* __restrict__ starts, int rows, long long nonzeros, long long step) {
    const int lane = threadIdx.x % 32;
    int low = static_cast<int>(max(step - nonzeros, 0ll)), high = static_cast<int>(min(step, static_cast<long long>(rows)));
    while (low < high) {
        const int stride = (high - low - 1) / 32 + 1;
        const long long row = low + lane * static_cast<long long>(stride);
        const bool before = row < high && row + starts[row + 1] < step;
        const int found = __popc(__ballot_sync(ALL_LANES, before));
        if (found == 0) {
            high = low;
        } else {
            high = static_cast<int>(min(static_cast<long long>(high), low + found * static_cast<long long>(stride)));
            low += (found - 1) * stride + 1;
        }
    }
    return low;
}

// The sum carried to each thread from the earlier threads of its block, back to the last beginning of a row: `sum` is the
// thread's own sum since a row last began, `begun` whether one begins in it. In a fixed order.
template <typename Value>
__device__ inline Value carried_to(Value sum, bool begun, Value* warp_sums, bool* warp_begun) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned lanes = __ballot_sync(ALL_LANES, begun);
    const Value inclusive = segment_sum(sum, begun);
    if (lane == 31) {
        warp_sums[warp] = inclusive;
        warp_begun[warp] = lanes != 0;
    }
    Value before = __shfl_up_sync(ALL_LANES, inclusive, 1);
    if (lane == 0) before = 0;
    __syncthreads();
    if (lanes & ((1u << lane) - 1)) return before;
    for (int w = warp - 1; w >= 0; --w) {
        before += warp_sums[w];
        if (warp_begun[w]) break;
    }
    return before;
}

// The index of a number in shared memory, with 16 bytes of padding after every 128, so that threads that read eight
// consecutive numbers have no bank conflicts.
template <typename Value>
__device__ constexpr int padded(unsigned i) {
    return static_cast<int>(i + i / unsigned(128 / sizeof(Value)) * unsigned(16 / sizeof(Value)));
}

// merge_tiles: one block per part. Products are formed in memory order, with many loads in flight, and a segmented scan
// turns them into running sums of their rows. A row's sum is then at its last nonzero; the sum of a row that ends in a later
// part is carried. Short rows cost nothing in the scan, and no row needs a search. Each block searches the start of its
// part itself, which is faster than a separate kernel.
// Warps read whole lines of values and columns, independent of where a part begins: shared lines would be read twice from
// L2, which is busy with x (H200: 265 us before, 253 after, on a power law of 3.2e7 nonzeros).
// Minimum blocks per multiprocessor: as many as registers allow without spilling (nvcc 13, sm_90).
template <typename Value, typename Offset>
__global__ void __launch_bounds__(THREADS, sizeof(Value) == 4 ? 8 : 5)
merge_tiles(const Value* __restrict__ values, const int* __restrict__ columns, const Offset* __restrict__ starts,
            const Value* __restrict__ x, Value* __restrict__ y, int rows, long long nonzeros,
            int* __restrict__ carry_rows, Value* __restrict__ carries) {
    constexpr int VECTORS = STEPS * sizeof(Value) / 16, LINE = 32;
    __shared__ __align__(16) Value sums[padded<Value>(TILE_STEPS)];
    __shared__ __align__(8) unsigned char heads[TILE_STEPS];  // where a row begins
    __shared__ unsigned short begins[TILE_STEPS + 1];
    __shared__ Value warp_sums[THREADS / 32];
    __shared__ bool warp_begun[THREADS / 32];
    __shared__ int bounds[2];
    const long long step = static_cast<long long>(blockIdx.x) * TILE_STEPS, end = min(step + TILE_STEPS, rows + nonzeros);
    const int warp = threadIdx.x / 32;
    if (warp < 2) {
        const int found = rows_before(starts, rows, nonzeros, warp == 0 ? step : end);
        if (threadIdx.x % 32 == 0) bounds[warp] = found;
    }
    __syncthreads();
    const int row = bounds[0], next_row = bounds[1], held_rows = next_row - row;
    const long long nonzero = step - row;
    const int held = static_cast<int>(end - next_row - nonzero);
    // A thread's nonzeros: `first`, which may be before the part, and every THREADS-th after it.
    const int first = static_cast<int>(threadIdx.x - static_cast<unsigned>(nonzero) % LINE);
    const Value* my_values = materialized(values + nonzero + first);
    const int* my_columns = materialized(columns + nonzero + first);
    Value value[STEPS];
    int column[STEPS];
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        const bool exists = (k > 0 || first >= 0) && first + k * THREADS < held;
        value[k] = exists ? read_once(my_values + k * THREADS) : Value(0);
        column[k] = exists ? read_once(my_columns + k * THREADS) : NONE;
    }
    // The first row starts load at the same time, and x as soon as the columns arrive, before the heads are set.
    const Offset* my_starts = materialized(starts + row + threadIdx.x);
    Offset start = 0, next_start = 0;
    if (threadIdx.x <= held_rows) start = my_starts[0];
    if (threadIdx.x < held_rows) next_start = my_starts[1];
    *reinterpret_cast<unsigned long long*>(heads + threadIdx.x * STEPS) = 0;
    Value of_x[STEPS];
#pragma unroll
    for (int k = 0; k < STEPS; ++k) of_x[k] = column[k] != NONE ? x[column[k]] : Value(0);
    __syncthreads();
#pragma unroll 1
    for (int r = threadIdx.x; r <= held_rows;) {
        const long long begin = start - nonzero;
        const bool empty = r < held_rows && next_start == start;
        begins[r] = static_cast<unsigned short>(max(begin, 0ll));
        if (begin >= 0 && begin < held && !empty) heads[begin] = 1;
        r += THREADS;
        if (r <= held_rows) start = starts[row + r];
        if (r < held_rows) next_start = starts[row + r + 1];
    }
    Value* to = sums + padded<Value>(first + THREADS) - padded<Value>(THREADS);
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
        if (k > 0 || first >= 0) to[k * padded<Value>(THREADS)] = value[k] * of_x[k];
    const int last = first + TILE_STEPS;
    if (last < held)  // a part of few rows that begins within a line
        to[padded<Value>(TILE_STEPS)] = read_once(values + nonzero + last) * x[read_once(columns + nonzero + last)];
    __syncthreads();

    uint4* mine = reinterpret_cast<uint4*>(sums + padded<Value>(threadIdx.x * STEPS));
    Value run[STEPS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) reinterpret_cast<uint4*>(run)[v] = mine[v];
    const uint2 begun = *reinterpret_cast<const uint2*>(heads + threadIdx.x * STEPS);  // a byte a nonzero
#pragma unroll
    for (int k = 1; k < STEPS; ++k)
        if (!((k < 4 ? begun.x : begun.y) & 1u << 8 * (k % 4))) run[k] += run[k - 1];
    const Value before = carried_to(run[STEPS - 1], (begun.x | begun.y) != 0, warp_sums, warp_begun);
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        const unsigned until = k < 4 ? begun.x & (2u << 8 * k) - 1 : begun.x | (begun.y & (2u << 8 * (k - 4)) - 1);
        if (until == 0) run[k] += before;
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) mine[v] = reinterpret_cast<const uint4*>(run)[v];
    __syncthreads();

#pragma unroll 1
    for (int r = threadIdx.x; r < held_rows; r += THREADS)
        y[row + r] = begins[r + 1] > begins[r] ? sums[padded<Value>(begins[r + 1] - 1)] : Value(0);
    if (threadIdx.x == 0) {
        carry_rows[blockIdx.x] = next_row;
        carries[blockIdx.x] = held > begins[held_rows] ? sums[padded<Value>(held - 1)] : Value(0);
    }
}
