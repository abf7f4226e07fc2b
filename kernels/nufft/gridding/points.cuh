// The steps before production: a thread per point and coil.
#pragma once

// order: from a rank to the trajectory's index if SORTED, the inverse otherwise. In trajectory order a thread's neighbours
// write anywhere, in sorted order near by.
template <int DIMS, bool SORTED>
__global__ void spread_points(const float4* __restrict__ points, const int* __restrict__ keys, const int* __restrict__ order,
                              const float2* __restrict__ samples, float2* __restrict__ grid, Gridding g) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= g.points) return;
    const long long rank = SORTED ? i : order[i], m = SORTED ? order[i] : i;
    const int coil = blockIdx.y;
    const float4 point = points[rank];
    const float2 value = samples[coil * g.points + m];
    int first[3];
    first_cell(first, point, keys[rank], g);
    for (int a = 0; a < g.width; ++a) {
        const float by_x = spreading(point.x + a, g);
        for (int b = 0; b < (DIMS == 3 ? g.width : 1); ++b) {
            const float by_y = DIMS == 3 ? by_x * spreading(point.y + b, g) : by_x;
            for (int c = 0; c < g.width; ++c) {
                const float weight = by_y * spreading(point.z + c, g);
                float2* cell = grid + cell_index(coil, wrapped(first[0] + a, g.size[0]), wrapped(first[1] + b, g.size[1]),
                                                 wrapped(first[2] + c, g.size[2]), g);
                atomicAdd(&cell->x, weight * value.x);
                atomicAdd(&cell->y, weight * value.y);
            }
        }
    }
}

template <int DIMS, bool SORTED>
__global__ void interpolate_points(const float4* __restrict__ points, const int* __restrict__ keys,
                                   const int* __restrict__ order, const float2* __restrict__ grid,
                                   float2* __restrict__ samples, Gridding g) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= g.points) return;
    const long long rank = SORTED ? i : order[i], m = SORTED ? order[i] : i;
    const int coil = blockIdx.y;
    const float4 point = points[rank];
    int first[3];
    first_cell(first, point, keys[rank], g);
    float2 sum = make_float2(0, 0);
    for (int a = 0; a < g.width; ++a) {
        const float by_x = spreading(point.x + a, g);
        for (int b = 0; b < (DIMS == 3 ? g.width : 1); ++b) {
            const float by_y = DIMS == 3 ? by_x * spreading(point.y + b, g) : by_x;
            for (int c = 0; c < g.width; ++c) {
                const float weight = by_y * spreading(point.z + c, g);
                const float2 value = grid[cell_index(coil, wrapped(first[0] + a, g.size[0]), wrapped(first[1] + b, g.size[1]),
                                                     wrapped(first[2] + c, g.size[2]), g)];
                sum.x += weight * value.x;
                sum.y += weight * value.y;
            }
        }
    }
    samples[coil * g.points + m] = sum;
}
