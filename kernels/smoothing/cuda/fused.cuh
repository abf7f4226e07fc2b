// Short windows along both axes at once. Part of smoothing.cu.
#pragma once

#include "pdl.cuh"
#include "opaque.cuh"
#include "cuda/tiles.cuh"

// fused: both axes of [planes, rows, columns, channels] in one kernel, for short windows (reach up to RADIUS on each side).
// A block walks down or up a band of rows, STEP at a time, while the next samples are copied to shared memory.
// Each thread filters four neighbouring columns from registers, which hold the rows of the window; the sums go through
// shared memory to threads that each filter a segment of one row, again from registers. So each sample is read once
// (except for halos, from L2) and written once, and nothing else leaves the chip.
//
//   copies of the next rows ......... stage        asynchronous; floats of short windows have two stages
//     |  barrier        the step's rows are in their stage; the last step's sums have been read
//   each thread       four columns, from registers -> sums
//     |  barrier        the sums are complete, and the stage is free: the next copies begin
//   each warp         its rows: sums -> results in their place -> memory; only its lanes wait for each other

// Gauss: weights at distance 0 … RADIUS. Zeros beyond the reach add nothing to integers, but 0 times infinity is NaN, so for
// floats RADIUS is the reach. Box over integers: 1 or 0 for each of the 2 RADIUS + 1 places. SQUARE has no weights.
// If samples are TINY, y is multiplied by 2^126 (SQUARE: scale), and bias by 2^-23.
struct Filter {
    float y[2 * MAX_RADIUS + 1], x[2 * MAX_RADIUS + 1];
    float scale, bias;  // box: see finished()
    int taps_y, taps_x;
};

// The bits of four samples, packed as they are stored.
template <int KIND, typename Sample>
__device__ inline Packed<Sample> packed_results(const unsigned (&bits)[4]) {
    Packed<Sample> packed = pack<Sample>(bits);
    if constexpr (KIND != GAUSS && same<Sample, short>) {
        packed.word[0] ^= 0x80008000u;
        packed.word[1] ^= 0x80008000u;
    }
    return packed;
}

// A segment's means, from the sums down its columns that start at `sums`.
template <typename Shape, int RADIUS, int CHANNELS, typename Sample>
__device__ inline void filter_square(Packed<Sample> (&done)[Shape::SEGMENT / 4], const unsigned* sums, float scale) {
    constexpr int SEGMENT = Shape::SEGMENT, HALO = Shape::HALO, REACH = Shape::REACH, AT_ONCE = 4 * Shape::A_WORD;
    constexpr int INNER = 3 * CHANNELS;  // nine are three times three
    unsigned seen[SEGMENT + 2 * HALO + AT_ONCE], threes[SEGMENT + 2 * HALO];
    const auto see = [&](int i) {
        const uint4 quad = *reinterpret_cast<const uint4*>(sums + i / SEGMENT * Shape::RUN + i % SEGMENT / Shape::A_WORD);
        const unsigned word[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            if constexpr (Shape::PAIRED) seen[i + j] = j % 2 ? word[j / 2] >> 16 : word[j / 2] & 0xFFFFu;
            else seen[i + j] = word[j];
        }
    };
    const auto add_three = [&](int i) { threes[i] = seen[i - CHANNELS] + seen[i] + seen[i + CHANNELS]; };
#pragma unroll
    for (int i = (HALO - REACH) / AT_ONCE * AT_ONCE; i < up_to(HALO + REACH, AT_ONCE); i += AT_ONCE) see(i);
#pragma unroll
    for (int i = HALO - INNER; RADIUS == 4 && i < HALO + INNER; ++i) add_three(i);
#pragma unroll
    for (int i = HALO; i < HALO + SEGMENT; i += 4) {
        if (up_to(i + REACH, AT_ONCE) < i + 4 + REACH) see(up_to(i + REACH, AT_ONCE));
#pragma unroll
        for (int j = i; RADIUS == 4 && j < i + 4; ++j) add_three(j + INNER);
        unsigned bits[4];
#pragma unroll
        for (int j = i; j < i + 4; ++j) {
            unsigned sum = seen[j];
            if constexpr (RADIUS == 4) sum = threes[j - INNER] + threes[j] + threes[j + INNER];
            else {
#pragma unroll
                for (int k = 1; k <= RADIUS; ++k) sum += seen[j - k * CHANNELS] + seen[j + k * CHANNELS];
            }
            bits[j - i] = finished<SQUARE, Sample>(__uint_as_float(sum), scale);
        }
        done[(i - HALO) / 4] = packed_results<SQUARE, Sample>(bits);
    }
}

// The same for Gaussians and other boxes.
template <typename Shape, int KIND, int RADIUS, int CHANNELS, typename Sample>
__device__ inline void filter_segment(Packed<Sample> (&done)[Shape::SEGMENT / 4], const unsigned* sums,
                                      const Filter& filter) {
    constexpr int SEGMENT = Shape::SEGMENT, HALO = Shape::HALO, REACH = Shape::REACH;
    constexpr bool FLOAT_BOX = KIND == BOX && same<Sample, float>;
    float seen[SEGMENT + 2 * HALO + 4];
    const auto see = [&](int i) {
        const float4 quad = *reinterpret_cast<const float4*>(sums + i / SEGMENT * Shape::RUN + i % SEGMENT);
        seen[i] = quad.x, seen[i + 1] = quad.y, seen[i + 2] = quad.z, seen[i + 3] = quad.w;
    };
#pragma unroll
    for (int i = (HALO - REACH) / 4 * 4; i < up_to(HALO + REACH, 4); i += 4) see(i);
    const auto filter_row = [&](auto taps) {
#pragma unroll
        for (int i = HALO; i < HALO + SEGMENT; i += 4) {
            see(up_to(i + REACH, 4));
            unsigned bits[4];
#pragma unroll
            for (int j = i; j < i + 4; ++j) {
                float sum;
                if constexpr (FLOAT_BOX) sum = doubled<taps.value, CHANNELS>(seen, j - taps.value / 2 * CHANNELS);
                else sum = filtered<KIND, RADIUS, CHANNELS>(seen, j, filter.x, filter.bias);
                bits[j - i] = finished<KIND, Sample>(sum, filter.scale);
            }
            done[(i - HALO) / 4] = packed_results<KIND, Sample>(bits);
        }
    };
    if constexpr (FLOAT_BOX) for_taps<2 * RADIUS + 1>(filter.taps_x, filter_row);
    else filter_row(Taps<1>());
}

template <bool SQUARE_BOX>
struct Summed {
    typedef float Value;
};
template <>
struct Summed<true> {
    typedef unsigned Value;
};

// A thread's four columns: the window's rows, and for a square box their sums.
template <typename Shape, int RADIUS, typename Value>
struct Window {
    Value row[2 * RADIUS + Shape::STEP][Shape::LANES];
    Value sum[Shape::LANES];
};

// A step: STEP rows enter, and the sums of the windows that they complete are written from `to` on. UPWARDS: the rows arrive,
// and are kept in the window, from the last up; this matters if they are summed in order.
template <typename Shape, int KIND, bool UPWARDS, int RADIUS, typename Sample, typename Value>
__device__ inline void filter_columns(Window<Shape, RADIUS, Value>& window, const Sample* entering,
                                      const Skews<Shape>& skews, unsigned* to, const Filter& filter) {
    constexpr int STEP = Shape::STEP, LANES = Shape::LANES, WIDTH = Shape::WIDTH;
    constexpr bool FLOAT_BOX = KIND == BOX && same<Sample, float>;
    const auto filter_rows = [&](auto taps) {
        // Two rows are loaded ahead, since the compiler does not move loads before the stores of sums.
        const auto row = [&](int i) { return packed_row<Shape>(entering + i * WIDTH, skews(i)); };
        Packed<Sample> ahead[2] = {row(0), row(1)};
#pragma unroll
        for (int i = 0; i < STEP; ++i) {
            enter<Shape, KIND>(ahead[i % 2], window.row[2 * RADIUS + i]);
            if (i + 2 < STEP) ahead[i % 2] = row(i + 2);
            Value sum[LANES];
#pragma unroll
            for (int j = 0; j < LANES; ++j) {
                if constexpr (KIND == SQUARE && RADIUS == 1) {
                    sum[j] = window.row[i][j] + window.row[i + 1][j] + window.row[i + 2][j];
                } else if constexpr (KIND == SQUARE) {
                    sum[j] = window.sum[j] + window.row[2 * RADIUS + i][j];
                    window.sum[j] = sum[j] - window.row[i][j];
                } else {
                    float column[2 * RADIUS + 1];
#pragma unroll
                    for (int k = 0; k <= 2 * RADIUS; ++k) column[k] = window.row[i + (UPWARDS ? 2 * RADIUS - k : k)][j];
                    if constexpr (FLOAT_BOX) sum[j] = doubled<taps.value, 1>(column, RADIUS - taps.value / 2);
                    else sum[j] = filtered<KIND, RADIUS, 1>(column, RADIUS, filter.y, 0.0f);
                }
            }
            put_sums<Shape>(to + i * Shape::PITCH, sum);
        }
    };
    if constexpr (FLOAT_BOX) for_taps<2 * RADIUS + 1>(filter.taps_y, filter_rows);
    else filter_rows(Taps<1>());
#pragma unroll
    for (int i = 0; i < 2 * RADIUS; ++i)
#pragma unroll
        for (int j = 0; j < LANES; ++j) window.row[i][j] = window.row[i + STEP][j];
}

template <typename Sample, int CHANNELS, int RADIUS, int KIND, bool ALIGNED>
__global__ void __launch_bounds__(Fused<Sample, CHANNELS, RADIUS, KIND, ALIGNED>::THREADS,
                                  Fused<Sample, CHANNELS, RADIUS, KIND, ALIGNED>::BLOCKS)
fused(const Sample* __restrict__ in, Sample* __restrict__ out, Picture picture, Filter filter, BlockPartition bands) {
    typedef Fused<Sample, CHANNELS, RADIUS, KIND, ALIGNED> Shape;
    constexpr int STEP = Shape::STEP, WIDTH = Shape::WIDTH, SEGMENT = Shape::SEGMENT;
    constexpr int STAGE = Shape::SAMPLES / static_cast<int>(sizeof(Sample));
    extern __shared__ __align__(16) unsigned char shared[];
    Sample* samples = reinterpret_cast<Sample*>(shared);
    unsigned* sums = reinterpret_cast<unsigned*>(shared + Shape::STAGES * Shape::SAMPLES);
    Sources* sources = reinterpret_cast<Sources*>(shared + Shape::STAGES * Shape::SAMPLES + Shape::SUMS);
    const Place place = place_of(blockIdx.x, picture);
    const Sample* in_plane = in + place.plane * picture.rows * picture.row_samples;
    Sample* out_plane = out + place.plane * picture.out_rows * picture.out_row_samples;
    const int x = opaque(place.tile * Shape::OUTPUTS), x_end = min(x + Shape::OUTPUTS, picture.out_row_samples);
    const int x_in = x - Shape::HALO + picture.centre_x;
    const int y_begin = bands.begin(place.band), y_end = min(bands.begin(place.band + 1), picture.out_rows);
    const Ends ends = ends_of<Shape>(x_in, picture);
    if (ends != Ends::NONE)
        find_sources<Shape, CHANNELS>(sources, x_in, x_end - x + Shape::HALO + Shape::REACH + Shape::SPARE, picture);
    __syncthreads();
    grid_dependency_synchronize();

    typedef typename Summed<KIND == SQUARE>::Value Value;
    Window<Shape, RADIUS, Value> window;
    constexpr bool ORDERED = KIND == BOX && same<Sample, float>;
    const bool up = Shape::TURNS && place.band % 2 != 0;
    const int mine = (Shape::APART == 1 ? 4 : 1) * threadIdx.x;
    int y = up ? y_end - 1 : y_begin, left = y_end - y_begin;  // the next row to write, and the number left
    const auto ahead = [&](int row) { return y + picture.centre_y + (up ? -row : row); };
    const unsigned address = reinterpret_cast<unsigned long long>(in_plane + x_in) / sizeof(Sample);
    const Skews<Shape> skews{address + ahead(RADIUS) * static_cast<unsigned>(picture.row_samples),
                             static_cast<unsigned>(up ? -picture.row_samples : picture.row_samples)};
    const Skews<Shape> skews_above = skews.before(2 * RADIUS);
    const auto fetch_above = [&](Sample* to) {
        fetch_rows<Shape, 2 * RADIUS>(to, skews_above, in_plane, ahead(-RADIUS), up, x_in, ends, sources, picture);
    };
    const auto fetch = [&](int stage, int steps) {
        fetch_rows<Shape, STEP>(samples + stage * STAGE, skews, in_plane, ahead(RADIUS + steps * STEP), up, x_in, ends, sources,
                                picture);
    };
    // The rows of the first window above its last are fetched into the place of the sums, if they fit there, together with
    // those of the first step; otherwise before these.
    constexpr int ABOVE = 2 * RADIUS * WIDTH * static_cast<int>(sizeof(Sample));
    constexpr bool FIT = ABOVE <= Shape::SUMS;
    static_assert(FIT || (ABOVE <= Shape::SAMPLES + Shape::SUMS && Shape::STAGES == 1), "shared memory holds the rows above");
    Sample* above = FIT ? reinterpret_cast<Sample*>(sums) : samples;
    fetch_above(above);
    if (FIT) fetch(0, 0);
    if (Shape::STAGES == 2) {
        end_copy_group();
        if (left > STEP) fetch(1, 1);
        end_copy_group();
    }
    const auto wait_for_stage = [&] {
        if (Shape::STAGES == 2) wait_for_copies_but_last();
        else wait_for_copies();
        __syncthreads();
    };
    wait_for_stage();
    if (Shape::COMPLETES && ends == Ends::WITHIN) copy_ends<Shape, 2 * RADIUS>(above, x_in, sources, picture);
#pragma unroll
    for (int i = 0; i < 2 * RADIUS; ++i)
        enter<Shape, KIND>(packed_row<Shape>(above + i * WIDTH + mine, skews_above(i)), window.row[i]);
    if (!FIT) {
        __syncthreads();
        fetch(0, 0);
    }
#pragma unroll
    for (int j = 0; KIND == SQUARE && j < Shape::LANES; ++j) {
        window.sum[j] = 0;
#pragma unroll
        for (int i = 0; i < 2 * RADIUS; ++i) window.sum[j] += window.row[i][j];
    }

    constexpr int SEGMENTS = WIDTH / SEGMENT, WARP_ROWS = 32 / SEGMENTS;
    static_assert(32 % SEGMENTS == 0 && WARP_ROWS * Shape::THREADS / 32 == STEP, "each row belongs to one warp");
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * WARP_ROWS;
    unsigned* to = sums + mine / SEGMENT * Shape::RUN + mine % SEGMENT / Shape::A_WORD;
    unsigned* segment = sums + (warp_row + lane / SEGMENTS) * Shape::PITCH + lane % SEGMENTS * Shape::RUN;
#pragma unroll 1
    for (int stage = 0; left > 0; left -= STEP, y += up ? -STEP : STEP) {
        wait_for_stage();  // and the last step's sums have been read
        if (Shape::COMPLETES && ends == Ends::WITHIN)
            copy_ends<Shape, STEP>(samples + stage * STAGE, x_in, sources, picture);
        const Sample* entering = samples + stage * STAGE + mine;
        // Floats have no registers to keep skews in.
        const Skews<Shape> step_skews{Shape::FLOATS ? opaque(skews.start) : skews.start, skews.stride};
        if (ORDERED && up) filter_columns<Shape, KIND, ORDERED>(window, entering, step_skews, to, filter);
        else filter_columns<Shape, KIND, false>(window, entering, step_skews, to, filter);
        __syncthreads();
        if (left > Shape::STAGES * STEP) fetch(stage, Shape::STAGES);
        if (Shape::STAGES == 2) {
            end_copy_group();
            stage ^= 1;
        }

        Packed<Sample> done[SEGMENT / 4];
        if constexpr (KIND == SQUARE) filter_square<Shape, RADIUS, CHANNELS>(done, segment, filter.scale);
        else filter_segment<Shape, KIND, RADIUS, CHANNELS>(done, segment, filter);
        const int first = up ? y - warp_row : y + warp_row;
        if constexpr (Shape::SKEW > 0 && !Shape::FLOATS)
            shift_results(done, shift_of(out_plane + (first + lane / SEGMENTS) *
                                                         static_cast<long long>(picture.out_row_samples) + x));
        // Only this warp reads its rows, so the results replace them, to be stored a row at a time.
        __syncwarp();
        constexpr int SIZE = sizeof(Sample);
#pragma unroll
        for (int i = 0; i < SEGMENT / 4 * SIZE; i += 4) {
            unsigned word[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) word[j] = done[(i + j) / SIZE].word[(i + j) % SIZE];
            *reinterpret_cast<uint4*>(segment + i) = make_uint4(word[0], word[1], word[2], word[3]);
        }
        __syncwarp();
        store_results<Shape, WARP_ROWS>(sums + warp_row * Shape::PITCH, out_plane, first, left - warp_row, up, x, x_end, picture);
    }
}
