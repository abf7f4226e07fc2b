// The first steps of the ladder: one number per thread, then a column of them. Floor: m n k fused multiply-adds, but each
// step here is bound by how often it reads shared or global memory for one of them.
#pragma once

struct Sizes {
    int m, n, k;
};

// The first element of a block's tile; tiles are numbered along rows of C in one dimension of the grid.
struct Corner {
    int row, column;

    __device__ Corner(const Sizes& size, int rows, int columns) {
        const unsigned across = (size.n + columns - 1) / columns;
        row = static_cast<int>(blockIdx.x / across) * rows;
        column = static_cast<int>(blockIdx.x % across) * columns;
    }
};

__device__ inline float at_or_zero(const float* matrix, int rows, int columns, int row, int column) {
    return row < rows && column < columns ? matrix[static_cast<long long>(row) * columns + column] : 0.0f;
}

// naive: one thread per number of C. A warp reads one number of A and 32 neighbours of B for each 32 multiply-adds.
__global__ void __launch_bounds__(256) naive(const float* __restrict__ a, const float* __restrict__ b, float* c, Sizes size) {
    const Corner corner(size, 8, 32);
    const int row = corner.row + threadIdx.x / 32, column = corner.column + threadIdx.x % 32;
    if (row >= size.m || column >= size.n) return;
    const float* left = a + static_cast<long long>(row) * size.k;
    float sum = 0;
    for (int k = 0; k < size.k; ++k) sum = fmaf(left[k], b[static_cast<long long>(k) * size.n + column], sum);
    c[static_cast<long long>(row) * size.n + column] = sum;
}

// tiles: a block reads each number of its tiles once for all its threads, 1/COLUMNS and 1/ROWS as often as naive. Square
// tiles reuse most; in rectangular ones a row fills whole warps, and more depth means fewer barriers.
template <int ROWS, int COLUMNS, int DEPTH>
__global__ void __launch_bounds__(ROWS * COLUMNS)
tiles(const float* __restrict__ a, const float* __restrict__ b, float* c, Sizes size) {
    __shared__ float left[ROWS][DEPTH], right[DEPTH][COLUMNS];
    const Corner corner(size, ROWS, COLUMNS);
    const int y = threadIdx.x / COLUMNS, x = threadIdx.x % COLUMNS;
    float sum = 0;
    for (int first = 0; first < size.k; first += DEPTH) {
        for (int i = threadIdx.x; i < ROWS * DEPTH; i += ROWS * COLUMNS)
            left[i / DEPTH][i % DEPTH] = at_or_zero(a, size.m, size.k, corner.row + i / DEPTH, first + i % DEPTH);
        for (int i = threadIdx.x; i < DEPTH * COLUMNS; i += ROWS * COLUMNS)
            right[i / COLUMNS][i % COLUMNS] =
                at_or_zero(b, size.k, size.n, first + i / COLUMNS, corner.column + i % COLUMNS);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) sum = fmaf(left[y][k], right[k][x], sum);
        __syncthreads();
    }
    const int row = corner.row + y, column = corner.column + x;
    if (row < size.m && column < size.n) c[static_cast<long long>(row) * size.n + column] = sum;
}

// coarsened: EACH rows of a column per thread, so that one read of B from shared memory serves EACH results.
template <int EACH>
__global__ void __launch_bounds__(256)
coarsened(const float* __restrict__ a, const float* __restrict__ b, float* c, Sizes size) {
    constexpr int COLUMNS = 64, GROUPS = 256 / COLUMNS, ROWS = GROUPS * EACH, DEPTH = 32;
    __shared__ __align__(16) float left[ROWS][DEPTH], right[DEPTH][COLUMNS];
    const Corner corner(size, ROWS, COLUMNS);
    const int group = threadIdx.x / COLUMNS, x = threadIdx.x % COLUMNS;
    float sum[EACH] = {};
    for (int first = 0; first < size.k; first += DEPTH) {
        for (int i = threadIdx.x; i < ROWS * DEPTH; i += 256)
            left[i / DEPTH][i % DEPTH] = at_or_zero(a, size.m, size.k, corner.row + i / DEPTH, first + i % DEPTH);
        for (int i = threadIdx.x; i < DEPTH * COLUMNS; i += 256)
            right[i / COLUMNS][i % COLUMNS] =
                at_or_zero(b, size.k, size.n, first + i / COLUMNS, corner.column + i % COLUMNS);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            const float number = right[k][x];
#pragma unroll
            for (int r = 0; r < EACH; ++r) sum[r] = fmaf(left[group * EACH + r][k], number, sum[r]);
        }
        __syncthreads();
    }
    const int column = corner.column + x;
    if (column >= size.n) return;
#pragma unroll
    for (int r = 0; r < EACH; ++r) {
        const int row = corner.row + group * EACH + r;
        if (row < size.m) c[static_cast<long long>(row) * size.n + column] = sum[r];
    }
}

// volkov: few threads with much work each. B needs no shared memory, since no other thread uses its column; the sixteen
// numbers of A are four reads of 16 bytes, shared by the whole warp.
__global__ void __launch_bounds__(64) volkov(const float* __restrict__ a, const float* __restrict__ b, float* c, Sizes size) {
    constexpr int EACH = 16, COLUMNS = 64, DEPTH = 16, PITCH = EACH + 4;
    __shared__ __align__(16) float left[DEPTH][PITCH];
    const Corner corner(size, EACH, COLUMNS);
    const int column = corner.column + threadIdx.x;
    float sum[EACH] = {};
    for (int first = 0; first < size.k; first += DEPTH) {
        for (int i = threadIdx.x; i < EACH * DEPTH; i += COLUMNS)
            left[i % DEPTH][i / DEPTH] = at_or_zero(a, size.m, size.k, corner.row + i / DEPTH, first + i % DEPTH);
        float right[DEPTH];
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) right[k] = at_or_zero(b, size.k, size.n, first + k, column);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k)
#pragma unroll
            for (int r = 0; r < EACH; r += 4) {
                const float4 numbers = *reinterpret_cast<const float4*>(&left[k][r]);
                sum[r] = fmaf(numbers.x, right[k], sum[r]);
                sum[r + 1] = fmaf(numbers.y, right[k], sum[r + 1]);
                sum[r + 2] = fmaf(numbers.z, right[k], sum[r + 2]);
                sum[r + 3] = fmaf(numbers.w, right[k], sum[r + 3]);
            }
        __syncthreads();
    }
    if (column >= size.n) return;
#pragma unroll
    for (int r = 0; r < EACH; ++r)
        if (corner.row + r < size.m) c[static_cast<long long>(corner.row + r) * size.n + column] = sum[r];
}

// gram_naive: C = A Aᵀ, one thread per number of C. Neighbouring threads read rows of A that are k numbers apart, so each
// read fetches a different sector.
__global__ void __launch_bounds__(256) gram_naive(const float* __restrict__ a, float* c, Sizes size) {
    const Corner corner(size, 8, 32);
    const int row = corner.row + threadIdx.x / 32, column = corner.column + threadIdx.x % 32;
    if (row >= size.m || column >= size.n) return;
    const float *left = a + static_cast<long long>(row) * size.k, *right = a + static_cast<long long>(column) * size.k;
    float sum = 0;
    for (int k = 0; k < size.k; ++k) sum = fmaf(left[k], right[k], sum);
    c[static_cast<long long>(row) * size.n + column] = sum;
}

// gram_tiles: both tiles are read along rows of A; one is transposed while it is copied to shared memory. Without padding a
// warp then writes 32 numbers to one bank, one after the other; with one more number per row they fall on 32 banks.
template <int PADDING>
__global__ void __launch_bounds__(1024) gram_tiles(const float* __restrict__ a, float* c, Sizes size) {
    constexpr int EDGE = 32;
    __shared__ float left[EDGE][EDGE], turned[EDGE][EDGE + PADDING];
    const Corner corner(size, EDGE, EDGE);
    const int y = threadIdx.x / EDGE, x = threadIdx.x % EDGE;
    float sum = 0;
    for (int first = 0; first < size.k; first += EDGE) {
        left[y][x] = at_or_zero(a, size.m, size.k, corner.row + y, first + x);
        turned[x][y] = at_or_zero(a, size.m, size.k, corner.column + y, first + x);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < EDGE; ++k) sum = fmaf(left[y][k], turned[k][x], sum);
        __syncthreads();
    }
    const int row = corner.row + y, column = corner.column + x;
    if (row < size.m && column < size.n) c[static_cast<long long>(row) * size.n + column] = sum;
}
