// The finest stage of a decimated Gaussian along two neighbouring axes at once. Part of smoothing.cu.
#pragma once

#include "borders.cuh"
#include "samples.cuh"
#include "cuda/resample.cuh"

// Arrays are seen as [planes, rows, columns, channels]; the bits are those of decimate and interpolate down the rows, then
// along them. A block takes turns with itself only: all its threads work on one row, meet at a barrier, and go on.
//
//   decimate_plane     load d rows -> add them to the coarse rows that they reach (registers)
//                      -> every d rows one coarse row is complete -> shared memory -> barrier -> sums along it
//   interpolate_plane  coarse rows (registers) -> one row, coarse along it -> shared memory -> barrier
//                      -> d results a thread -> shared memory -> barrier -> whole sectors to the result
//
// Floors for N samples of b bytes, D the product of both factors (8192 x 8192 u16 RGB, d = 4 or 8), on an H200 (4.2 TB/s,
// 132 multiprocessors of 128 lanes at 1.98 GHz):
//   bytes         N b (1 + 4 / (b D)) each              99 us
//   instructions  about 5 + 3 and 6 + 6 a sample        48 us, 72 us
constexpr int PLANE_THREADS = 256;
constexpr int COLUMNS_A_THREAD = 4;  // of a row that a thread of decimate_plane sums
constexpr int STRIP_SAMPLES = PLANE_THREADS * COLUMNS_A_THREAD;

struct Plane {
    long long rows, columns, out_rows, out_columns;  // of the input and the result; columns of pixels
    long long first_y, first_x;                      // as Resample::first along each axis
    int channels, factor_y, taps_y, factor_x, taps_x, mode_y, mode_x;
    int tile;   // decimate: coarse columns of a block; interpolate: samples of `in` per row and block, whole pixels
    int steps;  // decimate: coarse rows of a block; interpolate: rows of results
};

struct PlaneWeights {
    float y[MOST_UP], x[MOST_UP];
};

// The sample as a float, by the bits of 2^23 + sample: a conversion takes four times as long.
template <typename Sample>
__device__ inline float quick_float(Sample sample) {
    if constexpr (same<Sample, float>) return sample;
    else if constexpr (same<Sample, short>)
        return __uint_as_float(0x4B000000u | static_cast<unsigned short>(sample ^ 0x8000)) - 8421376.0f;
    else return __uint_as_float(0x4B000000u | sample) - 8388608.0f;
}

// The float rounded to nearest, ties to even, as the low bits of 1.5 * 2^23 + value.
template <typename Sample>
__device__ inline Sample quick_sample(float value) {
    if constexpr (same<Sample, float>) return value;
    else return static_cast<Sample>(__float_as_uint(value + 12582912.0f));
}

// fill, filled: the value beyond the edge of the rows, and of the sums down them.
template <typename In, int FACTOR, int ORDER>
__global__ void __launch_bounds__(PLANE_THREADS)
decimate_plane(const In* __restrict__ in, float* __restrict__ out, Plane plane, PlaneWeights weights, float fill,
               float filled) {
    constexpr int TAPS = ORDER * (FACTOR - 1) + 1, OPEN = (TAPS + FACTOR - 1) / FACTOR, LAST = (TAPS - 1) % FACTOR;
    __shared__ float line[2][STRIP_SAMPLES], across[MOST_DOWN];
    const int channels = plane.channels, thread = threadIdx.x;
    if (thread < plane.taps_x) across[thread] = weights.x[thread];
    const long long tiles = (plane.out_columns + plane.tile - 1) / plane.tile;
    const long long bands = (plane.out_rows + plane.steps - 1) / plane.steps;
    const long long column = blockIdx.x % tiles * plane.tile, row = blockIdx.x / tiles % bands * plane.steps;
    const long long which = blockIdx.x / tiles / bands;
    const int width = static_cast<int>(min(static_cast<long long>(plane.tile), plane.out_columns - column));
    const int height = static_cast<int>(min(static_cast<long long>(plane.steps), plane.out_rows - row));
    const int strip = ((width - 1) * plane.factor_x + plane.taps_x) * channels;
    const long long pitch = plane.columns * channels;
    const In* image = in + which * plane.rows * pitch;

    long long from[COLUMNS_A_THREAD];  // place in a row; -1 beyond its edge
    bool wanted[COLUMNS_A_THREAD];
    float sum[OPEN][COLUMNS_A_THREAD];
#pragma unroll
    for (int i = 0; i < COLUMNS_A_THREAD; ++i) {
        const int at = thread + i * PLANE_THREADS, channel = at % channels;
        const long long pixel = border_index(plane.first_x + column * plane.factor_x + at / channels, plane.columns,
                                             plane.mode_x);
        wanted[i] = at < strip;
        from[i] = pixel < 0 || !wanted[i] ? -1 : pixel * channels + channel;
#pragma unroll
        for (int t = 0; t < OPEN; ++t) sum[t][i] = -0.0f;
    }
    float* target = out + ((which * plane.out_rows + row) * plane.out_columns + column) * channels;
#pragma unroll 1
    for (int step = 0; step < height + OPEN - 1; ++step) {
        const long long first = plane.first_y + (row + step) * FACTOR;
        In raw[FACTOR][COLUMNS_A_THREAD];
        bool inside[FACTOR];
#pragma unroll
        for (int p = 0; p < FACTOR; ++p) {
            const long long at = border_index(first + p, plane.rows, plane.mode_y);
            inside[p] = at >= 0;
            const In* source = image + (at < 0 ? 0 : at) * pitch;
#pragma unroll
            for (int i = 0; i < COLUMNS_A_THREAD; ++i) raw[p][i] = from[i] < 0 ? In(0) : __ldg(source + from[i]);
        }
#pragma unroll
        for (int p = 0; p < FACTOR; ++p) {
#pragma unroll
            for (int i = 0; i < COLUMNS_A_THREAD; ++i) {
                const float x = inside[p] ? quick_float(raw[p][i]) : fill;
#pragma unroll
                for (int t = 0; t < OPEN; ++t)
                    if (p + t * FACTOR < TAPS) sum[t][i] = fma_rn(weights.y[p + t * FACTOR], x, sum[t][i]);
            }
            if (p == LAST && step >= OPEN - 1) {
                float* done = line[step % 2];
#pragma unroll
                for (int i = 0; i < COLUMNS_A_THREAD; ++i)
                    if (wanted[i]) done[thread + i * PLANE_THREADS] = from[i] < 0 ? filled : sum[OPEN - 1][i];
                __syncthreads();
                for (int at = thread; at < width * channels; at += PLANE_THREADS) {
                    const float* x = done + at / channels * plane.factor_x * channels + at % channels;
                    float total = across[0] * x[0];
#pragma unroll 4
                    for (int k = 1; k < plane.taps_x; ++k) total = fma_rn(across[k], x[k * channels], total);
                    target[at] = total;
                }
                target += plane.out_columns * channels;
            }
        }
#pragma unroll
        for (int i = 0; i < COLUMNS_A_THREAD; ++i) {
#pragma unroll
            for (int t = OPEN - 1; t > 0; --t) sum[t][i] = sum[t - 1][i];
            sum[0][i] = -0.0f;
        }
    }
}

// FACTOR, ORDER: along the rows. weights.y: [phase][order], weights.x likewise.
template <typename Out, int FACTOR, int ORDER, int ORDER_Y>
__global__ void __launch_bounds__(PLANE_THREADS)
interpolate_plane(const float* __restrict__ in, Out* __restrict__ out, Plane plane, PlaneWeights weights) {
    constexpr int MOST_BESIDE = (ORDER - 1) * 8;  // samples, of up to eight channels
    __shared__ float line[PLANE_THREADS + MOST_BESIDE], down[MOST_UP];
    __shared__ __align__(16) Out results[PLANE_THREADS * FACTOR];
    const int channels = plane.channels, thread = threadIdx.x, beside = (ORDER - 1) * channels;
    if (thread < plane.factor_y * ORDER_Y) down[thread] = weights.y[thread];
    const long long pitch = plane.columns * channels, out_pitch = plane.out_columns * channels;
    const long long cells = (plane.first_x + plane.out_columns + FACTOR - 1) / FACTOR * channels;  // samples
    const long long tiles = (cells + plane.tile - 1) / plane.tile, bands = (plane.out_rows + plane.steps - 1) / plane.steps;
    const long long begin = blockIdx.x % tiles * plane.tile, row = blockIdx.x / tiles % bands * plane.steps;
    const long long which = blockIdx.x / tiles / bands;
    const int active = static_cast<int>(min(static_cast<long long>(plane.tile), cells - begin));
    const int height = static_cast<int>(min(static_cast<long long>(plane.steps), plane.out_rows - row));
    const bool owns = thread < active + beside, owns_more = thread + PLANE_THREADS < active + beside;
    const float* source = in + which * plane.rows * pitch + begin + thread;
    // Results of the block in a row: they start in the middle of its first cell if the image does.
    const long long at = begin * FACTOR - plane.first_x * channels;
    const int skipped = static_cast<int>(max(-at, 0LL));
    const int count = static_cast<int>(min(at + active * FACTOR, out_pitch) - at);
    Out* target = out + (which * plane.out_rows + row) * out_pitch + at;

    float tap[ORDER_Y], more[ORDER_Y];  // of two places of the coarse rows
    long long held = -1;
#pragma unroll
    for (int t = 0; t < ORDER_Y; ++t) tap[t] = more[t] = 0;
    const int cell = thread / channels * FACTOR * channels + thread % channels;
#pragma unroll 1
    for (int y = 0; y < height; ++y, target += out_pitch) {
        const int position = static_cast<int>((plane.first_y + row + y) % plane.factor_y);
        const long long needed = (plane.first_y + row + y) / plane.factor_y;
        if (needed != held) {
            const int fresh = held < 0 ? ORDER_Y : 1;
#pragma unroll
            for (int t = 0; t < ORDER_Y; ++t) {
                if (t + fresh < ORDER_Y) {
                    tap[t] = tap[min(t + 1, ORDER_Y - 1)], more[t] = more[min(t + 1, ORDER_Y - 1)];
                } else {
                    tap[t] = owns ? __ldg(source + (needed + t) * pitch) : 0;
                    more[t] = owns_more ? __ldg(source + (needed + t) * pitch + PLANE_THREADS) : 0;
                }
            }
            held = needed;
        }
        const float* weight = down + position * ORDER_Y;
        float sum = weight[0] * tap[0], other = weight[0] * more[0];
#pragma unroll
        for (int t = 1; t < ORDER_Y; ++t)
            sum = fma_rn(weight[t], tap[t], sum), other = fma_rn(weight[t], more[t], other);
        if (owns) line[thread] = sum;
        if (owns_more) line[thread + PLANE_THREADS] = other;
        __syncthreads();
        if (thread < active) {
            float x[ORDER];
#pragma unroll
            for (int k = 0; k < ORDER; ++k) x[k] = line[thread + k * channels];
#pragma unroll
            for (int p = 0; p < FACTOR; ++p) {
                float total = weights.x[p * ORDER] * x[0];
#pragma unroll
                for (int k = 1; k < ORDER; ++k) total = fma_rn(weights.x[p * ORDER + k], x[k], total);
                results[cell + p * channels] = quick_sample<Out>(total);
            }
        }
        __syncthreads();
        if (skipped == 0 && reinterpret_cast<unsigned long long>(target) % 16 == 0) {
            constexpr int WIDE = 16 / sizeof(Out);
            for (int i = thread; i < count / WIDE; i += PLANE_THREADS)
                __stcs(reinterpret_cast<uint4*>(target) + i, reinterpret_cast<const uint4*>(results)[i]);
            for (int i = count / WIDE * WIDE + thread; i < count; i += PLANE_THREADS) target[i] = results[i];
        } else {
            for (int i = skipped + thread; i < count; i += PLANE_THREADS) target[i] = results[i];
        }
    }
}
