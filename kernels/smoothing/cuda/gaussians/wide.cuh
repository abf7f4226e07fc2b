// Gaussians of medium reach along both axes at once. Part of smoothing.cu.
#pragma once

#include "async_copy.cuh"
#include "bands.cuh"
#include "pdl.cuh"
#include "shifted.cuh"
#include "cuda/windows.cuh"

// wide: a block walks along a strip of 32 rows, STEP positions at a time, while the next step's samples are copied to shared
// memory. Each thread sums 16 outputs down a column from registers; the sums go to rings in shared memory, one per channel,
// from which each thread sums 16 outputs along a row. So samples that windows share are loaded once for many outputs, and no
// column is summed twice: arithmetic, two slots per pair of taps, determines the time.
//
//   copies of step i ................ samples      during the sums along the rows of step i - 1; asynchronous within rows
//     |  barrier        samples of step i and results of step i - 1 are complete; the ring's oldest sums have been read
//   each thread       16 sums down a column -> ring; results of step i - 1 -> memory
//     |  barrier        the ring is complete, and the samples' place is free: copies of step i + 1 begin
//   each warp         16 sums along a row a lane: ring -> results
constexpr int WIDE_RUN = 16;    // outputs that a thread sums along a row, or down a column
constexpr int WIDE_STRIP = 32;  // rows of a block, one per lane

struct Reach {
    float y[33], x[33];  // weights at distance 0 … reach, then 0; y is multiplied by 2^126 if samples are TINY
    int reach_y, reach_x;
};

// Pitch of rows of at least `width` words that starts them `apart` banks apart.
constexpr int pitch_of(int width, int apart) { return (width - apart + 31) / 32 * 32 + apart; }

// ALIGNED: rows begin at multiples of 16 bytes, in the input and in the output.
template <typename Sample, int CHANNELS, int RADIUS, bool ALIGNED>
struct Wide {
    static constexpr bool ROWS_ALIGNED = ALIGNED;
    static constexpr int COLUMN = WIDE_RUN, PARTS = WIDE_STRIP / COLUMN;
    static constexpr int STEP = CHANNELS <= 2 ? 64 : 32, SPAN = STEP * CHANNELS, THREADS = SPAN * PARTS;
    static constexpr int BLOCKS = (RADIUS > 16 ? 512 : 768) / THREADS;  // as registers allow
    static constexpr int SEEN_ROWS = WIDE_STRIP + 2 * RADIUS;
    static constexpr int CHUNKS = (STEP + 2 * RADIUS) / WIDE_RUN;  // of the ring, a channel
    // Channels start in different banks for threads that write neighbouring samples, rows 4 banks apart for those that read
    // quads.
    static constexpr int PLANE = CHUNKS * WIDE_RUN + (CHANNELS == 1 ? 0 : CHANNELS == 2 ? 16 : CHANNELS == 3 ? 12 : 8);
    static constexpr int PITCH = pitch_of(CHANNELS * PLANE, 4);
    static constexpr bool WHOLE_QUADS = CHANNELS == 1 && sizeof(Sample) == 4;
    static constexpr int VECTOR_WORDS = WHOLE_QUADS ? 4 : 2, WORDS = SPAN * static_cast<int>(sizeof(Sample)) / 4;
    static constexpr int RESULT_PITCH = pitch_of(WORDS, VECTOR_WORDS);
    // Samples of a row of a step that are fetched. Unaligned rows are fetched from the multiple of 16 bytes below: up to SKEWS - 1
    // samples more. Rows SKEWS apart have the same skew in every step.
    static constexpr int VECTOR = 16 / sizeof(Sample), SKEWS = ALIGNED ? 1 : VECTOR, FETCHED = SPAN + (ALIGNED ? 0 : VECTOR);
    // Bytes of shared memory: unconverted samples, the ring of sums, results; row offsets follow.
    static constexpr int SAMPLES = SEEN_ROWS * FETCHED * static_cast<int>(sizeof(Sample)), SUMS = WIDE_STRIP * PITCH * 4;
    static constexpr int RESULTS = WIDE_STRIP * RESULT_PITCH * 4;
};

// COUNT outputs whose first centre is x[RADIUS].
template <int GUARD, int COUNT, int RADIUS>
__device__ inline void weighed_run(float (&sum)[COUNT], const float (&x)[COUNT + 2 * RADIUS], const float* weights,
                                   int reach) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[i] = weights[0] * x[RADIUS + i];
#pragma unroll
    for (int k = 1; k <= RADIUS; ++k) {
        if (k % GUARD == 1 % GUARD && k > reach) break;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            sum[i] = fma_rn(weights[k], x[RADIUS + i - k] + x[RADIUS + i + k], sum[i]);
    }
}

// Weights beyond the reach add nothing to integers, but for floats the sum must stop: 0 times infinity is NaN.
template <typename Sample, int COUNT, int RADIUS>
__device__ inline void weighed(float (&sum)[COUNT], const float (&x)[COUNT + 2 * RADIUS], const float* weights,
                               int reach) {
    if (reach == RADIUS) weighed_run<RADIUS, COUNT, RADIUS>(sum, x, weights, reach);
    else weighed_run<same<Sample, float> ? 1 : 4, COUNT, RADIUS>(sum, x, weights, reach);
}

// Fetches a step's samples: SEEN_ROWS rows, which start at `offsets` (-1: beyond the edge), from position `x` on. Row i is put
// (start + i row_samples) % SKEWS samples farther right.
template <typename Shape, int CHANNELS, typename Sample>
__device__ inline void fetch_step(Sample* samples, const Sample* plane, int x, const long long* offsets, bool inside,
                                  unsigned start, const Picture& picture) {
    constexpr int VECTOR = Shape::VECTOR, A_ROW = Shape::FETCHED / VECTOR, ROWS_AT_ONCE = Shape::THREADS / A_ROW;
    constexpr int SPAN = Shape::SPAN, FETCHED = Shape::FETCHED, BESIDE = 2 * (FETCHED - SPAN);  // that vectors may lie beside
    Sample fill;
    if constexpr (same<Sample, float>) fill = __uint_as_float(picture.fill);
    else fill = static_cast<Sample>(picture.fill);
    const auto skew_of = [&](int row) { return static_cast<int>((start + static_cast<unsigned>(row) * picture.row_samples) % Shape::SKEWS); };
    const int begin = x * CHANNELS;
    if (begin >= BESIDE && begin + SPAN + BESIDE <= picture.row_samples) {
        const int row = threadIdx.x / A_ROW, at = threadIdx.x % A_ROW * VECTOR;
        if (row >= ROWS_AT_ONCE) return;
        const Sample* from = plane + offsets[0] + row * static_cast<long long>(picture.row_samples) + begin + at;
        const long long stride = ROWS_AT_ONCE * static_cast<long long>(picture.row_samples);
        samples += row * FETCHED + at;
#pragma unroll
        for (int i = 0; inside && i < Shape::SEEN_ROWS; i += ROWS_AT_ONCE, from += stride)
            if (Shape::SEEN_ROWS % ROWS_AT_ONCE == 0 || i + row < Shape::SEEN_ROWS) {
                const Sample* vector = from;
                if (!Shape::ROWS_ALIGNED)
                    vector = reinterpret_cast<const Sample*>(reinterpret_cast<unsigned long long>(from) & ~15ULL);
                copy_16_bytes(samples + i * FETCHED, vector);
            }
#pragma unroll 1
        for (int i = 0; !inside && i + row < Shape::SEEN_ROWS; i += ROWS_AT_ONCE) {
            const long long offset = offsets[i + row];
            const Sample* vector = plane + offset + begin + at - skew_of(i + row);
            if (offset < 0)
                for (int j = 0; j < VECTOR; ++j) samples[i * FETCHED + j] = fill;
            else if (Shape::ROWS_ALIGNED || reinterpret_cast<unsigned long long>(vector) % 16 == 0)
                copy_16_bytes(samples + i * FETCHED, vector);
            else *reinterpret_cast<uint4*>(samples + i * FETCHED) = load_anywhere(vector);
        }
        return;
    }
    const int sample = threadIdx.x % SPAN;
    const int position = border_index(x + sample / CHANNELS, picture.columns, picture.mode_x);
    const Sample* from = plane + max(position, 0) * CHANNELS + sample % CHANNELS;
#pragma unroll 8
    for (int i = threadIdx.x / SPAN; i < Shape::SEEN_ROWS; i += Shape::PARTS) {
        const long long offset = offsets[i];
        const Sample found = __ldg(from + max(offset, 0LL));
        samples[i * FETCHED + skew_of(i) + sample] = offset < 0 || position < 0 ? fill : found;
    }
}

template <typename Shape, int CHANNELS, typename Sample>
__device__ inline void put_results(unsigned* row, int at, const float (&done)[WIDE_RUN]) {
    if constexpr (Shape::WHOLE_QUADS) {
#pragma unroll
        for (int i = 0; i < WIDE_RUN; i += 4)
            *reinterpret_cast<float4*>(row + at + i) = make_float4(done[i], done[i + 1], done[i + 2], done[i + 3]);
    } else {
#pragma unroll
        for (int i = 0; i < WIDE_RUN; ++i) {
            const unsigned bits = finished<GAUSS, Sample>(done[i], 1.0f);
            if constexpr (sizeof(Sample) == 4) row[at + i * CHANNELS] = bits;
            else reinterpret_cast<unsigned short*>(row)[at + i * CHANNELS] = bits;
        }
    }
}

// Writes samples `begin` … `end` of a step's results, in the first `rows` rows; sample 0 of row 0 goes to `line`.
template <typename Shape, typename Sample>
__device__ inline void store_step(const unsigned* results, Sample* line, int rows, int begin, int end,
                                  const Picture& picture) {
    constexpr int VECTOR = 4 * Shape::VECTOR_WORDS / sizeof(Sample), A_ROW = Shape::WORDS / Shape::VECTOR_WORDS;
    constexpr int ROWS_AT_ONCE = Shape::THREADS / A_ROW;
    static_assert(Shape::THREADS % A_ROW == 0 && WIDE_STRIP % ROWS_AT_ONCE == 0, "a thread keeps to its place in a row");
    const int row = threadIdx.x / A_ROW, place = threadIdx.x % A_ROW, at = place * VECTOR;
    const long long stride = ROWS_AT_ONCE * static_cast<long long>(picture.out_row_samples);
    Sample* to = line + row * static_cast<long long>(picture.out_row_samples) + at;
    const unsigned* from = results + row * Shape::RESULT_PITCH + place * Shape::VECTOR_WORDS;
    if (Shape::ROWS_ALIGNED && rows == WIDE_STRIP && begin == 0 && end == Shape::SPAN) {
#pragma unroll
        for (int i = 0; i < WIDE_STRIP; i += ROWS_AT_ONCE, to += stride) {
            if constexpr (Shape::WHOLE_QUADS)
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + i * Shape::RESULT_PITCH);
            else *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from + i * Shape::RESULT_PITCH);
        }
        return;
    }
    if constexpr (!Shape::ROWS_ALIGNED && sizeof(Sample) == 4) {
        const int sample = threadIdx.x % Shape::SPAN, part = threadIdx.x / Shape::SPAN;
        if (sample < begin || sample >= end) return;
        const long long row_samples = picture.out_row_samples;
        float* to = line + part * row_samples + sample;
#pragma unroll
        for (int i = 0; i < WIDE_STRIP; i += Shape::PARTS, to += Shape::PARTS * row_samples)
            if (i + part < rows) *to = __uint_as_float(results[(i + part) * Shape::RESULT_PITCH + sample]);
        return;
    }
    if (!Shape::ROWS_ALIGNED && begin == 0) {
#pragma unroll 1
        for (int i = threadIdx.x / 32; i < rows; i += Shape::THREADS / 32) {
            const unsigned* words = results + i * Shape::RESULT_PITCH;
            const auto vector = [&](int v) {
                const uint2* pairs = reinterpret_cast<const uint2*>(words) + 2 * v;  // rows are aligned to pairs
                return make_uint4(pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y);
            };
            store_anywhere<Shape::SPAN>(line + i * static_cast<long long>(picture.out_row_samples), end, vector,
                                        [&](int j) { return reinterpret_cast<const Sample*>(words)[j]; });
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; row + i < rows; i += ROWS_AT_ONCE, to += stride)
#pragma unroll 1
        for (int j = max(begin - at, 0); j < min(VECTOR, end - at); ++j)
            to[j] = reinterpret_cast<const Sample*>(from + i * Shape::RESULT_PITCH)[j];
}

template <typename Sample>
__device__ inline float entered(Sample sample) {
    if constexpr (TINY<GAUSS, Sample>) return __uint_as_float(sample);
    else return static_cast<float>(sample);
}

template <typename Sample, int CHANNELS, int RADIUS, bool ALIGNED>
__global__ void __launch_bounds__(Wide<Sample, CHANNELS, RADIUS, ALIGNED>::THREADS,
                                  Wide<Sample, CHANNELS, RADIUS, ALIGNED>::BLOCKS)
wide(const Sample* __restrict__ in, Sample* __restrict__ out, Picture picture, Reach weights, BlockPartition tiles) {
    typedef Wide<Sample, CHANNELS, RADIUS, ALIGNED> Shape;
    constexpr int COLUMN = Shape::COLUMN, STEP = Shape::STEP, SPAN = Shape::SPAN, RING = Shape::CHUNKS * WIDE_RUN;
    extern __shared__ __align__(16) unsigned char shared[];
    Sample* samples = reinterpret_cast<Sample*>(shared);
    float* sums = reinterpret_cast<float*>(shared + Shape::SAMPLES);
    unsigned* results = reinterpret_cast<unsigned*>(shared + Shape::SAMPLES + Shape::SUMS);
    long long* offsets = reinterpret_cast<long long*>(shared + Shape::SAMPLES + Shape::SUMS + Shape::RESULTS);

    const Place area = place_in_strips(blockIdx.x, picture);
    const Sample* in_plane = in + area.plane * picture.rows * picture.row_samples;
    const int y = area.band * WIDE_STRIP, rows = min(WIDE_STRIP, picture.out_rows - y);
    const int x_begin = tiles.begin(area.tile), x_end = min(tiles.begin(area.tile + 1), picture.out_row_samples / CHANNELS);
    Sample* line = out + (area.plane * picture.out_rows + y) * picture.out_row_samples;
    const auto store = [&](int x) {
        store_step<Shape>(results, line + static_cast<long long>(x) * CHANNELS, rows, max(x_begin - x, 0) * CHANNELS,
                          min(x_end - x, STEP) * CHANNELS, picture);
    };

    const int first = y + picture.centre_y - RADIUS, centre = RADIUS + picture.centre_x / CHANNELS;
    const bool inside = first >= 0 && first + Shape::SEEN_ROWS <= picture.rows;
    for (int i = threadIdx.x; i < Shape::SEEN_ROWS; i += Shape::THREADS) {
        const int row = border_index(first + i, picture.rows, picture.mode_y);
        offsets[i] = row < 0 ? -1 : row * static_cast<long long>(picture.row_samples);
    }
    __syncthreads();
    grid_dependency_synchronize();

    const int lane = threadIdx.x % 32, sample = threadIdx.x % SPAN, part = threadIdx.x / SPAN * COLUMN;
    const int channel = sample % CHANNELS, place = sample / CHANNELS;
    // A step sums the columns from `x` + RADIUS on, which completes the windows of outputs `x` ….
    int x = x_begin - 2 * RADIUS, written = 0;
    const unsigned start = static_cast<unsigned>(reinterpret_cast<unsigned long long>(in_plane) / sizeof(Sample)) +
                           static_cast<unsigned>(first) * picture.row_samples + (x + centre) * CHANNELS;
    const auto fetch = [&](int x) {
        fetch_step<Shape, CHANNELS>(samples, in_plane, x + centre, offsets, inside, start, picture);
    };
    fetch(x);
    for (; x < x_end; x += STEP, written = (written + STEP) % RING) {
        wait_for_copies();
        __syncthreads();  // samples and the last step's results are visible; the ring's oldest sums have been read
        float sum[COLUMN];
        {
            float column[COLUMN + 2 * RADIUS];
#pragma unroll
            for (int i = 0; i < COLUMN + 2 * RADIUS; ++i) {
                const int skew = (start + i % Shape::SKEWS * static_cast<unsigned>(picture.row_samples)) % Shape::SKEWS;
                column[i] = entered(samples[(part + i) * Shape::FETCHED + skew + sample]);
            }
            weighed<Sample, COLUMN, RADIUS>(sum, column, weights.y, weights.reach_y);
        }
        const int wrapped = written + place - (written + place >= RING ? RING : 0);
        float* to = sums + part * Shape::PITCH + channel * Shape::PLANE + wrapped;
#pragma unroll
        for (int i = 0; i < COLUMN; ++i) to[i * Shape::PITCH] = sum[i];
        if (x > x_begin) store(x - STEP);
        __syncthreads();
        if (x + STEP < x_end) fetch(x + STEP);
        if (x + STEP <= x_begin) continue;
        const int oldest = written + STEP - (written + STEP >= RING ? RING : 0);  // of position x - RADIUS
#pragma unroll 1
        for (int task = threadIdx.x / 32; task < SPAN / WIDE_RUN; task += Shape::THREADS / 32) {
            const int of = task % CHANNELS, run = task / CHANNELS;
            const float* ring = sums + lane * Shape::PITCH + of * Shape::PLANE;
            float seen[WIDE_RUN + 2 * RADIUS];
            int chunk = oldest / WIDE_RUN + run;
#pragma unroll
            for (int i = 0; i < WIDE_RUN + 2 * RADIUS; i += WIDE_RUN, ++chunk) {
                if (chunk >= Shape::CHUNKS) chunk -= Shape::CHUNKS;
                const float4* quads = reinterpret_cast<const float4*>(ring + chunk * WIDE_RUN);
#pragma unroll
                for (int j = 0; j < WIDE_RUN; j += 4) {
                    const float4 quad = quads[j / 4];
                    seen[i + j] = quad.x, seen[i + j + 1] = quad.y, seen[i + j + 2] = quad.z, seen[i + j + 3] = quad.w;
                }
            }
            float done[WIDE_RUN];
            weighed<Sample, WIDE_RUN, RADIUS>(done, seen, weights.x, weights.reach_x);
            put_results<Shape, CHANNELS, Sample>(results + lane * Shape::RESULT_PITCH, run * WIDE_RUN * CHANNELS + of,
                                                 done);
        }
    }
    __syncthreads();
    store(x - STEP);
}
