// Top-down with balanced work: a queue's entry is at most 1024 edges of a vertex, and the threads of a block share the
// edges of all its entries. Visited vertices are bits, which fit L2 where levels do not.
#pragma once

#include "block_scan.cuh"
#include "queues.cuh"

constexpr int CHUNK_THREADS = 256;
constexpr int CHUNK = 1024;         // edges of an entry
constexpr int CHUNK_BUFFER = 1024;  // vertices found, before they become entries
constexpr int SMALL_THREADS = 512;

// Blocks of search_small, which synchronise with each other: a cluster if the device supports it, otherwise one block.
#if __CUDA_ARCH__ >= 900
#define SMALL_BLOCKS 8
#define CLUSTER __cluster_dims__(SMALL_BLOCKS, 1, 1)
#else
#define SMALL_BLOCKS 1
#define CLUSTER
#endif

// At most CHUNK edges out of a vertex.
struct alignas(16) Entry {
    long long begin;
    int length, vertex;
};

// The kernels' counters, which the host reads after a level.
struct Tally {
    unsigned long long entries;   // of the next frontier's queue
    unsigned long long vertices;  // of the next frontier
    unsigned long long edges;     // out of these vertices
    unsigned long long searched;  // search_small: edges out of all vertices that it found
    unsigned long long level;     // search_small: its last level
};

struct Search {
    Graph graph;
    int* levels;
    unsigned* visited;  // a bit a vertex
};

__device__ inline bool visits(unsigned* visited, int vertex) {
    const unsigned bit = 1u << vertex % 32;
    unsigned* const word = visited + vertex / 32;
    return !(*word & bit) && !(atomicOr(word, bit) & bit);
}

// Appends the vertices found, in shared memory, to the queue: one thread per vertex, one reservation per block.
template <int THREADS>
__device__ inline void flush(const Search& search, const int* found, int held, int level, Entry* next, Tally* tally,
                             unsigned long long* base, int* warps) {
    for (int from = 0; from < held; from += THREADS) {
        const int k = from + threadIdx.x;
        int vertex = 0, entries = 0, total;
        long long row = 0, degree = 0;
        if (k < held) {
            vertex = found[k];
            search.levels[vertex] = level;
            row = search.graph.offsets[vertex];
            degree = search.graph.offsets[vertex + 1] - row;
            entries = static_cast<int>((degree + CHUNK - 1) / CHUNK);
        }
        const long long end = row + degree;
        const int place = exclusive_block_sum<THREADS>(entries, warps, total);
        if (threadIdx.x == 0) *base = atomicAdd(&tally->entries, static_cast<unsigned long long>(total));
        for (int step = 16; step > 0; step /= 2) degree += __shfl_down_sync(WHOLE_WARP, degree, step);
        if (threadIdx.x % 32 == 0 && degree > 0) atomicAdd(&tally->edges, static_cast<unsigned long long>(degree));
        __syncthreads();
        for (int chunk = 0; chunk < entries; ++chunk, row += CHUNK)
            next[*base + place + chunk] = {row, static_cast<int>(min(end - row, static_cast<long long>(CHUNK))), vertex};
        __syncthreads();
    }
    if (threadIdx.x == 0 && held > 0) atomicAdd(&tally->vertices, static_cast<unsigned long long>(held));
}

// Shared memory of a block that expands entries.
template <int THREADS>
struct Expansion {
    int ends[THREADS];          // inclusive prefix sums of the entries' lengths
    long long begins[THREADS];  // first edge of each entry minus the lengths of the entries before
    int found[CHUNK_BUFFER];
    int warps[THREADS / 32];
    int held;
    unsigned long long base;
};

// Expands up to THREADS entries, one per thread, with all threads of the block: thread t takes the t-th of THREADS edges
// at a time and finds its entry by bisection.
template <int THREADS>
__device__ inline void expand(const Search& search, Expansion<THREADS>& shared, Entry entry, int level, Entry* next,
                              Tally* tally) {
    int total;
    const int before = exclusive_block_sum<THREADS>(entry.length, shared.warps, total);
    shared.ends[threadIdx.x] = before + entry.length;
    shared.begins[threadIdx.x] = entry.begin - before;
    __syncthreads();
    for (int from = 0; from < total; from += THREADS) {
        const int edge = from + threadIdx.x;
        if (edge < total) {
            int low = 0, high = THREADS - 1;  // the first entry that ends beyond the edge
            while (low < high) {
                const int middle = (low + high) / 2;
                if (shared.ends[middle] > edge) high = middle;
                else low = middle + 1;
            }
            const int other = search.graph.columns[shared.begins[low] + edge];
            if (visits(search.visited, other)) shared.found[atomicAdd(&shared.held, 1)] = other;
        }
        __syncthreads();
        const int held = shared.held;
        if (held + THREADS > CHUNK_BUFFER || from + THREADS >= total) {
            __syncthreads();
            flush<THREADS>(search, shared.found, held, level, next, tally, &shared.base, shared.warps);
            if (threadIdx.x == 0) shared.held = 0;
        }
        __syncthreads();
    }
}

// Expands all entries of a queue, divided among the blocks of the grid: a block takes at most its share at a time, since
// few entries may have many edges.
template <int THREADS>
__device__ inline void expand_queue(const Search& search, Expansion<THREADS>& shared, const Entry* queue,
                                    unsigned long long count, int level, Entry* next, Tally* tally) {
    const unsigned long long most = THREADS, share = min((count + gridDim.x - 1) / gridDim.x, most);
    for (unsigned long long from = blockIdx.x * share; from < count; from += gridDim.x * share) {
        const unsigned long long i = from + threadIdx.x;
        expand(search, shared, threadIdx.x < share && i < count ? queue[i] : Entry{0, 0, 0}, level, next, tally);
    }
}

// expand_chunks: threads have equal work for any degrees, and reads of columns are coalesced.
__global__ void __launch_bounds__(CHUNK_THREADS)
    expand_chunks(Search search, const Entry* __restrict__ frontier, long long count, int level, Entry* next,
                  Tally* tally) {
    __shared__ Expansion<CHUNK_THREADS> shared;
    if (threadIdx.x == 0) shared.held = 0;
    __syncthreads();
    expand_queue(search, shared, frontier, count, level, next, tally);
}

// A barrier of all blocks of search_small, with visibility of each other's writes.
__device__ inline void cluster_barrier() {
#if SMALL_BLOCKS > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// search_small: a few blocks search level after level, from queue to queue, until the frontier is empty or too large: a
// level costs a few microseconds, without a launch or the host. `counts` are three cleared tallies that rotate: one is
// counted into, one is read, and one is cleared.
__global__ void CLUSTER __launch_bounds__(SMALL_THREADS)
    search_small(Search search, Entry* queue, Entry* other, long long entries, long long most_entries, long long most_edges,
                 int level, Tally* counts, Tally* tally) {
    __shared__ Expansion<SMALL_THREADS> shared;
    if (threadIdx.x == 0) shared.held = 0;
    __syncthreads();
    unsigned long long count = entries, edges = 0, searched = 0;
    for (int turn = 0;; turn = (turn + 1) % 3, ++level) {
        expand_queue(search, shared, queue, count, level, other, counts + turn);
        if (blockIdx.x == 0 && threadIdx.x == 0) counts[(turn + 1) % 3] = {0, 0, 0, 0, 0};
        cluster_barrier();
        const volatile Tally* const counted = counts + turn;
        count = counted->entries, edges = counted->edges;
        searched += edges;
        Entry* const swapped = queue;
        queue = other, other = swapped;
        if (count == 0 || count > most_entries || edges > most_edges) {
            const unsigned long long vertices = counted->vertices, last = level;
            if (blockIdx.x == 0 && threadIdx.x == 0) *tally = {count, vertices, edges, searched, last};
            return;
        }
    }
}

// The queue of the first level: the source.
__global__ void __launch_bounds__(CHUNK_THREADS) start_search(Search search, int source, Entry* queue, Tally* tally) {
    __shared__ int found[1], warps[CHUNK_THREADS / 32];
    __shared__ unsigned long long base;
    if (threadIdx.x == 0) {
        found[0] = source;
        search.visited[source / 32] = 1u << source % 32;
    }
    __syncthreads();
    flush<CHUNK_THREADS>(search, found, 1, 0, queue, tally, &base, warps);
}
