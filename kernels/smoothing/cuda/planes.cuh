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
constexpr int STRIP_SAMPLES = 4 * PLANE_THREADS;  // of a row that a block of decimate_plane sums

struct Plane {
    long long rows, columns, out_rows, out_columns;  // of the input and the result; columns of pixels
    // As Resample::first along each axis. Interpolation: the first column is in coarse column cell_x, and first_x its phase.
    long long first_y, first_x, cell_x;
    int channels, factor_y, taps_y, factor_x, taps_x, mode_y, mode_x;
    int tile;   // decimate: coarse columns of a block; interpolate: samples of `in` per row and block, whole pixels
    int steps;  // decimate: coarse rows of a block; interpolate: rows of results
};

struct PlaneWeights {
    float y[MOST_UP], x[MOST_UP];
};

// Four neighbouring samples of a row, packed as in memory.
template <typename Sample>
struct Four {
    static constexpr int WORDS = sizeof(Sample);
    unsigned word[WORDS];

    __device__ void load(const Sample* from) {
        if constexpr (WORDS == 4) {
            const uint4 found = __ldg(reinterpret_cast<const uint4*>(from));
            word[0] = found.x, word[1] = found.y, word[2] = found.z, word[3] = found.w;
        } else if constexpr (WORDS == 2) {
            const uint2 found = __ldg(reinterpret_cast<const uint2*>(from));
            word[0] = found.x, word[1] = found.y;
        } else {
            word[0] = __ldg(reinterpret_cast<const unsigned*>(from));
        }
    }
    __device__ void set(int i, Sample sample) {
        if constexpr (WORDS == 4) word[i] = __float_as_uint(sample);
        else if constexpr (WORDS == 2)
            word[i / 2] = i % 2 == 0 ? static_cast<unsigned short>(sample)
                                     : word[i / 2] | static_cast<unsigned>(static_cast<unsigned short>(sample)) << 16;
        else word[0] = i == 0 ? sample : word[0] | static_cast<unsigned>(sample) << 8 * i;
    }
    // As a float, by the bits of 2^23 + sample: a conversion takes four times as long.
    __device__ float at(int i) const {
        if constexpr (WORDS == 4) return __uint_as_float(word[i]);
        constexpr bool SIGNED = same<Sample, short>;
        const unsigned biased = SIGNED ? word[i / 2] ^ 0x80008000u : word[WORDS == 2 ? i / 2 : 0];
        const unsigned bits = WORDS == 2 ? __byte_perm(biased, 0x4B000000u, i % 2 == 0 ? 0x7610 : 0x7632)
                                         : __byte_perm(biased, 0x4B000000u, 0x7650 + i);
        return __uint_as_float(bits) - (SIGNED ? 8421376.0f : 8388608.0f);
    }
};

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
    constexpr int TAPS = ORDER * (FACTOR - 1) + 1, OPEN = (TAPS + FACTOR - 1) / FACTOR;
    __shared__ __align__(16) float line[2][STRIP_SAMPLES];
    __shared__ float across[MOST_DOWN];
    const int channels = plane.channels, thread = threadIdx.x;
    if (thread < plane.taps_x) across[thread] = weights.x[thread];
    const long long tiles = (plane.out_columns + plane.tile - 1) / plane.tile;
    const long long bands = (plane.out_rows + plane.steps - 1) / plane.steps;
    const long long column = blockIdx.x % tiles * plane.tile, row = blockIdx.x / tiles % bands * plane.steps;
    const long long which = blockIdx.x / tiles / bands;
    const int width = static_cast<int>(min(static_cast<long long>(plane.tile), plane.out_columns - column));
    const int height = static_cast<int>(min(static_cast<long long>(plane.steps), plane.out_rows - row));
    const long long pitch = plane.columns * channels, begin = (plane.first_x + column * plane.factor_x) * channels;
    const In* image = in + which * plane.rows * pitch;
    // The strip starts up to three samples early, so that fours are aligned, if all rows are.
    const bool alike = pitch % 4 == 0 && reinterpret_cast<unsigned long long>(image) % (4 * sizeof(In)) == 0;
    const int early = alike ? static_cast<int>(begin & 3) : 0, own = 4 * thread - early;
    const int strip = ((width - 1) * plane.factor_x + plane.taps_x) * channels;
    const bool wanted = own < strip, whole = alike && begin + own >= 0 && begin + own + 4 <= pitch;

    // Places in a row; -1 beyond its edge.
    long long from[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = max(own + i, 0);
        const long long pixel =
            border_index(plane.first_x + column * plane.factor_x + at / channels, plane.columns, plane.mode_x);
        from[i] = pixel < 0 ? -1 : pixel * channels + at % channels;
    }
    Four<In> raw[FACTOR];
    const auto load = [&](int step) {
        const long long first = plane.first_y + (row + step) * FACTOR;
        if (whole && first >= 0 && first + FACTOR <= plane.rows) {
            const In* source = image + first * pitch + begin + own;
#pragma unroll
            for (int p = 0; p < FACTOR; ++p, source += pitch) raw[p].load(source);
            return;
        }
#pragma unroll
        for (int p = 0; p < FACTOR; ++p) {
            const long long at = border_index(first + p, plane.rows, plane.mode_y);
            const In* source = image + at * pitch;
            if (at >= 0 && whole) {
                raw[p].load(source + begin + own);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    raw[p].set(i, at < 0 ? static_cast<In>(fill) : from[i] < 0 ? In(0) : __ldg(source + from[i]));
            }
        }
    };
    float sum[OPEN][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int t = 0; t < OPEN; ++t) sum[t][i] = -0.0f;
    float* target = out + ((which * plane.out_rows + row) * plane.out_columns + column) * channels;
    const int results = width * channels;
    const int first_tap = thread / channels * plane.factor_x * channels + thread % channels + early;
    if (wanted) load(0);
#pragma unroll 1
    for (int step = 0; step < height + OPEN - 1; ++step) {
#pragma unroll
        for (int p = 0; p < FACTOR; ++p)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float x = raw[p].at(i);
#pragma unroll
                for (int t = 0; t < OPEN; ++t)
                    if (p + t * FACTOR < TAPS) sum[t][i] = fma_rn(weights.y[p + t * FACTOR], x, sum[t][i]);
            }
        if (wanted && step + 1 < height + OPEN - 1) load(step + 1);  // on the way during the sums across
        if (step >= OPEN - 1) {
            float* done = line[step % 2];
            if (wanted) {
                float4 complete;
                complete.x = from[0] < 0 ? filled : sum[OPEN - 1][0];
                complete.y = from[1] < 0 ? filled : sum[OPEN - 1][1];
                complete.z = from[2] < 0 ? filled : sum[OPEN - 1][2];
                complete.w = from[3] < 0 ? filled : sum[OPEN - 1][3];
                reinterpret_cast<float4*>(done)[thread] = complete;
            }
            __syncthreads();
            if (thread < results) {
                const float* x = done + first_tap;
                float total;
                if (plane.taps_x == TAPS) {
                    total = weights.x[0] * x[0];
#pragma unroll
                    for (int k = 1; k < TAPS; ++k) {
                        x += channels;
                        total = fma_rn(weights.x[k], *x, total);
                    }
                } else {
                    total = across[0] * x[0];
#pragma unroll 6
                    for (int k = 1; k < plane.taps_x; ++k) {
                        x += channels;
                        total = fma_rn(across[k], *x, total);
                    }
                }
                target[thread] = total;
            }
            target += plane.out_columns * channels;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
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
    constexpr int ROWS = sizeof(Out) == 4 ? 2 : 1;  // between two barriers; four of 16 bits are 20 % slower (H100)
    __shared__ float line[ROWS][PLANE_THREADS + MOST_BESIDE], down[MOST_UP];
    __shared__ __align__(16) Out results[ROWS][PLANE_THREADS * FACTOR];
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
    const float* source = in + which * plane.rows * pitch + plane.cell_x * channels + begin + thread;
    // Results of the block in a row: they start in the middle of its first cell if the image does.
    const long long at = begin * FACTOR - plane.first_x * channels;
    const int skipped = static_cast<int>(max(-at, 0LL));
    const int count = static_cast<int>(min(at + active * FACTOR, out_pitch) - at);
    Out* target = out + (which * plane.out_rows + row) * out_pitch + at;

    float tap[ORDER_Y + 1], more[ORDER_Y + 1];  // of two places of the coarse rows; the last is the next cell's
    const int cell = thread / channels * FACTOR * channels + thread % channels;
    __syncthreads();  // `down` is complete
    int position = static_cast<int>((plane.first_y + row) % plane.factor_y);
    source += (plane.first_y + row) / plane.factor_y * pitch;
#pragma unroll
    for (int t = 0; t < ORDER_Y; ++t, source += pitch) {
        tap[t] = owns ? __ldg(source) : 0;
        more[t] = owns_more ? __ldg(source + PLANE_THREADS) : 0;
    }
    const bool aligned = skipped == 0 && reinterpret_cast<unsigned long long>(target) % 16 == 0 &&
                         out_pitch * sizeof(Out) % 16 == 0;
#pragma unroll 1
    for (int y = 0, end; y < height; y = end, position = 0, source += pitch) {  // cell by cell
        end = min(y + plane.factor_y - position, height);
        tap[ORDER_Y] = owns && end < height ? __ldg(source) : 0;
        more[ORDER_Y] = owns_more && end < height ? __ldg(source + PLANE_THREADS) : 0;
#pragma unroll 1
        for (int rows; y < end; y += rows, position += rows, target += rows * out_pitch) {
            rows = min(ROWS, end - y);
            const float* weight = down + position * ORDER_Y;
#pragma unroll
            for (int r = 0; r < ROWS; ++r, weight += ORDER_Y) {
                if (r >= rows) break;
                float sum = weight[0] * tap[0];
#pragma unroll
                for (int t = 1; t < ORDER_Y; ++t) sum = fma_rn(weight[t], tap[t], sum);
                if (owns) line[r][thread] = sum;
                if (owns_more) {
                    float other = weight[0] * more[0];
#pragma unroll
                    for (int t = 1; t < ORDER_Y; ++t) other = fma_rn(weight[t], more[t], other);
                    line[r][thread + PLANE_THREADS] = other;
                }
            }
            __syncthreads();
            if (thread < active) {
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    if (r >= rows) break;
                    float x[ORDER];
#pragma unroll
                    for (int k = 0; k < ORDER; ++k) x[k] = line[r][thread + k * channels];
#pragma unroll
                    for (int p = 0; p < FACTOR; ++p) {
                        float total = weights.x[p * ORDER] * x[0];
#pragma unroll
                        for (int k = 1; k < ORDER; ++k) total = fma_rn(weights.x[p * ORDER + k], x[k], total);
                        results[r][cell + p * channels] = quick_sample<Out>(total);
                    }
                }
            }
            __syncthreads();
            constexpr int WIDE = 16 / sizeof(Out);
            const int whole = aligned ? count / WIDE : 0, rest = aligned ? whole * WIDE : skipped;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (r >= rows) break;
                Out* to = target + r * out_pitch;
#pragma unroll
                for (int i = 0; i < FACTOR; i += WIDE) {
                    const int at = i / WIDE * PLANE_THREADS + thread;
                    if (at < whole) __stcs(reinterpret_cast<uint4*>(to) + at, reinterpret_cast<const uint4*>(results[r])[at]);
                }
#pragma unroll 1
                for (int i = rest + thread; i < count; i += PLANE_THREADS) to[i] = results[r][i];
            }
        }
#pragma unroll
        for (int t = 0; t < ORDER_Y; ++t) tap[t] = tap[t + 1], more[t] = more[t + 1];
    }
}
