// The finest stage of a decimated Gaussian along two neighbouring axes at once. Part of smoothing.cu.
#pragma once

#include "borders.cuh"
#include "pdl.cuh"
#include "samples.cuh"
#include "cuda/coarse/resample.cuh"

// Arrays are seen as [planes, rows, columns, channels]; the bits are those of decimate and interpolate down the rows, then
// along them. A block takes turns with itself only: all its threads work on the same rows, meet at a barrier, and go on.
//
//   decimate_plane     load d rows -> add them to the coarse rows that they reach (registers)
//                      -> every d rows one coarse row is complete -> shared memory, by channel -> barrier -> sums along it
//                      by all threads, or for d = 3 and 8 by half of them in turn, while the next d rows are loaded; for
//                      d = 3 a thread sums four neighbouring results, whose samples are whole vectors
//   interpolate_plane  coarse rows (registers) -> up to six rows, coarse along them -> shared memory -> barrier
//                      -> d results of each row a thread, 3 d of RGB, or 6 d of every second row (RGB, d = 3)
//                      -> shared memory -> barrier -> whole vectors to the result
//
// Floors for N samples of b bytes, D the product of both factors (8192 x 8192 RGB), on an H200 (4.2 TB/s, 132
// multiprocessors of 128 lanes at 1.98 GHz), and measured; instructions a sample are counted by ncu:
//                                            u16, d = 4          u8, d = 4          u8, d = 8
//   bytes         N b (1 + 4 / (b D)) each   106 us              60 us              51 us
//   decimation    instructions               20, 118 us          14, 82 us          12, 74 us
//                 measured                   176 us              115 us             117 us
//   interpolation instructions               15, 92 us           10, 60 us          8.5, 51 us
//                 measured                   134 us              83 us              74 us
// u16, d = 3: 117 us for bytes; 220 us for decimation and 166 us for interpolation measured.
constexpr int PLANE_THREADS = 256;
// interpolate_plane: most threads that interpolate along the rows, and all; the last only prepare their neighbours' cells.
constexpr int most_places(int group) { return group == 1 ? 256 : 128; }
constexpr int place_threads(int group) { return group == 1 ? 288 : 128; }
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
    // As a float, since a conversion takes four times as long: an unsigned sample times 2^-149, which are its bits, a signed
    // one by the bits of 2^23 + sample.
    __device__ float at(int i) const {
        if constexpr (WORDS == 4) return __uint_as_float(word[i]);
        else if constexpr (WORDS == 1) return __uint_as_float(__byte_perm(word[0], 0, 0x4440 + i));
        else if constexpr (same<Sample, short>)
            return __uint_as_float(__byte_perm(word[i / 2] ^ 0x80008000u, 0x4B000000u, i % 2 == 0 ? 0x7610 : 0x7632)) - 8421376.0f;
        else return __uint_as_float(__byte_perm(word[i / 2], 0, i % 2 == 0 ? 0x4410 : 0x4432));
    }
};

// The float rounded to nearest, ties to even, as the low bits of 1.5 * 2^23 + value.
__device__ inline unsigned quick_bits(float value) { return __float_as_uint(value + 12582912.0f); }
template <typename Sample>
__device__ inline Sample quick_sample(float value) {
    if constexpr (same<Sample, float>) return value;
    else return static_cast<Sample>(quick_bits(value));
}

// Places between the channels of a line of decimate_plane, each with its samples in a row from place 4 on. Up to four
// channels begin in different banks, so that threads that read neighbouring taps of all of them use all banks.
constexpr int LINE_PLACES = STRIP_SAMPLES + 320;
__device__ inline int span_of(int channels) {
    const int least = STRIP_SAMPLES / channels + 8, bank = channels == 3 ? 12 : 32 / channels & ~3;
    return least + ((bank - least) & 31);
}

// COUNT results of TAPS neighbours of a line, each FACTOR farther; `x` is aligned to the vectors that are read.
template <int TAPS, int FACTOR, int COUNT>
__device__ inline void weigh(float (&totals)[COUNT], const float* x, const float* weights) {
    constexpr int WIDE = FACTOR * COUNT % 4 == 0 ? 4 : 2;
#pragma unroll
    for (int k = 0; k < TAPS + (COUNT - 1) * FACTOR; k += WIDE) {
        float part[WIDE];
        if constexpr (WIDE == 4) {
            const float4 four = *reinterpret_cast<const float4*>(x + k);
            part[0] = four.x, part[1] = four.y, part[2] = four.z, part[3] = four.w;
        } else {
            const float2 two = *reinterpret_cast<const float2*>(x + k);
            part[0] = two.x, part[1] = two.y;
        }
#pragma unroll
        for (int i = 0; i < WIDE; ++i)
#pragma unroll
            for (int r = 0; r < COUNT; ++r) {
                const int tap = k + i - r * FACTOR;
                if (tap == 0) totals[r] = weights[0] * part[i];
                else if (tap > 0 && tap < TAPS) totals[r] = fma_rn(weights[tap], part[i], totals[r]);
            }
    }
}

// fill, filled: the value beyond the edge of the rows, and of the sums down them. Unsigned samples are 2^-149 of their value:
// weights.y are multiplied by 2^126, weights.x by 2^23, and filled by 2^-23, which changes no rounding.
template <typename In, int FACTOR, int TAPS>
__global__ void __launch_bounds__(PLANE_THREADS, !same<In, float> || FACTOR == 2 ? 4 : FACTOR == 8 ? 2 : 3)
decimate_plane(const In* __restrict__ in, float* __restrict__ out, Plane plane, PlaneWeights weights, float fill,
               float filled) {
    constexpr int OPEN = (TAPS + FACTOR - 1) / FACTOR;
    constexpr int RESULTS = FACTOR == 2 ? 2 : 1;  // of a thread along a row, of which each are BESIDE neighbours
    constexpr int BESIDE = FACTOR == 3 ? 4 : 1;   // so that vectors of their samples are aligned
    constexpr int TURNS = FACTOR == 8 || FACTOR == 3 ? 2 : 1;  // halves of the block sum along the rows in turn, if a half suffices
    constexpr int SUMMING = PLANE_THREADS / TURNS;
    constexpr int PAIR = sizeof(In) == 1 && FACTOR == 4 ? 2 : 1;  // coarse rows between two barriers
    constexpr int LOADED = PAIR * FACTOR;
    __shared__ __align__(16) float line[2][PAIR][LINE_PLACES];
    __shared__ float across[MOST_DOWN];
    const int channels = plane.channels, thread = threadIdx.x, span = span_of(channels);
    if (thread < plane.taps_x) across[thread] = weights.x[thread];
    const long long tiles = (plane.out_columns + plane.tile - 1) / plane.tile;
    const long long bands = (plane.out_rows + plane.steps - 1) / plane.steps;
    // Blocks at the edges take longer, so they come first: the tiles from both ends inwards, of each the last band and the first.
    const int turn = static_cast<int>(blockIdx.x / bands % tiles);
    const int column = (turn % 2 ? turn / 2 : static_cast<int>(tiles) - 1 - turn / 2) * plane.tile;
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
    const bool wanted = own < strip, whole = wanted && alike && begin + own >= 0 && begin + own + 4 <= pitch;

    int from[4], to[4];  // places in a row; bytes in a line
    unsigned outside = 0;  // a bit for each that is beyond the edge of a row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = own + i + 4 * channels;  // not negative
        const int pixel = border_index(first_x + max(at / channels - 4, 0), static_cast<int>(plane.columns), plane.mode_x);
        outside |= static_cast<unsigned>(pixel < 0) << i;
        from[i] = max(pixel, 0) * channels + at % channels;
        to[i] = (at % channels * span + at / channels) * static_cast<int>(sizeof(float));
    }
    Four<In> raw[LOADED];
    const auto load = [&](int step) {  // by all threads
        const int first = first_y + step * FACTOR;
        const bool inside = first >= 0 && first + LOADED <= rows;
        // Where rows begin: those beyond an edge are found by a lane each.
        int at[LOADED];
        if (inside) {
#pragma unroll
            for (int p = 0; p < LOADED; ++p) at[p] = (first + p) * pitch;
        } else {
            const int held = max(border_index(first + thread % 32, rows, plane.mode_y), 0) * pitch;
#pragma unroll
            for (int p = 0; p < LOADED; ++p) at[p] = __shfl_sync(~0u, held, p);
        }
        if (whole) {
#pragma unroll
            for (int p = 0; p < LOADED; ++p) raw[p].load(image + (at[p] + begin + own));
        } else if (wanted) {
#pragma unroll
            for (int p = 0; p < LOADED; ++p)
#pragma unroll
                for (int i = 0; i < 4; ++i) raw[p].set(i, __ldg(image + (at[p] + from[i])));
        }
        if (!inside && plane.mode_y == CONSTANT) {
#pragma unroll
            for (int p = 0; p < LOADED; ++p)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (first + p < 0 || first + p >= rows) raw[p].set(i, beyond);
        }
    };
    float sum[OPEN][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int t = 0; t < OPEN; ++t) sum[t][i] = -0.0f;
    const int results = (width + BESIDE - 1) / BESIDE * channels, summing = thread % SUMMING;
    const int mine = summing / channels * BESIDE;  // result of a row
    const unsigned row_samples = static_cast<unsigned>(plane.out_columns) * channels;
    unsigned target = static_cast<unsigned>(which * plane.out_rows + row) * row_samples + (column + mine) * channels + summing % channels;
    int tap[RESULTS];
#pragma unroll
    for (int r = 0; r < RESULTS; ++r) {
        const int result = summing + r * SUMMING;
        tap[r] = result % channels * span + 4 + result / channels * BESIDE * plane.factor_x;
    }
    grid_dependency_synchronize();
    load(0);
#pragma unroll 1
    for (int step = 0; step < height + OPEN - 1; step += PAIR) {
        float(*done)[LINE_PLACES] = line[step / PAIR % 2];
#pragma unroll
        for (int s = 0; s < PAIR; ++s) {
#pragma unroll
            for (int p = 0; p < FACTOR; ++p)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float x = raw[s * FACTOR + p].at(i);
#pragma unroll
                    for (int t = 0; t < OPEN; ++t)
                        if (p + t * FACTOR < TAPS) sum[t][i] = fma_rn(weights.y[p + t * FACTOR], x, sum[t][i]);
                }
            if (s == PAIR - 1 && step + PAIR < height + OPEN - 1) load(step + PAIR);  // on the way during the sums across
            if (wanted && step + s >= OPEN - 1) {
                char* bytes = reinterpret_cast<char*>(done[s]);
#pragma unroll
                for (int i = 0; i < 4; ++i) *reinterpret_cast<float*>(bytes + to[i]) = outside >> i & 1 ? filled : sum[OPEN - 1][i];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int t = OPEN - 1; t > 0; --t) sum[t][i] = sum[t - 1][i];
                sum[0][i] = -0.0f;
            }
        }
        if (step + PAIR < OPEN) continue;  // none is complete
        __syncthreads();
#pragma unroll
        for (int s = 0; s < PAIR; ++s) {
            if (PAIR > 1 && (step + s < OPEN - 1 || step + s >= height + OPEN - 1)) continue;
#pragma unroll
            for (int r = 0; r < RESULTS; ++r) {
                if ((TURNS > 1 && thread / SUMMING != (step + s) % TURNS) || summing + r * SUMMING >= results) break;
                const float* x = done[s] + tap[r];
                float totals[BESIDE];
                if (plane.taps_x == TAPS) {
                    weigh<TAPS, FACTOR>(totals, x, weights.x);
                } else {
#pragma unroll
                    for (int b = 0; b < BESIDE; ++b, x += plane.factor_x) {
                        totals[b] = across[0] * x[0];
#pragma unroll(BESIDE == 1 ? 6 : 1)
                        for (int k = 1; k < plane.taps_x; ++k) totals[b] = fma_rn(across[k], x[k], totals[b]);
                    }
                }
#pragma unroll
                for (int b = 0; b < BESIDE; ++b)
                    if (BESIDE == 1 || mine + b < width) out[target + r * SUMMING + b * channels] = totals[b];
            }
            target += row_samples;
        }
    }
}

template <int VALUE>
struct Rows {
    static constexpr int value = VALUE;
};

// Neighbouring results, rounded and stored at once; `to` is aligned to the widest vector that divides them.
template <typename Out, int COUNT>
__device__ inline void put_neighbours(Out* to, const float (&totals)[COUNT]) {
    constexpr int BYTES = COUNT * static_cast<int>(sizeof(Out)), WORDS = BYTES / 4, A_WORD = 4 / static_cast<int>(sizeof(Out));
    if constexpr (BYTES % 4 != 0) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) to[i] = quick_sample<Out>(totals[i]);
    } else {
        unsigned word[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            if constexpr (A_WORD == 1) {
                word[i] = __float_as_uint(totals[i]);
            } else {
                unsigned low[A_WORD];
#pragma unroll
                for (int j = 0; j < A_WORD; ++j) low[j] = quick_bits(totals[i * A_WORD + j]);
                if constexpr (A_WORD == 2) word[i] = __byte_perm(low[0], low[1], 0x5410);
                else word[i] = __byte_perm(__byte_perm(low[0], low[1], 0x0040), __byte_perm(low[2], low[3], 0x0040), 0x5410);
            }
        }
        if constexpr (WORDS % 4 == 0)
#pragma unroll
            for (int i = 0; i < WORDS; i += 4)
                reinterpret_cast<uint4*>(to)[i / 4] = make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]);
        else if constexpr (WORDS % 2 == 0)
#pragma unroll
            for (int i = 0; i < WORDS; i += 2) reinterpret_cast<uint2*>(to)[i / 2] = make_uint2(word[i], word[i + 1]);
        else
#pragma unroll
            for (int i = 0; i < WORDS; ++i) reinterpret_cast<unsigned*>(to)[i] = word[i];
    }
}

// Whether a weight of a spline is 0 because its tap lies beyond it.
constexpr bool beyond_spline(int factor, int order, int phase, int tap) {
    const int distance = phase + (order / 2 - 1 - tap) * factor, reach = (factor - 1) * order / 2;
    return distance > reach || -distance > reach;
}

// A coarse row in shared memory, as a thread writes and reads it.
template <int GROUP>
struct CellPlace {
    float at[1];
};
template <>
struct __align__(16) CellPlace<3> {
    float at[4];
};

// FACTOR, ORDER: along the rows. GROUP: channels of a thread, 1 (of any number) or all 3. weights.y: [phase][order], weights.x
// likewise. A place is a cell's samples of a thread.
template <typename Out, int FACTOR, int ORDER, int ORDER_Y, int GROUP>
__global__ void __launch_bounds__(place_threads(GROUP), GROUP == 1 ? 3 : 6)
interpolate_plane(const float* __restrict__ in, Out* __restrict__ out, Plane plane, PlaneWeights weights) {
    constexpr int THREADS = place_threads(GROUP), MADE = FACTOR * GROUP;  // results of a place in a row
    constexpr int BESIDE = GROUP > 1 && FACTOR == 3 ? 2 : 1;  // places of a thread, which takes every BESIDE-th row
    constexpr int SIZE = sizeof(Out), WIDE = 16 / SIZE, MOST_RESULTS = most_places(GROUP) * MADE;
    // Between two barriers: as many as there usually are in a cell, in up to 24 KiB of shared memory.
    constexpr int ROWS = FACTOR == 3 ? 6 : FACTOR * SIZE <= 16 ? 4 : 2;
    constexpr int CELLS = FACTOR < 4 ? 2 : 1, HELD = ORDER_Y + CELLS - 1;  // cells of these rows, and coarse rows that they need
    constexpr bool WHOLE_CELLS = CELLS * FACTOR == ROWS;
    constexpr int STORING = THREADS / ROWS;  // threads that store a row
    __shared__ CellPlace<GROUP> line[ROWS][THREADS];
    __shared__ __align__(16) float down[8 * 8];  // for each phase, padded
    __shared__ __align__(16) Out results[ROWS][MOST_RESULTS];
    const int channels = plane.channels, thread = threadIdx.x, apart = channels / GROUP;  // places of a cell
    if (thread < plane.factor_y * ORDER_Y) down[thread / ORDER_Y * 8 + thread % ORDER_Y] = weights.y[thread];
    const long long pitch = plane.columns * channels, out_pitch = plane.out_columns * channels;
    const long long places = (plane.first_x + plane.out_columns + FACTOR - 1) / FACTOR * apart;
    const long long tiles = (places + plane.tile - 1) / plane.tile, bands = (plane.out_rows + plane.steps - 1) / plane.steps;
    const long long begin = blockIdx.x % tiles * plane.tile, row = blockIdx.x / tiles % bands * plane.steps;
    const long long which = blockIdx.x / tiles / bands;
    const int active = static_cast<int>(min(static_cast<long long>(plane.tile), places - begin));
    const int height = static_cast<int>(min(static_cast<long long>(plane.steps), plane.out_rows - row));
    const bool owns = thread < active + (ORDER - 1) * apart;
    const float* source = in + which * plane.rows * pitch + plane.cell_x * channels + (begin + thread) * GROUP;
    // Results of the block in a row: they start in the middle of its first cell if the image does.
    const long long at = begin * MADE - plane.first_x * channels;
    const int skipped = static_cast<int>(max(-at, 0LL));
    const int count = static_cast<int>(min(at + active * MADE, out_pitch) - at);
    const int storing = thread / STORING, stored = thread % STORING;  // the row that this thread stores, and where
    Out* target = out + (which * plane.out_rows + row) * out_pitch + at;
    const bool aligned = skipped == 0 && reinterpret_cast<unsigned long long>(target) % 16 == 0 && out_pitch * SIZE % 16 == 0;
    const int vectors = aligned ? count / WIDE : 0, rest = aligned ? vectors * WIDE : skipped;
    target += storing * out_pitch;

    float tap[HELD + CELLS][GROUP];  // coarse rows; the last are the next cells'
    const int own = thread % (most_places(GROUP) / BESIDE) * BESIDE, turn = thread / (most_places(GROUP) / BESIDE);
    const int cell = GROUP > 1 ? own * MADE : own / channels * FACTOR * channels + own % channels;
    grid_dependency_synchronize();
    __syncthreads();  // `down` is complete
    int position = static_cast<int>((plane.first_y + row) % plane.factor_y);
    int coarse = static_cast<int>((plane.first_y + row) / plane.factor_y);  // the next row to load
    source += coarse * pitch;
    const auto load = [&](int t) {
        const bool exists = coarse++ < plane.rows;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) tap[t][g] = owns && exists ? __ldg(source + g) : 0;
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
            CellPlace<GROUP> sums = {};
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                sums.at[g] = weight[0] * tap[of][g];
#pragma unroll
                for (int t = 1; t < ORDER_Y; ++t) sums.at[g] = fma_rn(weight[t], tap[of + t][g], sums.at[g]);
            }
            line[r][thread] = sums;
        }
        __syncthreads();
        if (turn < BESIDE && own < active) {
#pragma unroll
            for (int r = 0; r < COUNT; r += BESIDE) {
                if (r + turn >= COUNT) break;
                CellPlace<GROUP> x[ORDER + BESIDE - 1];
#pragma unroll
                for (int k = 0; k < ORDER + BESIDE - 1; ++k) x[k] = line[r + turn][own + k * apart];
                float totals[BESIDE * MADE];
#pragma unroll
                for (int p = 0; p < BESIDE * FACTOR; ++p)
#pragma unroll
                    for (int g = 0; g < GROUP; ++g) {
                        // Weights of 0 change no byte; floats may be NaN, and have others.
                        const int phase = p % FACTOR, at = p / FACTOR;
                        const int from = same<Out, unsigned char> && beyond_spline(FACTOR, ORDER, phase, 0);
                        const int end = ORDER - (same<Out, unsigned char> && beyond_spline(FACTOR, ORDER, phase, ORDER - 1));
                        float total = weights.x[phase * ORDER + from] * x[at + from].at[g];
#pragma unroll
                        for (int k = 1; k < ORDER; ++k)
                            if (k > from && k < end) total = fma_rn(weights.x[phase * ORDER + k], x[at + k].at[g], total);
                        totals[p * GROUP + g] = total;
                    }
                if (GROUP > 1 || channels == 1) put_neighbours(results[r + turn] + cell, totals);
                else
#pragma unroll
                    for (int p = 0; p < FACTOR; ++p) results[r + turn][cell + p * channels] = quick_sample<Out>(totals[p]);
            }
        }
        __syncthreads();
        if (storing < COUNT) {
            const Out* done = results[storing];
#pragma unroll
            for (int i = 0; i < MOST_RESULTS / WIDE; i += STORING)
                if (stored + i < vectors)
                    __stcs(reinterpret_cast<uint4*>(target) + stored + i, reinterpret_cast<const uint4*>(done)[stored + i]);
#pragma unroll 1
            for (int i = rest + stored; i < count; i += STORING) target[i] = done[i];
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
            for (int t = 0; t < HELD; ++t)
#pragma unroll
                for (int g = 0; g < GROUP; ++g) tap[t][g] = tap[t + CELLS][g];
            continue;
        }
        const int end = min(y + plane.factor_y - position, height);
#pragma unroll 1
        for (; !WHOLE_CELLS && y + ROWS <= end; y += ROWS, position += ROWS) interpolate_rows(Rows<ROWS>());
#pragma unroll 1
        for (; y < end; ++y, ++position) interpolate_rows(Rows<1>());
#pragma unroll
        for (int t = 0; t < HELD; ++t)
#pragma unroll
            for (int g = 0; g < GROUP; ++g) tap[t][g] = tap[t + 1][g];
    }
}
