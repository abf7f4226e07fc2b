// Codes, nodes, and the tree built level by level.
#pragma once

#include "block_scan.cuh"

constexpr int THREADS = 256;

// The tree's nodes as arrays; child is initially -1, and remains -1 for leaves.
struct Nodes {
    int *begin, *end, *child;
    signed char* depth;
    unsigned* code;

    __device__ void write(long long node, long long from, long long to, int at_depth, unsigned prefix) const {
        begin[node] = static_cast<int>(from);
        end[node] = static_cast<int>(to);
        depth[node] = static_cast<signed char>(at_depth);
        code[node] = prefix;
    }
};

struct Box {
    double low[2], per_cell[2];  // per_cell: cells of the maximum depth per unit of length
    int depth;
};

// Points outside belong to the nearest cell at the edge, NaNs to the first cell.
template <typename Real>
__device__ inline unsigned cell_of(Real coordinate, double low, double per_cell, int depth) {
    const double cell = (static_cast<double>(coordinate) - low) * per_cell;
    const unsigned cells = 1u << depth;
    return cell >= 0 ? cell < cells ? static_cast<unsigned>(cell) : cells - 1 : 0;
}

constexpr int BOUNDS = 4;  // low x, low y, high x, high y

// The bounding box of each block's points: bounds [blocks][4], reduced on the host. Blocks stride over the points, so that
// there are few.
template <typename Real>
__global__ void __launch_bounds__(THREADS) find_bounds(const Real* __restrict__ points, long long count, Real* bounds) {
    __shared__ Real warps[BOUNDS * THREADS / 32];
    Real found[BOUNDS] = {points[0], points[1], points[0], points[1]};
    const long long step = gridDim.x * static_cast<long long>(THREADS);
#pragma unroll 4
    for (long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x; i < count; i += step)
        for (int axis = 0; axis < 2; ++axis) {
            const Real coordinate = points[2 * i + axis];
            found[axis] = min(found[axis], coordinate);
            found[axis + 2] = max(found[axis + 2], coordinate);
        }
    for (int k = 0; k < BOUNDS; ++k) {
        for (int apart = 16; apart > 0; apart /= 2) {
            const Real other = __shfl_xor_sync(WHOLE_WARP, found[k], apart);
            found[k] = k < 2 ? min(found[k], other) : max(found[k], other);
        }
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32 * BOUNDS + k] = found[k];
    }
    __syncthreads();
    if (threadIdx.x >= BOUNDS) return;
    Real all = warps[threadIdx.x];
    for (int w = 1; w < THREADS / 32; ++w) {
        const Real other = warps[w * BOUNDS + threadIdx.x];
        all = threadIdx.x < 2 ? min(all, other) : max(all, other);
    }
    bounds[blockIdx.x * BOUNDS + threadIdx.x] = all;
}

// Moves bits 0 to 15 to the even bits of 32.
__device__ inline unsigned spread(unsigned bits) {
    bits = (bits | bits << 8) & 0x00ff00ffu;
    bits = (bits | bits << 4) & 0x0f0f0f0fu;
    bits = (bits | bits << 2) & 0x33333333u;
    return (bits | bits << 1) & 0x55555555u;
}

template <typename Real>
__global__ void __launch_bounds__(THREADS)
    find_codes(const Real* __restrict__ points, long long count, Box box, unsigned* codes) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i >= count) return;
    const unsigned x = cell_of(points[2 * i], box.low[0], box.per_cell[0], box.depth);
    const unsigned y = cell_of(points[2 * i + 1], box.low[1], box.per_cell[1], box.depth);
    codes[i] = spread(x) | spread(y) << 1;
}

// Level by level: a point's code, its index in the input, and the range of points in its cell.
struct Placed {
    unsigned code;
    int from, begin, end;
};

__global__ void __launch_bounds__(THREADS)
    place_points(const unsigned* __restrict__ codes, long long count, Placed* placed) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i < count) placed[i] = {codes[i], static_cast<int>(i), 0, static_cast<int>(count)};
}

// Whether each point is in each quadrant of its cell: flags [4][count], for prefix sums.
__global__ void __launch_bounds__(THREADS)
    flag_quadrants(const Placed* __restrict__ placed, long long count, int shift, int* flags) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i >= count) return;
    const int mine = static_cast<int>(placed[i].code >> shift) & 3;
    for (int quadrant = 0; quadrant < 4; ++quadrant) flags[quadrant * count + i] = quadrant == mine;
}

// The number of points of [begin, end) in a quadrant, from the inclusive sums of flags.
__device__ inline int in_quadrant(const int* __restrict__ upto, long long count, int quadrant, int begin, int end) {
    const int* const row = upto + quadrant * count;
    return end > begin ? row[end - 1] - (begin > 0 ? row[begin - 1] : 0) : 0;
}

__global__ void __launch_bounds__(THREADS)
    move_points(const Placed* __restrict__ placed, long long count, int shift, const int* __restrict__ upto,
                Placed* moved) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i >= count) return;
    const Placed point = placed[i];
    const int mine = static_cast<int>(point.code >> shift) & 3;
    int begin = point.begin;
    for (int quadrant = 0; quadrant < mine; ++quadrant) begin += in_quadrant(upto, count, quadrant, point.begin, point.end);
    const int end = begin + in_quadrant(upto, count, mine, point.begin, point.end);
    const int target = begin + in_quadrant(upto, count, mine, point.begin, static_cast<int>(i));
    moved[target] = {point.code, point.from, begin, end};
}

// Whether each node of a level splits, for prefix sums.
__global__ void __launch_bounds__(THREADS)
    flag_splits(Nodes nodes, long long first, long long count, int limit, int* flags) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i < count) flags[i] = nodes.end[first + i] - nodes.begin[first + i] > limit;
}

// Writes the children of the splitting nodes after the level's last node, with ranges from the sums of flags.
__global__ void __launch_bounds__(THREADS)
    split_nodes(Nodes nodes, long long first, long long count, int limit, const int* __restrict__ splits, int depth,
                const int* __restrict__ upto, long long points) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i >= count) return;
    const long long node = first + i;
    int from = nodes.begin[node];
    const int end = nodes.end[node];
    if (end - from <= limit) return;
    const long long child = first + count + 4 * static_cast<long long>(splits[i] - 1);
    nodes.child[node] = static_cast<int>(child);
    const int begin = from;
    for (int quadrant = 0; quadrant < 4; ++quadrant) {
        const int to = from + in_quadrant(upto, points, quadrant, begin, end);
        nodes.write(child + quadrant, from, to, depth + 1, nodes.code[node] << 2 | quadrant);
        from = to;
    }
}

__global__ void __launch_bounds__(THREADS) take_order(const Placed* __restrict__ placed, long long count, int* order) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i < count) order[i] = placed[i].from;
}
