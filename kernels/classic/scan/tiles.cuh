// Tiles scanned by a block. A warp has ROWS × 32 consecutive vectors of 16 bytes: they are copied to shared memory row by
// row, and each lane then sums ROWS consecutive vectors by itself; results are written back the same way. ROWS is odd, so
// lanes access different banks. Sums have 64 bits, those of floats are doubles. (32-bit integers would need only 32 bits,
// but the scan is faster with 64: 0.90 instead of 0.81 of the copy on an H200.)
#pragma once

#include "async_copy.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int ROWS = 11;  // the largest with five tiles in a multiprocessor of 228 KB and one in 48 KB; larger is faster

template <typename T>
struct Summed {
    typedef unsigned long long Type;
};
template <>
struct Summed<float> {
    typedef double Type;
};
template <>
struct Summed<double> {
    typedef double Type;
};

// The sum of a range of values, from the last head in it if there is one.
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
    // Joins all 32 lanes; `before` becomes the prefix of the calling lane.
    __device__ Prefix join_lanes(Prefix& before) const {
        const int lane = threadIdx.x % 32;
        Prefix joined = *this;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const Prefix below = joined.lanes_below(distance);
            if (lane >= distance) joined = below.then(joined);
        }
        before = joined.lanes_below(1);
        if (lane == 0) before = none();
        return joined.from_lane(31);
    }
    // Joins all warps, with the same `this` in all lanes of a warp; `before` becomes the prefix of the calling warp. Every
    // thread must call it.
    __device__ Prefix join_warps(Prefix& before, Prefix* shared) const {
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = *this;
        __syncthreads();
        Prefix joined = none();
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            if (w == threadIdx.x / 32) before = joined;
            joined = joined.then(shared[w]);
        }
        return joined;
    }
};

template <typename T>
struct Scan {
    const T* values;
    T* out;
    const unsigned char* heads;  // null: not segmented
    long long n;
    int exclusive;
    int aligned;  // whether values and out can be accessed 16 bytes at a time, and the heads of these values together
};

template <typename T, bool SEGMENTED>
struct Tile {
    static constexpr int ACROSS = 16 / sizeof(T), LANE = ROWS * ACROSS, WARP = 32 * LANE, SIZE = WARPS * WARP;
    typedef typename Summed<T>::Type Number;
    typedef Prefix<Number, SEGMENTED> Sum;
    struct alignas(16) Vector {
        T at[ACROSS];
    };
    typedef Vector Staged[WARPS][ROWS * 32];

    Vector* staged;  // the warp's
    unsigned long long heads;  // of the lane's values, one bit each
    long long first;           // of the warp's values
    bool whole;                // the tile is complete and can be accessed 16 bytes at a time

    __device__ Tile(const Scan<T>& scan, long long tile, Staged& shared) : heads(0) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        staged = shared[warp];
        first = tile * SIZE + warp * WARP;
        whole = scan.aligned && (tile + 1) * SIZE <= scan.n;
        if (whole) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int vector = r * 32 + lane;
                copy_16_bytes(staged + vector, scan.values + first + vector * ACROSS);
            }
            if constexpr (SEGMENTED) load_heads(scan.heads + first + lane * LANE);
            wait_for_copies();
        } else {
            T* values = reinterpret_cast<T*>(staged);
            for (int k = lane; k < WARP; k += 32) values[k] = first + k < scan.n ? scan.values[first + k] : T(0);
            if constexpr (SEGMENTED)
                for (int k = 0; k < LANE; ++k) {
                    const long long i = first + lane * LANE + k;
                    if (i < scan.n && scan.heads[i]) heads |= 1ull << k;
                }
        }
        __syncwarp();
    }

    // Loads the lane's heads, as many per word as a vector has values.
    __device__ void load_heads(const unsigned char* from) {
        unsigned word[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            word[r] = ACROSS == 4 ? reinterpret_cast<const unsigned*>(from)[r]
                                  : reinterpret_cast<const unsigned short*>(from)[r];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const unsigned low = (word[r] & 0x7f7f7f7f) + 0x7f7f7f7f;  // a byte's top bit is set if one of its others was
            const unsigned ones = ((word[r] | low) >> 7) & 0x01010101;
            const unsigned packed = (ones * 0x01020408) >> 24 & 15;  // the four side by side
            heads |= static_cast<unsigned long long>(packed) << (r * ACROSS);
        }
    }

    // Adds the lane's values one by one to `sum`, and calls use(row, vector, index in it, sum before, sum after) for each.
    template <typename Use>
    __device__ void walk(Number& sum, Use use) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            Vector vector = staged[threadIdx.x % 32 * ROWS + r];
#pragma unroll
            for (int k = 0; k < ACROSS; ++k) {
                if (SEGMENTED && (heads >> (r * ACROSS + k) & 1)) sum = 0;
                const Number before = sum;
                sum += static_cast<Number>(vector.at[k]);
                use(r, vector, k, before, sum);
            }
        }
    }

    // The tile's total; `before` becomes the prefix of the lane within the tile.
    __device__ Sum total(Sum& before, Sum* shared) const {
        Sum lane = Sum::none(), lanes, warps;
        walk(lane.sum, [](int, Vector&, int, Number, Number) {});
        lane.head = heads != 0;
        const Sum all = lane.join_lanes(lanes).join_warps(warps, shared);
        before = warps.then(lanes);
        return all;
    }

    // Writes the sums; `before` is the prefix of the lane within the array. Overwrites the values.
    __device__ void store(const Scan<T>& scan, const Sum& before) const {
        const int lane = threadIdx.x % 32;
        Number sum = before.sum;
        Vector* own = staged + lane * ROWS;
        walk(sum, [&](int r, Vector& vector, int k, Number without, Number with) {
            vector.at[k] = static_cast<T>(scan.exclusive ? without : with);
            if (k == ACROSS - 1) own[r] = vector;
        });
        __syncwarp();
        if (whole) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int vector = r * 32 + lane;
                *reinterpret_cast<Vector*>(scan.out + first + vector * ACROSS) = staged[vector];
            }
        } else {
            const T* sums = reinterpret_cast<const T*>(staged);
            for (int k = lane; k < WARP && first + k < scan.n; k += 32) scan.out[first + k] = sums[k];
        }
    }
};

// sum_tiles: the totals of tiles, to be scanned before scan_tiles.
template <typename T>
__global__ void __launch_bounds__(THREADS) sum_tiles(Scan<T> scan, typename Summed<T>::Type* __restrict__ totals) {
    typedef Tile<T, false> Part;
    __shared__ typename Part::Staged staged;
    __shared__ typename Part::Sum shared[WARPS];
    const Part tile(scan, blockIdx.x, staged);
    typename Part::Sum before;
    const auto total = tile.total(before, shared);
    if (threadIdx.x == 0) totals[blockIdx.x] = total.sum;
}

// scan_tiles: `totals` are inclusive sums; null if there is only one tile.
template <typename T>
__global__ void __launch_bounds__(THREADS)
scan_tiles(Scan<T> scan, const typename Summed<T>::Type* __restrict__ totals) {
    typedef Tile<T, false> Part;
    __shared__ typename Part::Staged staged;
    __shared__ typename Part::Sum shared[WARPS];
    const Part tile(scan, blockIdx.x, staged);
    typename Part::Sum before;
    tile.total(before, shared);
    if (totals && blockIdx.x) before = typename Part::Sum{totals[blockIdx.x - 1], false}.then(before);
    tile.store(scan, before);
}
