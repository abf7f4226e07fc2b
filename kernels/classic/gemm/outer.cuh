// C = A B by outer products in registers. Floor: m n k fused multiply-adds; a step of depth 1 takes 64 of them and four
// reads of 16 bytes from shared memory per thread.
#pragma once

#include "outer_product.cuh"
#include "tiles.cuh"

constexpr int EDGE = 128;

// Tiles of C are numbered in bands of BAND rows of tiles, so that blocks that run at the same time share rows and columns.
struct BandCorner {
    int row, column;

    __device__ explicit BandCorner(const Sizes& size) {
        constexpr unsigned BAND = 8;
        const unsigned across = (size.n + EDGE - 1) / EDGE, down = (size.m + EDGE - 1) / EDGE;
        const unsigned band = blockIdx.x / (BAND * across), within = blockIdx.x % (BAND * across);
        const unsigned rows = min(down - band * BAND, BAND);
        row = static_cast<int>(band * BAND + within % rows) * EDGE;
        column = static_cast<int>(within / rows) * EDGE;
    }
};

// Four numbers of a row, zero beyond the matrix. ALIGNED: rows are whole vectors, so all four are inside or all outside.
template <bool ALIGNED>
__device__ inline float4 four_of(const float* matrix, int rows, int columns, int row, int column) {
    float4 four = make_float4(0, 0, 0, 0);
    if (row >= rows || column >= columns) return four;
    const float* from = matrix + static_cast<long long>(row) * columns + column;
    if constexpr (ALIGNED) return __ldg(reinterpret_cast<const float4*>(from));
    four.x = from[0];
    if (column + 1 < columns) four.y = from[1];
    if (column + 2 < columns) four.z = from[2];
    if (column + 3 < columns) four.w = from[3];
    return four;
}

template <bool ALIGNED>
__device__ inline void store_four(float* matrix, int rows, int columns, int row, int column, const float* four) {
    if (row >= rows || column >= columns) return;
    float* to = matrix + static_cast<long long>(row) * columns + column;
    if constexpr (ALIGNED) {
        *reinterpret_cast<float4*>(to) = make_float4(four[0], four[1], four[2], four[3]);
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (column + j < columns) to[j] = four[j];
    }
}

// double_buffered: 8 × 8 results per thread, i.e. 64 multiply-adds per 16 numbers read; two buffers, so that one barrier
// per tile is enough and the loads of the next tile overlap the arithmetic of this one.
template <bool ALIGNED>
__global__ void __launch_bounds__(256, 2)
double_buffered(const float* __restrict__ a, const float* __restrict__ b, float* c, Sizes size) {
    constexpr int DEPTH = 8, PITCH = EDGE + 4;  // pitch: the transposed tile is written to 32 banks
    __shared__ __align__(16) float left[2][DEPTH][PITCH], right[2][DEPTH][EDGE];
    const BandCorner corner(size);
    OuterProduct<EDGE, EDGE> product;
    const int left_row = threadIdx.x / 2, left_k = threadIdx.x % 2 * 4;
    const int right_k = threadIdx.x / 32, right_column = threadIdx.x % 32 * 4;
    float4 next_left, next_right;
    const auto fetch = [&](int first) {
        next_left = four_of<ALIGNED>(a, size.m, size.k, corner.row + left_row, first + left_k);
        next_right = four_of<ALIGNED>(b, size.k, size.n, first + right_k, corner.column + right_column);
    };
    const auto store = [&](int buffer) {
        left[buffer][left_k][left_row] = next_left.x;
        left[buffer][left_k + 1][left_row] = next_left.y;
        left[buffer][left_k + 2][left_row] = next_left.z;
        left[buffer][left_k + 3][left_row] = next_left.w;
        *reinterpret_cast<float4*>(&right[buffer][right_k][right_column]) = next_right;
    };
    fetch(0);
    store(0);
    __syncthreads();
    int buffer = 0;
    for (int first = 0; first < size.k; first += DEPTH) {
        const bool more = size.k - first > DEPTH;
        if (more) fetch(first + DEPTH);
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) product.add(left[buffer][k], right[buffer][k]);
        buffer ^= 1;
        if (more) store(buffer);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; j += 4)
            store_four<ALIGNED>(c, size.m, size.n, corner.row + product.row_of(i), corner.column + product.column_of(j),
                                &product.sum[i][j]);
}
