// A block's product of ROWS × depth by depth × COLUMNS, both staged in shared memory, as outer products in registers: a
// thread holds 8 × 8 sums, and uses each number that it reads from shared memory in eight fused multiply-adds.
#pragma once

template <int ROWS, int COLUMNS>
struct OuterProduct {
    static constexpr int THREADS = ROWS * COLUMNS / 64;
    int row, column;
    float sum[8][8];

    // A warp has 4 × 8 threads, each with two runs of four rows and of four columns: its reads of 16 bytes a thread
    // cover 64 and 128 neighbouring bytes, without bank conflicts.
    __device__ OuterProduct() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        row = warp / (COLUMNS / 64) * 32 + lane / 8 * 4;
        column = warp % (COLUMNS / 64) * 64 + lane % 8 * 4;
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[i][j] = 0;
    }

    __device__ int row_of(int i) const { return row + i / 4 * 16 + i % 4; }
    __device__ int column_of(int j) const { return column + j / 4 * 32 + j % 4; }

    // left: one number for each row; right: one for each column; both aligned to 16 bytes.
    __device__ void add(const float* left, const float* right) {
        float a[8], b[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<float4*>(a + 4 * half) = *reinterpret_cast<const float4*>(left + row + 16 * half);
            *reinterpret_cast<float4*>(b + 4 * half) = *reinterpret_cast<const float4*>(right + column + 32 * half);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[i][j] = fmaf(a[i], b[j], sum[i][j]);
    }
};
