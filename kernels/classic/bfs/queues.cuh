// The classic queues: a thread expands one vertex of the frontier and appends the vertices it finds to the next queue.
#pragma once

constexpr int UNREACHED = -1;
constexpr int QUEUE_THREADS = 256;
constexpr int BLOCK_QUEUE = 2048;   // vertices buffered by a block
constexpr int LANE_QUEUES = 8, LANE_QUEUE = 128;

struct Graph {
    const long long* offsets;
    const int* columns;
    int vertices;
};

// Whether the calling thread is the first to reach the vertex. Reads before the atomic: most edges lead to visited vertices.
__device__ inline bool reaches(int* levels, int vertex, int level) {
    return levels[vertex] == UNREACHED && atomicCAS(levels + vertex, UNREACHED, level) == UNREACHED;
}

// expand_global: every vertex found costs an atomic addition to one counter, which serialises all threads.
__global__ void __launch_bounds__(QUEUE_THREADS)
    expand_global(Graph graph, const int* __restrict__ frontier, int count, int* levels, int level, int* next, int* tail) {
    const int i = blockIdx.x * QUEUE_THREADS + threadIdx.x;
    if (i >= count) return;
    const int vertex = frontier[i];
    for (long long e = graph.offsets[vertex]; e < graph.offsets[vertex + 1]; ++e) {
        const int other = graph.columns[e];
        if (reaches(levels, other, level)) next[atomicAdd(tail, 1)] = other;
    }
}

// expand_block: vertices are buffered in shared memory; a block reserves space in the queue once, and its writes are
// coalesced. Vertices that do not fit are appended one by one.
__global__ void __launch_bounds__(QUEUE_THREADS)
    expand_block(Graph graph, const int* __restrict__ frontier, int count, int* levels, int level, int* next, int* tail) {
    __shared__ int queue[BLOCK_QUEUE];
    __shared__ int held, base;
    if (threadIdx.x == 0) held = 0;
    __syncthreads();
    const int i = blockIdx.x * QUEUE_THREADS + threadIdx.x;
    if (i < count) {
        const int vertex = frontier[i];
        for (long long e = graph.offsets[vertex]; e < graph.offsets[vertex + 1]; ++e) {
            const int other = graph.columns[e];
            if (!reaches(levels, other, level)) continue;
            const int place = atomicAdd(&held, 1);
            if (place < BLOCK_QUEUE) queue[place] = other;
            else next[atomicAdd(tail, 1)] = other;
        }
    }
    __syncthreads();
    const int queued = min(held, BLOCK_QUEUE);
    if (threadIdx.x == 0) base = atomicAdd(tail, queued);
    __syncthreads();
    for (int k = threadIdx.x; k < queued; k += QUEUE_THREADS) next[base + k] = queue[k];
}

// expand_hierarchical: every eighth lane shares a queue, so that a warp's threads add to eight counters instead of one; the
// queues are then joined into the block's.
__global__ void __launch_bounds__(QUEUE_THREADS)
    expand_hierarchical(Graph graph, const int* __restrict__ frontier, int count, int* levels, int level, int* next,
                        int* tail) {
    __shared__ int queue[LANE_QUEUES][LANE_QUEUE];
    __shared__ int over[BLOCK_QUEUE];
    __shared__ int held[LANE_QUEUES], begins[LANE_QUEUES + 1], over_held, base;
    if (threadIdx.x < LANE_QUEUES) held[threadIdx.x] = 0;
    if (threadIdx.x == 0) over_held = 0;
    __syncthreads();
    const int i = blockIdx.x * QUEUE_THREADS + threadIdx.x, mine = threadIdx.x % LANE_QUEUES;
    if (i < count) {
        const int vertex = frontier[i];
        for (long long e = graph.offsets[vertex]; e < graph.offsets[vertex + 1]; ++e) {
            const int other = graph.columns[e];
            if (!reaches(levels, other, level)) continue;
            int place = atomicAdd(&held[mine], 1);
            if (place < LANE_QUEUE) {
                queue[mine][place] = other;
            } else if ((place = atomicAdd(&over_held, 1)) < BLOCK_QUEUE) {
                over[place] = other;
            } else {
                next[atomicAdd(tail, 1)] = other;
            }
        }
    }
    __syncthreads();
    const int over_queued = min(over_held, BLOCK_QUEUE);
    if (threadIdx.x == 0) {
        int sum = 0;
        for (int q = 0; q < LANE_QUEUES; ++q) {
            begins[q] = sum;
            sum += min(held[q], LANE_QUEUE);
        }
        begins[LANE_QUEUES] = sum;
        base = atomicAdd(tail, sum + over_queued);
    }
    __syncthreads();
    for (int q = threadIdx.x / 32; q < LANE_QUEUES; q += QUEUE_THREADS / 32)  // a warp a queue
        for (int k = threadIdx.x % 32; k < begins[q + 1] - begins[q]; k += 32) next[base + begins[q] + k] = queue[q][k];
    for (int k = threadIdx.x; k < over_queued; k += QUEUE_THREADS) next[base + begins[LANE_QUEUES] + k] = over[k];
}
