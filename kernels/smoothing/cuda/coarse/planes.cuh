// The finest stage of a decimated Gaussian along two neighbouring axes at once. Part of smoothing.cu.
#pragma once

#include "borders.cuh"
#include "samples.cuh"
#include "cuda/coarse/resample.cuh"

// Arrays are seen as [planes, rows, columns, channels]; the bits are those of decimate and interpolate down the rows, then
// along them. A block takes turns with itself only: all its threads work on the same rows, meet at a barrier, and go on.
//
//   decimate_plane     load d rows -> add them to the coarse rows that they reach (registers)
//                      -> every d rows one coarse row is complete -> shared memory, by channel -> barrier -> sums along it
//   interpolate_plane  coarse rows (registers) -> up to four rows, coarse along them -> shared memory -> barrier
//                      -> d results of each row a thread -> shared memory -> barrier -> whole vectors to the result
//
// Floors for N samples of b bytes, D the product of both factors (8192 x 8192 u16 RGB, d = 4), on an H200 (4.2 TB/s,
// 132 multiprocessors of 128 lanes at 1.98 GHz):
//   bytes         N b (1 + 4 / (b D)) each              106 us
//   instructions  21 and 22 a sample (counted by ncu)   127 us, 137 us
//   shared        38 N / 512 and 15 N / 128 wavefronts  57 us, 90 us
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

// Places between the channels of a line of decimate_plane, each with its samples in a row from place 4 on. Up to four
// channels begin in different banks, so that threads that read neighbouring taps of all of them use all banks.
constexpr int LINE_PLACES = STRIP_SAMPLES + 320;
__device__ inline int span_of(int channels) {
    const int least = STRIP_SAMPLES / channels + 8, bank = channels == 3 ? 12 : 32 / channels & ~3;
    return least + ((bank - least) & 31);
}

// TAPS neighbours of a line, weighted; `x` is aligned to WIDE floats.
template <int TAPS, int WIDE>
__device__ inline float weighted(const float* x, const float* weights) {
    float total = 0;
#pragma unroll
    for (int k = 0; k < TAPS; k += WIDE) {
        float part[WIDE];
        if constexpr (WIDE == 4) {
            const float4 four = *reinterpret_cast<const float4*>(x + k);
            part[0] = four.x, part[1] = four.y, part[2] = four.z, part[3] = four.w;
        } else {
            const float2 two = *reinterpret_cast<const float2*>(x + k);
            part[0] = two.x, part[1] = two.y;
        }
#pragma unroll
        for (int i = 0; i < WIDE && k + i < TAPS; ++i)
            total = k + i == 0 ? weights[0] * part[0] : fma_rn(weights[k + i], part[i], total);
    }
    return total;
}

// fill, filled: the value beyond the edge of the rows, and of the sums down them.
template <typename In, int FACTOR, int TAPS>
__global__ void __launch_bounds__(PLANE_THREADS, same<In, float> && FACTOR == 8 ? 1 : 4)
decimate_plane(const In* __restrict__ in, float* __restrict__ out, Plane plane, PlaneWeights weights, float fill,
               float filled) {
    constexpr int OPEN = (TAPS + FACTOR - 1) / FACTOR;
    constexpr int RESULTS = FACTOR == 2 ? 2 : 1;  // of a thread along a row
    __shared__ __align__(16) float line[2][LINE_PLACES];
    __shared__ float across[MOST_DOWN];
    const int channels = plane.channels, thread = threadIdx.x, span = span_of(channels);
    if (thread < plane.taps_x) across[thread] = weights.x[thread];
    const long long tiles = (plane.out_columns + plane.tile - 1) / plane.tile;
    const long long bands = (plane.out_rows + plane.steps - 1) / plane.steps;
    // Blocks at the edges take longer, so those of the last tile come first, then those of the first; likewise the bands.
    const int column = static_cast<int>((blockIdx.x / bands + tiles - 1) % tiles) * plane.tile;
    const int row = static_cast<int>((blockIdx.x + bands - 1) % bands) * plane.steps, rows = static_cast<int>(plane.rows);
    const long long which = blockIdx.x / tiles / bands;
    const int width = min(plane.tile, static_cast<int>(plane.out_columns) - column);
    const int height = min(plane.steps, static_cast<int>(plane.out_rows) - row);
    const int pitch = static_cast<int>(plane.columns) * channels, first_x = static_cast<int>(plane.first_x) + column * plane.factor_x;
    const int begin = first_x * channels, first_y = static_cast<int>(plane.first_y) + row * FACTOR;
    const In* image = in + which * plane.rows * pitch;
    const In beyond = static_cast<In>(fill);
    // The strip starts up to three samples early, so that fours are aligned, if all rows are.
    const bool alike = pitch % 4 == 0 && reinterpret_cast<unsigned long long>(image) % (4 * sizeof(In)) == 0;
    const int own = 4 * thread - (alike ? begin & 3 : 0);
    const int strip = ((width - 1) * plane.factor_x + plane.taps_x) * channels;
    const bool wanted = own < strip, whole = alike && begin + own >= 0 && begin + own + 4 <= pitch;

    int from[4], to[4];  // places in a row, -1 beyond its edge; in a line
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = own + i + 4 * channels;  // not negative
        const int pixel = border_index(first_x + max(at / channels - 4, 0), static_cast<int>(plane.columns), plane.mode_x);
        from[i] = pixel < 0 ? -1 : pixel * channels + at % channels;
        to[i] = at % channels * span + at / channels;
    }
    Four<In> raw[FACTOR];
    const auto load = [&](int step) {
        const int first = first_y + step * FACTOR;
        if (whole && first >= 0 && first + FACTOR <= rows) {
            const In* source = image + static_cast<long long>(first) * pitch + begin + own;
#pragma unroll
            for (int p = 0; p < FACTOR; ++p, source += pitch) raw[p].load(source);
            return;
        }
#pragma unroll
        for (int p = 0; p < FACTOR; ++p) {
            const int at = border_index(first + p, rows, plane.mode_y);
            const In* source = image + static_cast<long long>(at) * pitch;
            if (at >= 0 && whole) {
                raw[p].load(source + begin + own);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    raw[p].set(i, at < 0 ? beyond : from[i] < 0 ? In(0) : __ldg(source + from[i]));
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
    int tap[RESULTS];
#pragma unroll
    for (int r = 0; r < RESULTS; ++r) {
        const int result = thread + r * PLANE_THREADS;
        tap[r] = result % channels * span + 4 + result / channels * plane.factor_x;
    }
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
#pragma unroll
                for (int i = 0; i < 4; ++i) done[to[i]] = from[i] < 0 ? filled : sum[OPEN - 1][i];
            }
            __syncthreads();
#pragma unroll
            for (int r = 0; r < RESULTS; ++r) {
                const int result = thread + r * PLANE_THREADS;
                if (result >= results) break;
                const float* x = done + tap[r];
                float total;
                if (plane.taps_x == TAPS) {
                    total = weighted<TAPS, FACTOR == 2 ? 2 : 4>(x, weights.x);
                } else {
                    total = across[0] * x[0];
#pragma unroll 6
                    for (int k = 1; k < plane.taps_x; ++k) total = fma_rn(across[k], x[k], total);
                }
                target[result] = total;
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

template <int VALUE>
struct Rows {
    static constexpr int value = VALUE;
};

// Neighbouring results, stored at once; `to` is aligned to all of them, or to 16 bytes.
template <typename Out, int COUNT>
__device__ inline void put_neighbours(Out* to, const Out (&results)[COUNT]) {
    constexpr int BYTES = COUNT * static_cast<int>(sizeof(Out)), WORDS = BYTES / 4, A_WORD = 4 / static_cast<int>(sizeof(Out));
    if constexpr (BYTES < 4) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) to[i] = results[i];
    } else {
        unsigned word[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            if constexpr (A_WORD == 1) word[i] = __float_as_uint(results[i]);
            else {
                constexpr unsigned MASK = A_WORD == 2 ? 0xFFFF : 0xFF;
                word[i] = 0;
#pragma unroll
                for (int j = 0; j < A_WORD; ++j) word[i] |= (static_cast<unsigned>(results[i * A_WORD + j]) & MASK) << 32 / A_WORD * j;
            }
        }
        if constexpr (WORDS == 1) *reinterpret_cast<unsigned*>(to) = word[0];
        else if constexpr (WORDS == 2) *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
        else
#pragma unroll
            for (int i = 0; i < WORDS; i += 4)
                reinterpret_cast<uint4*>(to)[i / 4] = make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]);
    }
}

// FACTOR, ORDER: along the rows. weights.y: [phase][order], weights.x likewise.
template <typename Out, int FACTOR, int ORDER, int ORDER_Y>
__global__ void __launch_bounds__(PLANE_THREADS, 4)
interpolate_plane(const float* __restrict__ in, Out* __restrict__ out, Plane plane, PlaneWeights weights) {
    constexpr int MOST_BESIDE = (ORDER - 1) * 8;  // samples, of up to eight channels
    constexpr int SIZE = sizeof(Out), WIDE = 16 / SIZE, MOST_RESULTS = PLANE_THREADS * FACTOR;
    // Between two barriers: as many as there usually are in a cell, in up to 16 KiB of shared memory.
    constexpr int ROWS = FACTOR * SIZE <= 16 ? 4 : 2;
    constexpr int CELLS = FACTOR == 2 ? 2 : 1, HELD = ORDER_Y + CELLS - 1;  // cells of these rows, and coarse rows that they need
    constexpr bool WHOLE_CELLS = CELLS * FACTOR == ROWS;
    constexpr int STORING = PLANE_THREADS / ROWS;  // threads that store a row
    __shared__ float line[ROWS][PLANE_THREADS + MOST_BESIDE];
    __shared__ __align__(16) float down[8 * 8];  // for each phase, padded
    __shared__ __align__(16) Out results[ROWS][MOST_RESULTS];
    const int channels = plane.channels, thread = threadIdx.x, beside = (ORDER - 1) * channels;
    if (thread < plane.factor_y * ORDER_Y) down[thread / ORDER_Y * 8 + thread % ORDER_Y] = weights.y[thread];
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
    const int storing = thread / STORING, place = thread % STORING;  // the row that this thread stores, and where
    Out* target = out + (which * plane.out_rows + row) * out_pitch + at;
    const bool aligned = skipped == 0 && reinterpret_cast<unsigned long long>(target) % 16 == 0 && out_pitch * SIZE % 16 == 0;
    const int vectors = aligned ? count / WIDE : 0, rest = aligned ? vectors * WIDE : skipped;
    target += storing * out_pitch;

    float tap[HELD + CELLS], more[HELD + CELLS];  // of two places of the coarse rows; the last are the next cells'
    const int cell = thread / channels * FACTOR * channels + thread % channels;
    __syncthreads();  // `down` is complete
    int position = static_cast<int>((plane.first_y + row) % plane.factor_y);
    int coarse = static_cast<int>((plane.first_y + row) / plane.factor_y);  // the next row to load
    source += coarse * pitch;
    const auto load = [&](int t) {
        const bool exists = coarse++ < plane.rows;
        tap[t] = owns && exists ? __ldg(source) : 0;
        more[t] = owns_more && exists ? __ldg(source + PLANE_THREADS) : 0;
        source += pitch;
    };
#pragma unroll
    for (int t = 0; t < HELD; ++t) load(t);
    const auto interpolate_rows = [&](auto rows) {  // ROWS, or one
        constexpr int COUNT = decltype(rows)::value;
        constexpr bool WHOLE = WHOLE_CELLS && COUNT == ROWS;
#pragma unroll
        for (int r = 0; r < COUNT; ++r) {
            const int of = WHOLE ? r / FACTOR : 0;  // the cell of this row
            float weight[8];
            if constexpr (WHOLE) {
#pragma unroll
                for (int t = 0; t < ORDER_Y; ++t) weight[t] = weights.y[r % FACTOR * ORDER_Y + t];
            } else {
                const float4* padded = reinterpret_cast<const float4*>(down + (position + r) * 8);
                const float4 low = padded[0], high = padded[1];
                weight[0] = low.x, weight[1] = low.y, weight[2] = low.z, weight[3] = low.w;
                weight[4] = high.x, weight[5] = high.y, weight[6] = high.z, weight[7] = high.w;
            }
            float sum = weight[0] * tap[of];
#pragma unroll
            for (int t = 1; t < ORDER_Y; ++t) sum = fma_rn(weight[t], tap[of + t], sum);
            if (owns) line[r][thread] = sum;
            if (owns_more) {
                float other = weight[0] * more[of];
#pragma unroll
                for (int t = 1; t < ORDER_Y; ++t) other = fma_rn(weight[t], more[of + t], other);
                line[r][thread + PLANE_THREADS] = other;
            }
        }
        __syncthreads();
        if (thread < active) {
#pragma unroll
            for (int r = 0; r < COUNT; ++r) {
                float x[ORDER];
#pragma unroll
                for (int k = 0; k < ORDER; ++k) x[k] = line[r][thread + k * channels];
                Out made[FACTOR];
#pragma unroll
                for (int p = 0; p < FACTOR; ++p) {
                    float total = weights.x[p * ORDER] * x[0];
#pragma unroll
                    for (int k = 1; k < ORDER; ++k) total = fma_rn(weights.x[p * ORDER + k], x[k], total);
                    made[p] = quick_sample<Out>(total);
                }
                if (channels == 1) put_neighbours(results[r] + cell, made);
                else
#pragma unroll
                    for (int p = 0; p < FACTOR; ++p) results[r][cell + p * channels] = made[p];
            }
        }
        __syncthreads();
        if (storing < COUNT) {
            const Out* done = results[storing];
#pragma unroll
            for (int i = 0; i < MOST_RESULTS / WIDE; i += STORING)
                if (place + i < vectors)
                    __stcs(reinterpret_cast<uint4*>(target) + place + i, reinterpret_cast<const uint4*>(done)[place + i]);
#pragma unroll 1
            for (int i = rest + place; i < count; i += STORING) target[i] = done[i];
        }
        target += COUNT * out_pitch;
    };
#pragma unroll 1
    for (int y = 0; y < height; position = 0) {  // cell by cell, or by two
        load(HELD);
        if (WHOLE_CELLS && plane.factor_y == FACTOR && position == 0 && y + ROWS <= height) {
            if (CELLS == 2) load(HELD + CELLS - 1);
            interpolate_rows(Rows<ROWS>());
            y += ROWS;
#pragma unroll
            for (int t = 0; t < HELD; ++t) tap[t] = tap[t + CELLS], more[t] = more[t + CELLS];
            continue;
        }
        const int end = min(y + plane.factor_y - position, height);
#pragma unroll 1
        for (; !WHOLE_CELLS && y + ROWS <= end; y += ROWS, position += ROWS) interpolate_rows(Rows<ROWS>());
#pragma unroll 1
        for (; y < end; ++y, ++position) interpolate_rows(Rows<1>());
#pragma unroll
        for (int t = 0; t < HELD; ++t) tap[t] = tap[t + 1], more[t] = more[t + 1];
    }
}
