// The normal operator without a doubled grid in memory: FFTs of lines in registers and shared memory that read only nonzero
// values and write only wanted ones. The first and last pass apply the coil maps; the middle one multiplies by the kernel
// between its two transforms.
//
// `work` is [coil][x][y][z] with the image's size on x and doubled sizes on y and z; in 2-D there is no y, and the middle
// pass is along x. With doubled sizes 2 N, a coil's 3-D image of V bytes moves 26 V; the doubled grid and a library's FFT
// move 96 V, not counting its padding and products.
//
// A line of 2^LOG values is T = 2^LOG / 8 threads with eight values each; thread t holds those at t + m T, before and
// after. Passes are of radix 8, the last of the remaining factor (Stockham: in order without a bit reversal). The table of
// twiddles is computed in float64.
#pragma once

#include "butterflies.cuh"

struct Lines {
    int image[3];   // x, y, z; in 2-D y is 1
    int padded[3];  // the doubled sizes; in 2-D y is 1
    int coils;
};

constexpr int LINE_THREADS = 256, INTERLEAVED = 8;  // adjacent lines that a block transforms together

template <int LOG>
struct Line {
    static constexpr int SIZE = 1 << LOG, T = SIZE / 8, PLACES = SIZE + SIZE / 8;
};

template <int LOG, int DONE, int RADIX, bool INVERSE>
__device__ inline void pass(float2 (&v)[8], int t, const float2* __restrict__ twiddles) {
    constexpr int T = Line<LOG>::T, BUTTERFLIES = 8 / RADIX;
#pragma unroll
    for (int q = 0; q < BUTTERFLIES; ++q) {
        if (DONE > 1) {
            const int k = (t + q * T) % DONE;
            float2 one = twiddles[k * (Line<LOG>::SIZE / (DONE * RADIX))];
            if (INVERSE) one.y = -one.y;
            float2 by = one;
#pragma unroll
            for (int r = 1; r < RADIX; ++r) {
                v[q + r * BUTTERFLIES] = turned(v[q + r * BUTTERFLIES], by);
                by = turned(by, one);
            }
        }
        if (RADIX == 2) transform2(v[q], v[q + 4]);
        if (RADIX == 4) transform4<INVERSE>(v[q], v[q + 2], v[q + 4], v[q + 6]);
    }
    if (RADIX == 8) transform8<INVERSE>(v);
}

// Moves the values to the threads of the next pass.
template <int LOG, int DONE, int RADIX, int STEP>
__device__ inline void exchange(float2 (&v)[8], int t, float2* line) {
    constexpr int T = Line<LOG>::T, BUTTERFLIES = 8 / RADIX;
    __syncthreads();
#pragma unroll
    for (int q = 0; q < BUTTERFLIES; ++q) {
        const int j = t + q * T, k = j % DONE;
#pragma unroll
        for (int r = 0; r < RADIX; ++r)
            line[shared_place<STEP>(j / DONE * DONE * RADIX + k + r * DONE)] = v[q + r * BUTTERFLIES];
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 8; ++m) v[m] = line[shared_place<STEP>(t + m * T)];
}

template <int LOG, bool INVERSE, int STEP, int DONE = 1>
__device__ inline void transform(float2 (&v)[8], int t, float2* line, const float2* __restrict__ twiddles) {
    constexpr int LEFT = Line<LOG>::SIZE / DONE, RADIX = LEFT < 8 ? LEFT : 8;
    pass<LOG, DONE, RADIX, INVERSE>(v, t, twiddles);
    if constexpr (LEFT > RADIX) {
        exchange<LOG, DONE, RADIX, STEP>(v, t, line);
        transform<LOG, INVERSE, STEP, DONE * RADIX>(v, t, line, twiddles);
    }
}

__device__ inline long long work_row(int coil, int x, int y, const Lines& g) {
    return ((static_cast<long long>(coil) * g.image[0] + x) * g.padded[1] + y) * g.padded[2];
}

// map × image, transformed along z. A block's lines belong to neighbouring coils, which share the image's line.
template <int LOG>
__global__ void __launch_bounds__(LINE_THREADS)
forward_rows(const float2* __restrict__ image, const float2* __restrict__ maps, float2* __restrict__ work,
             const float2* __restrict__ twiddles, Lines g) {
    using L = Line<LOG>;
    __shared__ float2 shared[LINE_THREADS / L::T * L::PLACES];
    const int t = threadIdx.x % L::T, slot = threadIdx.x / L::T;
    const long long number = blockIdx.x * static_cast<long long>(LINE_THREADS / L::T) + slot;
    const long long rows = static_cast<long long>(g.image[0]) * g.image[1], row = number / g.coils;
    const int coil = number % g.coils;
    float2 v[8];
#pragma unroll
    for (int m = 0; m < 8; ++m) {
        const int z = t + m * L::T;
        v[m] = make_float2(0, 0);
        if (row >= rows || z >= g.image[2]) continue;
        const long long of_coil = (coil * rows + row) * g.image[2] + z;
        v[m] = maps ? turned(maps[of_coil], image[row * g.image[2] + z]) : image[of_coil];
    }
    transform<LOG, false, 1>(v, t, shared + slot * L::PLACES, twiddles);
    if (row >= rows) return;
    float2* to = work + work_row(coil, row / g.image[1], row % g.image[1], g);
#pragma unroll
    for (int m = 0; m < 8; ++m) to[t + m * L::T] = v[m];
}

enum Middle { FORWARD, INVERSE, CONVOLVE };

// Lines across memory, in place: along y for each x (FORWARD, INVERSE), or along x, with both transforms and the kernel's
// product in one pass (CONVOLVE). `stride` is between a line's values, of which the first `wanted` are in the image.
template <int LOG, Middle KIND>
__global__ void __launch_bounds__(Line<LOG>::T * INTERLEAVED, 1024 / (Line<LOG>::T * INTERLEAVED))
cross_lines(float2* __restrict__ work, const float* __restrict__ kernel, const float2* __restrict__ twiddles,
            long long stride, long long outer_stride, int wanted, int outers) {
    using L = Line<LOG>;
    extern __shared__ float2 crossing[];
    const int lane = threadIdx.x % INTERLEAVED, t = threadIdx.x / INTERLEAVED;
    // With a kernel coils vary fastest, so that they find its part in the cache; otherwise a plane's columns do.
    const long long columns = stride / INTERLEAVED;
    const long long outer = KIND == CONVOLVE ? blockIdx.x % outers : blockIdx.x / columns;
    const long long column = (KIND == CONVOLVE ? blockIdx.x / outers : blockIdx.x % columns) * INTERLEAVED + lane;
    float2* at = work + outer * outer_stride + column;
    float2* line = crossing + lane;
    float2 v[8];
#pragma unroll
    for (int m = 0; m < 8; ++m) {
        const int i = t + m * L::T;
        v[m] = KIND == INVERSE || i < wanted ? at[i * stride] : make_float2(0, 0);
    }
    if (KIND != INVERSE) transform<LOG, false, INTERLEAVED>(v, t, line, twiddles);
    if (KIND == CONVOLVE) {
#pragma unroll
        for (int m = 0; m < 8; ++m) {
            const float by = kernel[(t + m * L::T) * stride + column];
            v[m] = make_float2(v[m].x * by, v[m].y * by);
        }
    }
    if (KIND != FORWARD) transform<LOG, true, INTERLEAVED>(v, t, line, twiddles);
#pragma unroll
    for (int m = 0; m < 8; ++m) {
        const int i = t + m * L::T;
        if (KIND == FORWARD || i < wanted) at[i * stride] = v[m];
    }
}

// As CONVOLVE, with several coefficients of a coil instead of one image: at each place a Hermitian matrix mixes them (its
// upper triangle in `kernels`, row by row). Lines that are transformed wait in shared memory for those of the other
// coefficients, `apart` away. A place costs 16 bytes a coefficient, and the matrix once a coil.
template <int LOG, class Element>
__global__ void __launch_bounds__(Line<LOG>::T * INTERLEAVED)
cross_mixed(float2* __restrict__ work, const Element* __restrict__ kernels, const float2* __restrict__ twiddles,
            long long stride, long long outer_stride, int wanted, int outers, int coefficients, long long apart) {
    using L = Line<LOG>;
    extern __shared__ float2 crossing[];
    const int lane = threadIdx.x % INTERLEAVED, t = threadIdx.x / INTERLEAVED;
    const long long outer = blockIdx.x % outers, column = blockIdx.x / outers * INTERLEAVED + lane;
    float2* at = work + outer * outer_stride + column;
    float2* line = crossing + lane;
    float2* waiting = crossing + L::PLACES * INTERLEAVED + threadIdx.x;
    constexpr int THREADS_HERE = L::T * INTERLEAVED;
    float2 v[8];
    for (int k = 0; k < coefficients; ++k) {
#pragma unroll
        for (int m = 0; m < 8; ++m) {
            const int i = t + m * L::T;
            v[m] = i < wanted ? at[k * apart + i * stride] : make_float2(0, 0);
        }
        transform<LOG, false, INTERLEAVED>(v, t, line, twiddles);
#pragma unroll
        for (int m = 0; m < 8; ++m) waiting[(k * 8 + m) * THREADS_HERE] = v[m];
    }
    const long long cells = L::SIZE * stride;
    for (int row = 0; row < coefficients; ++row) {
#pragma unroll
        for (int m = 0; m < 8; ++m) v[m] = make_float2(0, 0);
        for (int column_of = 0; column_of < coefficients; ++column_of) {
            const int upper = row < column_of ? row : column_of, right = row < column_of ? column_of : row;
            const Element* from = kernels + (upper * coefficients - upper * (upper - 1) / 2 + right - upper) * cells + column;
#pragma unroll
            for (int m = 0; m < 8; ++m)
                add_product(v[m], from[(t + m * L::T) * stride], waiting[(column_of * 8 + m) * THREADS_HERE],
                            row > column_of);
        }
        transform<LOG, true, INTERLEAVED>(v, t, line, twiddles);
#pragma unroll
        for (int m = 0; m < 8; ++m) {
            const int i = t + m * L::T;
            if (i < wanted) at[row * apart + i * stride] = v[m];
        }
    }
}

// Transformed back along z; conj(map) × the image's values summed over coils, or each coil's own. A block per row.
template <int LOG, bool COMBINED>
__global__ void __launch_bounds__(LINE_THREADS)
inverse_rows(const float2* __restrict__ work, const float2* __restrict__ maps, float2* __restrict__ out,
             const float2* __restrict__ twiddles, bool first, Lines g) {
    using L = Line<LOG>;
    constexpr int SLOTS = LINE_THREADS / L::T;
    __shared__ float2 shared[SLOTS * L::PLACES];
    const int t = threadIdx.x % L::T, slot = threadIdx.x / L::T;
    const long long row = blockIdx.x, rows = static_cast<long long>(g.image[0]) * g.image[1];
    float2 sum[8] = {};
    for (int begin = 0; begin < g.coils; begin += SLOTS) {
        const int coil = begin + slot;
        const float2* from = work + work_row(coil, row / g.image[1], row % g.image[1], g);
        float2 v[8];
#pragma unroll
        for (int m = 0; m < 8; ++m) v[m] = coil < g.coils ? from[t + m * L::T] : make_float2(0, 0);
        transform<LOG, true, 1>(v, t, shared + slot * L::PLACES, twiddles);
#pragma unroll
        for (int m = 0; m < 8; ++m) {
            const int z = t + m * L::T;
            if (z >= g.image[2] || coil >= g.coils) continue;
            const long long of_coil = (coil * rows + row) * g.image[2] + z;
            if (!COMBINED) {
                out[of_coil] = v[m];
                continue;
            }
            const float2 map = maps[of_coil];
            sum[m] = plus(sum[m], turned(make_float2(map.x, -map.y), v[m]));
        }
    }
    if (!COMBINED) return;
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 8; ++m) shared[slot * L::PLACES + t + m * L::T] = sum[m];
    __syncthreads();
    for (int z = threadIdx.x; z < g.image[2]; z += LINE_THREADS) {
        float2 total = first ? make_float2(0, 0) : out[row * g.image[2] + z];
#pragma unroll
        for (int other = 0; other < SLOTS; ++other) total = plus(total, shared[other * L::PLACES + z]);
        out[row * g.image[2] + z] = total;
    }
}
