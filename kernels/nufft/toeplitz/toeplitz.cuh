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
