// FFTs between images and the grid, one axis a pass, that move only what is wanted: forward, the image's pixels of an axis
// become the grid's cells; inverse, the reverse. Passes scale by the spreading kernel's transform on the way.
//
// Floor in 3-D, for an image of N1 N2 N3 on a grid of G1 G2 G3: 8 bytes of (N1 N2 N3 + 2 G1 N2 N3 + 2 G1 G2 N3 + G1 G2 G3);
// a library's FFT moves 48 G1 G2 G3, padding and cropping 8 (G1 G2 G3 + N1 N2 N3) more.
//
// In between, the grid's memory keeps its strides: a pixel of an axis that is not transformed yet is in the place of the
// cell of its index. A line of N values is (N + 7) / 8 threads; passes of radix 8, 4, 9, 7, 5 or 3 (Stockham: in order
// without a bit reversal) between two buffers in shared memory. The table of twiddles is computed in float64.
#pragma once

#include "butterflies.cuh"
#include "pdl.cuh"

struct LinePass {
    int image;                         // pixels of the axis
    int outers, inner;                 // lines: outer index, and inner index of neighbours in memory
    long long from_stride, to_stride;  // between a line's values
    long long from_outer, to_outer;
    long long from_coil, to_coil;
};

// Sizes are multiples of four. Sixteens are fours times fours, since eights would leave a two.
constexpr int radix_of(int left) {
    return left % 8 == 0 && left % 32 != 16 ? 8 : left % 4 == 0 ? 4 : left % 9 == 0 ? 9 : left % 7 == 0 ? 7 : left % 5 == 0 ? 5 : 3;
}

// ROWS: along the fastest axis, where lines are `outers`. Otherwise a block's lines are neighbours on it.
template <int N, bool ROWS>
struct GridLine {
    static constexpr int T = (N + 7) / 8, LINES = ROWS ? (T >= 256 ? 1 : 256 / T) : 8, THREADS = T * LINES;
    static constexpr int PLACES = N + N / 8, STEP = ROWS ? 1 : LINES, BUFFER = PLACES * LINES;
};

template <int N, bool INVERSE, int STEP, int DONE, class Load, class Store>
__device__ inline void transform_line(int t, float2* from, float2* to, const float2* __restrict__ twiddles, const Load& load,
                                      const Store& store) {
    constexpr int LEFT = N / DONE, R = radix_of(LEFT), COUNT = N / R, T = (N + 7) / 8;
    static_assert(LEFT % R == 0, "");
    for (int j = t; j < COUNT; j += T) {
        float2 v[R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if constexpr (DONE == 1) v[r] = load(j + r * COUNT);
            else v[r] = from[shared_place<STEP>(j + r * COUNT)];
        }
        const int k = j % DONE;
        if constexpr (DONE > 1) {
            float2 one = twiddles[k * (LEFT / R)];
            if (INVERSE) one.y = -one.y;
            float2 by = one;
#pragma unroll
            for (int r = 1; r < R; ++r) {
                v[r] = turned(v[r], by);
                by = turned(by, one);
            }
        }
        transform_in_registers<INVERSE, R>(v);
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const int place = j / DONE * (DONE * R) + k + r * DONE;
            if constexpr (LEFT == R) store(place, v[r]);
            else to[shared_place<STEP>(place)] = v[r];
        }
    }
    if constexpr (LEFT > R) {
        __syncthreads();
        transform_line<N, INVERSE, STEP, DONE * R>(t, to, from, twiddles, load, store);
    }
}

template <int N, bool ROWS, bool INVERSE>
__global__ void __launch_bounds__(GridLine<N, ROWS>::THREADS)
grid_lines(const float2* from, float2* to, const float* __restrict__ scale, const float2* __restrict__ twiddles, LinePass g) {
    using L = GridLine<N, ROWS>;
    extern __shared__ float2 buffers[];
    grid_dependency_synchronize();
    const int lane = ROWS ? threadIdx.x / L::T : threadIdx.x % L::LINES;
    const int t = ROWS ? threadIdx.x % L::T : threadIdx.x / L::LINES;
    int outer, column = 0;
    if (ROWS) {
        outer = blockIdx.x * L::LINES + lane;
    } else {
        const int across = (g.inner + L::LINES - 1) / L::LINES;
        outer = blockIdx.x / across;
        column = blockIdx.x % across * L::LINES + lane;
    }
    const bool inside = ROWS ? outer < g.outers : column < g.inner;
    const float2* line = from + blockIdx.y * g.from_coil + outer * g.from_outer + column;
    float2* result = to + blockIdx.y * g.to_coil + outer * g.to_outer + column;
    float2* first = buffers + (ROWS ? lane * L::PLACES : lane);
    const auto load = [&](int cell) {
        const int pixel = INVERSE ? cell : pixel_of(cell, g.image, N);
        if (!inside || pixel < 0) return make_float2(0, 0);
        float2 value = line[pixel * g.from_stride];
        if (!INVERSE) value = make_float2(value.x * scale[pixel], value.y * scale[pixel]);
        return value;
    };
    const auto store = [&](int cell, float2 value) {
        const int pixel = INVERSE ? pixel_of(cell, g.image, N) : cell;
        if (!inside || pixel < 0) return;
        if (INVERSE) value = make_float2(value.x * scale[pixel], value.y * scale[pixel]);
        result[pixel * g.to_stride] = value;
    };
    transform_line<N, INVERSE, L::STEP, 1>(t, first, first + L::BUFFER, twiddles, load, store);
}
