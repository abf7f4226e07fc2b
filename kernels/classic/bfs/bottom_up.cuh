// Bottom-up: when the frontier is large, most unvisited vertices find a parent in it after a few edges.
#pragma once

#include "chunks.cuh"

constexpr int UP_THREADS = 256;
constexpr int ALONE = 32;  // edges that a thread checks by itself

__device__ inline bool is_set(const unsigned* bits, int vertex) { return bits[vertex / 32] >> vertex % 32 & 1; }

// expand_bottom_up: 32 vertices per warp, one word of each bit set, so no atomics. Each thread checks its vertex's edges
// until one leads to the frontier; the rest of long rows is checked by the whole warp, row by row. The graph must be
// symmetric.
__global__ void __launch_bounds__(UP_THREADS)
    expand_bottom_up(Search search, const unsigned* __restrict__ frontier, unsigned* __restrict__ next, int level,
                     Tally* tally) {
    const int lane = threadIdx.x % 32;
    const long long word = (blockIdx.x * static_cast<long long>(UP_THREADS) + threadIdx.x) / 32;
    if (word * 32 >= search.graph.vertices) return;
    const unsigned visited = search.visited[word];
    const int vertex = static_cast<int>(word) * 32 + lane;
    const bool looks = vertex < search.graph.vertices && !(visited >> lane & 1);
    if (!__any_sync(WHOLE_WARP, looks)) {
        if (lane == 0) next[word] = 0;
        return;
    }
    long long e = 0, end = 0;
    if (looks) {
        e = search.graph.offsets[vertex];
        end = search.graph.offsets[vertex + 1];
    }
    const long long begin = e, alone = min(end, e + ALONE);
    bool found = false;
    for (; e < alone && !found; ++e) found = is_set(frontier, search.graph.columns[e]);
    for (unsigned left = __ballot_sync(WHOLE_WARP, !found && e < end); left; left &= left - 1) {
        const int owner = __ffs(left) - 1;
        const long long from = __shfl_sync(WHOLE_WARP, e, owner), to = __shfl_sync(WHOLE_WARP, end, owner);
        bool any = false;
        for (long long k = from; k < to && !any; k += 32)
            any = __any_sync(WHOLE_WARP, k + lane < to && is_set(frontier, search.graph.columns[k + lane]));
        if (lane == owner) found = any;
    }
    const unsigned reached = __ballot_sync(WHOLE_WARP, found);
    long long degree = 0;
    if (found) {
        search.levels[vertex] = level;
        degree = end - begin;
    }
    for (int step = 16; step > 0; step /= 2) degree += __shfl_down_sync(WHOLE_WARP, degree, step);
    if (lane == 0) {
        next[word] = reached;
        search.visited[word] = visited | reached;
        if (reached) {
            atomicAdd(&tally->vertices, static_cast<unsigned long long>(__popc(reached)));
            atomicAdd(&tally->edges, static_cast<unsigned long long>(degree));
        }
    }
}

// Converts a queue's entries to bits, which must be zero.
__global__ void entries_to_bits(const Entry* __restrict__ frontier, long long count, unsigned* bits) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i < count) atomicOr(bits + frontier[i].vertex / 32, 1u << frontier[i].vertex % 32);
}

// Converts bits to entries of a queue.
__global__ void __launch_bounds__(CHUNK_THREADS)
    bits_to_entries(Search search, const unsigned* __restrict__ bits, int level, Entry* next, Tally* tally) {
    __shared__ int found[CHUNK_THREADS], warps[CHUNK_THREADS / 32];
    __shared__ unsigned long long base;
    const long long vertex = blockIdx.x * static_cast<long long>(CHUNK_THREADS) + threadIdx.x;
    const bool has = vertex < search.graph.vertices && is_set(bits, static_cast<int>(vertex));
    int held;
    const int place = exclusive_block_sum<CHUNK_THREADS>(static_cast<int>(has), warps, held);
    if (has) found[place] = static_cast<int>(vertex);
    __syncthreads();
    flush<CHUNK_THREADS>(search, found, held, level, next, tally, &base, warps);
}
