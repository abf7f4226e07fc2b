// Convolution layers of neural networks: filters are not flipped, images are not padded. Floor: maps × channels × weights
// multiply-adds per pixel of the result.
#pragma once

#include "outer_product.cuh"

struct Layer {
    int channels, rows, columns;  // of an image
    int maps, mask_rows, mask_columns, out_rows, out_columns;
    long long pixels;  // of a map of the result, in all images
};

// The offsets of a pixel in the result and of its window in the images.
struct Pixel {
    long long window, at;  // `at`: in the first map

    __device__ Pixel(const Layer& layer, long long number) {
        const long long area = static_cast<long long>(layer.out_rows) * layer.out_columns, image = number / area;
        const long long within = number % area;
        window = (image * layer.channels * layer.rows + within / layer.out_columns) * layer.columns +
                 within % layer.out_columns;
        at = image * layer.maps * area + within;
    }
};

// layer_direct: one thread per result. Threads of a warp read neighbouring pixels and the same weight.
__global__ void __launch_bounds__(256)
layer_direct(const float* __restrict__ images, const float* __restrict__ filters, float* to, Layer layer) {
    const long long groups = (layer.pixels + 255) / 256;
    const long long number = blockIdx.x % groups * 256 + threadIdx.x;
    const int map = static_cast<int>(blockIdx.x / groups);
    if (number >= layer.pixels) return;
    const Pixel pixel(layer, number);
    const float* weight = filters + static_cast<long long>(map) * layer.channels * layer.mask_rows * layer.mask_columns;
    const float* plane = images + pixel.window;
    float sum = 0;
    for (int c = 0; c < layer.channels; ++c, plane += static_cast<long long>(layer.rows) * layer.columns)
        for (int y = 0; y < layer.mask_rows; ++y)
            for (int x = 0; x < layer.mask_columns; ++x)
                sum = fmaf(*weight++, plane[static_cast<long long>(y) * layer.columns + x], sum);
    to[pixel.at + static_cast<long long>(map) * layer.out_rows * layer.out_columns] = sum;
}

// Iterates over the numbers of a window: columns, rows, channels.
struct Walk {
    int x = 0, y = 0;
    long long offset = 0;  // from the window's first number

    __device__ void next(const Layer& layer) {
        ++offset;
        if (++x < layer.mask_columns) return;
        x = 0;
        offset += layer.columns - layer.mask_columns;
        if (++y < layer.mask_rows) return;
        y = 0;
        offset += static_cast<long long>(layer.rows - layer.mask_rows) * layer.columns;
    }
};

// layer_gemm: filters [maps][depth] times windows [depth][pixels]. The windows, which overlap, are never stored: a thread
// gathers the window of one pixel while it loads the right matrix. Arithmetic as in a matrix product.
__global__ void __launch_bounds__(128, 4)
layer_gemm(const float* __restrict__ images, const float* __restrict__ filters, float* to, Layer layer) {
    constexpr int ROWS = 64, COLUMNS = 128, DEPTH = 8, PITCH = ROWS + 4;
    __shared__ __align__(16) float left[2][DEPTH][PITCH], right[2][DEPTH][COLUMNS];
    const int depth = layer.channels * layer.mask_rows * layer.mask_columns;
    const unsigned bands = (layer.maps + ROWS - 1) / ROWS;
    const int map = static_cast<int>(blockIdx.x % bands) * ROWS;
    const long long first = static_cast<long long>(blockIdx.x / bands) * COLUMNS, mine = first + threadIdx.x;
    const bool exists = mine < layer.pixels;
    const float* window = images + (exists ? Pixel(layer, mine).window : 0);
    const int left_row = threadIdx.x / 2, left_k = threadIdx.x % 2 * 4;
    const bool left_exists = map + left_row < layer.maps;
    const float* weights = filters + static_cast<long long>(left_exists ? map + left_row : 0) * depth;
    Walk walk;
    float next_left[4], next_right[DEPTH];
    const auto fetch = [&](int k) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            next_left[i] = left_exists && k + left_k + i < depth ? weights[k + left_k + i] : 0.0f;
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            next_right[i] = exists && k + i < depth ? window[walk.offset] : 0.0f;
            walk.next(layer);
        }
    };
    const auto store = [&](int buffer) {
#pragma unroll
        for (int i = 0; i < 4; ++i) left[buffer][left_k + i][left_row] = next_left[i];
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) right[buffer][i][threadIdx.x] = next_right[i];
    };
    OuterProduct<ROWS, COLUMNS> product;
    fetch(0);
    store(0);
    __syncthreads();
    int buffer = 0;
    for (int k = 0; k < depth; k += DEPTH) {
        const bool more = depth - k > DEPTH;
        if (more) fetch(k + DEPTH);
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) product.add(left[buffer][i], right[buffer][i]);
        buffer ^= 1;
        if (more) store(buffer);
        __syncthreads();
    }
    const long long area = static_cast<long long>(layer.out_rows) * layer.out_columns;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const long long number = first + product.column_of(j);
        if (number >= layer.pixels) continue;
        float* at = to + Pixel(layer, number).at;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (map + product.row_of(i) < layer.maps) at[(map + product.row_of(i)) * area] = product.sum[i][j];
    }
}
