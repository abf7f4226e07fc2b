// The normal operator without a doubled grid in memory: FFTs of lines in registers and shared memory that read only nonzero
// values and write only wanted ones. The first and last pass apply the coil maps; the middle one multiplies by the kernel
// between its two transforms.
//
// `work` is [coil][x][y][z] with the image's size on x and doubled sizes on y and z; in 2-D there is no y, and the middle
// pass is along x. With doubled sizes 2 N, a coil's 3-D image of V bytes moves 26 V; the doubled grid and a library's FFT
// move 96 V, not counting its padding and products.
//
// A line of SIZE values is T threads with VALUES each; thread t holds those at t + m T, before and after. Passes are of radix 3 or 5 first, then 8 and 4 (Stockham: in order without a
// bit reversal). The table of twiddles is computed in float64. An image fills at most half of a line, so the other half of
// the registers holds zeros that the compiler knows.
#pragma once

#include "butterflies.cuh"
#include "opaque.cuh"

struct Lines {
    int image[3];   // x, y, z; in 2-D y is 1
    int padded[3];  // the doubled sizes; in 2-D y is 1
    int coils;
};

constexpr int INTERLEAVED = 8;  // adjacent lines that a block transforms together

template <int N>
struct Line {
    static constexpr int SIZE = N, VALUES = N % 5 == 0 ? 20 : N == 768 ? 12 : N % 3 == 0 ? 24 : 8, T = SIZE / VALUES, PLACES = SIZE + SIZE / 8;
    static constexpr int ROW_THREADS = VALUES <= 12 ? 256 : VALUES <= 24 ? 128 : 64;  // of a block of rows
    // Threads of a multiprocessor that registers must leave room for.
    static constexpr int RESIDENT = VALUES <= 12 ? 1024 : VALUES <= 20 ? 768 : VALUES <= 24 ? 384 : 256;
};

constexpr int line_radix(int left, int values) {
    return left % 5 == 0 ? 5 : left % 3 == 0 ? 3 : left < 8 ? left : left == 16 || values % 8 ? 4 : 8;
}

template <int N, int DONE, int RADIX, bool INVERSE>
__device__ inline void pass(float2 (&v)[Line<N>::VALUES], int t, const float2* __restrict__ twiddles) {
    constexpr int T = Line<N>::T, BUTTERFLIES = Line<N>::VALUES / RADIX;
#pragma unroll
    for (int q = 0; q < BUTTERFLIES; ++q) {
        float2 own[RADIX];
#pragma unroll
        for (int r = 0; r < RADIX; ++r) own[r] = v[q + r * BUTTERFLIES];
        if (DONE > 1) {
            const int k = (t + q * T) % DONE;
            float2 one = twiddles[k * (N / (DONE * RADIX))];
            if (INVERSE) one.y = -one.y;
            float2 by = one;
#pragma unroll
            for (int r = 1; r < RADIX; ++r) {
                own[r] = turned(own[r], by);
                by = turned(by, one);
            }
        }
        if constexpr (RADIX == 2) transform2(own[0], own[1]);
        else transform_in_registers<INVERSE, RADIX>(own);
#pragma unroll
        for (int r = 0; r < RADIX; ++r) v[q + r * BUTTERFLIES] = own[r];
    }
}

// K lines at once, whose places in shared memory follow one another: threads wait for each other as often as for one.
template <int N, int K, bool INVERSE, int STEP, int DONE = 1>
__device__ inline void transform_all(float2 (&v)[K][Line<N>::VALUES], int t, float2* lines, const float2* __restrict__ twiddles) {
    using L = Line<N>;
    constexpr int LEFT = N / DONE, RADIX = line_radix(LEFT, L::VALUES), BUTTERFLIES = L::VALUES / RADIX;
#pragma unroll
    for (int k = 0; k < K; ++k) pass<N, DONE, RADIX, INVERSE>(v[k], t, twiddles);
    if constexpr (LEFT > RADIX) {
        __syncthreads();
#pragma unroll
        for (int q = 0; q < BUTTERFLIES; ++q) {
            const int j = t + q * L::T, first = j / DONE * DONE * RADIX + j % DONE;
#pragma unroll
            for (int r = 0; r < RADIX; ++r)
#pragma unroll
                for (int k = 0; k < K; ++k)
                    lines[k * L::PLACES * STEP + shared_place<STEP>(first + r * DONE)] = v[k][q + r * BUTTERFLIES];
        }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < L::VALUES; ++m)
#pragma unroll
            for (int k = 0; k < K; ++k) v[k][m] = lines[k * L::PLACES * STEP + shared_place<STEP>(t + m * L::T)];
        transform_all<N, K, INVERSE, STEP, DONE * RADIX>(v, t, lines, twiddles);
    }
}

template <int N, bool INVERSE, int STEP>
__device__ inline void transform(float2 (&v)[Line<N>::VALUES], int t, float2* line, const float2* __restrict__ twiddles) {
    transform_all<N, 1, INVERSE, STEP>(reinterpret_cast<float2 (&)[1][Line<N>::VALUES]>(v), t, line, twiddles);
}

__device__ inline long long work_row(int coil, int x, int y, const Lines& g) {
    return ((static_cast<long long>(coil) * g.image[0] + x) * g.padded[1] + y) * g.padded[2];
}

// map × image, transformed along z. A block's lines belong to neighbouring coils, which share the image's line.
template <int N>
__global__ void __launch_bounds__(Line<N>::ROW_THREADS)
forward_rows(const float2* __restrict__ image, const float2* __restrict__ maps, float2* __restrict__ work,
             const float2* __restrict__ twiddles, Lines g) {
    using L = Line<N>;
    __shared__ float2 shared[L::ROW_THREADS / L::T * L::PLACES];
    const int t = threadIdx.x % L::T, slot = threadIdx.x / L::T;
    const long long number = blockIdx.x * static_cast<long long>(L::ROW_THREADS / L::T) + slot;
    const long long rows = static_cast<long long>(g.image[0]) * g.image[1], row = number / g.coils;
    const int coil = number % g.coils;
    float2 v[L::VALUES];
#pragma unroll
    for (int m = 0; m < L::VALUES; ++m) {
        const int z = t + m * L::T;
        v[m] = make_float2(0, 0);
        if (m >= L::VALUES / 2 || row >= rows || z >= g.image[2]) continue;
        const long long of_coil = (coil * rows + row) * g.image[2] + z;
        v[m] = maps ? turned(maps[of_coil], image[row * g.image[2] + z]) : image[of_coil];
    }
    transform<N, false, 1>(v, t, shared + slot * L::PLACES, twiddles);
    if (row >= rows) return;
    float2* to = work + work_row(coil, row / g.image[1], row % g.image[1], g);
#pragma unroll
    for (int m = 0; m < L::VALUES; ++m) to[t + m * L::T] = v[m];
}

enum Middle { FORWARD, INVERSE, CONVOLVE };

// Lines across memory, in place: along y for each x (FORWARD, INVERSE), or along x, with both transforms and the kernel's
// product in one pass (CONVOLVE). `stride` is between a line's values, of which the first `wanted` are in the image.
template <int N, Middle KIND>
__global__ void __launch_bounds__(Line<N>::T * INTERLEAVED, Line<N>::RESIDENT / (Line<N>::T * INTERLEAVED))
cross_lines(float2* __restrict__ work, const float* __restrict__ kernel, const float2* __restrict__ twiddles,
            long long stride, long long outer_stride, int wanted, int outers) {
    using L = Line<N>;
    extern __shared__ float2 crossing[];
    const int lane = threadIdx.x % INTERLEAVED, t = threadIdx.x / INTERLEAVED;
    // With a kernel coils vary fastest, so that they find its part in the cache; otherwise a plane's columns do.
    const long long columns = stride / INTERLEAVED;
    const long long outer = KIND == CONVOLVE ? blockIdx.x % outers : blockIdx.x / columns;
    const long long column = (KIND == CONVOLVE ? blockIdx.x / outers : blockIdx.x % columns) * INTERLEAVED + lane;
    float2* at = work + outer * outer_stride + column;
    float2* line = crossing + lane;
    float2 v[L::VALUES];
#pragma unroll
    for (int m = 0; m < L::VALUES; ++m) {
        const int i = t + m * L::T;
        v[m] = KIND == INVERSE || (m < L::VALUES / 2 && i < wanted) ? at[i * stride] : make_float2(0, 0);
    }
    if (KIND != INVERSE) transform<N, false, INTERLEAVED>(v, t, line, twiddles);
    // Places are computed anew after each transform: kept, they would take more registers than there are.
    int now = opaque(t);
    if (KIND == CONVOLVE) {
#pragma unroll
        for (int m = 0; m < L::VALUES; ++m) {
            const float by = kernel[(now + m * L::T) * stride + column];
            v[m] = make_float2(v[m].x * by, v[m].y * by);
        }
    }
    now = opaque(t);
    if (KIND != FORWARD) transform<N, true, INTERLEAVED>(v, now, line, twiddles);
    now = opaque(t);
#pragma unroll
    for (int m = 0; m < L::VALUES; ++m) {
        const int i = now + m * L::T;
        if (KIND == FORWARD || (m < L::VALUES / 2 && i < wanted)) at[i * stride] = v[m];
    }
}

// As CONVOLVE, with K coefficients of a coil, `apart` from one another, instead of one image: at each place a Hermitian
// matrix mixes them (its upper triangle in `kernels`, row by row), all in registers. A place costs 16 K bytes, and the
// matrix once a coil.
template <int N, int K, class Element>
__global__ void __launch_bounds__(Line<N>::T * INTERLEAVED)
cross_mixed(float2* __restrict__ work, const Element* __restrict__ kernels, const float2* __restrict__ twiddles,
            long long stride, long long outer_stride, int wanted, int outers, long long apart) {
    using L = Line<N>;
    extern __shared__ float2 crossing[];
    const int lane = threadIdx.x % INTERLEAVED, t = threadIdx.x / INTERLEAVED;
    const long long outer = blockIdx.x % outers, column = blockIdx.x / outers * INTERLEAVED + lane;
    float2* at = work + outer * outer_stride + column;
    float2 v[K][L::VALUES];
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
        for (int m = 0; m < L::VALUES; ++m) {
            const int i = t + m * L::T;
            v[k][m] = m < L::VALUES / 2 && i < wanted ? at[k * apart + i * stride] : make_float2(0, 0);
        }
    transform_all<N, K, false, INTERLEAVED>(v, t, crossing + lane, twiddles);
    int now = opaque(t);  // as in cross_lines
#pragma unroll
    for (int m = 0; m < L::VALUES; ++m) {
        const Element* from = kernels + (now + m * L::T) * stride + column;
        float2 mixed[K] = {};
#pragma unroll
        for (int row = 0; row < K; ++row)
#pragma unroll
            for (int other = row; other < K; ++other, from += L::SIZE * stride) {
                const Element by = *from;
                add_product(mixed[row], by, v[other][m], false);
                if (other != row) add_product(mixed[other], by, v[row][m], true);
            }
#pragma unroll
        for (int k = 0; k < K; ++k) v[k][m] = mixed[k];
    }
    now = opaque(t);
    transform_all<N, K, true, INTERLEAVED>(v, now, crossing + lane, twiddles);
    now = opaque(t);
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
        for (int m = 0; m < L::VALUES / 2; ++m) {
            const int i = now + m * L::T;
            if (i < wanted) at[k * apart + i * stride] = v[k][m];
        }
}

// Transformed back along z; conj(map) × the image's values summed over coils, or each coil's own. A block per row.
template <int N, bool COMBINED>
__global__ void __launch_bounds__(Line<N>::ROW_THREADS, Line<N>::RESIDENT / 2 / Line<N>::ROW_THREADS)
inverse_rows(const float2* __restrict__ work, const float2* __restrict__ maps, float2* __restrict__ out,
             const float2* __restrict__ twiddles, bool first, Lines g) {
    using L = Line<N>;
    constexpr int SLOTS = L::ROW_THREADS / L::T;
    __shared__ float2 shared[SLOTS * L::PLACES];
    const int t = threadIdx.x % L::T, slot = threadIdx.x / L::T;
    const long long row = blockIdx.x, rows = static_cast<long long>(g.image[0]) * g.image[1];
    float2 sum[L::VALUES / 2] = {};
    for (int begin = 0; begin < g.coils; begin += SLOTS) {
        const int coil = begin + slot;
        const float2* from = work + work_row(coil, row / g.image[1], row % g.image[1], g);
        float2 v[L::VALUES];
#pragma unroll
        for (int m = 0; m < L::VALUES; ++m) v[m] = coil < g.coils ? from[t + m * L::T] : make_float2(0, 0);
        transform<N, true, 1>(v, t, shared + slot * L::PLACES, twiddles);
        const int now = opaque(t);
#pragma unroll
        for (int m = 0; m < L::VALUES / 2; ++m) {
            const int z = now + m * L::T;
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
    for (int m = 0; m < L::VALUES / 2; ++m) shared[slot * L::PLACES + t + m * L::T] = sum[m];
    __syncthreads();
    for (int z = threadIdx.x; z < g.image[2]; z += L::ROW_THREADS) {
        float2 total = first ? make_float2(0, 0) : out[row * g.image[2] + z];
#pragma unroll
        for (int other = 0; other < SLOTS; ++other) total = plus(total, shared[other * L::PLACES + z]);
        out[row * g.image[2] + z] = total;
    }
}
