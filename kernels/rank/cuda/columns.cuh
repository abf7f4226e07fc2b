// Any rank of boxes of medium size, samples of at most 16 bits, at a cost that hardly grows with the window: counts of the
// columns of a tile, after Perreault and Hébert. Part of rank.cu.
//
// A block sorts the samples of a tile with its halo, so that each has a place in one order, and the image may have any values.
// WIDTH places are a bin, 16 bins a group. A thread owns a column, and goes down the rows with it: of the column's samples in
// the window's rows it counts those of each group and each bin, in bytes. Each four neighbours have one more such count, of
// all four. A result adds the counts of the columns of its window, of which most come by four:
//
//      x x x [x x x x] [x x x x] [x x x x]         15 columns: six vectors of 16 counts, of 31 columns ten
//
// of the groups, then of the bins of the group that holds the rank, and last looks at the places of one bin, four at a time:
// which of them lie in the window, and the one of the rank that is left.
//
//   load      samples -> keys, and counts of their lower 13 bits all threads
//     |  barrier
//   sort      by these: scan, scatter, equal ones in any order;  all threads, a barrier after each; by the upper digit each
//             by the upper 3, if a sample has them, in order     warp takes a part, by ballots
//     |  barrier
//   bins      of each sample; position and value by place        all threads
//     |  barrier
//   a row     enters, and another leaves                         one thread a column; atomic where four share counts
//     |  barrier                                                 results read the counts of all columns
//   results   of the row                                         one thread each
//     |  barrier                                                 before the counts change again
//   the next row
//
// Floors of 8192 x 8192 samples of 16 bits (of 8) on an H200, in ms, by what limits each method: 33 T instructions a second,
// 16.5 T of integers, 33 TB of shared memory, 5.5 TB of L2. A copy takes 0.066 (0.035).
//
//                                15 x 15     31 x 31
//   these counts                 1.2 (1.1)   1.8 (1.6)   600 and 870 instructions; 370 and 570 bytes of shared memory: 0.8, 1.2
//   networks (tile.cuh)          1.1 (1.1)   2.7 (2.7)   270 and 650 instructions of integers; of 31 no registers hold the lists
//   moving windows (ordered.cuh) 1.6 (1.4)   2.7 (2.5)   800 and 1,300 instructions, but shared memory holds few windows
//   wavelet matrices             160 (80)    160 (80)    2 look-ups of 32 bytes of L2, for each of 13 bits of x, for each bit
//   histograms of values         none (1.0)  none (1.4)  as these counts without the sort; a column has no room for 2^16 counts
//
// Sources: Perreault and Hébert, "Median filtering in constant time" (2007); Satish, Harris and Garland (2009) for the sort.
#pragma once

#include "ordered.cuh"

constexpr int COLUMN_THREADS = 128, COLUMN_WARPS = COLUMN_THREADS / 32;
constexpr int GROUP_BINS = 16;                                      // and groups
constexpr int COLUMN_BYTES = GROUP_BINS + GROUP_BINS * GROUP_BINS;  // counts of the groups, then of the bins
constexpr int MOST_SIDE = 127;                                      // of a tile with its halo: positions have 7 bits
constexpr int LOW_BITS = 13;                                        // digits of the first pass of the sort
constexpr unsigned NUMBER = (1u << LOW_BITS) - 1;                   // of a sample: y * columns + x
constexpr unsigned ONES = 0x01010101u, TOPS = 0x80808080u;

struct ColumnsTask {
    long long rows, columns, out_rows, out_columns, inner;
    int first_y, first_x, mode_y, mode_x, taps_y, taps_x;
    int tile_y, tile_x, tiles_y, tiles_x;  // results of a tile; a multiple of 32 along x
    int quads;                             // whole ones that every window has
    int rank;
};

// Counters of digits, two in a word, of which a thread scans EACH words: those side by side read different banks.
template <typename Sample>
struct Digits {
    static constexpr int BITS = sizeof(Sample) == 1 ? 8 : LOW_BITS, WORDS = (1 << BITS) / 2;
    static constexpr int EACH = WORDS / COLUMN_THREADS, HELD = WORDS + COLUMN_THREADS;
    static __device__ int word_of(unsigned digit) { return digit / 2 + digit / 2 / EACH; }
    static __device__ unsigned of(unsigned key) { return key & ((1u << BITS) - 1); }
    static __device__ unsigned one(unsigned digit) { return 1u << digit % 2 * 16; }
};

// Counts of all digits become those of the digits before.
template <typename Sample>
__device__ inline void scan_digits(unsigned* counts) {
    constexpr int EACH = Digits<Sample>::EACH;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    __shared__ unsigned totals[COLUMN_WARPS];
    unsigned* mine = counts + thread * (EACH + 1);
    unsigned own = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) own += (mine[i] & 0xFFFFu) + (mine[i] >> 16);
    unsigned before = own;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const unsigned other = __shfl_up_sync(~0u, before, apart);
        if (lane >= apart) before += other;
    }
    if (lane == 31) totals[warp] = before;
    __syncthreads();
    before -= own;
    for (int other = 0; other < warp; ++other) before += totals[other];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const unsigned two = mine[i], between = before + (two & 0xFFFFu);
        mine[i] = before | between << 16;
        before = between + (two >> 16);
    }
}

// Sorts words by their upper 3 bits, which keeps the order of equal ones. `padded` is a multiple of the block's threads.
__device__ inline void sort_by_upper_digit(const unsigned short* words, unsigned short* sorted, int padded) {
    constexpr int DIGIT_BITS = 16 - LOW_BITS, COUNT = 1 << DIGIT_BITS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __shared__ unsigned totals[COLUMN_WARPS][COUNT];
    const int part = padded / COLUMN_WARPS;
    words += warp * part + lane;
    // Each lane counts the digit of its own number.
    unsigned not_mine[DIGIT_BITS], held = 0;
#pragma unroll
    for (int bit = 0; bit < DIGIT_BITS; ++bit) not_mine[bit] = (lane >> bit & 1) - 1;
#pragma unroll 4
    for (int i = 0; i < part; i += 32) {
        const unsigned word = words[i];
        unsigned counted = ~0u;
#pragma unroll
        for (int bit = 0; bit < DIGIT_BITS; ++bit)
            counted &= __ballot_sync(~0u, word >> (LOW_BITS + bit) & 1) ^ not_mine[bit];
        held += __popc(counted);
    }
    if (lane < COUNT) totals[warp][lane] = held;
    __syncthreads();
    unsigned all = 0, next = 0;
#pragma unroll
    for (int other = 0; other < COLUMN_WARPS; ++other) {
        const unsigned count = totals[other][lane % COUNT];
        all += count;
        if (other < warp) next += count;
    }
    unsigned through = all;
#pragma unroll
    for (int apart = 1; apart < COUNT; apart *= 2) {
        const unsigned other = __shfl_up_sync(~0u, through, apart, COUNT);
        if (lane % COUNT >= apart) through += other;
    }
    next += through - all;
#pragma unroll 4
    for (int i = 0; i < part; i += 32) {
        const unsigned word = words[i];
        unsigned counted = ~0u, alike = (1u << lane) - 1;  // before this lane
#pragma unroll
        for (int bit = 0; bit < DIGIT_BITS; ++bit) {
            const unsigned set = __ballot_sync(~0u, word >> (LOW_BITS + bit) & 1);
            counted &= set ^ not_mine[bit];
            alike &= set ^ ((word >> (LOW_BITS + bit) & 1) - 1);
        }
        sorted[__shfl_sync(~0u, next, word >> LOW_BITS) + __popc(alike)] = static_cast<unsigned short>(word);
        next += __popc(counted);
    }
}

// The sums of counts, of 16 bins: bytes, or if they may exceed 255 the even and the odd ones apart.
template <bool SMALL>
struct Sums {
    unsigned word[4] = {}, odd[4] = {};
    __device__ void add(uint4 a) {
        const unsigned counts[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            word[k] += SMALL ? counts[k] : counts[k] & 0x00FF00FFu;
            if constexpr (!SMALL) odd[k] += __byte_perm(counts[k], 0, 0x4341);
        }
    }
    // The bin that holds `rank`, which becomes that among its samples.
    __device__ int find(int& rank) const {
        unsigned through[4], before = 0, chosen = 0, odds = 0;
        int found = 0;
        if constexpr (SMALL) {
            // Byte i of word * ONES is the sum of the bytes up to i.
#pragma unroll
            for (int k = 0; k < 4; ++k) through[k] = word[k] * ONES;
            unsigned sum = 0;
            chosen = through[0];
#pragma unroll
            for (int k = 1; k < 4; ++k) {
                sum += through[k - 1] >> 24;
                if (rank >= static_cast<int>(sum)) chosen = through[k], before = sum, found = 4 * k;
            }
            rank -= before;
            const int first = chosen & 255u, second = chosen >> 8 & 255u, third = chosen >> 16 & 255u;
            const int within = (rank >= first) + (rank >= second) + (rank >= third);
            rank -= chosen << 8 >> 8 * within & 255u;
            return found + within;
        } else {
            unsigned sum = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const unsigned both = word[k] + odd[k];
                through[k] = (both & 0xFFFFu) + (both >> 16);
            }
            chosen = word[0], odds = odd[0];
#pragma unroll
            for (int k = 1; k < 4; ++k) {
                sum += through[k - 1];
                if (rank >= static_cast<int>(sum)) chosen = word[k], odds = odd[k], before = sum, found = 4 * k;
            }
            rank -= before;
            const int first = chosen & 0xFFFFu, second = first + (odds & 0xFFFFu), third = second + (chosen >> 16);
            const int within = (rank >= first) + (rank >= second) + (rank >= third);
            rank -= within == 0 ? 0 : within == 1 ? first : within == 2 ? second : third;
            return found + within;
        }
    }
};

__device__ inline uint4 plus(uint4 a, uint4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// rank_columns: one block a tile. SMALL: windows have less than 256 samples.
template <typename Sample, bool SMALL>
__global__ void __launch_bounds__(COLUMN_THREADS) rank_columns(
    const Sample* __restrict__ in, Sample* __restrict__ out, const __grid_constant__ ColumnsTask task, Sample cval) {
    constexpr int WORDS = SMALL ? 4 : 8, WIDTH = 4 * WORDS;  // a bin's places
    extern __shared__ __align__(16) unsigned char memory[];
    const int thread = threadIdx.x;
    const int columns = task.tile_x + task.taps_x - 1, rows = task.tile_y + task.taps_y - 1, total = rows * columns;
    const int padded = (total + COLUMN_THREADS - 1) / COLUMN_THREADS * COLUMN_THREADS;
    const int bins = (total + WIDTH - 1) / WIDTH, fours = (columns + 3) / 4;
    // Of places: x and y of four each, with the top bits set; values. Bins by position. Behind them the counts.
    uint2* spots = reinterpret_cast<uint2*>(memory);
    Sample* values = reinterpret_cast<Sample*>(spots + bins * WORDS);
    unsigned char* bin_of = reinterpret_cast<unsigned char*>(values + bins * WIDTH);
    unsigned char* counts = bin_of + (total + 15) / 16 * 16;
    // Of the sort, before: numbers in the order of the lower digit; its counters, later numbers in order; keys.
    using Lower = Digits<Sample>;
    unsigned short* by_lower = reinterpret_cast<unsigned short*>(memory);
    unsigned* digits = reinterpret_cast<unsigned*>(counts);
    unsigned short* sorted = reinterpret_cast<unsigned short*>(counts);
    unsigned short* keys = sorted + max(padded, 2 * Lower::HELD);

    long long block = blockIdx.x;
    const long long x0 = block % task.tiles_x * task.tile_x;
    block /= task.tiles_x;
    const long long y0 = block % task.tiles_y * task.tile_y;
    block /= task.tiles_y;
    in += block / task.inner * task.rows * task.columns * task.inner + block % task.inner;
    out += block / task.inner * task.out_rows * task.out_columns * task.inner + block % task.inner;

    __shared__ int from_y[COLUMN_THREADS];
    __shared__ int from_x[COLUMN_THREADS];
    from_y[thread] = static_cast<int>(border_index(y0 + task.first_y + thread, task.rows, task.mode_y));
    from_x[thread] = static_cast<int>(border_index(x0 + task.first_x + thread, task.columns, task.mode_x));
    for (int i = thread; i < Lower::HELD; i += COLUMN_THREADS) digits[i] = 0;
    __syncthreads();
    const unsigned a_column = 0xFFFFFFFFu / columns + 1;  // of 2^32: divides numbers
    constexpr unsigned HOME = same<Sample, short> ? 0x8000u >> LOW_BITS : 0;
    bool is_wide = false;
#pragma unroll 4
    for (int i = thread; i < total; i += COLUMN_THREADS) {
        const int y = __umulhi(i, a_column), x = i - y * columns, from_row = from_y[y], from = from_x[x];
        const unsigned key = key_of(from_row < 0 || from < 0 ? cval : in[(from_row * task.columns + from) * task.inner]);
        const unsigned digit = Lower::of(key);
        keys[i] = static_cast<unsigned short>(key);
        is_wide |= key >> LOW_BITS != HOME;
        atomicAdd(digits + Lower::word_of(digit), Lower::one(digit));
    }
    is_wide = __syncthreads_or(is_wide);
    scan_digits<Sample>(digits);
    __syncthreads();
#pragma unroll 4
    for (int i = thread; i < total; i += COLUMN_THREADS) {
        const unsigned key = keys[i], digit = Lower::of(key);
        const unsigned two = atomicAdd(digits + Lower::word_of(digit), Lower::one(digit));
        by_lower[two >> digit % 2 * 16 & 0xFFFFu] = static_cast<unsigned short>((key & ~NUMBER) | i);
    }
    if (total + thread < padded) by_lower[total + thread] = 0xFFFF;
    __syncthreads();
    if (is_wide) {
        sort_by_upper_digit(by_lower, sorted, padded);
    } else {
        for (int i = thread; i < padded; i += COLUMN_THREADS) sorted[i] = by_lower[i];
    }
    __syncthreads();
#pragma unroll 2
    for (unsigned place = thread; place < static_cast<unsigned>(bins * WIDTH); place += COLUMN_THREADS) {
        const unsigned bin = place / WIDTH, within = place % WIDTH, word = within % WORDS, byte = within / WORDS;
        unsigned char* spot = reinterpret_cast<unsigned char*>(spots + bin * WORDS + word) + byte;
        int x = MOST_SIDE, y = MOST_SIDE;  // of no window
        if (place < static_cast<unsigned>(total)) {
            const unsigned number = sorted[place] & NUMBER;
            y = __umulhi(number, a_column), x = number - y * columns;
            values[place] = sample_of<Sample>(keys[number]);
            bin_of[number] = static_cast<unsigned char>(bin);
        }
        spot[0] = static_cast<unsigned char>(x | 128);
        spot[4] = static_cast<unsigned char>(y | 128);
    }
    __syncthreads();
    for (int i = thread; i < (columns + fours + 1) * COLUMN_BYTES / 16; i += COLUMN_THREADS)
        reinterpret_cast<uint4*>(counts)[i] = {0, 0, 0, 0};
    __syncthreads();

    unsigned char* own = counts + thread * COLUMN_BYTES;
    unsigned char* shared = counts + (columns + thread / 4) * COLUMN_BYTES;
    // Atomic, because four columns share a count, and because an addition without a result does not make the thread wait.
    const auto count = [&](int row, unsigned change) {
        const unsigned bin = bin_of[row * columns + thread], group = bin / GROUP_BINS;
        const unsigned of_group = change << group % 4 * 8, of_bin = change << bin % 4 * 8;
        const unsigned at_group = group & ~3u, at_bin = GROUP_BINS + (bin & ~3u);
        atomicAdd(reinterpret_cast<unsigned*>(own + at_group), of_group);
        atomicAdd(reinterpret_cast<unsigned*>(own + at_bin), of_bin);
        atomicAdd(reinterpret_cast<unsigned*>(shared + at_group), of_group);
        atomicAdd(reinterpret_cast<unsigned*>(shared + at_bin), of_bin);
    };
    const bool is_column = thread < columns;
    if (is_column)
        for (int y = 0; y < task.taps_y; ++y) count(y, 1);

    // Where the counts of this thread's window are: `quads` by four from the first on, and up to six more.
    constexpr int MOST_PIECES = 6;
    const int quads = task.quads;
    const int first_four = (thread + 3) / 4, left = 4 * first_four - thread, whole = (task.taps_x - left) / 4;
    const uint4* by_four = reinterpret_cast<const uint4*>(counts + (columns + first_four) * COLUMN_BYTES);
    const uint4* piece[MOST_PIECES];
#pragma unroll
    for (int j = 0; j < MOST_PIECES; ++j) {
        const int right = j - left - (whole - quads);
        const int at = j < left                          ? thread + j
                       : right < 0                       ? columns + first_four + quads
                       : right < task.taps_x - left - 4 * whole ? thread + left + 4 * whole + right
                                                         : columns + fours;
        piece[j] = reinterpret_cast<const uint4*>(counts + at * COLUMN_BYTES);
    }
    const bool is_odd = task.taps_x % 4 == 3;  // three pieces are all
    const auto sum = [&](int vector) {
        Sums<SMALL> sums;
        if constexpr (SMALL) {
#pragma unroll
            for (int j = 0; j < 3; ++j) sums.add(piece[j][vector]);
#pragma unroll 4
            for (int q = 0; q < quads; ++q) sums.add(by_four[q * (COLUMN_BYTES / 16) + vector]);
        } else {
            sums.add(plus(plus(piece[0][vector], piece[1][vector]), piece[2][vector]));
            int q = 0;
#pragma unroll 4
            for (; q + 2 <= quads; q += 2)
                sums.add(plus(by_four[q * (COLUMN_BYTES / 16) + vector], by_four[(q + 1) * (COLUMN_BYTES / 16) + vector]));
            if (q < quads) sums.add(by_four[q * (COLUMN_BYTES / 16) + vector]);
        }
        if (!is_odd) {
            if constexpr (SMALL) {
#pragma unroll
                for (int j = 3; j < MOST_PIECES; ++j) sums.add(piece[j][vector]);
            } else {
                sums.add(plus(plus(piece[3][vector], piece[4][vector]), piece[5][vector]));
            }
        }
        return sums;
    };
    const bool is_result = thread < task.tile_x && x0 + thread < task.out_columns;
    const int end = static_cast<int>(min(static_cast<long long>(task.tile_y), task.out_rows - y0));
    const unsigned low_x = thread * ONES, high_x = (thread + task.taps_x - 1) * ONES + 2 * TOPS;
    out += (y0 * task.out_columns + x0 + thread) * task.inner;
    for (int y = 0; y < end; ++y) {
        __syncthreads();
        if (is_result) {
            int rank = task.rank;
            const int group = sum(0).find(rank);
            const int bin = group * GROUP_BINS + sum(1 + group).find(rank);
            const unsigned low_y = y * ONES, high_y = (y + task.taps_y - 1) * ONES + 2 * TOPS;
            const uint4* spot = reinterpret_cast<const uint4*>(spots + bin * WORDS);
            // Bit 8 i + j + 8 - WORDS: of byte i of word j.
            unsigned inside = 0;
            const auto look = [&](unsigned x, unsigned y) {
                inside = inside >> 1 | ((x - low_x) & (high_x - x) & (y - low_y) & (high_y - y) & TOPS);
            };
#pragma unroll
            for (int j = 0; j < WORDS / 2; ++j) {
                const uint4 two = spot[j];
                look(two.x, two.y);
                look(two.z, two.w);
            }
            const int bit = place_of_bit(inside, rank);
            out[y * task.out_columns * task.inner] = values[bin * WIDTH + bit / 8 * WORDS + bit % 8 - (8 - WORDS)];
        }
        __syncthreads();
        if (is_column && y + 1 < end) {
            count(y + task.taps_y, 1);
            count(y, ~0u);
        }
    }
}
