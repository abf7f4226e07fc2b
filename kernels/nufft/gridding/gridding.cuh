// Points of k-space, the FFT's grid, and the two directions of convolution with the spreading kernel
//
//   phi(t) = sum over i of coefficient[i] (1 − (2 t / width)²)^i,   |t| <= width / 2 cells
//
// with the coefficients of spreading.py: a polynomial costs one multiply-add per degree and no special function.
//
// A grid's axes are x, y, z, z fastest; a 2-D grid has no y. A point touches `width` cells from its first one on along each
// axis. Its record holds the distance from the point to its first cell on x, y, z (-width/2 … 1 - width/2), and the packed
// position of that cell: x | (y % 4) << 28 | (z % 4) << 30. Points are sorted by (y / 4, z / 4, x) of their first cell, so
// that starts[((y / 4) bins_z + z / 4) size_x + x] is the first of a column's points. Every size of the grid is a multiple
// of four and at least 16.
//
// Each call brings samples into that order once, coils innermost, [chunk][rank][lanes], where a chunk is `lanes` coils.
#pragma once

struct Gridding {
    long long points;
    int size[3];        // of the grid: x, y, z
    int image[3];
    int bins[2];        // of four cells along y and z
    int width;
    int coils, lanes;   // lanes: a power of two up to 32
    int items;
    int part;           // candidates that one warp processes
    float per_half;     // 2 / width
    float coefficient[12];
};

constexpr int DEGREE = 11;        // of the widest kernel
constexpr int NARROW_DEGREE = 7;  // of those up to 5 cells wide

template <int DEGREES = DEGREE>
__device__ inline float spreading(float distance, const Gridding& g) {
    const float r = distance * g.per_half, s = fmaxf(1 - r * r, 0.f);
    float value = g.coefficient[DEGREES];
#pragma unroll
    for (int i = DEGREES - 1; i >= 0; --i) value = value * s + g.coefficient[i];
    return value;
}

__device__ inline int wrapped(int cell, int size) { return cell >= size ? cell - size : cell; }

constexpr int PLACE_BITS = 28, PLACE_MASK = (1 << PLACE_BITS) - 1;

__device__ inline int place_x(float4 point) { return __float_as_int(point.w) & PLACE_MASK; }
__device__ inline int place_y(float4 point) { return __float_as_int(point.w) >> PLACE_BITS & 3; }
__device__ inline int place_z(float4 point) { return __float_as_int(point.w) >> 30 & 3; }

// Records and sort keys of a trajectory in cycles per field of view; k is folded into its period in float64.
template <typename Real, int DIMS>
__global__ void place_points(const Real* __restrict__ trajectory, float4* __restrict__ points, int* __restrict__ keys,
                             Gridding g) {
    const long long m = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (m >= g.points) return;
    int cell[3] = {0, 0, 0};
    float to_cell[3] = {0, 0, 0};
#pragma unroll
    for (int axis = 0; axis < DIMS; ++axis) {
        const int i = DIMS == 2 ? 2 * axis : axis;
        double turns = static_cast<double>(trajectory[m * DIMS + axis]) / g.image[i];
        turns -= floor(turns);
        const double at = turns * g.size[i], first = ceil(at - 0.5 * g.width);
        to_cell[i] = static_cast<float>(first - at);
        int place = static_cast<int>(first);
        if (place < 0) place += g.size[i];
        cell[i] = min(max(wrapped(place, g.size[i]), 0), g.size[i] - 1);  // NaN stays inside the grid
    }
    const int packed = cell[0] | (cell[1] & 3) << PLACE_BITS | static_cast<int>((cell[2] & 3u) << 30);
    points[m] = make_float4(to_cell[0], to_cell[1], to_cell[2], __int_as_float(packed));
    keys[m] = (cell[1] / 4 * g.bins[1] + cell[2] / 4) * g.size[0] + cell[0];
}

// A point's first cell on y and z, from its key.
__device__ inline void first_cell(int (&cell)[3], float4 point, int key, const Gridding& g) {
    const int bin = key / g.size[0];
    cell[0] = place_x(point);
    cell[1] = bin / g.bins[1] * 4 + place_y(point);
    cell[2] = bin % g.bins[1] * 4 + place_z(point);
}

__device__ inline long long cell_index(int coil, int x, int y, int z, const Gridding& g) {
    return ((static_cast<long long>(coil) * g.size[0] + x) * g.size[1] + y) * g.size[2] + z;
}

#include "gridding/order.cuh"
#include "gridding/points.cuh"
#include "gridding/spread.cuh"
#include "gridding/cells.cuh"
#include "gridding/interpolate.cuh"
#include "gridding/gather.cuh"
#include "gridding/grid_lines.cuh"
