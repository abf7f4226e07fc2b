// Tiles scanned by a block. A tile is WARPS × ROWS × 32 × across values, `across` those of 16 bytes: a warp has ROWS
// rows, and a lane 16 bytes of each. The values wait in shared memory, each lane's for that lane alone, so that many
// tiles can be on their way into a multiprocessor at once, whatever registers are left. float is summed in double.
#pragma once

#include "async_copy.cuh"

constexpr int WARPS = THREADS / 32;

template <typename T>
struct Summed {
    typedef T Type;
};
template <>
struct Summed<float> {
    typedef double Type;
};

// The sum of what lies between two places, from the last head between them if there is one.
template <typename S, bool SEGMENTED>
struct Prefix {
    S sum;
    bool head;
    static __device__ Prefix none() { return {S(0), false}; }
    __device__ Prefix then(const Prefix& next) const {
        if constexpr (SEGMENTED) return {next.head ? next.sum : sum + next.sum, head || next.head};
        return {sum + next.sum, false};
    }
    __device__ Prefix from_lane(int lane) const {
        return {__shfl_sync(~0u, sum, lane), SEGMENTED && __shfl_sync(~0u, static_cast<int>(head), lane)};
    }
    __device__ Prefix lanes_below(int distance) const {
        return {__shfl_up_sync(~0u, sum, distance), SEGMENTED && __shfl_up_sync(~0u, static_cast<int>(head), distance)};
    }
    __device__ Prefix lanes_above(int distance) const {
        return {__shfl_down_sync(~0u, sum, distance), SEGMENTED && __shfl_down_sync(~0u, static_cast<int>(head),
            distance)};
    }
};

template <typename T>
struct Scan {
    const T* in;
    T* out;
    const unsigned char* heads;  // null: not segmented
    long long n;
    int exclusive;
    int aligned;  // whether in and out can be taken 16 bytes at a time, and heads as many at a time
};

template <typename T, bool SEGMENTED>
struct Tile {
    // As many rows as 48 KB hold: tiles wait for each other, and the larger, the less often. A lane's heads are 32 bits.
    static constexpr int ROWS = SEGMENTED ? 8 : 11;
    static constexpr int ACROSS = 16 / sizeof(T), ROW = 32 * ACROSS, SIZE = WARPS * ROWS * ROW;
    typedef typename Summed<T>::Type Number;
    typedef Prefix<Number, SEGMENTED> Sum;
    struct alignas(16) Vector {
        T at[ACROSS];
    };
    struct alignas(ACROSS) Heads {
        unsigned char at[ACROSS];
    };
    typedef Vector Staged[ROWS][THREADS];

    Vector (*staged)[THREADS];
    unsigned heads;   // one bit a value
    long long first;  // of the lane's values in the first row
    bool whole;       // all of the tile's places are there, and may be taken 16 bytes at a time

    __device__ Tile(const Scan<T>& scan, long long tile, Staged& shared) : staged(shared), heads(0) {
        first = tile * SIZE + (threadIdx.x / 32) * (ROWS * ROW) + threadIdx.x % 32 * ACROSS;
        whole = scan.aligned && (tile + 1) * SIZE <= scan.n;
        if (whole) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) copy_16_bytes(&staged[r][threadIdx.x], scan.in + first + r * ROW);
            if constexpr (SEGMENTED)
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const Heads found = *reinterpret_cast<const Heads*>(scan.heads + first + r * ROW);
#pragma unroll
                    for (int k = 0; k < ACROSS; ++k) heads |= static_cast<unsigned>(found.at[k] != 0) << (r * ACROSS
                        + k);
                }
            wait_for_copies();
        } else {
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int k = 0; k < ACROSS; ++k) {
                    const long long i = first + r * ROW + k;
                    staged[r][threadIdx.x].at[k] = i < scan.n ? scan.in[i] : T(0);
                    if (SEGMENTED && i < scan.n && scan.heads[i]) heads |= 1u << (r * ACROSS + k);
                }
        }
    }

    __device__ Sum value(const Vector& vector, int r, int k) const {
        return {static_cast<Number>(vector.at[k]), SEGMENTED && (heads >> (r * ACROSS + k) & 1)};
    }

    // What lies before the lane's values of each row within the warp; returns the warp's total.
    __device__ Sum scan_warp(Sum (&before)[ROWS]) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const Vector vector = staged[r][threadIdx.x];
            before[r] = value(vector, r, 0);
#pragma unroll
            for (int k = 1; k < ACROSS; ++k) before[r] = before[r].then(value(vector, r, k));
        }
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Sum below = before[r].lanes_below(distance);
                if (lane >= distance) before[r] = below.then(before[r]);
            }
        Sum total = Sum::none();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const Sum row = before[r].from_lane(31), below = before[r].lanes_below(1);
            before[r] = lane ? total.then(below) : total;
            total = total.then(row);
        }
        return total;
    }

    // Writes the sums; `warp` is what lies before the warp's values from the whole array's beginning.
    __device__ void store(const Scan<T>& scan, const Sum& warp, const Sum (&before)[ROWS]) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const Vector vector = staged[r][threadIdx.x];
            Sum sum = warp.then(before[r]);
            Vector sums;
#pragma unroll
            for (int k = 0; k < ACROSS; ++k) {
                const Sum each = value(vector, r, k), next = sum.then(each);
                sums.at[k] = static_cast<T>(!scan.exclusive ? next.sum : each.head ? 0 : sum.sum);
                sum = next;
            }
            if (whole) {
                *reinterpret_cast<Vector*>(scan.out + first + r * ROW) = sums;
            } else {
#pragma unroll
                for (int k = 0; k < ACROSS; ++k)
                    if (first + r * ROW + k < scan.n) scan.out[first + r * ROW + k] = sums.at[k];
            }
        }
    }
};

// The total of the block, and in `before` what lies before the calling warp. Every thread must call it.
template <typename Sum>
__device__ inline Sum join_warps(const Sum& total, Sum& before, Sum* shared) {
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = total;
    __syncthreads();
    Sum sum = Sum::none();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w == threadIdx.x / 32) before = sum;
        sum = sum.then(shared[w]);
    }
    return sum;
}

// sum_tiles: the totals of tiles, which are scanned before scan_tiles.
template <typename T>
__global__ void __launch_bounds__(THREADS) sum_tiles(Scan<T> scan, typename Summed<T>::Type* __restrict__ totals) {
    typedef Tile<T, false> Part;
    __shared__ typename Part::Staged staged;
    __shared__ typename Part::Sum shared[WARPS];
    const Part tile(scan, blockIdx.x, staged);
    typename Part::Sum before[Part::ROWS], unused;
    const auto total = join_warps(tile.scan_warp(before), unused, shared);
    if (threadIdx.x == 0) totals[blockIdx.x] = total.sum;
}

// scan_tiles: `totals` are scanned, inclusive; null: there is one tile.
template <typename T>
__global__ void __launch_bounds__(THREADS)
scan_tiles(Scan<T> scan, const typename Summed<T>::Type* __restrict__ totals) {
    typedef Tile<T, false> Part;
    __shared__ typename Part::Staged staged;
    __shared__ typename Part::Sum shared[WARPS];
    const Part tile(scan, blockIdx.x, staged);
    typename Part::Sum before[Part::ROWS], warp;
    join_warps(tile.scan_warp(before), warp, shared);
    if (totals && blockIdx.x) warp = typename Part::Sum{totals[blockIdx.x - 1], false}.then(warp);
    tile.store(scan, warp, before);
}
