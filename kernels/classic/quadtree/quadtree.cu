// A quadtree over points; the contract is in kernels/classic/quadtree/__init__.py.
//
// A point's cell at the maximum depth is its code: 2 bits per level, y over x, the top level first, so that a cell of any
// depth is a range of codes. The points are ordered by code, and a node is a range of points.
//
// The number of nodes is known only on the device. A kernel that launches a grid for each node that splits (dynamic
// parallelism) pays a launch latency per level; here nodes are counted, numbered by prefix sums, and written.
//
// Floors for n points of p bytes on a device that copies B bytes a second: p n / B to read the points, 4 n / B to write
// their order; a radix sort of 4-byte codes with indices moves 64 n bytes more, most of the work of production.
//
// Naive to fast:
//   level by level  (levels.cuh) every level moves all points into the quadrants of their cells, by counts and prefix sums
//   Morton order    (here) codes, one radix sort, and the nodes of all levels at once: a cell with more than `limit` points
//                   begins at point i if codes i - 1 and i differ above its depth, and codes i and i + limit do not
// Built with --fmad=false, so the codes are the same as on the CPU.
// Sources: Morton, "A computer oriented geodetic data base" (1966); Karras, "Maximizing parallelism in the construction of
// BVHs, octrees, and k-d trees" (2012).

#include "levels.cuh"

constexpr int MAX_DEPTH = 16;
constexpr int WARPS = THREADS / 32;

// The largest depth at which points i and j share a cell; -1 if one of them does not exist.
__device__ inline int common_depth(const unsigned* __restrict__ codes, long long i, long long j, long long count,
                                   int depth) {
    if (i < 0 || j >= count) return -1;
    const unsigned apart = codes[i] ^ codes[j];
    return apart == 0 ? depth : depth - 1 - (31 - __clz(static_cast<int>(apart))) / 2;
}

// The depths of the splitting cells that begin with a point: (above, last].
struct Splits {
    int above, last;

    __device__ bool has(int depth) const { return depth > above && depth <= last; }
};

__device__ inline Splits splits_at(const unsigned* __restrict__ codes, long long i, long long count, int depth, int limit) {
    if (i >= count) return {0, -1};
    return {common_depth(codes, i - 1, i, count, depth), min(common_depth(codes, i, i + limit, count, depth), depth - 1)};
}

// The number of splitting cells by depth and block: counts [depth][blocks]. By votes, without atomics.
__global__ void __launch_bounds__(THREADS)
    count_splits(const unsigned* __restrict__ codes, long long count, int depth, int limit, long long* counts) {
    __shared__ int found[MAX_DEPTH * WARPS];
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    const int warp = threadIdx.x / 32;
    const Splits splits = splits_at(codes, i, count, depth, limit);
    for (int d = 0; d < depth; ++d) {
        const unsigned here = __ballot_sync(WHOLE_WARP, splits.has(d));
        if (threadIdx.x % 32 == 0) found[d * WARPS + warp] = __popc(here);
    }
    __syncthreads();
    if (threadIdx.x < depth) {
        int sum = 0;
        for (int w = 0; w < WARPS; ++w) sum += found[threadIdx.x * WARPS + w];
        counts[threadIdx.x * static_cast<long long>(gridDim.x) + blockIdx.x] = sum;
    }
}

// The first of codes [begin, end) that is not below `code`.
__device__ inline long long first_from(const unsigned* __restrict__ codes, long long begin, long long end,
                                       unsigned long long code) {
    while (begin < end) {
        const long long middle = (begin + end) / 2;
        if (codes[middle] < code) begin = middle + 1;
        else end = middle;
    }
    return begin;
}

// Writes the four children of the k-th splitting cell, numbered level by level: nodes 4 k + 1 to 4 k + 4.
__device__ inline void make_children(const Nodes& nodes, const unsigned* __restrict__ codes, long long begin,
                                     long long count, int d, int depth, long long k) {
    const int shift = 2 * (depth - d - 1);
    const unsigned long long prefix = static_cast<unsigned long long>(codes[begin]) >> shift >> 2 << 2;
    long long from = begin;
    for (int quadrant = 0; quadrant < 4; ++quadrant) {
        const unsigned long long next = (prefix + quadrant + 1) << shift;
        const long long to = first_from(codes, from, count, next);
        nodes.write(4 * k + 1 + quadrant, from, to, d + 1, static_cast<unsigned>(prefix + quadrant));
        from = to;
    }
}

// make_nodes: every splitting cell writes its children and their number in its own node. `upto` [depth][blocks] are the
// inclusive sums of counts; a cell's number is its rank by depth, then by code.
__global__ void __launch_bounds__(THREADS)
    make_nodes(const unsigned* __restrict__ codes, long long count, int depth, int limit,
               const long long* __restrict__ upto, Nodes nodes) {
    __shared__ int found[MAX_DEPTH * WARPS];
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Splits splits = splits_at(codes, i, count, depth, limit);
    for (int d = 0; d < depth; ++d) {
        const unsigned here = __ballot_sync(WHOLE_WARP, splits.has(d));
        if (lane == 0) found[d * WARPS + warp] = __popc(here);
    }
    __syncthreads();
    if (threadIdx.x < depth) {
        int sum = 0;
        for (int w = 0; w < WARPS; ++w) {
            const int own = found[threadIdx.x * WARPS + w];
            found[threadIdx.x * WARPS + w] = sum;
            sum += own;
        }
    }
    __syncthreads();
    long long parent = -1;  // the number of the last cell that splits one level up, at or before this point
    for (int d = 0; d < depth; ++d) {
        const bool is = splits.has(d);
        const unsigned here = __ballot_sync(WHOLE_WARP, is);
        const long long row = d * static_cast<long long>(gridDim.x) + blockIdx.x;
        const long long k = (row > 0 ? upto[row - 1] : 0) + found[d * WARPS + warp] + __popc(here & ((1u << lane) - 1));
        if (is) {
            const int quadrant = static_cast<int>(codes[i] >> 2 * (depth - d)) & 3;
            nodes.child[d == 0 ? 0 : 4 * parent + 1 + quadrant] = static_cast<int>(4 * k + 1);
            make_children(nodes, codes, i, count, d, depth, k);
        }
        parent = k + is - 1;
    }
}
