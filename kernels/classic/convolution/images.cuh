// Convolution of an image with a mask. Floor: 8 bytes per result over the device's bandwidth, up to 54 weights on an H200,
// then one multiply-add per result and weight.
#pragma once

#include "lines.cuh"

struct Image {
    int rows, columns;
};

__device__ inline float pixel_or_zero(const float* image, const Image& size, int row, int column) {
    const bool inside = row >= 0 && row < size.rows && column >= 0 && column < size.columns;
    return inside ? image[static_cast<long long>(row) * size.columns + column] : 0.0f;
}

// The first result of a block; blocks are numbered along the image's rows.
struct Tile {
    int row, column;

    __device__ Tile(const Image& size, int rows, int columns) {
        const unsigned across = (size.columns + columns - 1) / columns;
        row = static_cast<int>(blockIdx.x / across) * rows;
        column = static_cast<int>(blockIdx.x % across) * columns;
    }
};

constexpr int TILE_ROWS = 8, TILE_COLUMNS = 32, TILE_THREADS = TILE_ROWS * TILE_COLUMNS;

struct Result {
    int row, column;
    bool exists;
    long long at;

    __device__ Result(const Image& size, const Tile& tile)
        : row(tile.row + threadIdx.x / TILE_COLUMNS), column(tile.column + threadIdx.x % TILE_COLUMNS) {
        exists = row < size.rows && column < size.columns;
        at = static_cast<long long>(row) * size.columns + column;
    }
};

// image_direct: one thread per result; mask and pixels are read through the caches.
__global__ void __launch_bounds__(256)
image_direct(const float* __restrict__ from, const float* __restrict__ mask, float* to, Image size, Image mask_size) {
    const Result result(size, Tile(size, TILE_ROWS, TILE_COLUMNS));
    if (!result.exists) return;
    const int top = result.row - mask_size.rows / 2, left = result.column - mask_size.columns / 2;
    float sum = 0;
    for (int y = 0; y < mask_size.rows; ++y)
        for (int x = 0; x < mask_size.columns; ++x)
            sum = fmaf(mask[y * mask_size.columns + x], pixel_or_zero(from, size, top + y, left + x), sum);
    to[result.at] = sum;
}

// image_constant: each weight is one read of constant memory per warp.
__global__ void __launch_bounds__(256)
image_constant(const float* __restrict__ from, float* to, Image size, const __grid_constant__ Mask mask) {
    const Result result(size, Tile(size, TILE_ROWS, TILE_COLUMNS));
    if (!result.exists) return;
    const int top = result.row - mask.rows / 2, left = result.column - mask.columns / 2;
    float sum = 0;
    for (int y = 0; y < mask.rows; ++y)
        for (int x = 0; x < mask.columns; ++x)
            sum = fmaf(mask.weight[y * mask.columns + x], pixel_or_zero(from, size, top + y, left + x), sum);
    to[result.at] = sum;
}

// image_steps: strategy 1. The threads load tile and halo into shared memory in several steps.
__global__ void __launch_bounds__(256)
image_steps(const float* __restrict__ from, float* to, Image size, const __grid_constant__ Mask mask) {
    extern __shared__ float staged[];
    const Tile tile(size, TILE_ROWS, TILE_COLUMNS);
    const int pitch = TILE_COLUMNS + mask.columns - 1, rows = TILE_ROWS + mask.rows - 1;
    for (int i = threadIdx.x; i < rows * pitch; i += TILE_THREADS)
        staged[i] = pixel_or_zero(from, size, tile.row - mask.rows / 2 + i / pitch, tile.column - mask.columns / 2 + i % pitch);
    __syncthreads();
    const Result result(size, tile);
    if (!result.exists) return;
    const float* window = staged + threadIdx.x / TILE_COLUMNS * pitch + threadIdx.x % TILE_COLUMNS;
    float sum = 0;
    for (int y = 0; y < mask.rows; ++y)
        for (int x = 0; x < mask.columns; ++x) sum = fmaf(mask.weight[y * mask.columns + x], window[y * pitch + x], sum);
    to[result.at] = sum;
}

// image_inputs: strategy 2. One thread per pixel of tile and halo, loaded in one step; with a mask of 9 × 9 only 24 × 24 of
// 32 × 32 threads have a result.
__global__ void __launch_bounds__(1024)
image_inputs(const float* __restrict__ from, float* to, Image size, const __grid_constant__ Mask mask) {
    __shared__ float staged[32][32];
    const int rows = 32 - (mask.rows - 1), columns = 32 - (mask.columns - 1);
    const Tile tile(size, rows, columns);
    const int ty = threadIdx.x / 32, tx = threadIdx.x % 32, row = tile.row + ty, column = tile.column + tx;
    staged[ty][tx] = pixel_or_zero(from, size, row - mask.rows / 2, column - mask.columns / 2);
    __syncthreads();
    if (ty >= rows || tx >= columns || row >= size.rows || column >= size.columns) return;
    float sum = 0;
    for (int y = 0; y < mask.rows; ++y)
        for (int x = 0; x < mask.columns; ++x) sum = fmaf(mask.weight[y * mask.columns + x], staged[ty + y][tx + x], sum);
    to[static_cast<long long>(row) * size.columns + column] = sum;
}

// image_inner: strategy 3. Only the tile is in shared memory; the halo comes from the caches, with a branch per weight.
__global__ void __launch_bounds__(256)
image_inner(const float* __restrict__ from, float* to, Image size, const __grid_constant__ Mask mask) {
    __shared__ float staged[TILE_ROWS][TILE_COLUMNS];
    const Tile tile(size, TILE_ROWS, TILE_COLUMNS);
    const Result result(size, tile);
    const int ty = threadIdx.x / TILE_COLUMNS, tx = threadIdx.x % TILE_COLUMNS;
    staged[ty][tx] = pixel_or_zero(from, size, result.row, result.column);
    __syncthreads();
    if (!result.exists) return;
    float sum = 0;
    for (int y = 0; y < mask.rows; ++y)
        for (int x = 0; x < mask.columns; ++x) {
            const int v = ty + y - mask.rows / 2, u = tx + x - mask.columns / 2;
            const bool inside = v >= 0 && v < TILE_ROWS && u >= 0 && u < TILE_COLUMNS;
            const float pixel = inside ? staged[v][u] : pixel_or_zero(from, size, tile.row + v, tile.column + u);
            sum = fmaf(mask.weight[y * mask.columns + x], pixel, sum);
        }
    to[result.at] = sum;
}

// Copies four pixels of a row to shared memory, zero beyond the image.
__device__ inline void stage_pixels(float* to, const float* image, const Image& size, int row, int column, bool aligned) {
    if (aligned && row >= 0 && row < size.rows && column >= 0 && column < size.columns) {
        copy_16_bytes(to, image + static_cast<long long>(row) * size.columns + column);
    } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) to[c] = pixel_or_zero(image, size, row, column + c);
    }
}

constexpr int REGISTER_ROWS = 32, REGISTER_COLUMNS = 128, EACH = 4;  // a block's tile; rows of a thread

// A square mask of a fixed size: all loops are unrolled, the weights are operands, and the tile begins SHIFT pixels before
// the first one needed, on a multiple of 16 bytes, so that it is copied in whole vectors.
template <int SIZE>
__device__ inline void square_sums(float (&sum)[EACH][4], float* staged, const float* from, const Image& size,
                                   const Tile& tile, const Mask& mask) {
    constexpr int SHIFT = (4 - SIZE / 2 % 4) % 4, VECTORS = (SHIFT + SIZE + 3 + 3) / 4;
    constexpr int ROW = REGISTER_COLUMNS / 4 + VECTORS - 1;  // vectors
    const bool aligned = is_aligned(from) && size.columns % 4 == 0;
    for (int i = threadIdx.x; i < (REGISTER_ROWS + SIZE - 1) * ROW; i += 256)
        stage_pixels(staged + 4 * i, from, size, tile.row - SIZE / 2 + i / ROW,
                     tile.column - SIZE / 2 - SHIFT + i % ROW * 4, aligned);
    wait_for_copies();
    __syncthreads();
    const float4* rows = reinterpret_cast<const float4*>(staged) + threadIdx.x / 32 * EACH * ROW + threadIdx.x % 32;
#pragma unroll
    for (int y = 0; y < EACH + SIZE - 1; ++y) {
        float window[4 * VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) *reinterpret_cast<float4*>(window + 4 * v) = rows[y * ROW + v];
#pragma unroll
        for (int r = 0; r < EACH; ++r)
#pragma unroll
            for (int t = 0; t < SIZE; ++t)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (y >= r && y - r < SIZE)
                        sum[r][c] = fmaf(mask.weight[(y - r) * SIZE + t], window[SHIFT + t + c], sum[r][c]);
    }
}

// Any other mask.
__device__ inline void any_sums(float (&sum)[EACH][4], float* staged, const float* from, const Image& size,
                                const Tile& tile, const Mask& mask) {
    const int pitch = (REGISTER_COLUMNS + mask.columns - 1 + 3) / 4 * 4 + 8;  // up to two unused vectors
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int y = warp; y < REGISTER_ROWS + mask.rows - 1; y += 8)
        for (int x = lane; x < pitch; x += 32)
            staged[y * pitch + x] =
                pixel_or_zero(from, size, tile.row - mask.rows / 2 + y, tile.column - mask.columns / 2 + x);
    __syncthreads();
    for (int y = 0; y < EACH + mask.rows - 1; ++y) {
        const float4* row = reinterpret_cast<const float4*>(staged + (warp * EACH + y) * pitch) + lane;
        float window[12];
        *reinterpret_cast<float4*>(window) = row[0];
        *reinterpret_cast<float4*>(window + 4) = row[1];
        for (int x = 0; x < mask.columns; x += 4) {
            *reinterpret_cast<float4*>(window + 8) = row[x / 4 + 2];
            const int left = mask.columns - x;
#pragma unroll
            for (int r = 0; r < EACH; ++r) {
                if (y < r || y - r >= mask.rows) continue;
                const float* weight = mask.weight + (y - r) * mask.columns + x;
                if (left >= 4) add_taps<4, 0>(sum[r], weight, window);
                else if (left == 3) add_taps<3, 0>(sum[r], weight, window);
                else add_taps<1, 0>(sum[r], weight, window);
            }
#pragma unroll
            for (int c = 0; c < 8; ++c) window[c] = window[c + 4];
        }
    }
}

// image_registers: 4 × 4 results per thread. A read of 16 bytes serves up to 64 multiply-adds. SIZE: of a square mask, or 0
// for any mask.
template <int SIZE>
__global__ void __launch_bounds__(256)
image_registers(const float* __restrict__ from, float* to, Image size, const __grid_constant__ Mask mask) {
    extern __shared__ __align__(16) float staged[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Tile tile(size, REGISTER_ROWS, REGISTER_COLUMNS);
    float sum[EACH][4] = {};
    if constexpr (SIZE) square_sums<SIZE>(sum, staged, from, size, tile, mask);
    else any_sums(sum, staged, from, size, tile, mask);
    const int column = tile.column + 4 * lane;
    const bool aligned = is_aligned(to) && size.columns % 4 == 0;
#pragma unroll
    for (int r = 0; r < EACH; ++r) {
        const int row = tile.row + warp * EACH + r;
        if (row >= size.rows) return;
        float* at = to + static_cast<long long>(row) * size.columns + column;
        if (aligned && column < size.columns) {
            *reinterpret_cast<float4*>(at) = *reinterpret_cast<const float4*>(sum[r]);
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (column + c < size.columns) at[c] = sum[r][c];
        }
    }
}
