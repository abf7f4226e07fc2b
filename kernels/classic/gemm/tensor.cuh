// C = A B on tensor cores (from sm_80), numbers as TF32: 8 exponent bits as in float, 10 bits of fraction. Floor: m n k (one
// term) or 3 m n k (three terms) multiply-adds at the rate of mma.sync, about 300 T/s on an H200.
#pragma once

#include "async_copy.cuh"
#include "outer.cuh"

// The nearest TF32 in the upper 19 bits, the only ones that tensor cores read. An integer addition: the conversion
// instruction runs at an eighth of its rate (sm_90). Finite numbers only.
__device__ inline unsigned as_tf32(float value) { return __float_as_uint(value) + 0x1000u; }
__device__ inline unsigned upper_bits(unsigned bits) { return bits & 0xffffe000u; }

// Loads a tile 16 × 8 of the left matrix for multiply_tile: `row` points to this lane's row of four numbers, one of the
// rows 0 … 7, 8 … 15, then the same rows four columns further. One read for the four numbers of a lane.
__device__ inline void load_tile(float (&a)[4], const float* row) {
#if __CUDA_ARCH__ >= 750
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=f"(a[0]), "=f"(a[1]), "=f"(a[2]), "=f"(a[3])
                 : "r"(at)
                 : "memory");
#else
    __trap();
#endif
}

// d += a b for a tile 16 × 8 × 8 held by a warp. Lane 4 g + t holds rows g, g + 8 and columns t, t + 4 of a, rows t, t + 4 of
// column g of b, and rows g, g + 8 and columns 2 t, 2 t + 1 of d.
__device__ inline void multiply_tile(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    __trap();
#endif
}

// A number as one TF32, or as the sum of two: the second holds the rounding error of the first.
template <int TERMS, int COUNT>
struct Split {
    unsigned high[COUNT], low[COUNT];

    __device__ void set(int i, float value) {
        high[i] = as_tf32(value);
        if constexpr (TERMS == 3) {
            high[i] = upper_bits(high[i]);
            low[i] = as_tf32(value - __uint_as_float(high[i]));
        }
    }
};

constexpr int TENSOR_DEPTH = 32, LEFT_PITCH = TENSOR_DEPTH + 4, RIGHT_PITCH = EDGE + 8;  // no two lanes in one bank
constexpr int LEFT_FLOATS = EDGE * LEFT_PITCH, STAGE_FLOATS = LEFT_FLOATS + TENSOR_DEPTH * RIGHT_PITCH;

template <bool ALIGNED>
__device__ inline void stage_four(float* to, const float* matrix, int rows, int columns, int row, int column) {
    if (ALIGNED && row < rows && column < columns)
        copy_16_bytes(to, matrix + static_cast<long long>(row) * columns + column);
    else *reinterpret_cast<float4*>(to) = four_of<ALIGNED>(matrix, rows, columns, row, column);
}

template <bool ALIGNED>
__device__ inline void stage_tiles(float* to, const float* a, const float* b, const Sizes& size, int row, int column, int k) {
    for (int i = threadIdx.x; i < EDGE * TENSOR_DEPTH / 4; i += 256) {
        const int y = i / (TENSOR_DEPTH / 4), x = i % (TENSOR_DEPTH / 4) * 4;
        stage_four<ALIGNED>(to + y * LEFT_PITCH + x, a, size.m, size.k, row + y, k + x);
    }
    for (int i = threadIdx.x; i < TENSOR_DEPTH * EDGE / 4; i += 256) {
        const int y = i / (EDGE / 4), x = i % (EDGE / 4) * 4;
        stage_four<ALIGNED>(to + LEFT_FLOATS + y * RIGHT_PITCH + x, b, size.k, size.n, k + y, column + x);
    }
}

// A warp's 64 × 32 numbers of C, eight steps of depth at a time. With three terms, low · high + high · low + high · high
// starts from zero and is added to the sum by an ordinary addition, because tensor cores truncate when they accumulate.
template <int TERMS>
__device__ inline void multiply_stage(float (&sum)[4][4][4], const float* left, const float* right, int g, int t) {
#pragma unroll
    for (int k = 0; k < TENSOR_DEPTH; k += 8) {
        Split<TERMS, 4> a[4];
        Split<TERMS, 2> b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float tile[4];
            load_tile(tile, left + (16 * i + threadIdx.x % 16) * LEFT_PITCH + k + threadIdx.x / 16 % 2 * 4);
#pragma unroll
            for (int part = 0; part < 4; ++part) a[i].set(part, tile[part]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int part = 0; part < 2; ++part) b[j].set(part, right[(k + t + part * 4) * RIGHT_PITCH + 8 * j + g]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if constexpr (TERMS == 1) {
                    multiply_tile(sum[i][j], a[i].high, b[j].high);
                } else {
                    float part[4] = {};
                    multiply_tile(part, a[i].low, b[j].high);
                    multiply_tile(part, a[i].high, b[j].low);
                    multiply_tile(part, a[i].high, b[j].high);
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum[i][j][e] += part[e];
                }
            }
    }
}

// tensor: eight warps, each 64 × 32 of a block's 128 × 128. TERMS 1: numbers are rounded to 11 bits, relative error of a
// product up to 2^-11 + 2^-11. TERMS 3: numbers have 22 bits, errors as in float products; three times the work.
template <bool ALIGNED, int TERMS>
__global__ void __launch_bounds__(256, TERMS == 1 ? 2 : 1)
tensor(const float* __restrict__ a, const float* __restrict__ b, float* c, Sizes size) {
    extern __shared__ __align__(16) float stages[];
    const BandCorner corner(size);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int row = warp / 4 * 64, column = warp % 4 * 32;
    float sum[4][4][4] = {};
    stage_tiles<ALIGNED>(stages, a, b, size, corner.row, corner.column, 0);
    int stage = 0;
    for (int k = 0; k < size.k; k += TENSOR_DEPTH) {
        wait_for_copies();
        __syncthreads();
        const float* staged = stages + stage * STAGE_FLOATS;
        stage ^= 1;
        if (size.k - k > TENSOR_DEPTH)
            stage_tiles<ALIGNED>(stages + stage * STAGE_FLOATS, a, b, size, corner.row, corner.column, k + TENSOR_DEPTH);
        multiply_stage<TERMS>(sum, staged + row * LEFT_PITCH, staged + LEFT_FLOATS + column, g, t);
    }
    wait_for_copies();  // none may be in flight when the block ends
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int y = corner.row + row + 16 * i + g + e / 2 * 8;
                const int x = corner.column + column + 8 * j + 2 * t + e % 2;
                if (y < size.m && x < size.n) c[static_cast<long long>(y) * size.n + x] = sum[i][j][e];
            }
}
