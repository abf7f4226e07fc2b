// The direct sum: every atom at every point. Atoms are float4 (x, y, z in angstrom from the grid's origin, charge), except
// in direct_tiles, which reads the caller's. Floor: points × atoms inverse roots, 16 per clock and multiprocessor.
#pragma once

#include "cuda/terms.cuh"

struct Points {
    double origin[3], step[3];  // angstrom; origin of the whole grid
    int first[3], shape[3];
    float scale, softening;  // softening: added to r²
    float split[SPLIT_TERMS];
    long long atoms;
};

constexpr int DIRECT_THREADS = 128;
constexpr int COARSE = 8;             // points a thread
constexpr int CONSTANT_ATOMS = 240;   // of one launch: parameters are limited to 4 KB
constexpr int TILE_X = 16, TILE_Y = 8;

struct AtomChunk {
    float4 atom[CONSTANT_ATOMS];
};

__device__ inline float place(const Points& points, int axis, int index) {
    return static_cast<float>((points.first[axis] + index) * points.step[axis]);
}

template <typename Real>
__global__ void relative_atoms(const Real* __restrict__ atoms, float4* __restrict__ relative, Points points) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= points.atoms) return;
    relative[i] = make_float4(static_cast<float>(atoms[4 * i] - points.origin[0]),
                              static_cast<float>(atoms[4 * i + 1] - points.origin[1]),
                              static_cast<float>(atoms[4 * i + 2] - points.origin[2]), static_cast<float>(atoms[4 * i + 3]));
}

__device__ inline float across_of(float x, float y, const float4& atom, float softening) {
    const float dx = x - atom.x, dy = y - atom.y;
    return fmaf(dx, dx, fmaf(dy, dy, softening));
}

// direct_scatter: a thread an atom, which adds to every point: one atomic read-modify-write of the map for each term.
template <bool BY_DISTANCE>
__global__ void direct_scatter(const float4* __restrict__ atoms, float* __restrict__ map, Points points) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= points.atoms) return;
    const float4 atom = atoms[i];
    float* to = map;
    for (int x = 0; x < points.shape[0]; ++x)
        for (int y = 0; y < points.shape[1]; ++y) {
            const float across = across_of(place(points, 0, x), place(points, 1, y), atom, points.softening);
            for (int z = 0; z < points.shape[2]; ++z) {
                float term = 0;
                add_term<DIRECT, BY_DISTANCE>(term, place(points, 2, z) - atom.z, across, atom.w, points.split);
                atomicAdd(to++, term * points.scale);
            }
        }
}

// direct_gather: a thread a point, which sums all atoms in a register: no atomics, one write per point.
template <bool BY_DISTANCE>
__global__ void __launch_bounds__(DIRECT_THREADS)
direct_gather(const float4* __restrict__ atoms, float* __restrict__ map, Points points) {
    const long long i = blockIdx.x * static_cast<long long>(DIRECT_THREADS) + threadIdx.x;
    const long long plane = points.shape[1] * static_cast<long long>(points.shape[2]);
    if (i >= points.shape[0] * plane) return;
    const float x = place(points, 0, static_cast<int>(i / plane));
    const float y = place(points, 1, static_cast<int>(i % plane / points.shape[2]));
    const float z = place(points, 2, static_cast<int>(i % points.shape[2]));
    float sum = 0;
    for (long long a = 0; a < points.atoms; ++a) {
        const float4 atom = atoms[a];
        add_term<DIRECT, BY_DISTANCE>(sum, z - atom.z, across_of(x, y, atom, points.softening), atom.w, points.split);
    }
    map[i] = sum * points.scale;
}

// A thread's eight points of a row: neighbours, or strided so that neighbouring threads' stores fill whole sectors.
template <bool APART>
struct Row {
    long long row;
    int first, stride;
    float x, y, z[COARSE], sum[COARSE];

    __device__ explicit Row(const Points& points) {
        const int threads = (points.shape[2] + COARSE - 1) / COARSE;  // a row
        const long long thread = blockIdx.x * static_cast<long long>(DIRECT_THREADS) + threadIdx.x;
        row = thread / threads;
        stride = APART ? threads : 1;
        first = static_cast<int>(thread % threads) * (APART ? 1 : COARSE);
        x = place(points, 0, static_cast<int>(row / points.shape[1]));
        y = place(points, 1, static_cast<int>(row % points.shape[1]));
#pragma unroll
        for (int k = 0; k < COARSE; ++k) z[k] = place(points, 2, first + k * stride), sum[k] = 0;
    }

    template <bool BY_DISTANCE>
    __device__ void add(const float4& atom, const Points& points) {
        const float across = across_of(x, y, atom, points.softening);
#pragma unroll
        for (int k = 0; k < COARSE; ++k) add_term<DIRECT, BY_DISTANCE>(sum[k], z[k] - atom.z, across, atom.w, points.split);
    }

    // Stores the sums, or adds them to the map.
    template <bool ADD>
    __device__ void store(float* map, const Points& points) const {
        if (row >= points.shape[0] * static_cast<long long>(points.shape[1])) return;
        float* to = map + row * points.shape[2] + first;
#pragma unroll
        for (int k = 0; k < COARSE; ++k)
            if (first + k * stride < points.shape[2])
                to[k * stride] = sum[k] * points.scale + (ADD ? to[k * stride] : 0.0f);
    }
};

// direct_coarsened: a thread eight points, which share an atom's load and its distance from the row.
template <bool BY_DISTANCE, bool APART>
__global__ void __launch_bounds__(DIRECT_THREADS)
direct_coarsened(const float4* __restrict__ atoms, float* __restrict__ map, Points points) {
    Row<APART> row(points);
    for (long long a = 0; a < points.atoms; ++a) row.template add<BY_DISTANCE>(atoms[a], points);
    row.template store<false>(map, points);
}

// direct_constant: the same with atoms from constant memory (launch parameters): no load instructions; one launch for each
// 240 atoms, which adds to the map.
template <bool BY_DISTANCE>
__global__ void __launch_bounds__(DIRECT_THREADS)
direct_constant(const __grid_constant__ AtomChunk chunk, int count, float* __restrict__ map,
                const __grid_constant__ Points points) {
    Row<true> row(points);
    for (int a = 0; a < count; ++a) row.template add<BY_DISTANCE>(chunk.atom[a], points);
    row.template store<true>(map, points);
}

// direct_tiles: a block 16 × 8 × 8 points, a thread eight along z. 128 atoms at a time are staged relative to the tile's
// centre, subtracted in float64, so that float32 resolves them at the scale of the tile. Sums of 128 atoms are added with
// compensation. Tiles are counted from the whole grid's origin, so a point's bits do not depend on the part computed.
// The float32 coordinates from the grid's origin of direct_coarsened<…, true>, and its single long float32 sum, exceed the
// contract's error by up to twelve times.
template <typename Real, bool BY_DISTANCE>
__global__ void __launch_bounds__(DIRECT_THREADS)
direct_tiles(const Real* __restrict__ atoms, float* __restrict__ map, Points points) {
    __shared__ float4 staged[2][DIRECT_THREADS];
    const int tile[3] = {TILE_X, TILE_Y, COARSE};
    unsigned rest = blockIdx.x;
    int corner[3];
    double centre[3];
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
        const int first = points.first[axis] / tile[axis];
        const int tiles = (points.first[axis] + points.shape[axis] - 1) / tile[axis] - first + 1;
        corner[axis] = (first + static_cast<int>(rest % tiles)) * tile[axis];
        rest /= tiles;
        centre[axis] = (corner[axis] + 0.5 * (tile[axis] - 1)) * points.step[axis];
    }
    const int i = threadIdx.x / TILE_Y, j = threadIdx.x % TILE_Y;
    const float x = static_cast<float>((i - 0.5 * (TILE_X - 1)) * points.step[0]);
    const float y = static_cast<float>((j - 0.5 * (TILE_Y - 1)) * points.step[1]);
    float z[COARSE], total[COARSE], lost[COARSE];
#pragma unroll
    for (int k = 0; k < COARSE; ++k) {
        z[k] = static_cast<float>((k - 0.5 * (COARSE - 1)) * points.step[2]);
        total[k] = lost[k] = 0;
    }
    for (long long begin = 0, round = 0; begin < points.atoms; begin += DIRECT_THREADS, ++round) {
        const long long mine = begin + threadIdx.x;
        float4* const stage = staged[round % 2];
        if (mine < points.atoms) {
            const Real* atom = atoms + 4 * mine;
            stage[threadIdx.x] = make_float4(static_cast<float>(atom[0] - points.origin[0] - centre[0]),
                                             static_cast<float>(atom[1] - points.origin[1] - centre[1]),
                                             static_cast<float>(atom[2] - points.origin[2] - centre[2]),
                                             static_cast<float>(atom[3]));
        } else {
            stage[threadIdx.x] = make_float4(1e9f, 1e9f, 1e9f, 0);
        }
        __syncthreads();  // one per round: threads past it have finished with the other stage
        float sum[COARSE] = {};
// The special-function unit then works at 0.95 of its rate, with 4 and 8 at 0.88 and 0.85.
#pragma unroll 16
        for (int a = 0; a < DIRECT_THREADS; ++a) {
            const float4 atom = stage[a];
            const float across = across_of(x, y, atom, points.softening);
#pragma unroll
            for (int k = 0; k < COARSE; ++k) add_term<DIRECT, BY_DISTANCE>(sum[k], z[k] - atom.z, across, atom.w, points.split);
        }
#pragma unroll
        for (int k = 0; k < COARSE; ++k) {  // Knuth's two-sum
            const float added = total[k] + sum[k], part = added - total[k];
            lost[k] += (total[k] - (added - part)) + (sum[k] - part);
            total[k] = added;
        }
    }
    const int px = corner[0] + i - points.first[0], py = corner[1] + j - points.first[1];
    if (px < 0 || px >= points.shape[0] || py < 0 || py >= points.shape[1]) return;
    float* to = map + (px * static_cast<long long>(points.shape[1]) + py) * points.shape[2];
#pragma unroll
    for (int k = 0; k < COARSE; ++k) {
        const int pz = corner[2] + k - points.first[2];
        if (pz >= 0 && pz < points.shape[2]) to[pz] = (total[k] + lost[k]) * points.scale;
    }
}

// The special-function unit's rate, for benchmarks: `rounds` × 8 inverse roots a thread, in eight independent chains.
__global__ void inverse_roots(float* __restrict__ out, int rounds) {
    float x[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = 1.0f + threadIdx.x + k;
    for (int round = 0; round < rounds; ++round)
#pragma unroll
        for (int k = 0; k < 8; ++k) x[k] = inverse_root(x[k]);
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) sum += x[k];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
