// Boxes of integers of any size along both axes at once, at a cost that does not grow with the window. Part of smoothing.cu.
#pragma once

#include "async_copy.cuh"
#include "block_scan.cuh"
#include "borders.cuh"
#include "bulk_copy.cuh"
#include "mbarrier.cuh"
#include "samples.cuh"
#include "shifted.cuh"
#include "cuda/boxes/running.cuh"

//   box_starts   column sums of the rows that the first window of a band has and that of the next band has not
//   box_sweep    a block goes down a band of a strip, ROWS rows in a step; the window of row y is that of row y - 1 plus the sum
//                across of D[x] = entering row - leaving row. A thread has neighbouring windows, whose sums differ by D at
//                their two edges:
//
//   last warp      asks for the rows of step + 1, and finds which come after them
//     |              an mbarrier on which the bytes arrive
//   other warps    sums of these differences in the thread and the warp, and a share of the strip's first window
//     |              the block's barrier: the rows of the step have been used, and each warp's sums are known
//   other warps    the next step's rows beyond the edges, once they have arrived; sums of the threads before -> results
//     |              an mbarrier on which these warps arrive before the results, so that none waits for another
//   other warps    the copy engine stores the results; the next step
//
// The sums of windows of bytes fit 32 bits, mostly up to 4096 x 4096 samples. Otherwise a result is kept as its mean m and the
// rest r of the division: m n + r = sum + n / 2.
// `parts` bands are exactly as high as the window, so that one block's leaving row is another's entering one in the same step,
// and comes from L2.
//
// Floors for N samples of b bytes (8192 x 8192 RGB, 1023 x 1023; b = 2, 1) on an H200 (4.2 TB/s, 132 multiprocessors at
// 1.98 GHz):
//   bytes         3 N b: read by both kernels, written once       288 us, 144 us
//   instructions  about 15 a result of bytes, by the assembly          –, 90 us
//   shared        2 b for each sample read and 9 b a result       140 us, 70 us
// Measured: box_starts 108 us and 65 us, box_sweep 342 us and 214 us.

constexpr int START_THREADS = 64, START_BLOCKS = 14, START_ROWS = 8;  // of box_starts; rows that a thread loads at once
constexpr unsigned short CONSTANT_SOURCE = 0xFFFF, FAR_SOURCE = 0xFFFE;

struct Sweep {
    int rows, out_rows, columns, out_columns;  // of a plane; columns of pixels
    int before_y, taps_y, mode_y, before_x, taps_x, mode_x;
    int tiles, outputs;         // blocks across a row, and samples that each writes
    int pitch;                  // bytes of a row in shared memory, a multiple of 32
    int bands, parts, span;     // blocks down the rows, of which `parts` write `span` rows: a window's, or one band's if higher
    int channels, aligned;      // aligned: whether all rows begin at multiples of 16 bytes
    int aligned_out;            // whether every warp's results begin and end at a multiple of 16 bytes
    unsigned fill;              // the sample beyond the edge
    unsigned samples;           // of a window
    unsigned multiplier, shift; // u * multiplier >> 32 + shift is u / samples for every u that occurs (sweep.py)
    int extra;                  // quotients added to keep u above 0

    // The first row that a band writes. Its first window is that of the next `parts` sums of box_starts.
    __device__ int begin(int band) const { return static_cast<int>(static_cast<long long>(band) * span / parts); }
    // The first row of that window; it may lie beyond the edge.
    __device__ int first(int band) const { return begin(band) - (mode_y == VALID ? 0 : before_y); }
};

// Sample k of the words of a row.
template <typename Sample>
__device__ inline unsigned sample_of(const unsigned* word, int k) {
    if constexpr (sizeof(Sample) == 1) return __byte_perm(word[k / 4], 0, 0x4440 + k % 4);
    else if constexpr (same<Sample, short>) return static_cast<short>(word[k / 2] >> k % 2 * 16);
    else return __byte_perm(word[k / 2], 0, k % 2 ? 0x4432 : 0x4410);
}

template <typename Sample>
__global__ void __launch_bounds__(START_THREADS, START_BLOCKS)
box_starts(const Sample* __restrict__ in, unsigned* __restrict__ sums, Sweep sweep) {
    constexpr int EACH = 16 / sizeof(Sample);
    const int row_samples = sweep.columns * sweep.channels, thread = threadIdx.x, lane = thread % 32;
    // A thread sums a vector of neighbours. If rows are not aligned, it gets the second part of it from the next lane.
    const int lanes = sweep.aligned ? 32 : 31, vector = thread / 32 * lanes + lane, size = START_THREADS / 32 * lanes * EACH;
    const int tiles = (row_samples + size - 1) / size, count = sweep.bands + sweep.parts - 1;
    const int tile = max(min(static_cast<int>(blockIdx.x % tiles) * size, row_samples - size), 0);  // the last one ends with the row
    const int band = blockIdx.x / tiles % count;
    const long long plane = blockIdx.x / tiles / count;
    const int first_sum = sweep.first(band), summed = min(sweep.first(band + 1) - first_sum, sweep.taps_y);
    // The rows that are read: in mode CONSTANT those inside.
    const bool constant = sweep.mode_y == CONSTANT;
    const int first = constant ? max(first_sum, 0) : first_sum;
    const int rows = (constant ? min(first_sum + summed, sweep.rows) : first_sum + summed) - first;
    const Sample* source = in + plane * sweep.rows * row_samples + tile;
    unsigned sum[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) sum[k] = (summed - max(rows, 0)) * static_cast<Sample>(sweep.fill);
    const bool inside = first >= 0 && first + rows <= sweep.rows;
    const bool vectors = row_samples >= size && (sweep.aligned || sweep.rows > 1);
    const auto row_of = [&](int row) { return inside ? row : border_index(row, sweep.rows, sweep.mode_y); };
    const auto line_of = [&](int row) { return source + static_cast<long long>(row) * row_samples; };
    // The lanes find 32 rows, and a thread begins START_ROWS loads before it adds.
    const auto add_vectors = [&](auto aligned, int replaced) {
        const int last = first + rows - 1;
        int found_rows = 0, found_skews = 0;
#pragma unroll 1
        for (int begin = first; begin <= last; begin += START_ROWS) {
            if ((begin - first) % 32 == 0) {
                found_rows = row_of(min(begin + lane, last));
                found_rows -= found_rows == replaced;
                found_skews = reinterpret_cast<long long>(line_of(found_rows)) % 16;
            }
            uint4 found[START_ROWS] = {};
#pragma unroll
            for (int k = 0; k < START_ROWS; ++k) {
                const int row = __shfl_sync(WHOLE_WARP, found_rows, (begin - first + k) % 32);
                long long at = reinterpret_cast<long long>(line_of(row) + vector * EACH);
                if (!aligned.value) at = (at - (lane == lanes)) & ~15LL;
                if (begin + k <= last) found[k] = __ldg(reinterpret_cast<const uint4*>(at));
            }
#pragma unroll
            for (int k = 0; k < START_ROWS; ++k) {
                uint4 own = found[k];
                const unsigned skew = aligned.value ? 0 : __shfl_sync(WHOLE_WARP, found_skews, (begin - first + k) % 32);
                if (skew != 0) {
                    const auto next = [](unsigned word) { return __shfl_down_sync(WHOLE_WARP, word, 1); };
                    own = shifted<sizeof(Sample)>(own, make_uint4(next(own.x), next(own.y), next(own.z), next(own.w)), skew);
                }
                const unsigned word[] = {own.x, own.y, own.z, own.w};
#pragma unroll
                for (int i = 0; i < EACH; ++i) sum[i] += sample_of<Sample>(word, i);
            }
        }
    };
    if (vectors && sweep.aligned) {
        add_vectors(Known<true>(), -1);
    } else if (vectors) {
        // Vectors of the image's last row may reach beyond its end: first, the row before takes its place.
        const int end = tile + size + EACH > row_samples ? sweep.rows - 1 : -1;
        add_vectors(Known<false>(), end);
        int times = 0;
        for (int i = lane; end > 0 && i < rows; i += 32) times += row_of(first + i) == end;
        times = warp_sum(times);
        if (times > 0 && lane < lanes) {
            const Sample *last = line_of(end) + vector * EACH, *taken = line_of(end - 1) + vector * EACH;
#pragma unroll
            for (int k = 0; k < EACH; ++k) sum[k] += times * (__ldg(last + k) - __ldg(taken + k));
        }
    } else {
        int place[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) place[k] = min(k * START_THREADS + thread, row_samples - 1);
#pragma unroll (32 / EACH)
        for (int row = first; row < first + rows; ++row) {
            const Sample* line = line_of(row_of(row));
            Sample found[EACH];
#pragma unroll
            for (int k = 0; k < EACH; ++k) found[k] = __ldg(line + place[k]);
#pragma unroll
            for (int k = 0; k < EACH; ++k) sum[k] += found[k];
        }
    }
    // Sums of signed samples are made those of samples plus 32768.
    const unsigned bias = same<Sample, short> ? 32768u * summed : 0;
    unsigned* target = sums + (plane * count + band) * row_samples + tile;
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const int at = vectors ? vector * EACH + k : k * START_THREADS + thread;
        if (vectors ? lane < lanes : at < row_samples) target[at] = sum[k] + bias;
    }
}

// Two stages of the rows of a step in shared memory, each as it lies in memory: entering, leaving, entering, leaving …
template <int ROWS>
struct Staged {
    int row[2][2 * ROWS], begin[2][2 * ROWS];  // -1: a row of the constant; where the strip begins in shared memory
};

template <typename T>
__device__ inline T whole_warp_sum(T value) {
    if constexpr (sizeof(T) == 4) return warp_sum(value);
    else return __shfl_sync(WHOLE_WARP, inclusive_warp_sum(value), 31);
}

// Sums over the threads of a block's first warps, COUNT of them: all threads' `first`, and `total` of those before this one.
template <typename T, int COUNT>
struct BlockSums {
    T totals[COUNT][32], firsts[COUNT][32];

    // Has a barrier; `before` receives the sums. Free again after the block's next barrier.
    __device__ void add(T (&before)[COUNT], const T (&total)[COUNT], const T (&first)[COUNT], int warps) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if constexpr (sizeof(T) == 4) scan(before, total);
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
            if constexpr (sizeof(T) != 4) before[c] = inclusive_warp_sum(total[c]) - total[c];
            const T share = whole_warp_sum(first[c]);
            if (lane == 31) totals[c][warp] = before[c] + total[c], firsts[c][warp] = share;
        }
        __syncthreads();
#pragma unroll
        for (int c = 0; c < COUNT; ++c)
            before[c] += whole_warp_sum((lane < warp ? totals[c][lane] : T(0)) + (lane < warps ? firsts[c][lane] : T(0)));
    }
};

// WORDS: of a row that a thread sums, preferably odd, so that lanes read from different banks. ROWS: of a step.
template <typename Sample, int CHANNELS, int WORDS, int THREADS, int ROWS, typename Sum>
__global__ void __launch_bounds__(THREADS, 1)
box_sweep(const Sample* __restrict__ in, Sample* __restrict__ out, const unsigned* __restrict__ starts, Sweep sweep) {
    constexpr int BYTES = sizeof(Sample), A_WORD = 4 / BYTES, SAMPLES = WORDS * A_WORD, SLOTS = 2 * ROWS;
    constexpr bool WHOLE = sizeof(Sum) == 4;  // whether the sum of a window, and half of its samples, fits 32 bits
    static_assert(SAMPLES % CHANNELS == 0, "a thread has whole pixels");
    extern __shared__ __align__(32) unsigned char shared[];
    __shared__ BlockSums<unsigned, CHANNELS * ROWS> sums[2];  // of odd and even steps
    __shared__ BlockSums<Sum, CHANNELS> first_sums;
    __shared__ Staged<ROWS> staged;
    __shared__ __align__(8) unsigned long long arrivals[2], completed[2];  // of the stages' rows
    const int pitch = sweep.pitch, warps = blockDim.x / 32 - 1, threads = 32 * warps;  // but for the last, which brings rows
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    unsigned* results = reinterpret_cast<unsigned*>(shared + 2 * SLOTS * pitch) + warp * ROWS * 32 * WORDS;
    // Of pixels beyond the ends: the pixel of the strip from which they come.
    unsigned short* source = reinterpret_cast<unsigned short*>(shared + 2 * SLOTS * pitch + 4 * ROWS * threads * WORDS);

    const int tile = blockIdx.x % sweep.tiles, band = blockIdx.x / sweep.tiles % sweep.bands;
    const long long plane = blockIdx.x / sweep.tiles / sweep.bands;
    const int row_samples = sweep.columns * CHANNELS, out_samples = sweep.out_columns * CHANNELS;
    const int x = tile * sweep.outputs, wanted = min(sweep.outputs, out_samples - x), reach = sweep.taps_x * CHANNELS;
    const int height = min(sweep.begin(band + 1), sweep.out_rows) - sweep.begin(band);
    const int steps = (height + ROWS - 2) / ROWS;  // after the first row
    // The strip begins a pixel before its first window.
    const int left = x - (sweep.mode_x == VALID ? 0 : sweep.before_x * CHANNELS) - CHANNELS, span = wanted + reach;
    const int low = max(-left, 0), high = min(row_samples - left, span);  // samples of the strip inside the row
    const int before = low / CHANNELS, after = high / CHANNELS, beyond = before + span / CHANNELS - after;  // pixels
    const int first = sweep.first(band);
    const Sample* image = in + plane * sweep.rows * row_samples;
    const auto line_of = [&](int row) { return image + static_cast<long long>(row) * row_samples; };
    // The sample of the row from which sample i of the strip comes; -1: the constant.
    const auto place_of = [&](int i) {
        const long long at = static_cast<long long>(left) + i + (1LL << 24) * CHANNELS;  // never negative
        const int pixel = border_index(static_cast<int>(at / CHANNELS - (1 << 24)), sweep.columns, sweep.mode_x);
        return pixel < 0 ? -1 : static_cast<int>(pixel * CHANNELS + at % CHANNELS);
    };

    // The last warp asks for the rows of a step, each by a part of its lanes. These find the row,
    constexpr int LANES = 32 / SLOTS;
    const auto row_of = [&](int step) {
        const int k = lane / LANES, after_first = min(step * ROWS + k / 2, height - 2);
        return border_index(first + after_first + (k % 2 == 0 ? sweep.taps_y : 0), sweep.rows, sweep.mode_y);
    };
    // and start its copy.
    const auto ask = [&](int step, int row) {
        if (step >= steps) return;
        const int k = lane / LANES, part = lane % LANES, stage = step % 2;
        unsigned char* slot = shared + (stage * SLOTS + k) * pitch;
        const Sample* line = line_of(max(row, 0));
        const long long begin = reinterpret_cast<long long>(line) + static_cast<long long>(left) * BYTES;
        const int skew = static_cast<int>(begin & 31);
        // Whole vectors of the row, and its first and last samples one by one.
        const int row_begin = skew - left * BYTES, row_end = skew + (row_samples - left) * BYTES, offset = skew / BYTES;
        const int from = max((row_begin + 15) >> 4, skew >> 4);
        const int to = max(min((skew + high * BYTES + 15) >> 4, row_end >> 4), from);
        const unsigned char* base = reinterpret_cast<const unsigned char*>(begin - skew) + 16 * from;
        const int count = row < 0 ? 0 : to - from;
        if (part == 0) staged.row[stage][k] = row, staged.begin[stage][k] = (stage * SLOTS + k) * pitch + skew;
#if __CUDA_ARCH__ >= 900
        if (part == 0)
            bulk_load(shared_address(slot + 16 * from), base, 16 * count, shared_address(&arrivals[stage]), bulk_policy(k % 2 == 0));
#else
        for (int v = part; v < count; v += LANES) copy_16_bytes(slot + 16 * (from + v), base + 16 * v);
#endif
        if (row < 0) {
            const unsigned fill = (sweep.fill & (BYTES == 1 ? 0xFF : 0xFFFF)) * (BYTES == 1 ? 0x01010101u : 0x00010001u);
            for (int at = 16 * part; at < pitch; at += 16 * LANES)
                *reinterpret_cast<uint4*>(slot + at) = make_uint4(fill, fill, fill, fill);
            fence_bulk_copies();
            return;
        }
        const int head = min(max(16 * from / BYTES - offset - low, 0), high - low);
        const int tail = min(max(high + offset - 16 * to / BYTES, 0), high - low - head);
        for (int j = part; j < head + tail; j += LANES) {
            const int i = j < head ? low + j : high - tail + j - head;
            reinterpret_cast<Sample*>(slot)[offset + i] = __ldg(line + left + i);
        }
        if (head + tail > 0) fence_bulk_copies();
    };
    // The other warps complete them beyond their ends.
    const auto complete = [&](int step) {
        const int stage = step % 2;
        wait_for_arrival(shared_address(&arrivals[stage]), step / 2);
        const auto sample = [&](int k, int i) -> Sample& { return reinterpret_cast<Sample*>(shared + staged.begin[stage][k])[i]; };
#pragma unroll 1
        for (int j = thread; j < beyond; j += threads) {
            const int to = (j < before ? j : j - before + after) * CHANNELS, from = source[j];
            Sample found[SLOTS][CHANNELS];
            if (from < FAR_SOURCE) {
#pragma unroll
                for (int i = 0; i < SLOTS * CHANNELS; ++i)
                    found[i / CHANNELS][i % CHANNELS] = sample(i / CHANNELS, from * CHANNELS + i % CHANNELS);
            } else {
                const int place = from == FAR_SOURCE ? place_of(to) : -1;
#pragma unroll
                for (int i = 0; i < SLOTS * CHANNELS; ++i) {
                    const int k = i / CHANNELS, c = i % CHANNELS, row = staged.row[stage][k];
                    found[k][c] = place < 0 || row < 0 ? static_cast<Sample>(sweep.fill) : __ldg(line_of(row) + place + c);
                }
            }
#pragma unroll
            for (int i = 0; i < SLOTS * CHANNELS; ++i) sample(i / CHANNELS, to + i % CHANNELS) = found[i / CHANNELS][i % CHANNELS];
        }
#if __CUDA_ARCH__ >= 900
        fence_bulk_copies();
        arrive(&completed[stage]);
#endif
    };

    if (thread < 2) {
        init_arrival(&arrivals[thread], SLOTS);
        init_arrival(&completed[thread], threads);
    }
    fence_bulk_copies();
    if (warp == warps) {
        __syncthreads();  // the others have the column sums,
        __syncthreads();  // add up the first windows,
        __syncthreads();  // and no longer need the column sums, whose place the rows take
        // These it finds ahead, so that the copies start right after the barrier.
        int row = row_of(0);
#pragma unroll 1
        for (int step = 0; step <= steps; ++step) {
            ask(step, row);
            row = row_of(step + 1);
#if __CUDA_ARCH__ < 900
            wait_for_copies();
            if (beyond > 0 && step > 0) __syncthreads();
#endif
            __syncthreads();
        }
        return;
    }
    // The column sums of the first window, in the place of the rows; several at once, since each waits for L2.
    unsigned* column = reinterpret_cast<unsigned*>(shared);
    const unsigned* band_starts = starts + (plane * (sweep.bands + sweep.parts - 1) + band) * static_cast<long long>(row_samples);
    const unsigned fill = to_sum<unsigned>(static_cast<Sample>(sweep.fill));
    constexpr int AT_ONCE = 4;
#pragma unroll 1
    for (int begin = thread; begin < span; begin += AT_ONCE * threads) {
        int from[AT_ONCE];
        unsigned sum[AT_ONCE] = {};
#pragma unroll
        for (int q = 0; q < AT_ONCE; ++q) from[q] = place_of(min(begin + q * threads, span - 1));
#pragma unroll 8
        for (int k = 0; k < sweep.parts; ++k)
#pragma unroll
            for (int q = 0; q < AT_ONCE; ++q)
                sum[q] += __ldg(band_starts + static_cast<long long>(k) * row_samples + max(from[q], 0));
#pragma unroll
        for (int q = 0; q < AT_ONCE; ++q) {
            const int i = begin + q * threads, inside = from[q] - left;
            if (i >= span) break;
            if ((i < low || i >= high) && i % CHANNELS == 0)
                source[i < low ? i / CHANNELS : i / CHANNELS - after + before] =
                    from[q] < 0 ? CONSTANT_SOURCE : inside >= low && inside < high ? inside / CHANNELS : FAR_SOURCE;
            column[i] = from[q] < 0 ? fill * sweep.taps_y : sum[q];
        }
    }
    __syncthreads();
    unsigned mean[WORDS] = {};  // as samples, of signed ones plus 32768
    unsigned state[SAMPLES];  // WHOLE: the sum of the window and half of its samples; otherwise the rest of the division
    {
        // The sum of a window, from the sum of that of the pixel before.
        Sum sum[CHANNELS] = {}, share[CHANNELS] = {}, earlier[CHANNELS];
#pragma unroll 1
        for (int j = 0; j < SAMPLES && thread * SAMPLES + j < wanted; j += CHANNELS)
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c)
                sum[c] += static_cast<Sum>(column[thread * SAMPLES + j + c + reach]) - column[thread * SAMPLES + j + c];
#pragma unroll 1
        for (int i = thread * CHANNELS; i < reach; i += threads * CHANNELS)
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) share[c] += column[i + c];
        first_sums.add(earlier, sum, share, warps);
        const double inverse = 1.0 / sweep.samples;
#pragma unroll
        for (int j = 0; j < SAMPLES; ++j) {
            state[j] = 0;
            if (thread * SAMPLES + j >= wanted) continue;
            Sum& total = earlier[j % CHANNELS];
            total += static_cast<Sum>(column[thread * SAMPLES + j + reach]) - column[thread * SAMPLES + j];
            const Sum rounded = total + sweep.samples / 2;
            if constexpr (WHOLE) {
                state[j] = rounded;
            } else {
                unsigned whole = static_cast<unsigned>(static_cast<double>(rounded) * inverse);  // or one off
                state[j] = static_cast<unsigned>(rounded) - whole * sweep.samples;
                if (static_cast<int>(state[j]) < 0) --whole, state[j] += sweep.samples;
                else if (state[j] >= sweep.samples) ++whole, state[j] -= sweep.samples;
                mean[j / A_WORD] += whole << 8 * BYTES * (j % A_WORD);
            }
        }
    }
    __syncthreads();
    Sample* target = out + (plane * sweep.out_rows + static_cast<long long>(sweep.begin(band))) * out_samples + x + warp * 32 * SAMPLES;
    const int stored = min(wanted - warp * 32 * SAMPLES, 32 * SAMPLES);
    const unsigned back = sweep.extra * sweep.samples, all = sweep.extra * (BYTES == 1 ? 0x01010101u : 0x00010001u);
    // The results of the windows, in row k of `results`.
    const auto give = [&](int k) {
        unsigned* to = results + (32 * k + lane) * WORDS;
        if constexpr (WHOLE) {
            unsigned high[SAMPLES];
#pragma unroll
            for (int j = 0; j < SAMPLES; ++j) high[j] = __umulhi(state[j], sweep.multiplier);
            pack_row<Sample, WORDS>(to, high, sweep.shift);
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) to[i] = same<Sample, short> ? mean[i] ^ 0x80008000u : mean[i];
        }
    };
    const auto store = [&](int rows) {
        fence_bulk_copies();
        __syncwarp();
#pragma unroll 1
        for (int k = 0; k < rows; ++k, target += out_samples)
            if (stored > 0) store_row(target, results + 32 * k * WORDS, stored, sweep.aligned_out, lane);
    };
    give(0);
    store(1);
    __syncthreads();

    const bool alike = row_samples * BYTES % 4 == 0;  // whether all rows start at the same byte of a word
#pragma unroll 1
    for (int step = -1; step < steps; ++step) {
        unsigned change[ROWS][SAMPLES], total[ROWS * CHANNELS], share[ROWS * CHANNELS] = {}, earlier[ROWS * CHANNELS];
        if (step >= 0) {
#if __CUDA_ARCH__ >= 900
            wait_for_arrival(shared_address(beyond > 0 ? &completed[step % 2] : &arrivals[step % 2]), step / 2);
#else
            if (beyond > 0) __syncthreads();
#endif
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                const int begin = staged.begin[step % 2][2 * k];
                const unsigned char *entering = shared + begin, *leaving = shared + staged.begin[step % 2][2 * k + 1];
                window_changes<Sample, CHANNELS>(change[k], reinterpret_cast<unsigned(&)[CHANNELS]>(total[k * CHANNELS]),
                                                 entering + thread * 4 * WORDS, leaving + thread * 4 * WORDS, reach * BYTES, 0xFF01u,
                                                 0x01FFu, alike, begin % 4);
#pragma unroll 1
                for (int i = thread * CHANNELS; i < reach; i += threads * CHANNELS)
#pragma unroll
                    for (int c = 0; c < CHANNELS; ++c)
                        share[k * CHANNELS + c] +=
                            reinterpret_cast<const Sample*>(entering)[i + c] - reinterpret_cast<const Sample*>(leaving)[i + c];
            }
            sums[step % 2].add(earlier, total, share, warps);
        }
        if (beyond > 0 && step + 1 < steps) complete(step + 1);
        if (step < 0) continue;
        wait_for_bulk_stores();
        __syncwarp();  // the last step's results have been read
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
#pragma unroll
            for (int j = 0; j < SAMPLES; ++j) {
                const unsigned u = state[j] + change[k][j] + (earlier[k * CHANNELS + j % CHANNELS] + (WHOLE ? 0 : back));
                if constexpr (WHOLE) {
                    state[j] = u;
                } else {
                    const unsigned quotient = __umulhi(u, sweep.multiplier) >> sweep.shift;
                    state[j] = u - quotient * sweep.samples;
                    mean[j / A_WORD] += quotient << 8 * BYTES * (j % A_WORD);
                    if (j % A_WORD == A_WORD - 1) mean[j / A_WORD] -= all;
                }
            }
            give(k);
        }
        store(min(ROWS, height - 1 - step * ROWS));
    }
    wait_for_bulk_stores();  // before the block's shared memory is freed
}
