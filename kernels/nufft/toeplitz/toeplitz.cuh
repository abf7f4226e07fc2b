// The normal operator as a convolution on a doubled grid: the steps before, between and after the FFTs.
//
// A grid is [coil][x][y][z], z fastest; in 2-D x is 1. The image occupies its first corner.
#pragma once

struct Doubled {
    int size[3];   // of the grid: x, y, z
    int image[3];
    int coils;
};

// map × image in the corner, zeros elsewhere. A thread per cell; without `maps`, one image per coil.
__global__ void weigh_coils(const float2* __restrict__ image, const float2* __restrict__ maps, float2* __restrict__ grid,
                            Doubled g) {
    const int z = blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = blockIdx.y + static_cast<long long>(gridDim.y) * blockIdx.z;
    if (z >= g.size[2] || row >= static_cast<long long>(g.coils) * g.size[0] * g.size[1]) return;
    const int y = row % g.size[1], x = row / g.size[1] % g.size[0], coil = row / g.size[1] / g.size[0];
    float2 value = make_float2(0, 0);
    if (x < g.image[0] && y < g.image[1] && z < g.image[2]) {
        const long long pixel = (static_cast<long long>(x) * g.image[1] + y) * g.image[2] + z;
        const long long of_coil = coil * static_cast<long long>(g.image[0]) * g.image[1] * g.image[2] + pixel;
        value = maps ? image[pixel] : image[of_coil];
        if (maps) {
            const float2 map = maps[of_coil];
            value = make_float2(map.x * value.x - map.y * value.y, map.x * value.y + map.y * value.x);
        }
    }
    grid[row * g.size[2] + z] = value;
}

// Each coil's grid times the kernel. A thread per two cells (sizes are even).
__global__ void multiply(float4* __restrict__ grid, const float2* __restrict__ kernel, long long pairs, int coils) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= pairs) return;
    const float2 by = kernel[i];
    for (int coil = blockIdx.y; coil < coils; coil += gridDim.y) {
        float4 value = grid[coil * pairs + i];
        grid[coil * pairs + i] = make_float4(value.x * by.x, value.y * by.x, value.z * by.y, value.w * by.y);
    }
}

// sum += by × value, or its conjugate
__device__ inline void add_product(float2& sum, float by, float2 value, bool) {
    sum.x += by * value.x;
    sum.y += by * value.y;
}

__device__ inline void add_product(float2& sum, float2 by, float2 value, bool conjugate) {
    const float y = conjugate ? -by.y : by.y;
    sum.x += by.x * value.x - y * value.y;
    sum.y += by.x * value.y + y * value.x;
}

// At each cell, the K coefficients of each coil times a Hermitian matrix, whose upper triangle is in `kernels`, row by
// row. Grids are [coefficient][coil][cell]. A thread per cell, which loads its matrix once for several coils: 16 K bytes
// a coil and cell, and the matrix, against 8 K² operations.
template <int K, class Element>
__global__ void mix_coefficients(float2* __restrict__ grids, const Element* __restrict__ kernels, long long cells, int coils) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= cells) return;
    Element matrix[K * (K + 1) / 2];
#pragma unroll
    for (int k = 0; k < K * (K + 1) / 2; ++k) matrix[k] = kernels[k * cells + i];
    for (int coil = blockIdx.y; coil < coils; coil += gridDim.y) {
        float2 value[K];
#pragma unroll
        for (int k = 0; k < K; ++k) value[k] = grids[(k * static_cast<long long>(coils) + coil) * cells + i];
#pragma unroll
        for (int row = 0; row < K; ++row) {
            float2 sum = make_float2(0, 0);
#pragma unroll
            for (int column = 0; column < K; ++column) {
                const int upper = row < column ? row : column, right = row < column ? column : row;
                const Element by = matrix[upper * K - upper * (upper - 1) / 2 + right - upper];
                add_product(sum, by, value[column], row > column);
            }
            grids[(row * static_cast<long long>(coils) + coil) * cells + i] = sum;
        }
    }
}

// conj(map) × the corner, summed over coils; added to `out` except for the first part of the coils. A thread per pixel.
__global__ void combine_coils(const float2* __restrict__ grid, const float2* __restrict__ maps, float2* __restrict__ out,
                              bool first, Doubled g) {
    const int z = blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = blockIdx.y + static_cast<long long>(gridDim.y) * blockIdx.z;
    if (z >= g.image[2] || row >= static_cast<long long>(g.image[0]) * g.image[1]) return;
    const int y = row % g.image[1], x = row / g.image[1];
    const long long pixel = row * g.image[2] + z, pixels = static_cast<long long>(g.image[0]) * g.image[1] * g.image[2];
    float2 sum = first ? make_float2(0, 0) : out[pixel];
#pragma unroll 4
    for (int coil = 0; coil < g.coils; ++coil) {
        const float2 value = grid[((static_cast<long long>(coil) * g.size[0] + x) * g.size[1] + y) * g.size[2] + z];
        const float2 map = maps[coil * pixels + pixel];
        sum.x += map.x * value.x + map.y * value.y;
        sum.y += map.x * value.y - map.y * value.x;
    }
    out[pixel] = sum;
}

// The corner of each coil's grid. A thread per pixel.
__global__ void crop_coils(const float2* __restrict__ grid, float2* __restrict__ images, Doubled g) {
    const int z = blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = blockIdx.y + static_cast<long long>(gridDim.y) * blockIdx.z;
    if (z >= g.image[2] || row >= static_cast<long long>(g.coils) * g.image[0] * g.image[1]) return;
    const int y = row % g.image[1], x = row / g.image[1] % g.image[0], coil = row / g.image[1] / g.image[0];
    images[row * g.image[2] + z] =
        grid[((static_cast<long long>(coil) * g.size[0] + x) * g.size[1] + y) * g.size[2] + z];
}
