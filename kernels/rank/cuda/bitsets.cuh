// Any rank of boxes of medium size, samples of at most 16 bits, at a cost that hardly grows with the window: bits over the
// sorted samples of a tile. Part of rank.cu.
//
// A block sorts the samples of a tile with its halo, so that each has a place in one order. The samples of a window are a
// set of places. A box is the intersection of its columns and its rows, so few sets serve all windows of a tile:
//
//      in_columns[x] & in_rows[y]     the samples of the window of result (y, x), by value: bits over the places
//
// Places that no result can have are left out: `rank` at the front, and at the end as many as a window has samples after its
// result. The others are GROUPS groups of equal size. Before each group, every window's samples are counted: bytes of the
// columns, then halves of the windows. So a result looks at the bits of one group: at most 512 places.
//
//   load      samples -> keys, and counts of their lower 13 bits   all threads
//     |  barrier
//   sort      by these: scan, scatter, equal ones in any order;    all threads, a barrier after each; of the second pass
//             by the upper 3, if a sample has them, in order       each takes words side by side
//     |  barrier
//   places    a bit each in the sets of its column and its row;    atomic: samples of a column share words
//             its group
//     |  barrier
//   windows   sets of columns -> of windows, likewise of rows;     some warps the sets, the others the counts
//             counts before each group down the columns
//     |  barrier
//   counts    along the rows                                       a lane a row
//     |  barrier
//   results   group, word, bit, sample                             one thread each
//
// A result of 31 x 31 takes about 900 instructions, of which a multiprocessor of an H200 starts 128 a cycle: 1.8 ms of
// 8192 x 8192. For 32 results, shared memory moves about 240 lines of 128 bytes, one a cycle, half of them for conflicts of
// random places: 1.9 ms; 2.62 ms measured. Two blocks fit; one block of twice the warps and results takes a tenth longer.
//
// Sources: Huang, Yang and Tang, "A fast two-dimensional median filtering algorithm" (1979) for windows as sets of places;
// Satish, Harris and Garland (2009) for the sort.
#pragma once

#include "ordered.cuh"

constexpr int BITSET_ROWS = 32;                        // results of a tile along a column
constexpr int GROUPS = 8;                              // whose counts are the bytes of two words
constexpr int SORTED_BITS = 13, HIGH = 8;              // of the first pass of the sort; digits of the second
constexpr unsigned NUMBERS = (1u << SORTED_BITS) - 1;  // of a sample: y * PITCH + x
constexpr int FIRSTS = HIGH / 2 + 1;                   // words of a thread's first places: odd, so that banks differ

struct BitsetsTask : PlanesTask {
    int taps_y, taps_x, inner, rank;
};

// Of a place: those of a word's first bits, which threads side by side read, lie in different banks.
__device__ inline unsigned slot_of(unsigned place) { return place + place / 32 * 2; }

// Numbers of a tile. CHUNKS: 32 samples of a line each; ACROSS: results of a line; QUADS: four words of a group each.
template <int WARPS, int CHUNKS, int ACROSS, int QUADS>
struct Bitsets {
    static constexpr int THREADS = 32 * WARPS, DIGITS_EACH = (1 << SORTED_BITS) / THREADS;
    static constexpr int PITCH = 32 * CHUNKS;         // of a line of samples
    static constexpr int EACH = 64 / WARPS * CHUNKS;  // samples of a thread
    static constexpr int WORDS = 4 * QUADS * GROUPS;  // of a set
    static constexpr int STEP = WORDS + 4;            // from one set to the next: four words of neighbours in other banks
    static constexpr int COUNTERS = (1 << SORTED_BITS) * (DIGITS_EACH + 4) / DIGITS_EACH;
    static constexpr int RESULTS = ACROSS, GROUP_QUADS = QUADS;
    static constexpr int LINE = (ACROSS + 1) * 4;     // words of a line of counts of windows
    static constexpr int COLUMN_LINE = PITCH + 1;     // and of counts of columns
    // Words of the parts of shared memory.
    static constexpr int PLACES = THREADS * EACH / 64 * 34;
    static constexpr int COUNTS = BITSET_ROWS * LINE > PLACES ? BITSET_ROWS * LINE : PLACES;
    static constexpr int COLUMN_COUNTS = 2 * BITSET_ROWS * COLUMN_LINE;
    static_assert(COUNTERS % (4 * THREADS) == 0 && THREADS * FIRSTS <= COLUMN_COUNTS && EACH < 16, "");

    static __device__ int sets(int samples) { return max(samples * STEP, COUNTERS); }  // samples: rows and columns
    // Counters that a thread scans lie side by side; those of threads side by side begin in different banks.
    static __device__ unsigned counter_of(unsigned digit) { return digit + digit / DIGITS_EACH * 4; }
};

// Counts of all digits become those of the digits before.
template <typename T>
__device__ inline void scan_digits(unsigned* counts) {
    constexpr int FOURS = T::DIGITS_EACH / 4;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    __shared__ unsigned totals[T::THREADS / 32];
    uint4* mine = reinterpret_cast<uint4*>(counts + T::counter_of(thread * T::DIGITS_EACH));
    uint4 held[FOURS];
    unsigned own = 0;
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
        held[i] = mine[i];
        own += held[i].x + held[i].y + held[i].z + held[i].w;
    }
    unsigned before = own;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const unsigned other = __shfl_up_sync(~0u, before, apart);
        if (lane >= apart) before += other;
    }
    if (lane == 31) totals[warp] = before;
    __syncthreads();
    unsigned others = lane < warp ? totals[lane] : 0;
#pragma unroll
    for (int apart = 16; apart >= 1; apart /= 2) others += __shfl_xor_sync(~0u, others, apart);
    before += others - own;
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
        const uint4 four = held[i];
        mine[i] = {before, before + four.x, before + four.x + four.y, before + four.x + four.y + four.z};
        before += four.x + four.y + four.z + four.w;
    }
}

// Sorts words by their upper 3 bits, which keeps the order of equal ones. Each thread takes EACH of them, side by side.
template <int WARPS, int EACH>
__device__ inline void sort_by_high_bits(const unsigned* words, unsigned short* sorted, unsigned* firsts) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    __shared__ unsigned short totals[HIGH][WARPS];
    __shared__ __align__(16) unsigned starts[WARPS][HIGH / 2];
    unsigned word[EACH / 2], before[EACH / 2];
#pragma unroll
    for (int i = 0; i < EACH / 2; ++i) word[i] = words[thread * (EACH / 2) + i];
    // Four bits a digit: how many of the thread's words had it so far.
    unsigned seen = 0;
#pragma unroll
    for (int i = 0; i < EACH / 2; ++i) {
        const unsigned low = word[i] >> 11 & 0x1Cu, high = word[i] >> 27 & 0x1Cu;
        before[i] = seen >> low & 15u;
        seen += 1u << low;
        before[i] |= (seen >> high & 15u) << 16;
        seen += 1u << high;
    }
    // The same of lanes before, in halves: digits k and k + 4.
    unsigned count[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const unsigned own = seen >> 4 * k & 0x000F000Fu;
        count[k] = own;
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
            const unsigned other = __shfl_up_sync(~0u, count[k], apart);
            if (lane >= apart) count[k] += other;
        }
        if (lane == 31) {
            totals[k][warp] = static_cast<unsigned short>(count[k]);
            totals[k + 4][warp] = static_cast<unsigned short>(count[k] >> 16);
        }
        count[k] -= own;
    }
    __syncthreads();
    if (warp == 0) {
        // A lane has the totals of some warps, of one digit; all lanes, those of all in the order of the result.
        const int digit = lane / 4, first = lane % 4 * (WARPS / 4);
        unsigned total[WARPS / 4], sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS / 4; ++i) sum += total[i] = totals[digit][first + i];
        unsigned start = sum;
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
            const unsigned other = __shfl_up_sync(~0u, start, apart);
            if (lane >= apart) start += other;
        }
        start -= sum;
#pragma unroll
        for (int i = 0; i < WARPS / 4; ++i) {
            reinterpret_cast<unsigned short*>(starts[first + i])[digit] = static_cast<unsigned short>(start);
            start += total[i];
        }
    }
    __syncthreads();
    const uint4 start = *reinterpret_cast<const uint4*>(starts[warp]);
    firsts += thread * FIRSTS;
    firsts[0] = start.x + __byte_perm(count[0], count[1], 0x5410);
    firsts[1] = start.y + __byte_perm(count[2], count[3], 0x5410);
    firsts[2] = start.z + __byte_perm(count[0], count[1], 0x7632);
    firsts[3] = start.w + __byte_perm(count[2], count[3], 0x7632);
    const unsigned short* mine = reinterpret_cast<const unsigned short*>(firsts);
#pragma unroll
    for (int i = 0; i < EACH / 2; ++i) {
        const unsigned low = mine[word[i] >> 13 & 7u] + (before[i] & 0xFFFFu), high = mine[word[i] >> 29] + (before[i] >> 16);
        sorted[slot_of(low)] = static_cast<unsigned short>(word[i] & NUMBERS);
        sorted[slot_of(high)] = static_cast<unsigned short>(word[i] >> 16 & NUMBERS);
    }
}

// A word of sets, which becomes that of `taps` sets from each on.
template <int STEP, int COUNT>
__device__ inline void sum_sets(unsigned* sets, int taps) {
    unsigned window = 0;
#pragma unroll 4
    for (int x = 0; x < taps; ++x) window ^= sets[x * STEP];
    const unsigned* next = sets + taps * STEP;
#pragma unroll 8
    for (int x = 0; x + 1 < COUNT; ++x) {
        const unsigned leaves = sets[x * STEP], enters = next[x * STEP];
        sets[x * STEP] = window;
        window ^= leaves ^ enters;
    }
    sets[(COUNT - 1) * STEP] = window;
}

// Of 32 columns, half of the rows and half of the groups, as `part` says: how many samples of the window's rows lie before
// each group. A lane goes down its column; four counts are bytes of a word.
template <typename T>
__device__ inline void count_columns(const unsigned short* codes, unsigned* counts, int part, int columns, int taps) {
    constexpr int ROWS = BITSET_ROWS / 2;
    const int half = part % 2, y = part / 2 % 2 * ROWS, x = part / 4 * 32 + threadIdx.x % 32;
    if (x >= columns) return;
    const unsigned char* code = reinterpret_cast<const unsigned char*>(codes + y * T::PITCH + x) + half;
    counts += (half * BITSET_ROWS + y) * T::COLUMN_LINE + x;
    const auto groups = [&](int row) { return __funnelshift_lc(0, 0x01010101u, code[row * 2 * T::PITCH]); };
    unsigned sum = 0;
#pragma unroll 4
    for (int row = 0; row < taps; ++row) sum += groups(row);
    counts[0] = sum;
#pragma unroll 5
    for (int row = 1; row < ROWS; ++row) {
        sum += groups(row + taps - 1) - groups(row - 1);
        counts[row * T::COLUMN_LINE] = sum;
    }
}

// The same for windows: a lane goes along a piece of its row. Bytes are widened to 16 bits: the even bytes of a word into
// one word, the odd bytes into another.
template <typename T>
__device__ inline void count_windows(const unsigned* column_counts, unsigned* counts, int taps) {
    constexpr int PIECE = 8, BATCH = 7;  // of counts of at most 33, whose sum is a byte
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32 % 2, x = threadIdx.x / 64 * PIECE;
    if (x >= T::RESULTS) return;
    const unsigned* from = column_counts + (half * BITSET_ROWS + lane) * T::COLUMN_LINE + x;
    uint2* found = reinterpret_cast<uint2*>(counts + lane * T::LINE + x * 4 + 2 * half);
    const auto even = [](unsigned four) { return four & 0x00FF00FFu; };
    const auto odd = [](unsigned four) { return __byte_perm(four, 0, 0x4341); };
    uint2 sum = {0, 0};
    int at = 0;
    for (; at + BATCH <= taps; at += BATCH) {
        unsigned four = 0;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) four += from[at + i];
        sum.x += even(four), sum.y += odd(four);
    }
    unsigned four = 0;
    for (; at < taps; ++at) four += from[at];
    sum.x += even(four), sum.y += odd(four);
    found[0] = sum;
    uint2 change[PIECE];  // loads come before stores, so that they do not wait for each other
#pragma unroll
    for (int i = 1; i < PIECE; ++i) {
        const unsigned enters = from[i + taps - 1], leaves = from[i - 1];
        change[i] = {even(enters) - even(leaves), odd(enters) - odd(leaves)};
    }
#pragma unroll
    for (int i = 1; i < PIECE; ++i) {
        sum.x += change[i].x, sum.y += change[i].y;
        found[2 * i] = sum;
    }
}

// The place of a window's sample of a rank, counted from the first group. `counts`: before groups 0 and 2, 1 and 3, 4 and 6,
// 5 and 7.
template <typename T>
__device__ inline int place_of_result(const unsigned* counts, const unsigned* in_columns, const unsigned* in_rows, int rank) {
    const uint4 all = *reinterpret_cast<const uint4*>(counts);
    const bool is_upper = (all.z & 0xFFFFu) <= rank;
    const unsigned even = is_upper ? all.z : all.x, odd = is_upper ? all.w : all.y;
    const bool is_second = even >> 16 <= rank;
    const int first = is_second ? even >> 16 : even & 0xFFFFu, second = is_second ? odd >> 16 : odd & 0xFFFFu;
    const bool is_odd = second <= rank;
    int left = rank - (is_odd ? second : first);
    const int group = 4 * is_upper + 2 * is_second + is_odd;
    const uint4* by_x = reinterpret_cast<const uint4*>(in_columns) + group * T::GROUP_QUADS;
    const uint4* by_y = reinterpret_cast<const uint4*>(in_rows) + group * T::GROUP_QUADS;
    const auto both = [&](int quad) {
        const uint4 a = by_x[quad], b = by_y[quad];
        return uint4{a.x & b.x, a.y & b.y, a.z & b.z, a.w & b.w};
    };
    int quad = 0, sum = 0, below = 0;
#pragma unroll
    for (int k = 0; k + 1 < T::GROUP_QUADS; ++k) {
        const uint4 bits = both(k);
        sum += __popc(bits.x) + __popc(bits.y) + __popc(bits.z) + __popc(bits.w);
        if (sum <= left) quad = k + 1, below = sum;
    }
    left -= below;
    const uint4 bits = both(quad);
    const int one = __popc(bits.x), two = one + __popc(bits.y), three = two + __popc(bits.z);
    unsigned word = bits.x;
    int at = 0;
    below = 0;
    if (one <= left) word = bits.y, at = 1, below = one;
    if (two <= left) word = bits.z, at = 2, below = two;
    if (three <= left) word = bits.w, at = 3, below = three;
    return ((group * T::GROUP_QUADS + quad) * 4 + at) * 32 + place_of_bit(word, left - below);
}

// rank_bitsets: one block a tile.
template <typename Sample, int WARPS, int CHUNKS, int ACROSS, int QUADS>
__global__ void __launch_bounds__(32 * WARPS, CHUNKS == 2 ? 2 : 1) rank_bitsets(
    const Sample* __restrict__ in, Sample* __restrict__ out, const __grid_constant__ BitsetsTask task, Sample cval) {
    using T = Bitsets<WARPS, CHUNKS, ACROSS, QUADS>;
    constexpr int PITCH = T::PITCH, EACH = T::EACH, STEP = T::STEP;
    constexpr bool BYTES = sizeof(Sample) == 1;
    extern __shared__ __align__(16) unsigned storage[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int columns = ACROSS + task.taps_x - 1, rows = BITSET_ROWS + task.taps_y - 1, total = rows * columns;
    unsigned* sets = storage;  // of columns, then of lines; first the counters of the sort
    unsigned short* places = reinterpret_cast<unsigned short*>(storage + T::sets(rows + columns));
    unsigned* counts = reinterpret_cast<unsigned*>(places) + T::PLACES;  // of windows; first words, then codes
    unsigned short* words = reinterpret_cast<unsigned short*>(counts);
    unsigned* column_counts = counts + T::COUNTS;
    Sample* raw = reinterpret_cast<Sample*>(column_counts + T::COLUMN_COUNTS);

    const int y0 = blockIdx.y * BITSET_ROWS, x0 = blockIdx.x * ACROSS;
    const int plane = task.inner == 1 ? blockIdx.z : blockIdx.z / task.inner, within = blockIdx.z - plane * task.inner;
    in += static_cast<long long>(plane) * task.rows * task.columns * task.inner + within;
    out += static_cast<long long>(plane) * task.out_rows * task.out_columns * task.inner + within;

#pragma unroll
    for (int i = 0; i < T::COUNTERS / 4; i += T::THREADS) reinterpret_cast<uint4*>(sets)[thread + i] = {0, 0, 0, 0};
    const int top = y0 + task.first_y, left_x = x0 + task.first_x;
    Sample sample[EACH];
    if (top >= 0 && left_x >= 0 && top + rows <= task.rows && left_x + columns <= task.columns) {
        const Sample* from = in + (static_cast<long long>(top + warp) * task.columns + left_x + lane) * task.inner;
#pragma unroll
        for (int i = 0; i < EACH; i += CHUNKS) {
            if (warp + i / CHUNKS * WARPS < rows) {
#pragma unroll
                for (int j = 0; j < CHUNKS; ++j)
                    if (lane + 32 * j < columns) sample[i + j] = from[32ll * j * task.inner];
            }
            from += static_cast<long long>(WARPS) * task.columns * task.inner;
        }
    } else {
#pragma unroll 1
        for (int j = 0; j < CHUNKS; ++j) {
            const int from_x = border_index(left_x + lane + 32 * j, task.columns, task.mode_x);
#pragma unroll 1
            for (int k = 0; k < EACH / CHUNKS; ++k) {
                const int y = warp + k * WARPS;
                const int from_y = border_index(top + y, task.rows, task.mode_y);
                const bool is_beyond = from_y < 0 || from_x < 0;
                const Sample found = is_beyond ? cval : in[(static_cast<long long>(from_y) * task.columns + from_x) * task.inner];
                if (y < rows && lane + 32 * j < columns) raw[y * PITCH + lane + 32 * j] = found;
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int y = warp + i / CHUNKS * WARPS, x = lane + 32 * (i % CHUNKS);
            if (y < rows && x < columns) sample[i] = raw[y * PITCH + x];
        }
    }
    __syncthreads();
    // Bytes: lanes count apart, so that they do not wait for each other.
    const auto counter = [&](Sample of) {
        const unsigned key = key_of(of);
        return sets + T::counter_of(BYTES ? key << 5 | lane : key & ((1u << SORTED_BITS) - 1));
    };
    unsigned before[EACH];  // samples with the same digit
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int y = warp + i / CHUNKS * WARPS, x = lane + 32 * (i % CHUNKS);
        if (y >= rows || x >= columns) continue;
        raw[y * PITCH + x] = sample[i];
        before[i] = atomicAdd(counter(sample[i]), 1u);
    }
    __syncthreads();
    scan_digits<T>(sets);
    __syncthreads();
    unsigned short* const first_pass = BYTES ? places : words;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int y = warp + i / CHUNKS * WARPS, x = lane + 32 * (i % CHUNKS);
        if (y >= rows || x >= columns) continue;
        const unsigned number = y * PITCH + x, digit = BYTES ? 0 : key_of(sample[i]) >> SORTED_BITS;
        const int place = *counter(sample[i]) + before[i];
        first_pass[BYTES ? slot_of(place) : place] = static_cast<unsigned short>(digit << SORTED_BITS | number);
    }
    if constexpr (!BYTES)
        for (int i = total + thread; i < T::THREADS * EACH; i += T::THREADS) words[i] = 0xFFFF;  // last of all
    __syncthreads();
    for (int i = 4 * thread; i < (rows + columns) * STEP; i += 4 * T::THREADS)
        *reinterpret_cast<uint4*>(sets + i) = {0, 0, 0, 0};
    if constexpr (!BYTES) {
        sort_by_high_bits<WARPS, EACH>(counts, places, column_counts);
        __syncthreads();
    }

    // Of each sample: its bits, and how far to shift ones in each byte to have those of the groups behind it, of four and four.
    unsigned short* codes = words;
    unsigned* const in_columns = sets;
    unsigned* const in_rows = sets + columns * STEP;
    if constexpr (BYTES) __syncthreads();
    for (int place = thread; place < task.rank; place += T::THREADS) codes[places[slot_of(place)]] = 0;
    for (int place = task.rank + 32 * T::WORDS + thread; place < total; place += T::THREADS)
        codes[places[slot_of(place)]] = 32 | 32 << 8;
#pragma unroll
    for (int bit = warp; bit < 32; bit += WARPS) {
        // Lanes take the same bit of different words.
#pragma unroll
        for (int k = 0; k < T::WORDS / 32; ++k) {
            const int word = 32 * k + lane, shift = 8 * (word / (4 * QUADS) + 1);
            if (task.rank + bit + 32 * word >= total) continue;
            const unsigned number = places[slot_of(task.rank + bit) + 34 * word], y = number / PITCH, x = number % PITCH;
            codes[number] = static_cast<unsigned short>(min(shift, 32) | max(shift - 32, 0) << 8);
            atomicOr(in_columns + x * STEP + word, 1u << bit);
            atomicOr(in_rows + y * T::WORDS + word, 1u << bit);
        }
    }
    __syncthreads();
    constexpr int COLUMN_TASKS = 4 * CHUNKS;
    for (int work = warp; work < COLUMN_TASKS + T::WORDS / 16; work += WARPS) {
        if (work < COLUMN_TASKS) {
            count_columns<T>(codes, column_counts, work, columns, task.taps_y);
        } else {
            const int word = (work - COLUMN_TASKS) * 32 + lane;
            if (word < T::WORDS) sum_sets<STEP, ACROSS>(in_columns + word, task.taps_x);
            else sum_sets<T::WORDS, BITSET_ROWS>(in_rows + word - T::WORDS, task.taps_y);
        }
    }
    __syncthreads();
    count_windows<T>(column_counts, counts, task.taps_x);
    __syncthreads();
    out += (static_cast<long long>(y0) * task.out_columns + x0) * task.inner;
    const int end_y = min(task.out_rows - y0, 32), end_x = min(task.out_columns - x0, 64);
#pragma unroll 2
    for (unsigned i = thread; i < BITSET_ROWS * ACROSS; i += T::THREADS) {
        const int y = i / ACROSS, x = i % ACROSS;
        const int place =
            place_of_result<T>(counts + y * T::LINE + 4 * x, in_columns + x * STEP, in_rows + y * T::WORDS, task.rank);
        const Sample found = raw[places[slot_of(place + task.rank)]];
        if (y < end_y && x < end_x) out[(y * task.out_columns + x) * task.inner] = found;
    }
}
