// Any rank of boxes of medium size, samples of at most 16 bits, at a cost that hardly grows with the window: counts of the
// columns of a tile, after Perreault and Hébert. Part of rank.cu.
//
// A block sorts the samples of a tile with its halo, so that each has a place in one order, of whatever values the image has.
// WIDTH places are a bin, 16 bins a group. A thread owns a column, and goes down the rows with it: of the column's samples in
// the window's rows it counts those of each group and each bin, in bytes. Each four neighbours have one more such count, of
// all four. A result adds the counts of the columns of its window, of which most come by four:
//
//      x x x [x x x x] [x x x x] [x x x x]         15 columns: six vectors of 16 counts, of 31 columns ten
//
// of the groups, then of the bins of the group that holds the rank, and last looks at the places of one bin, four at a time:
// which of them lie in the window, and the one of the rank that is left.
//
//   load      samples -> keys                                    all threads
//     |  barrier
//   sort      lower 12 bits of the tile's range: count, scan,    all threads, a barrier after each; equal digits in any order
//             scatter; the upper 4, if it has them: each warp
//             its part in order, by ballots
//     |  barrier
//   bins      of each sample; position and value by place        all threads
//     |  barrier
//   a row     enters, and another leaves                         one thread a column; atomic where four share counts
//     |  barrier                                                 results read the counts of all columns
//   results   of the row                                         one thread each
//     |  barrier                                                 before the counts change again
//   the next row
//
// Floors of a result of 15 x 15 (31 x 31), of 4 instructions a multiprocessor and cycle, half of which can be integer:
//   counting and selecting    EDIT
//
// Sources: Perreault and Hébert, "Median filtering in constant time" (2007); Satish, Harris and Garland (2009) for the sort.
#pragma once

#include "ordered.cuh"

constexpr int COLUMN_THREADS = 128, COLUMN_WARPS = COLUMN_THREADS / 32;
constexpr int KEY_PITCH = 128;           // a sample's number is y * KEY_PITCH + x
constexpr int GROUP_BINS = 16;           // and groups
constexpr int COLUMN_BYTES = GROUP_BINS + GROUP_BINS * GROUP_BINS;  // counts of the groups, then of the bins
constexpr int LOW_BITS = 12;             // digits of the first pass of the sort
constexpr int LOW_WORDS = (1 << LOW_BITS) / 2;
constexpr unsigned ONES = 0x01010101u, TOPS = 0x80808080u;

struct ColumnsTask {
    long long rows, columns, out_rows, out_columns, inner;
    int first_y, first_x, mode_y, mode_x, taps_y, taps_x;
    int tile_y, tile_x, tiles_y, tiles_x;  // results of a tile; a multiple of 32 along x
    int quads;                             // whole ones that every window has
    int rank;
};

// Two counters in a word; threads that scan 16 words each read different banks.
constexpr int low_word(int word) { return word + word / 16; }

// Sorts the numbers of a tile's samples by their keys; `spare` has room for as many. Returns where they are.
template <typename Number>
__device__ inline Number* sort_numbers(
    const unsigned short* keys, Number* numbers, Number* spare, unsigned* counts, int rows, int columns, unsigned least,
    int bits) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    __shared__ unsigned totals[COLUMN_WARPS][16];
    const auto digit_of = [&](int number) { return (keys[number] - least) & ((1u << LOW_BITS) - 1); };
    for (int i = thread; i < low_word(LOW_WORDS); i += COLUMN_THREADS) counts[i] = 0;
    __syncthreads();
    for (int y = warp; y < rows; y += COLUMN_WARPS)
#pragma unroll 4
        for (int x = lane; x < columns; x += 32) {
            const unsigned digit = digit_of(y * KEY_PITCH + x);
            atomicAdd(counts + low_word(digit / 2), 1u << digit % 2 * 16);
        }
    __syncthreads();
    constexpr int EACH = LOW_WORDS / COLUMN_THREADS;
    unsigned own = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const unsigned two = counts[low_word(thread * EACH + i)];
        own += (two & 0xFFFFu) + (two >> 16);
    }
    unsigned before = own;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const unsigned other = __shfl_up_sync(~0u, before, apart);
        if (lane >= apart) before += other;
    }
    if (lane == 31) totals[warp][0] = before;
    __syncthreads();
    before -= own;
    for (int other = 0; other < warp; ++other) before += totals[other][0];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const unsigned two = counts[low_word(thread * EACH + i)], between = before + (two & 0xFFFFu);
        counts[low_word(thread * EACH + i)] = before | between << 16;
        before = between + (two >> 16);
    }
    __syncthreads();
    for (int y = warp; y < rows; y += COLUMN_WARPS)
#pragma unroll 4
        for (int x = lane; x < columns; x += 32) {
            const int number = y * KEY_PITCH + x;
            const unsigned digit = digit_of(number), shift = digit % 2 * 16;
            const unsigned place = atomicAdd(counts + low_word(digit / 2), 1u << shift) >> shift & 0xFFFFu;
            numbers[place] = static_cast<Number>(number);
        }
    __syncthreads();
    if (bits <= LOW_BITS) return numbers;

    // Lane d and lane 16 + d count digit d.
    const int total = rows * columns, part = (total + COLUMN_THREADS - 1) / COLUMN_THREADS * 32;
    const int begin = warp * part, end = min(begin + part, total);
    const auto upper_digit = [&](int number) { return (keys[number] - least) >> LOW_BITS & 15u; };
    // Lanes whose digit is that of this lane, and those whose digit is this lane's number.
    const auto match = [&](unsigned digit, bool is_held, unsigned& alike, unsigned& counted) {
        alike = counted = __ballot_sync(~0u, is_held);
#pragma unroll
        for (int bit = 0; bit < 4; ++bit) {
            const unsigned set = __ballot_sync(~0u, digit >> bit & 1);
            alike &= digit >> bit & 1 ? set : ~set;
            counted &= lane >> bit & 1 ? set : ~set;
        }
    };
    unsigned alike, counted, held = 0;
    for (int i = begin; i < end; i += 32) {
        const bool is_held = i + lane < end;
        match(is_held ? upper_digit(numbers[i + lane]) : 0, is_held, alike, counted);
        held += __popc(counted);
    }
    if (lane < 16) totals[warp][lane] = held;
    __syncthreads();
    unsigned all = 0, next = 0;
    for (int other = 0; other < COLUMN_WARPS; ++other) {
        const unsigned count = totals[other][lane % 16];
        all += count;
        if (other < warp) next += count;
    }
    unsigned through = all;
#pragma unroll
    for (int apart = 1; apart < 16; apart *= 2) {
        const unsigned other = __shfl_up_sync(~0u, through, apart, 16);
        if (lane % 16 >= apart) through += other;
    }
    next += through - all;
    for (int i = begin; i < end; i += 32) {
        const bool is_held = i + lane < end;
        const Number number = is_held ? numbers[i + lane] : Number(0);
        const unsigned digit = is_held ? upper_digit(number) : 0;
        match(digit, is_held, alike, counted);
        const unsigned place = __shfl_sync(~0u, next, digit) + __popc(alike & ((1u << lane) - 1));
        if (is_held) spare[place] = number;
        next += __popc(counted);
    }
    __syncthreads();
    return spare;
}

// The sums of counts, of 16 bins: bytes, or if they may exceed 255 the even and the odd ones apart.
template <bool SMALL>
struct Sums {
    unsigned word[4] = {}, even[4] = {};
    __device__ void add(uint4 a) {
        const unsigned counts[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            word[k] += counts[k];
            if constexpr (!SMALL) even[k] += counts[k] & 0x00FF00FFu;
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
            unsigned odd[4], sum = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                odd[k] = (word[k] - even[k]) >> 8;
                const unsigned both = even[k] + odd[k];
                through[k] = (both & 0xFFFFu) + (both >> 16);
            }
            chosen = even[0], odds = odd[0];
#pragma unroll
            for (int k = 1; k < 4; ++k) {
                sum += through[k - 1];
                if (rank >= static_cast<int>(sum)) chosen = even[k], odds = odd[k], before = sum, found = 4 * k;
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

// rank_columns: one block a tile. QUADS: as in the task, or 0 for any. SMALL: windows have less than 256 samples. WORDS: a
// quarter of a bin's places.
template <typename Sample, int QUADS, bool SMALL, int WORDS>
__global__ void __launch_bounds__(COLUMN_THREADS) rank_columns(
    const Sample* __restrict__ in, Sample* __restrict__ out, const __grid_constant__ ColumnsTask task, Sample cval) {
    constexpr int WIDTH = 4 * WORDS;
    extern __shared__ __align__(16) unsigned char memory[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int columns = task.tile_x + task.taps_x - 1, rows = task.tile_y + task.taps_y - 1, total = rows * columns;
    const int bins = (total + WIDTH - 1) / WIDTH, fours = (columns + 3) / 4;
    // Places: positions, values; bins by position; and behind them the sort's memory, later the counts.
    uint2* spots = reinterpret_cast<uint2*>(memory);  // x and y of four places each, with the top bits set
    Sample* values = reinterpret_cast<Sample*>(spots + bins * WORDS);
    unsigned char* bin_of = reinterpret_cast<unsigned char*>(values + bins * WIDTH);
    unsigned char* counts = bin_of + (total + 15) / 16 * 16;
    unsigned* digits = reinterpret_cast<unsigned*>(counts);
    unsigned short* keys = reinterpret_cast<unsigned short*>(digits + low_word(LOW_WORDS));
    unsigned short* numbers = keys + rows * KEY_PITCH;

    long long block = blockIdx.x;
    const long long x0 = block % task.tiles_x * task.tile_x;
    block /= task.tiles_x;
    const long long y0 = block % task.tiles_y * task.tile_y;
    block /= task.tiles_y;
    in += block / task.inner * task.rows * task.columns * task.inner + block % task.inner;
    out += block / task.inner * task.out_rows * task.out_columns * task.inner + block % task.inner;

    unsigned least = 0xFFFFu, most = 0;
    long long from_x[KEY_PITCH / 32];
#pragma unroll
    for (int j = 0; j < KEY_PITCH / 32; ++j)
        from_x[j] = border_index(x0 + task.first_x + lane + 32 * j, task.columns, task.mode_x) * task.inner;
#pragma unroll 2
    for (int y = warp; y < rows; y += COLUMN_WARPS) {
        const long long from_y = border_index(y0 + task.first_y + y, task.rows, task.mode_y);
        const Sample* row = in + from_y * task.columns * task.inner;
#pragma unroll
        for (int j = 0; j < KEY_PITCH / 32; ++j) {
            const int x = lane + 32 * j;
            if (x >= columns) break;
            const unsigned key = key_of(from_y < 0 || from_x[j] < 0 ? cval : row[from_x[j]]);
            keys[y * KEY_PITCH + x] = static_cast<unsigned short>(key);
            least = min(least, key);
            most = max(most, key);
        }
    }
    __shared__ unsigned ends[2][COLUMN_WARPS];
#pragma unroll
    for (int apart = 16; apart >= 1; apart /= 2) {
        least = min(least, __shfl_xor_sync(~0u, least, apart));
        most = max(most, __shfl_xor_sync(~0u, most, apart));
    }
    if (lane == 0) ends[0][warp] = least, ends[1][warp] = most;
    __syncthreads();
#pragma unroll
    for (int other = 0; other < COLUMN_WARPS; ++other) least = min(least, ends[0][other]), most = max(most, ends[1][other]);
    numbers = sort_numbers(keys, numbers, numbers + total, digits, rows, columns, least, 32 - __clz(most - least));

    for (int place = thread; place < bins * WIDTH; place += COLUMN_THREADS) {
        const int bin = place / WIDTH, within = place % WIDTH, word = within % WORDS, byte = within / WORDS;
        unsigned char* spot = reinterpret_cast<unsigned char*>(spots + bin * WORDS + word) + byte;
        int x = 127, y = 127;  // of no window
        if (place < total) {
            const int number = numbers[place];
            x = number % KEY_PITCH, y = number / KEY_PITCH;
            values[place] = sample_of<Sample>(keys[number]);
            bin_of[y * columns + x] = static_cast<unsigned char>(bin);
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
    const auto count = [&](int row, int change) {
        const int bin = bin_of[row * columns + thread], group = bin / GROUP_BINS;
        own[group] += change;
        own[GROUP_BINS + bin] += change;
        atomicAdd(reinterpret_cast<unsigned*>(shared + group / 4 * 4), static_cast<unsigned>(change) << group % 4 * 8);
        atomicAdd(reinterpret_cast<unsigned*>(shared + GROUP_BINS + bin / 4 * 4), static_cast<unsigned>(change) << bin % 4 * 8);
    };
    const bool is_column = thread < columns;
    if (is_column)
        for (int y = 0; y < task.taps_y; ++y) count(y, 1);

    // Where the counts of this thread's window are: `quads` by four from the first on, and up to six more.
    constexpr int MOST_PIECES = 6;
    const int quads = QUADS > 0 ? QUADS : task.quads;
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
    const bool is_odd = QUADS > 0 || task.taps_x % 4 == 3;  // three pieces are all
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
            count(y, -1);
        }
    }
}
