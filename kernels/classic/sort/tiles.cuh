// Sorting within a block: the initial runs for merging.
#pragma once

#include "merge.cuh"

constexpr int BITONIC_TILE = 2048;
constexpr int BITONIC_THREADS = 512;

// sort_bitonic: 2048 keys per block by Batcher's bitonic network in shared memory: 66 steps with a barrier each.
template <typename Key>
__global__ void __launch_bounds__(BITONIC_THREADS)
    sort_bitonic(const Key* __restrict__ in, Key* __restrict__ out, long long count) {
    __shared__ Key keys[BITONIC_TILE];
    const long long from = blockIdx.x * static_cast<long long>(BITONIC_TILE);
    for (int i = threadIdx.x; i < BITONIC_TILE; i += BITONIC_THREADS)
        keys[i] = from + i < count ? in[from + i] : static_cast<Key>(~Key(0));
    for (int size = 2; size <= BITONIC_TILE; size *= 2)
        for (int apart = size / 2; apart > 0; apart /= 2) {
            __syncthreads();
            for (int pair = threadIdx.x; pair < BITONIC_TILE / 2; pair += BITONIC_THREADS) {
                const int low = pair / apart * 2 * apart + pair % apart, high = low + apart;
                const bool upwards = (low & size) == 0;
                const Key a = keys[low], b = keys[high];
                if ((b < a) == upwards) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
        }
    __syncthreads();
    for (int i = threadIdx.x; i < BITONIC_TILE; i += BITONIC_THREADS)
        if (from + i < count) out[from + i] = keys[i];
}

// A thread's keys in registers, by odd-even transposition: stable, and every index a compile-time constant.
template <typename Key>
__device__ inline void sort_in_registers(Key (&keys)[ITEMS], int (&sources)[ITEMS]) {
#pragma unroll
    for (int round = 0; round < ITEMS; ++round)
#pragma unroll
        for (int k = round % 2; k + 1 < ITEMS; k += 2) {
            const Key low = keys[k], high = keys[k + 1];
            const int low_source = sources[k], high_source = sources[k + 1];
            const bool swap = high < low;
            keys[k] = swap ? high : low;
            keys[k + 1] = swap ? low : high;
            sources[k] = swap ? high_source : low_source;
            sources[k + 1] = swap ? low_source : high_source;
        }
}

// sort_tiles: 3840 keys per block: each thread sorts 15 in registers, then the threads' runs are merged along merge paths
// in 8 rounds of barriers instead of 66. Stable: padding keys are the largest, and last. If `values` is null, a key's
// value is its index.
template <typename Key, typename Value>
__global__ void __launch_bounds__(MERGE_THREADS)
    sort_tiles(const Key* __restrict__ in, const Value* __restrict__ values, Key* __restrict__ out,
               Value* __restrict__ out_values, long long count, int kind_in, int kind_out) {
    __shared__ Key keys[TILE];
    __shared__ short sources_of[HAS_VALUES<Value> ? TILE : 1];
    const long long from = blockIdx.x * static_cast<long long>(TILE);
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
        const int i = k * MERGE_THREADS + threadIdx.x;
        keys[i] = from + i < count ? ordered(in[from + i], kind_in) : static_cast<Key>(~Key(0));
    }
    __syncthreads();
    const int begin = threadIdx.x * ITEMS;
    Key mine[ITEMS];
    int sources[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) mine[k] = keys[begin + k], sources[k] = begin + k;
    sort_in_registers(mine, sources);
    for (int run = ITEMS; run < TILE; run *= 2) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) {
            keys[begin + k] = mine[k];
            if constexpr (HAS_VALUES<Value>) sources_of[begin + k] = static_cast<short>(sources[k]);
        }
        __syncthreads();
        const int first = begin / (2 * run) * (2 * run), rank = begin - first;
        const int i = first + co_rank(rank, keys + first, run, keys + first + run, run);
        merge_in_registers(keys, i, first + run, first + run + rank - (i - first), first + 2 * run, mine, sources);
        if constexpr (HAS_VALUES<Value>)
#pragma unroll
            for (int k = 0; k < ITEMS; ++k) sources[k] = sources_of[sources[k]];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
        keys[begin + k] = mine[k];
        if constexpr (HAS_VALUES<Value>) sources_of[begin + k] = static_cast<short>(sources[k]);
    }
    __syncthreads();
    for (int k = threadIdx.x; k < TILE; k += MERGE_THREADS)
        if (from + k < count) {
            out[from + k] = unordered(keys[k], kind_out);
            if constexpr (HAS_VALUES<Value>) {
                const long long source = from + sources_of[k];
                out_values[from + k] = values ? values[source] : static_cast<Value>(source);
            }
        }
}
