// Merging two sorted arrays, or all pairs of neighbouring sorted runs of one. Equal keys of the first array (run) come
// first. Floor: every key read once and written once.
#pragma once

#include "order.cuh"

constexpr int MERGE_THREADS = 256;
constexpr int RANGE = 16;            // outputs of a thread of merge_ranges
constexpr int STAGE = 1024;          // keys of each array that a block of merge_tiles holds
constexpr int STAGES_A_BLOCK = 4;   // no more than the two shortest runs
constexpr int ITEMS = 15;            // keys of a thread of merge_paths and sort_tiles: odd, so that no two threads of a
constexpr int TILE = MERGE_THREADS * ITEMS;  // warp read the same bank when each reads its own keys in turn

// The input: `first` and `second`; or, if run > 0, the runs of that length (a multiple of what a block or thread writes)
// of `first`, each odd one merged with the even one before it.
template <typename Key>
struct Merge {
    const Key* first;
    const Key* second;
    long long count, second_count;
    long long run;
};

// The two sorted pieces that are merged into the output around a position.
template <typename Key>
struct Pieces {
    const Key* a;
    const Key* b;
    long long a_count, b_count;
    long long begin;  // of their output
};

template <typename Key>
__device__ inline Pieces<Key> pieces_at(const Merge<Key>& merge, long long position) {
    if (merge.run == 0) return {merge.first, merge.second, merge.count, merge.second_count, 0};
    const long long begin = position / (2 * merge.run) * (2 * merge.run);
    const long long middle = min(begin + merge.run, merge.count), end = min(middle + merge.run, merge.count);
    return {merge.first + begin, merge.first + middle, middle - begin, end - middle, begin};
}

template <typename Key>
__device__ inline long long outputs(const Merge<Key>& merge) {
    return merge.run == 0 ? merge.count + merge.second_count : merge.count;
}

// The co-rank: the number of keys from a among the first `rank` merged keys, i.e. the smallest i with
// b[rank - 1 - i] < a[i].
template <typename Keys, typename Index>
__device__ inline Index co_rank(Index rank, Keys a, Index a_count, Keys b, Index b_count) {
    Index low = max(rank - b_count, Index(0)), high = min(rank, a_count);
    while (low < high) {
        const Index middle = (low + high) / 2;
        if (b[rank - 1 - middle] < a[middle]) high = middle;
        else low = middle + 1;
    }
    return low;
}

// The number of keys below (or, with `or_equal`, not above) a key.
template <typename Key>
__device__ inline long long rank_of(Key key, const Key* keys, long long count, bool or_equal) {
    long long low = 0, high = count;
    while (low < high) {
        const long long middle = (low + high) / 2;
        if (or_equal ? keys[middle] <= key : keys[middle] < key) low = middle + 1;
        else high = middle;
    }
    return low;
}

// merge_ranks: one thread per key, placed by its rank in the other array: n log n reads of global memory.
template <typename Key>
__global__ void merge_ranks(Merge<Key> merge, Key* out) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= outputs(merge)) return;
    const Pieces<Key> of = pieces_at(merge, i);
    const long long place = i - of.begin;
    const bool from_a = place < of.a_count;
    const Key key = from_a ? of.a[place] : of.b[place - of.a_count];
    const long long others =
        from_a ? rank_of(key, of.b, of.b_count, false) : rank_of(key, of.a, of.a_count, true);
    out[of.begin + (from_a ? place : place - of.a_count) + others] = key;
}

// merge_ranges: 16 outputs per thread, found by two co-ranks and merged sequentially: one search for 16 keys, but
// neighbouring threads read and write 16 keys apart.
template <typename Key>
__global__ void merge_ranges(Merge<Key> merge, Key* out) {
    const long long from = (blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x) * RANGE;
    if (from >= outputs(merge)) return;
    const Pieces<Key> of = pieces_at(merge, from);
    const long long rank = from - of.begin, end = min(rank + RANGE, of.a_count + of.b_count);
    long long i = co_rank(rank, of.a, of.a_count, of.b, of.b_count), j = rank - i;
    for (long long k = rank; k < end; ++k) {
        const bool take_a = i < of.a_count && (j >= of.b_count || of.a[i] <= of.b[j]);
        out[of.begin + k] = take_a ? of.a[i++] : of.b[j++];
    }
}

// A block's part of the output in merge_tiles and merge_circular.
template <typename Key>
struct BlockRange {
    Pieces<Key> of;
    long long a_begin, b_begin, a_left, b_left, out_begin, count;
};

template <typename Key>
__device__ inline BlockRange<Key> block_range(const Merge<Key>& merge, long long* corners) {
    const long long from = blockIdx.x * static_cast<long long>(STAGE * STAGES_A_BLOCK);
    const Pieces<Key> of = pieces_at(merge, from);
    const long long rank = from - of.begin, end = min(rank + STAGE * STAGES_A_BLOCK, of.a_count + of.b_count);
    if (threadIdx.x < 2)  // the block's corners, found in global memory by two threads
        corners[threadIdx.x] = co_rank(threadIdx.x ? end : rank, of.a, of.a_count, of.b, of.b_count);
    __syncthreads();
    const long long a0 = corners[0], a1 = corners[1];
    return {of, a0, rank - a0, a1 - a0, (end - a1) - (rank - a0), from, end - rank};
}

// merge_tiles: a block walks along its range with the next 1024 keys of each array in shared memory, where its threads
// search and merge. Global reads are coalesced, but each step uses half of the keys it has read, and reads the rest again.
template <typename Key>
__global__ void __launch_bounds__(MERGE_THREADS) merge_tiles(Merge<Key> merge, Key* out) {
    constexpr int EACH = STAGE / MERGE_THREADS;
    __shared__ Key a[STAGE], b[STAGE];
    __shared__ long long corners[2];
    __shared__ int used;
    const BlockRange<Key> range = block_range(merge, corners);
    long long a_done = 0, b_done = 0;
    for (long long done = 0; done < range.count; done += STAGE) {
        const int a_held = static_cast<int>(min(range.a_left - a_done, static_cast<long long>(STAGE)));
        const int b_held = static_cast<int>(min(range.b_left - b_done, static_cast<long long>(STAGE)));
        for (int i = threadIdx.x; i < a_held; i += MERGE_THREADS) a[i] = range.of.a[range.a_begin + a_done + i];
        for (int i = threadIdx.x; i < b_held; i += MERGE_THREADS) b[i] = range.of.b[range.b_begin + b_done + i];
        __syncthreads();
        const int writes = static_cast<int>(min(range.count - done, static_cast<long long>(STAGE)));
        const int from = min(static_cast<int>(threadIdx.x) * EACH, writes), to = min(from + EACH, writes);
        int i = co_rank(from, a, a_held, b, b_held), j = from - i;
        for (int k = from; k < to; ++k) {
            const bool take_a = i < a_held && (j >= b_held || a[i] <= b[j]);
            out[range.out_begin + done + k] = take_a ? a[i++] : b[j++];
        }
        if (threadIdx.x == MERGE_THREADS - 1) used = i;
        __syncthreads();
        a_done += used;
        b_done += writes - used;
        __syncthreads();
    }
}

// A ring buffer of STAGE keys in shared memory, indexed from its oldest key.
template <typename Key>
struct Ring {
    const Key* keys;
    int oldest;

    __device__ Key operator[](int i) const { return keys[(oldest + i) % STAGE]; }
};


// merge_circular: the stages are ring buffers that each step refills, so no key is read twice; but every access pays for
// the index arithmetic.
template <typename Key>
__global__ void __launch_bounds__(MERGE_THREADS) merge_circular(Merge<Key> merge, Key* out) {
    constexpr int EACH = STAGE / MERGE_THREADS;
    __shared__ Key a[STAGE], b[STAGE];
    __shared__ long long corners[2];
    __shared__ int used;
    const BlockRange<Key> range = block_range(merge, corners);
    long long a_done = 0, b_done = 0, a_read = 0, b_read = 0;
    for (long long done = 0; done < range.count; done += STAGE) {
        const long long a_until = min(range.a_left, a_done + STAGE), b_until = min(range.b_left, b_done + STAGE);
        for (long long i = a_read + threadIdx.x; i < a_until; i += MERGE_THREADS)
            a[i % STAGE] = range.of.a[range.a_begin + i];
        for (long long i = b_read + threadIdx.x; i < b_until; i += MERGE_THREADS)
            b[i % STAGE] = range.of.b[range.b_begin + i];
        a_read = a_until, b_read = b_until;
        __syncthreads();
        const Ring<Key> ring_a{a, static_cast<int>(a_done % STAGE)}, ring_b{b, static_cast<int>(b_done % STAGE)};
        const int a_held = static_cast<int>(a_until - a_done), b_held = static_cast<int>(b_until - b_done);
        const int writes = static_cast<int>(min(range.count - done, static_cast<long long>(STAGE)));
        const int from = min(static_cast<int>(threadIdx.x) * EACH, writes), to = min(from + EACH, writes);
        int i = co_rank(from, ring_a, a_held, ring_b, b_held), j = from - i;
        for (int k = from; k < to; ++k) {
            const bool take_a = i < a_held && (j >= b_held || ring_a[i] <= ring_b[j]);
            out[range.out_begin + done + k] = take_a ? ring_a[i++] : ring_b[j++];
        }
        if (threadIdx.x == MERGE_THREADS - 1) used = i;
        __syncthreads();
        a_done += used;
        b_done += writes - used;
        __syncthreads();
    }
}

// The start of each output tile in its a: the corners of merge_paths, searched in parallel by a separate kernel.
template <typename Key>
__global__ void find_corners(Merge<Key> merge, long long* corners, long long tiles) {
    const long long tile = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (tile >= tiles) return;
    const Pieces<Key> of = pieces_at(merge, tile * TILE);
    corners[tile] = co_rank(tile * TILE - of.begin, of.a, of.a_count, of.b, of.b_count);
}

// Merges the next ITEMS keys of keys[i, a_end) and keys[j, b_end), all in shared memory, into registers; `sources` are
// their indices in `keys`.
template <typename Key>
__device__ inline void merge_in_registers(const Key* keys, int i, int a_end, int j, int b_end, Key (&merged)[ITEMS],
                                          int (&sources)[ITEMS]) {
    Key a = i < a_end ? keys[i] : Key(0), b = j < b_end ? keys[j] : Key(0);
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
        const bool take_a = i < a_end && (j >= b_end || a <= b);
        merged[k] = take_a ? a : b;
        sources[k] = take_a ? i : j;
        const int next = take_a ? ++i : ++j;
        const Key key = keys[min(next, TILE - 1)];
        if (take_a) a = key;
        else b = key;
    }
}

// merge_paths: one block per tile of the output, with known corners: only its own keys are read, coalesced; each thread
// merges 15 in registers, and writes are coalesced. Values are fetched by the source indices of their keys.
template <typename Key, typename Value>
__global__ void __launch_bounds__(MERGE_THREADS)
    merge_paths(Merge<Key> merge, const long long* __restrict__ corners, const Value* first_values,
                const Value* second_values, Key* out, Value* out_values, int kind_out) {
    __shared__ Key keys[TILE];
    const long long from = blockIdx.x * static_cast<long long>(TILE);
    const Pieces<Key> of = pieces_at(merge, from);
    const long long rank = from - of.begin, end = min(rank + TILE, of.a_count + of.b_count);
    const long long a0 = corners[blockIdx.x], b0 = rank - a0;
    const long long a1 = end == of.a_count + of.b_count ? of.a_count : corners[blockIdx.x + 1];
    const int a_held = static_cast<int>(a1 - a0), count = static_cast<int>(end - rank);
    const Key* a = of.a + a0;
    const Key* b = of.b + b0 - a_held;  // one index runs through both
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
        const int i = k * MERGE_THREADS + threadIdx.x;
        if (i < count) keys[i] = i < a_held ? a[i] : b[i];
    }
    __syncthreads();
    const int begin = min(static_cast<int>(threadIdx.x) * ITEMS, count);
    const int i = co_rank(begin, keys, a_held, keys + a_held, count - a_held);
    Key merged[ITEMS];
    int sources[ITEMS];
    merge_in_registers(keys, i, a_held, a_held + begin - i, count, merged, sources);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) keys[threadIdx.x * ITEMS + k] = merged[k];
    __syncthreads();
    for (int k = threadIdx.x; k < count; k += MERGE_THREADS) out[from + k] = unordered(keys[k], kind_out);
    if constexpr (HAS_VALUES<Value>) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) keys[threadIdx.x * ITEMS + k] = static_cast<Key>(sources[k]);
        __syncthreads();
        const Value* a_values = first_values + (of.a - merge.first) + a0;
        const Value* b_values = (merge.run == 0 ? second_values : first_values + (of.b - merge.first)) + b0 - a_held;
        for (int k = threadIdx.x; k < count; k += MERGE_THREADS) {
            const int source = static_cast<int>(keys[k]);
            out_values[from + k] = source < a_held ? a_values[source] : b_values[source];
        }
    }
}
