// Short windows along both axes at once. Part of smoothing.cu.
#pragma once

#include "bands.cuh"

// fused: both axes of [planes, rows, columns, channels] in one kernel, short windows (reach up to RADIUS on each side).
// A block walks down a band of rows, ROWS at a time. Each thread filters four neighbouring columns from registers, where
// the rows of the window stay; the sums go through shared memory to threads that each filter 32 samples of one row, again
// from registers. So each sample is read once (but for halos, from L2) and written once, and nothing else leaves the chip.
constexpr int SEGMENT = 32;  // samples of a row that a thread filters along it
constexpr int MAX_RADIUS = 8;
enum FilterKind { GAUSS, BOX };

// Gauss: weight at distance 0 … RADIUS; 0 beyond the reach adds nothing to whole numbers, but 0 times infinity is NaN: for
// floats RADIUS is the reach. Box over whole numbers: 1 or 0 for each of the 2 RADIUS + 1 places.
struct Filter {
    float y[2 * MAX_RADIUS + 1], x[2 * MAX_RADIUS + 1];
    float scale, bias;  // box: see finished()
    int taps_y, taps_x;
};

// W(TAPS) at x[at] by the contract's doubling; the compiler shares the parts among neighbours.
template <int TAPS, int STRIDE, int SIZE>
__device__ inline float doubled(const float (&x)[SIZE], int at) {
    if constexpr (TAPS == 1) {
        return x[at];
    } else {
        constexpr int HALF = TAPS / 2;
        float sum = doubled<HALF, STRIDE>(x, at) + doubled<HALF, STRIDE>(x, at + HALF * STRIDE);
        if constexpr (TAPS % 2 == 1) sum = sum + x[at + 2 * HALF * STRIDE];
        return sum;
    }
}

// One filtered sample from x[centre - RADIUS * STRIDE] … x[centre + RADIUS * STRIDE].
template <int KIND, int RADIUS, int STRIDE, int SIZE>
__device__ inline float filtered(const float (&x)[SIZE], int centre, const float* weights, float bias) {
    if constexpr (KIND == GAUSS) {
        float sum = weights[0] * x[centre];
#pragma unroll
        for (int k = 1; k <= RADIUS; ++k)
            sum = fma_rn(weights[k], x[centre - k * STRIDE] + x[centre + k * STRIDE], sum);
        return sum;
    } else {
        float sum = bias;
#pragma unroll
        for (int k = -RADIUS; k <= RADIUS; ++k) sum = fma_rn(weights[k + RADIUS], x[centre + k * STRIDE], sum);
        return sum;
    }
}

// Calls body(Taps<taps>()) for the number of taps that a float box has.
template <int TAPS>
struct Taps {
    static constexpr int value = TAPS;
};

template <int MOST, typename Body>
__device__ inline void for_taps(int taps, Body body) {
    if constexpr (MOST > 1) {
        if (taps != MOST) return for_taps<MOST - 1>(taps, body);
    }
    body(Taps<MOST>());
}

// The bits of the finished sample in the low end of a word. Adding 2^23 (for signed numbers 1.5 * 2^23) rounds to a whole
// number, ties to even. A box's mean must go up at a tie: sums of an even number of samples carry a bias of 1/2, which
// moves ties up and nothing else across; for up to 81 samples of 16 bits the error of scale, at most 65535 * 2^-24 of a
// unit, is less than the distance, 1/162, of every other quotient from a half.
template <int KIND, typename Sample>
__device__ inline unsigned finished(float sum, float scale) {
    if constexpr (same<Sample, float>) return __float_as_uint(KIND == BOX ? sum * scale : sum);
    else if constexpr (KIND == BOX) return __float_as_uint(fma_rn(sum, scale, 8388608.0f));
    else return __float_as_uint(sum + (same<Sample, short> ? 12582912.0f : 8388608.0f));
}

// Writes the warp's 128 samples of each of ROWS rows, which lie at `staged` a row of PITCH words each, to row `y` and
// column `x` of the output on: each lane writes vectors one below the other.
template <int PITCH, typename Sample>
__device__ inline void store_rows(const float* staged, Sample* plane, int y, int y_end, int x, int x_end,
                                  const Picture& picture) {
    constexpr int VECTOR = 16 / sizeof(Sample), A_ROW = 128 / VECTOR, STRIDE = 32 / A_ROW;
    const int lane = threadIdx.x % 32, first_row = lane / A_ROW, column = lane % A_ROW * VECTOR;
    const long long row_samples = picture.out_row_samples;
    Sample* target = plane + (y + first_row) * row_samples + x + column;
    staged += first_row * PITCH;
    if (picture.aligned_out && x + column + VECTOR <= x_end && y + ROWS <= y_end) {
#pragma unroll
        for (int i = 0; i < ROWS; i += STRIDE)
            *reinterpret_cast<uint4*>(target + i * row_samples) =
                reinterpret_cast<const uint4*>(staged + i * PITCH)[lane % A_ROW];
        return;
    }
    const int samples = min(VECTOR, x_end - x - column);
#pragma unroll 1
    for (int i = 0; i < ROWS && y + first_row + i < y_end; i += STRIDE)
#pragma unroll 1
        for (int j = 0; j < samples; ++j)
            target[i * row_samples + j] = reinterpret_cast<const Sample*>(staged + i * PITCH)[column + j];
}

// Small blocks: while one waits at its barrier, others compute. Floats of a long window need more registers each.
constexpr int FUSED_THREADS = 128;
template <typename Sample, int RADIUS>
constexpr int FUSED_BLOCKS = same<Sample, float> && RADIUS > 4 ? 3 : 4;

template <typename Sample, int CHANNELS, int RADIUS, int KIND>
__global__ void __launch_bounds__(FUSED_THREADS, FUSED_BLOCKS<Sample, RADIUS>)
fused(const Sample* __restrict__ in, Sample* __restrict__ out, Picture picture, Filter filter) {
    constexpr int WIDTH = 4 * FUSED_THREADS;  // samples of a row that a block loads
    constexpr int PITCH = WIDTH + 68;  // room to read beyond the end; 4 modulo 32: eight rows lie in different banks
    constexpr int HALO = (RADIUS * CHANNELS + 3) / 4 * 4, ALIGN = SECTOR_BYTES / sizeof(Sample);
    constexpr int OUTPUTS = (WIDTH - 2 * HALO) / ALIGN * ALIGN;
    constexpr bool FLOAT_BOX = KIND == BOX && same<Sample, float>;
    __shared__ __align__(16) float both_sums[2][ROWS][PITCH];
    const Place place = place_of(blockIdx.x, picture);
    const Sample* in_plane = in + place.plane * picture.rows * picture.row_samples;
    Sample* out_plane = out + place.plane * picture.out_rows * picture.out_row_samples;
    const int x = place.tile * OUTPUTS, x_end = min(x + OUTPUTS, picture.out_row_samples);
    const int y_begin = place.band * picture.band_rows, y_end = min(y_begin + picture.band_rows, picture.out_rows);
    const Columns columns = columns_at<CHANNELS>(x - HALO + picture.centre_x + 4 * static_cast<int>(threadIdx.x), picture);

    float window[2 * RADIUS + ROWS][4];
    // The rows of the next step are on their way while this one is computed: in registers, or where those do not suffice
    // at least to L2.
    constexpr bool AHEAD = RADIUS == 1, KEEP_PACKED = RADIUS > 4;
    Packed<Sample> next[ROWS], past[2 * RADIUS];
    const int first = y_begin + picture.centre_y - RADIUS;
    load_rows<2 * RADIUS>(past, in_plane, first, columns, picture);
#pragma unroll
    for (int i = 0; i < 2 * RADIUS; ++i) unpack<KIND == BOX>(past[i], window[i]);
    if (AHEAD) load_rows<ROWS>(next, in_plane, first + 2 * RADIUS, columns, picture);

    const int lane = threadIdx.x % 32, row = lane % ROWS, warp_x = threadIdx.x / 32 * 128;
    const int segment = warp_x + lane / ROWS * SEGMENT;
#pragma unroll 1
    for (int y = y_begin, step = 0; y < y_end; y += ROWS, ++step) {
        // Two buffers, so that one barrier a step is enough: who writes here has passed the barrier after which the
        // other buffer was read, and all had read this one before that.
        float(*sums)[PITCH] = both_sums[step & 1];
const int entering = y - y_begin + first + 2 * RADIUS;
        if (!AHEAD) load_rows<ROWS>(next, in_plane, entering, columns, picture);
#pragma unroll
        for (int i = 0; KEEP_PACKED && i < 2 * RADIUS; ++i) {
            unpack<KIND == BOX>(past[i], window[i]);
            past[i] = i + ROWS < 2 * RADIUS ? past[i + ROWS] : next[i + ROWS - 2 * RADIUS];
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) unpack<KIND == BOX>(next[i], window[2 * RADIUS + i]);
        if (y + ROWS < y_end) {
            if (AHEAD) load_rows<ROWS>(next, in_plane, entering + ROWS, columns, picture);
            else prefetch_rows(in_plane, entering + ROWS, columns, picture);
        }
        const auto filter_columns = [&](auto taps) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                float sum[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float column[2 * RADIUS + 1];
#pragma unroll
                    for (int k = 0; k <= 2 * RADIUS; ++k) column[k] = window[i + k][j];
                    if constexpr (FLOAT_BOX) sum[j] = doubled<taps.value, 1>(column, RADIUS - taps.value / 2);
                    else sum[j] = filtered<KIND, RADIUS, 1>(column, RADIUS, filter.y, 0.0f);
                }
                *reinterpret_cast<float4*>(&sums[i][4 * threadIdx.x]) = make_float4(sum[0], sum[1], sum[2], sum[3]);
            }
        };
        if constexpr (FLOAT_BOX) for_taps<2 * RADIUS + 1>(filter.taps_y, filter_columns);
        else filter_columns(Taps<1>());
#pragma unroll
        for (int i = 0; !KEEP_PACKED && i < 2 * RADIUS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) window[i][j] = window[i + ROWS][j];
        __syncthreads();

        constexpr int SEEN = SEGMENT + 2 * HALO;
        float seen[SEEN];
        Packed<Sample> done[SEGMENT / 4];
        const auto see = [&](int i) {
            const float4 quad = *reinterpret_cast<const float4*>(&sums[row][segment + i]);
            seen[i] = quad.x, seen[i + 1] = quad.y, seen[i + 2] = quad.z, seen[i + 3] = quad.w;
        };
#pragma unroll
        for (int i = 0; i < 2 * HALO; i += 4) see(i);
        const auto filter_row = [&](auto taps) {
#pragma unroll
            for (int i = 0; i < SEGMENT; i += 4) {
                unsigned bits[4];
                see(2 * HALO + i);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = HALO + i + j;
                    float sum;
                    if constexpr (FLOAT_BOX) sum = doubled<taps.value, CHANNELS>(seen, at - taps.value / 2 * CHANNELS);
                    else
                        sum = filtered<KIND, RADIUS, CHANNELS>(seen, at, filter.x, filter.bias);
                    bits[j] = finished<KIND, Sample>(sum, filter.scale);
                }
                done[i / 4] = pack<Sample>(bits);
                if constexpr (KIND == BOX && same<Sample, short>) {
                    done[i / 4].word[0] ^= 0x80008000u;
                    done[i / 4].word[1] ^= 0x80008000u;
                }
            }
        };
        if constexpr (FLOAT_BOX) for_taps<2 * RADIUS + 1>(filter.taps_x, filter_row);
        else filter_row(Taps<1>());

        // The other buffer is free from the barrier on. The warp's own zone of it, which only it will write, takes the
        // results, to be stored a row at a time.
        float(*results)[PITCH] = both_sums[~step & 1];
        unsigned* staged = reinterpret_cast<unsigned*>(&results[row][warp_x]) + lane / ROWS * SEGMENT * sizeof(Sample) / 4;
#pragma unroll
        for (int i = 0; i < SEGMENT / 4 * static_cast<int>(sizeof(Sample)); ++i)
            staged[i] = done[i / sizeof(Sample)].word[i % sizeof(Sample)];
        __syncwarp();
        store_rows<PITCH>(&results[0][warp_x], out_plane, y, y_end, x + warp_x, x_end, picture);
        __syncwarp();
    }
}
