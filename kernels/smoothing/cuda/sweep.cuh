// Boxes of integers of any size along both axes at once, at a cost that does not grow with the window. Part of smoothing.cu.
#pragma once

#include "async_copy.cuh"
#include "block_scan.cuh"
#include "borders.cuh"
#include "bulk_copy.cuh"
#include "samples.cuh"
#include "cuda/running.cuh"

//   box_starts   column sums of every band's first rows
//   box_sweep    a block goes down a band of a strip; the window of row y is that of row y - 1 plus the sum across of
//                D[x] = entering row - leaving row:
//     ask for the next two rows -> [copies arrive] -> D, prefix sums in the thread and the warp -> barrier
//     -> sums of the warps before -> prefix sums in shared memory -> barrier -> two of them a result, divided
// A result is kept as its mean m and the rest r of the division, so that 32 bits suffice: m n + r = sum + n / 2.
// A band is as high as the window, or a whole part of it, so that one block's leaving row is another's entering one at
// nearly the same time, and comes from L2.
//
// Floors for N samples of b bytes (8192 x 8192 u16 RGB, 1023 x 1023) on an H200 (4.2 TB/s, 132 multiprocessors at 1.98 GHz):
//   bytes         3 N b: read by both kernels, written once       288 us
//   instructions  about 6 for each sample read and 10 a result    120 us
//   shared        2 b + 8 for each sample read and 8 a result     150 us

constexpr int SWEEP_EACH = 24;  // samples of a row that a thread adds up: whole pixels, vectors on different banks
constexpr int START_EACH = 8;
constexpr unsigned short CONSTANT_SOURCE = 0xFFFF, FAR_SOURCE = 0xFFFE;

struct Sweep {
    int rows, out_rows, columns, out_columns;  // of a plane; columns of pixels
    int before_y, taps_y, mode_y, before_x, taps_x, mode_x;
    int tiles, outputs;         // blocks across a row, and samples that each writes
    int bands, band_rows;       // blocks down the rows, and rows that each writes
    int start_rows, starts;     // rows of a sum of box_starts, and sums that belong to the first window of a band
    int channels, aligned;      // aligned: whether box_starts may load vectors
    unsigned fill;              // the sample beyond the edge
    unsigned samples;           // of a window
    unsigned multiplier, shift; // u * multiplier >> 32 + shift is u / samples for every u that occurs (sweep.py)
    int extra;                  // quotients added to keep u above 0
};

// Sample k of the words of a row.
template <typename Sample>
__device__ inline unsigned sample_of(const unsigned* word, int k) {
    if constexpr (sizeof(Sample) == 1) return __byte_perm(word[k / 4], 0, 0x4440 + k % 4);
    else if constexpr (same<Sample, short>) return static_cast<short>(word[k / 2] >> k % 2 * 16);
    else return __byte_perm(word[k / 2], 0, k % 2 ? 0x4432 : 0x4410);
}

template <typename Sample>
__global__ void __launch_bounds__(256, 8)
box_starts(const Sample* __restrict__ in, unsigned* __restrict__ sums, Sweep sweep) {
    constexpr int WORDS = START_EACH * sizeof(Sample) / 4;
    const int row_samples = sweep.columns * sweep.channels;
    const int tiles = (row_samples + 256 * START_EACH - 1) / (256 * START_EACH), count = sweep.bands + sweep.starts - 1;
    const int at = (blockIdx.x % tiles * 256 + threadIdx.x) * START_EACH, band = blockIdx.x / tiles % count;
    const long long plane = blockIdx.x / tiles / count;
    if (at >= row_samples) return;
    const int own = min(START_EACH, row_samples - at);
    const int first = band * sweep.band_rows - (sweep.mode_y == VALID ? 0 : sweep.before_y);
    const Sample* source = in + plane * sweep.rows * row_samples + at;
    unsigned sum[START_EACH] = {};
    if (sweep.aligned && own == START_EACH && first >= 0 && first + sweep.start_rows <= sweep.rows) {
        const Sample* line = source + static_cast<long long>(first) * row_samples;
#pragma unroll 4
        for (int row = 0; row < sweep.start_rows; ++row, line += row_samples) {
            unsigned word[WORDS];
            if constexpr (WORDS == 4) {
                const uint4 found = __ldg(reinterpret_cast<const uint4*>(line));
                word[0] = found.x, word[1] = found.y, word[2] = found.z, word[3] = found.w;
            } else {
                const uint2 found = __ldg(reinterpret_cast<const uint2*>(line));
                word[0] = found.x, word[1] = found.y;
            }
#pragma unroll
            for (int k = 0; k < START_EACH; ++k) sum[k] += sample_of<Sample>(word, k);
        }
    } else {
        for (int row = 0; row < sweep.start_rows; ++row) {
            const int from = border_index(first + row, sweep.rows, sweep.mode_y);
            const Sample* line = source + static_cast<long long>(max(from, 0)) * row_samples;
#pragma unroll
            for (int k = 0; k < START_EACH; ++k)
                if (k < own) sum[k] += from < 0 ? static_cast<Sample>(sweep.fill) : __ldg(line + k);
        }
    }
    // Sums of signed samples are made those of samples plus 32768.
    const unsigned bias = same<Sample, short> ? 32768u * sweep.start_rows : 0;
    unsigned* target = sums + (plane * count + band) * row_samples + at;
#pragma unroll
    for (int k = 0; k < START_EACH; ++k)
        if (k < own) target[k] = sum[k] + bias;
}

// The rows of a step: two stages of an entering and a leaving row in shared memory, each as it lies in memory.
struct Staged {
    int row[2][2], skew[2][2];  // -1: a row of the constant; bytes between the slot's start and the strip's
};

template <typename Sample, int CHANNELS, int THREADS>
__global__ void __launch_bounds__(THREADS, THREADS > 320 ? 1 : 2)
box_sweep(const Sample* __restrict__ in, Sample* __restrict__ out, const unsigned* __restrict__ starts, Sweep sweep) {
    constexpr int BYTES = sizeof(Sample), EACH = SWEEP_EACH, SPAN = EACH * THREADS, WORDS = EACH * BYTES / 4;
    constexpr int PITCH = SPAN * BYTES + 32;
    static_assert(EACH % CHANNELS == 0 && THREADS % 32 == 0, "a thread has whole pixels");
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ unsigned totals[CHANNELS][32];
    __shared__ Staged staged;
    __shared__ __align__(8) unsigned long long arrivals[2];  // of the stages' rows
    unsigned* before = reinterpret_cast<unsigned*>(shared);  // [SPAN]: sum of the channel's samples before
    unsigned char* stages = shared + 4 * SPAN;               // [stage][entering, leaving][PITCH]
    unsigned short* source = reinterpret_cast<unsigned short*>(stages + 4 * PITCH);  // [SPAN], of samples beyond the ends

    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int tile = blockIdx.x % sweep.tiles, band = blockIdx.x / sweep.tiles % sweep.bands;
    const long long plane = blockIdx.x / sweep.tiles / sweep.bands;
    const int row_samples = sweep.columns * CHANNELS, out_samples = sweep.out_columns * CHANNELS;
    const int x = tile * sweep.outputs, wanted = min(sweep.outputs, out_samples - x);
    const int height = min(sweep.band_rows, sweep.out_rows - band * sweep.band_rows);
    const int left = x - (sweep.mode_x == VALID ? 0 : sweep.before_x * CHANNELS), span = wanted + sweep.taps_x * CHANNELS;
    const int low = max(-left, 0), high = min(row_samples - left, span);  // samples of the strip inside the row
    const int first = band * sweep.band_rows - (sweep.mode_y == VALID ? 0 : sweep.before_y);
    const Sample* image = in + plane * sweep.rows * row_samples;
    const auto line_of = [&](int row) { return image + static_cast<long long>(row) * row_samples; };
    // The sample of the row from which sample i of the strip comes; -1: the constant.
    const auto place_of = [&](int i) {
        const long long at = static_cast<long long>(left) + i + (1LL << 24) * CHANNELS;  // never negative
        const int pixel = border_index(static_cast<int>(at / CHANNELS - (1 << 24)), sweep.columns, sweep.mode_x);
        return pixel < 0 ? -1 : static_cast<int>(pixel * CHANNELS + at % CHANNELS);
    };

    // Starts copying the rows of a step: half of the first warp takes each.
    const auto ask = [&](int step) {
        if (warp != 0) return;
        const int k = lane / 16, part = lane % 16;
        const int row = border_index(first + step - 1 + (k == 0 ? sweep.taps_y : 0), sweep.rows, sweep.mode_y);
        unsigned char* slot = stages + (step % 2 * 2 + k) * PITCH;
        const Sample* line = line_of(max(row, 0));
        const long long begin = reinterpret_cast<long long>(line) + static_cast<long long>(left) * BYTES;
        const int skew = row < 0 ? 0 : static_cast<int>(begin & 15);
        // Whole vectors of the row, and its first and last samples one by one.
        const int row_begin = skew - left * BYTES, row_end = skew + (row_samples - left) * BYTES, offset = skew / BYTES;
        const int from = max((row_begin + 15) >> 4, 0), to = max(min((skew + high * BYTES + 15) >> 4, row_end >> 4), from);
        const unsigned char* base = reinterpret_cast<const unsigned char*>(begin - skew) + 16 * from;
        const int count = row < 0 ? 0 : to - from;
        if (part == 0) staged.row[step % 2][k] = row, staged.skew[step % 2][k] = skew;
#if __CUDA_ARCH__ >= 900
        if (part == 0)
            bulk_load(shared_address(slot + 16 * from), base, 16 * count, shared_address(&arrivals[step % 2]), bulk_policy(k == 0));
#else
        for (int v = part; v < count; v += 16) copy_16_bytes(slot + 16 * (from + v), base + 16 * v);
#endif
        if (row < 0) {
            const unsigned fill = (sweep.fill & (BYTES == 1 ? 0xFF : 0xFFFF)) * (BYTES == 1 ? 0x01010101u : 0x00010001u);
            for (int at = 16 * part; at < PITCH; at += 16 * 16)
                *reinterpret_cast<uint4*>(slot + at) = make_uint4(fill, fill, fill, fill);
            fence_bulk_copies();
            return;
        }
        const int head = min(max(16 * from / BYTES - offset - low, 0), high - low);
        const int tail = min(max(high + offset - 16 * to / BYTES, 0), high - low - head);
        for (int j = part; j < head + tail; j += 16) {
            const int i = j < head ? low + j : high - tail + j - head;
            reinterpret_cast<Sample*>(slot)[offset + i] = __ldg(line + left + i);
        }
        if (head + tail > 0) fence_bulk_copies();
    };
    // Completes the rows of a stage beyond their ends.
    const auto patch = [&](int stage) {
        for (int j = thread; j < low + span - high; j += THREADS) {
            const int i = j < low ? j : high + j - low, from = source[i];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int row = staged.row[stage][k];
                Sample* samples = reinterpret_cast<Sample*>(stages + (stage * 2 + k) * PITCH + staged.skew[stage][k]);
                samples[i] = from == CONSTANT_SOURCE || row < 0 ? static_cast<Sample>(sweep.fill)
                             : from == FAR_SOURCE              ? __ldg(line_of(row) + place_of(i))
                                                               : samples[from];
            }
        }
        fence_bulk_copies();
    };
    const auto read = [&](unsigned(&word)[WORDS], int stage, int k) {
        const int skew = staged.skew[stage][k];
        const unsigned char* from = stages + (stage * 2 + k) * PITCH + skew + thread * EACH * BYTES;
        if (skew % (8 * BYTES) == 0) {
#pragma unroll
            for (int i = 0; i < 3; ++i) {
                if constexpr (BYTES == 2) {
                    const uint4 found = reinterpret_cast<const uint4*>(from)[i];
                    word[4 * i] = found.x, word[4 * i + 1] = found.y, word[4 * i + 2] = found.z, word[4 * i + 3] = found.w;
                } else {
                    const uint2 found = reinterpret_cast<const uint2*>(from)[i];
                    word[2 * i] = found.x, word[2 * i + 1] = found.y;
                }
            }
        } else {
            const unsigned byte = skew % 4;
            const unsigned* words = reinterpret_cast<const unsigned*>(from - byte);
#pragma unroll
            for (int i = 0; i < WORDS; ++i) word[i] = __funnelshift_r(words[i], words[i + 1], 8 * byte);
        }
    };
    // own: the sums of the thread's samples before each; run: of all. Afterwards `before` is complete.
    const auto spread = [&](unsigned(&own)[EACH], const unsigned(&run)[CHANNELS]) {
        unsigned offset[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
            offset[c] = inclusive_warp_sum(run[c]);
            if (lane == 31) totals[c][warp] = offset[c];
        }
        __syncthreads();
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
            offset[c] += warp_sum(lane < warp ? static_cast<int>(totals[c][lane]) : 0) - run[c];
#pragma unroll
        for (int j = 0; j < EACH; ++j) own[j] += offset[j % CHANNELS];
#pragma unroll
        for (int j = 0; j < EACH; j += 4)
            *reinterpret_cast<uint4*>(before + thread * EACH + j) = make_uint4(own[j], own[j + 1], own[j + 2], own[j + 3]);
        wait_for_copies();
        __syncthreads();
    };
    // Samples past the strip's end give windows that are not used.
    const unsigned* windows = before + thread;
    const int reach = sweep.taps_x * CHANNELS;
    const auto window = [&](int i) { return windows[i * THREADS + reach] - windows[i * THREADS]; };

    // The sums of the first window.
    if (thread < 2) init_arrival(&arrivals[thread], 2);
    fence_bulk_copies();
    __syncthreads();
    if (height > 1) ask(1);
    for (int i = thread; i < SPAN; i += THREADS) {
        unsigned sum = 0;
        if (i < span) {
            const int from = place_of(i), inside = from - left;
            const unsigned fill = to_sum<unsigned>(static_cast<Sample>(sweep.fill));
            source[i] = from < 0 ? CONSTANT_SOURCE : inside >= low && inside < high ? inside : FAR_SOURCE;
            if (from < 0) {
                sum = fill * sweep.taps_y;
            } else {
                const unsigned* held =
                    starts + (plane * (sweep.bands + sweep.starts - 1) + band) * static_cast<long long>(row_samples) + from;
                for (int k = 0; k < sweep.starts; ++k) sum += __ldg(held + static_cast<long long>(k) * row_samples);
                for (int k = sweep.starts * sweep.start_rows; k < sweep.taps_y; ++k) {
                    const int row = border_index(first + k, sweep.rows, sweep.mode_y);
                    sum += row < 0 ? fill : to_sum<unsigned>(__ldg(line_of(row) + from));
                }
            }
        }
        before[i] = sum;
    }
    __syncthreads();
    unsigned mean[EACH / 2];  // pairs of them, of signed samples plus 32768
    unsigned rest[EACH];      // and extra * samples
    {
        unsigned column[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) column[j] = before[thread * EACH + j];
#pragma unroll
        for (int limb = 0; limb < 2; ++limb) {
            unsigned own[EACH], run[CHANNELS] = {};
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                own[j] = run[j % CHANNELS];
                run[j % CHANNELS] += limb == 0 ? column[j] & 0xFFFF : column[j] >> 16;
            }
            spread(own, run);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (i * THREADS >= wanted) break;
                if (limb == 0) {
                    rest[i] = window(i);
                } else {
                    const unsigned long long sum =
                        (static_cast<unsigned long long>(window(i)) << 16) + rest[i] + sweep.samples / 2;
                    const unsigned whole = static_cast<unsigned>(sum / sweep.samples);
                    rest[i] = static_cast<unsigned>(sum - static_cast<unsigned long long>(whole) * sweep.samples) +
                              sweep.extra * sweep.samples;
                    mean[i / 2] = i % 2 == 0 ? whole : mean[i / 2] + (whole << 16);
                }
            }
        }
    }
    Sample* target = out + (plane * sweep.out_rows + static_cast<long long>(band) * sweep.band_rows) * out_samples + x + thread;
    const int outputs = wanted - thread;  // of the thread: those at multiples of THREADS below this
    const auto store = [&](int i) {
        const unsigned pair = same<Sample, short> ? mean[i / 2] ^ 0x80008000u : mean[i / 2];
        if (i * THREADS < outputs) target[i * THREADS] = static_cast<Sample>(pair);
        if ((i + 1) * THREADS < outputs) target[(i + 1) * THREADS] = static_cast<Sample>(pair >> 16);
    };
#pragma unroll
    for (int i = 0; i < EACH; i += 2) store(i);

    const bool at_edge = low > 0 || high < span;
    const unsigned back = sweep.extra * sweep.samples, both = sweep.extra * 0x10001u;
#pragma unroll 1
    for (int step = 1; step < height; ++step) {
        const int stage = step % 2;
        wait_for_arrival(shared_address(&arrivals[stage]), (step - 1) / 2);
        if (step + 1 < height) ask(step + 1);
        if (at_edge) {
            patch(stage);
            __syncthreads();
        }
        unsigned own[EACH], run[CHANNELS] = {};
        {
            unsigned entering[WORDS], leaving[WORDS];
            read(entering, stage, 0);
            read(leaving, stage, 1);
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const int word = j * BYTES / 4;
                const bool upper = j * BYTES % 4 >= 2;
                const unsigned pair = __byte_perm(entering[word], leaving[word],
                                                  BYTES == 1 ? (upper ? 0x7362 : 0x5140) : (upper ? 0x7632 : 0x5410));
                own[j] = run[j % CHANNELS];
                run[j % CHANNELS] = dot<Sample>(pair, BYTES == 1 && j % 2 ? 0xFF010000u : 0xFF01u, run[j % CHANNELS]);
            }
        }
        spread(own, run);
        target += out_samples;
#pragma unroll
        for (int i = 0; i < EACH; i += 2) {
            if (i * THREADS >= wanted) break;
            unsigned quotient[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const unsigned u = rest[i + k] + window(i + k);
                quotient[k] = __umulhi(u, sweep.multiplier) >> sweep.shift;
                rest[i + k] = u - quotient[k] * sweep.samples + back;
            }
            mean[i / 2] += quotient[0] + (quotient[1] << 16) - both;
            store(i);
        }
    }
}
