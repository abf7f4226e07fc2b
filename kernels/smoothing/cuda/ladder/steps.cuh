// The classic steps between `naive` and the kernels in production, for measurements. Only the threads of `tiled` wait, for a
// block's samples and again for its sums. Part of smoothing.cu.
#pragma once

#include "borders.cuh"
#include "samples.cuh"

// All filter both axes of [planes, rows, columns, channels] at once, in vectors: a vector is one sample, or a whole pixel
// of 2 or 4. The steps differ in where taps are read from, and in the layout of pixels and rows.
namespace ladder {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int MAX_DEPTH = 7;  // of the doubling tree of 255 samples
enum Rule { BOX, GAUSS };

struct Frame {
    long long pitch;                      // vectors from a row to the next
    int rows, columns, step;              // of a plane; vectors from a pixel to the next
    int out_rows, out_columns, channels;  // of a plane of the result, which is not padded
    int first_y, taps_y, mode_y;          // input position of the first tap of output 0
    int first_x, taps_x, mode_x;
    int tile_rows, tile_columns, tiles_y, tiles_x;  // pixels of a block's output; blocks of a plane
    unsigned divisor;
    float scale;                          // 1 / divisor
    float weights_y[128], weights_x[128];  // Gauss: at distance 0 … 127
};

template <typename T, int N>
struct alignas(N * sizeof(T)) Vector {
    typedef T Number;
    static constexpr int SIZE = N;
    T at[N];
};

template <typename T, int N>
__device__ inline Vector<T, N> operator+(const Vector<T, N>& a, const Vector<T, N>& b) {
    Vector<T, N> sum;
#pragma unroll
    for (int c = 0; c < N; ++c) sum.at[c] = a.at[c] + b.at[c];
    return sum;
}

template <int BYTES>
struct Bits;
template <>
struct Bits<1> { typedef unsigned char Type; };
template <>
struct Bits<2> { typedef unsigned short Type; };
template <>
struct Bits<4> { typedef unsigned Type; };
template <>
struct Bits<8> { typedef uint2 Type; };
template <>
struct Bits<16> { typedef uint4 Type; };

// One load, which the compiler might otherwise split.
template <typename T, int N>
__device__ inline Vector<T, N> load(const Vector<T, N>* from) {
    typedef typename Bits<N * sizeof(T)>::Type Whole;
    const Whole whole = __ldg(reinterpret_cast<const Whole*>(from));
    return reinterpret_cast<const Vector<T, N>&>(whole);
}

template <typename T, int N>
__device__ inline Vector<T, N> all(T value) {
    Vector<T, N> vector;
#pragma unroll
    for (int c = 0; c < N; ++c) vector.at[c] = value;
    return vector;
}

// The type of sums: floats, except for boxes of integers, whose 32 bits hold the sum of 255 × 255 samples of 16 bits.
template <int RULE, typename Sample>
struct Summed {
    typedef unsigned Type;
};
template <typename Sample>
struct Summed<GAUSS, Sample> {
    typedef float Type;
};
template <>
struct Summed<BOX, float> {
    typedef float Type;
};
template <int RULE, typename Sample>
using Work = typename Summed<RULE, Sample>::Type;

template <typename Number, typename Sample, int N>
__device__ inline Vector<Number, N> numbers(const Vector<Sample, N>& samples) {
    Vector<Number, N> result;
#pragma unroll
    for (int c = 0; c < N; ++c) {
        if constexpr (same<Number, unsigned>) result.at[c] = to_sum<unsigned>(samples.at[c]);
        else result.at[c] = static_cast<float>(samples.at[c]);
    }
    return result;
}

// The sum of read(0) … read(taps - 1). For floats it is W(taps) by the contract's doubling tree, walked depth first, so that
// samples are read in order: halves merge like the carries of a counter, and a single sample may follow.
template <typename Read>
__device__ inline auto box_sum(int taps, const Read& read) {
    typedef decltype(read(0)) Sum;
    if constexpr (same<typename Sum::Number, unsigned>) {
        Sum sum = {};
        for (int k = 0; k < taps; ++k) sum = sum + read(k);
        return sum;
    } else {
        const int depth = 31 - __clz(taps);
        Sum pending[MAX_DEPTH], before_lone, sum;
        int leaf = 0, lone_after = -1;  // the level whose sum waits for the next sample
        for (int k = 0; k < taps; ++k) {
            sum = read(k);
            if (lone_after >= 0) sum = before_lone + sum;
            int level = lone_after + 1;
            lone_after = -1;
#pragma unroll
            for (int each = 0; each < MAX_DEPTH; ++each) {
                if (each != level || each == depth) continue;
                if (leaf >> each & 1) {
                    sum = pending[each] + sum;
                    if (taps >> (depth - each - 1) & 1) before_lone = sum, lone_after = each;
                    else ++level;
                } else {
                    pending[each] = sum, ++leaf;
                }
            }
        }
        return sum;
    }
}

template <int RULE, typename Read>
__device__ inline auto window_sum(int taps, const float* weights, const Read& read) {
    if constexpr (RULE == BOX) {
        return box_sum(taps, read);
    } else {
        const int reach = taps / 2;
        auto sum = read(reach);
        constexpr int N = decltype(sum)::SIZE;
#pragma unroll
        for (int c = 0; c < N; ++c) sum.at[c] = weights[0] * sum.at[c];
        for (int k = 1; k <= reach; ++k) {
            const auto pair = read(reach - k) + read(reach + k);
#pragma unroll
            for (int c = 0; c < N; ++c) sum.at[c] = fma_rn(weights[k], pair.at[c], sum.at[c]);
        }
        return sum;
    }
}

// Stores those samples of a vector that belong to the image.
template <int RULE, typename Sample, typename Number, int N>
__device__ inline void store(Sample* to, const Vector<Number, N>& sum, const Frame& frame) {
#pragma unroll
    for (int c = 0; c < N; ++c) {
        if (N == 4 && c >= frame.channels) return;
        if constexpr (RULE == GAUSS) to[c] = to_sample<Sample>(sum.at[c]);
        else if constexpr (same<Number, float>) to[c] = to_mean<Sample>(sum.at[c], frame.scale);
        else to[c] = to_mean<Sample>(sum.at[c], frame.divisor);
    }
}

struct Tile {
    long long plane;
    int y, x;
};

__device__ inline Tile tile_of(int block, const Frame& frame) {
    const int rest = block / frame.tiles_x;
    return {rest / frame.tiles_y, rest % frame.tiles_y * frame.tile_rows, block % frame.tiles_x * frame.tile_columns};
}

// lay_out: copies the image with RGB as RGBX, so that a pixel is one vector, and `pitch` vectors from row to row.
// Costs reading and writing the image; buys pixels, and with a pitch also rows, that are aligned for whole loads.
template <typename Sample, int N>
__global__ void __launch_bounds__(THREADS)
lay_out(const Sample* __restrict__ in, Vector<Sample, N>* __restrict__ out, long long rows, int columns,
        long long pitch, int channels) {
    const long long chunks = (columns + THREADS - 1) / THREADS, total = rows * chunks;
    for (long long i = blockIdx.x; i < total; i += gridDim.x) {
        const int column = static_cast<int>(i % chunks) * THREADS + threadIdx.x;
        if (column >= columns) continue;
        const Sample* from = in + (i / chunks * columns + column) * channels;
        Vector<Sample, N> pixel;
#pragma unroll
        for (int c = 0; c < N; ++c) pixel.at[c] = N < 4 || c < channels ? from[c] : Sample(0);
        out[i / chunks * pitch + column] = pixel;
    }
}

// The sum of read(down, across) over the whole window; for floats down the columns first, as in the contract.
template <typename Number, int N, typename Read>
__device__ inline Vector<Number, N> square_sum(const Frame& frame, const Read& read) {
    if constexpr (same<Number, unsigned>)
        return box_sum(frame.taps_y, [&](int down) {
            return box_sum(frame.taps_x, [&](int across) { return read(down, across); });
        });
    else
        return box_sum(frame.taps_x, [&](int across) {
            return box_sum(frame.taps_y, [&](int down) { return read(down, across); });
        });
}

// gather: a thread per pixel, every tap one vector from global memory: RGB takes a third of naive's loads and index
// arithmetic. With pitched rows a warp's loads also start at a sector in every row; an H200's caches hide that (no gain).
template <typename Sample, int N>
__global__ void __launch_bounds__(THREADS, 2)  // without the 2, it spills
gather(const Vector<Sample, N>* __restrict__ in, Sample* __restrict__ out, Frame frame, Sample fill) {
    typedef Work<BOX, Sample> Number;
    const Tile tile = tile_of(blockIdx.x, frame);
    const int y = tile.y + static_cast<int>(threadIdx.x) / 32, x = tile.x + static_cast<int>(threadIdx.x) % 32;
    if (y >= frame.out_rows || x >= frame.out_columns) return;
    const Vector<Sample, N>* plane = in + tile.plane * frame.rows * frame.pitch;
    const int first_y = y + frame.first_y, first_x = x + frame.first_x;
    Vector<Number, N> sum;
    const bool inside = first_y >= 0 && first_y + frame.taps_y <= frame.rows && first_x >= 0 &&
                        first_x + frame.taps_x <= frame.columns;
    if (inside) {
        const Vector<Sample, N>* first = plane + first_y * frame.pitch + first_x;
        sum = square_sum<Number, N>(frame, [&](int down, int across) {
            return numbers<Number>(load(first + down * frame.pitch + across));
        });
    } else {
        sum = square_sum<Number, N>(frame, [&](int down, int across) {
            const int row = border_index(first_y + down, frame.rows, frame.mode_y);
            const int column = border_index(first_x + across, frame.columns, frame.mode_x);
            return numbers<Number>(row < 0 || column < 0 ? all<Sample, N>(fill)
                                                         : load(plane + row * frame.pitch + column));
        });
    }
    store<BOX>(out + ((tile.plane * frame.out_rows + y) * frame.out_columns + x) * frame.channels, sum, frame);
}

// tiled: samples and their halo are in shared memory, so each is loaded once per block, not once per tap. Sums down the
// columns are there too and serve all windows across them: taps + taps additions instead of taps × taps.
template <typename Sample, int N, int RULE>
__global__ void __launch_bounds__(THREADS)
tiled(const Vector<Sample, N>* __restrict__ in, Sample* __restrict__ out, Frame frame, Sample fill) {
    typedef Work<RULE, Sample> Number;
    extern __shared__ __align__(16) unsigned char shared[];
    const int seen_rows = frame.tile_rows + frame.taps_y - 1;
    const int seen = (frame.tile_columns + frame.taps_x - 1) * frame.step;  // vectors of a row
    Vector<Number, N>* sums = reinterpret_cast<Vector<Number, N>*>(shared);
    Vector<Sample, N>* samples = reinterpret_cast<Vector<Sample, N>*>(sums + frame.tile_rows * seen);
    const Tile tile = tile_of(blockIdx.x, frame);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;

    const Vector<Sample, N>* plane = in + tile.plane * frame.rows * frame.pitch;
    const int first = tile.x + frame.first_x;
    const bool inside = first >= 0 && (first + frame.tile_columns + frame.taps_x - 1) <= frame.columns;
    for (int row = warp; row < seen_rows; row += WARPS) {
        const int from = border_index(tile.y + frame.first_y + row, frame.rows, frame.mode_y);
        const Vector<Sample, N>* line = plane + from * frame.pitch;
        Vector<Sample, N>* to = samples + row * seen;
        if (inside && from >= 0) {
#pragma unroll 4
            for (int i = lane; i < seen; i += 32) to[i] = load(line + first * frame.step + i);
            continue;
        }
        for (int i = lane; i < seen; i += 32) {
            const int column = border_index(first + i / frame.step, frame.columns, frame.mode_x);
            to[i] = from < 0 || column < 0 ? all<Sample, N>(fill) : load(line + column * frame.step + i % frame.step);
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < frame.tile_rows * seen; at += THREADS) {
        sums[at] = window_sum<RULE>(frame.taps_y, frame.weights_y,
                                    [&](int tap) { return numbers<Number>(samples[at + tap * seen]); });
    }
    __syncthreads();
    const int width = min(frame.tile_columns, frame.out_columns - tile.x) * frame.step;
    for (int row = warp; row < min(frame.tile_rows, frame.out_rows - tile.y); row += WARPS) {
        const long long line = (tile.plane * frame.out_rows + tile.y + row) * frame.out_columns + tile.x;
        for (int i = lane; i < width; i += 32) {
            const Vector<Number, N>* from = sums + row * seen + i;
            const auto sum = window_sum<RULE>(frame.taps_x, frame.weights_x,
                                              [&](int tap) { return from[tap * frame.step]; });
            // A pixel is `step` single samples, or one vector of `channels` samples.
            store<RULE>(out + line * frame.channels + i * (frame.step > 1 ? 1 : frame.channels), sum, frame);
        }
    }
}

}  // namespace ladder
