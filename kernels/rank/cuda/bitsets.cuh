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
//   load      samples -> keys                                      all threads
//     |  barrier
//   count     of samples with the same lower 13 bits               atomic: a counter has 16 bits
//     |  barrier
//   sort      by these: scan, scatter, equal ones in any order;    all threads, a barrier after each; of the second pass
//             by the upper 3, if a sample has them, in order       each takes words side by side
//     |  barrier
//   places    a bit each in the sets of its column and its row;    atomic: samples of a column share words
//             its group
//     |  barrier
//   windows   sets of columns -> of windows, likewise of rows;     some warps the sets, others the counts
//             counts before each group down the columns
//     |  barrier
//   counts    along the rows                                       a lane a row
//     |  barrier
//   results   group, word, bit, sample                             two or more a thread
//
// The lines of a tile are filled up to whole warps, so that no branch separates a thread's samples.
//
// A result of 31 x 31 takes about 700 instructions, of which a multiprocessor of an H200 starts 128 a cycle: 1.5 ms of
// 8192 x 8192. For 32 results, shared memory moves about 200 lines of 128 bytes, one a cycle, a third of them for conflicts of
// random places: 1.6 ms; 2.32 ms measured. Two blocks fit; one block of twice the warps and results takes a tenth longer.
//
// Sources: Huang, Yang and Tang, "A fast two-dimensional median filtering algorithm" (1979) for windows as sets of places;
// Satish, Harris and Garland (2009) for the sort.
#pragma once

#include "ordered.cuh"

constexpr int BITSET_ROWS = 32;                        // results of a tile along a column
constexpr int GROUPS = 8;                              // whose counts are the bytes of two words
constexpr int SORTED_BITS = 13, HIGH = 8;              // of the first pass of the sort; digits of the second
constexpr unsigned NUMBERS = (1u << SORTED_BITS) - 1;  // of a sample: y * PITCH + x

struct BitsetsTask : PlanesTask {
    int taps_y, taps_x, inner, rank;
};

// Of a place: those of a bit of neighbouring words, which threads side by side read, lie in different banks.
__device__ inline unsigned slot_of(unsigned place) { return place ^ (place >> 5 & 0x1Eu); }

// Numbers of a tile. CHUNKS: 32 samples of a line each; ACROSS: results of a line; QUADS: four words of a group each.
template <int WARPS, int CHUNKS, int ACROSS, int QUADS>
struct Bitsets {
    static constexpr int THREADS = 32 * WARPS, DIGITS_EACH = (1 << SORTED_BITS) / THREADS;
    static constexpr int PITCH = 32 * CHUNKS;         // of a line of samples
    static constexpr int EACH = 64 / WARPS * CHUNKS;  // samples of a thread
    static constexpr int SAMPLES = THREADS * EACH, LINES = SAMPLES / PITCH;
    static constexpr int WORDS = 4 * QUADS * GROUPS;  // of a set
    static constexpr int STEP = WORDS + 4;            // from one set to the next: four words of neighbours in other banks
    static constexpr int COUNTERS = THREADS * (DIGITS_EACH / 2 + 4);  // words
    static constexpr int RESULTS = ACROSS, GROUP_QUADS = QUADS;
    static constexpr int LINE = (ACROSS + 1) * 2;     // words of a line of counts of windows, of half of the groups
    static constexpr int COLUMN_LINE = PITCH + 1;     // and of counts of columns
    // Words of the parts of shared memory.
    static constexpr int SETS = PITCH * STEP + (LINES + 1) * WORDS;  // one more for places past the last
    static constexpr int PLACES = SAMPLES / 2;
    static constexpr int COUNTS = 2 * BITSET_ROWS * LINE > PLACES ? 2 * BITSET_ROWS * LINE : PLACES;
    static constexpr int COLUMN_COUNTS = 2 * BITSET_ROWS * COLUMN_LINE;
    static_assert(SETS >= COUNTERS + THREADS && DIGITS_EACH == 16 && COUNTERS % (4 * THREADS) == 0 && EACH < 16, "");

    // First byte of a digit's counter of 16 bits. Counters that a thread scans lie side by side; those of threads side by side
    // begin in different banks.
    static __device__ unsigned counter_of(unsigned digit) { return 2 * digit + (digit & ~15u); }
};

// The sum of the lanes up to this one.
__device__ inline unsigned scan_lanes(unsigned sum) {
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2)
        asm volatile("{ .reg .pred is_there; .reg .u32 other; shfl.sync.up.b32 other|is_there, %0, %1, 0, 0xFFFFFFFF; "
                     "@is_there add.u32 %0, %0, other; }" : "+r"(sum) : "r"(apart));
    return sum;
}

// Counts of all digits become those of the digits before.
template <typename T>
__device__ inline void scan_digits(unsigned* counts) {
    const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __shared__ unsigned totals[T::THREADS / 32];
    uint4* mine = reinterpret_cast<uint4*>(counts) + T::counter_of(thread * T::DIGITS_EACH) / 16;
    uint4 four[2] = {mine[0], mine[1]};
    unsigned own = four[0].x + four[0].y + four[0].z + four[0].w + four[1].x + four[1].y + four[1].z + four[1].w;
    own = (own & 0xFFFFu) + (own >> 16);
    unsigned before = scan_lanes(own);
    if (lane == 31) totals[warp] = before;
    __syncthreads();
    unsigned others = lane < warp ? totals[lane] : 0;
#pragma unroll
    for (int apart = 16; apart >= 1; apart /= 2) others += __shfl_xor_sync(~0u, others, apart);
    before = (before + others - own) * 0x10001u;  // in both halves
    const auto scan = [&](unsigned& two) {
        const unsigned all = two * 0x10001u;  // the upper half is the sum of both
        two = two * 0x10000u + before;
        before += __byte_perm(all, 0, 0x3232);
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        scan(four[i].x), scan(four[i].y), scan(four[i].z), scan(four[i].w);
        mine[i] = four[i];
    }
}

// Sorts words by their upper 3 bits, which keeps the order of equal ones. Each thread takes EACH of them, side by side.
template <int WARPS, int EACH>
__device__ inline void sort_by_high_bits(const unsigned* words, unsigned short* sorted) {
    const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __shared__ __align__(8) unsigned short totals[HIGH][WARPS];
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
        count[k] = scan_lanes(own);
        if (lane == 31) {
            totals[k][warp] = static_cast<unsigned short>(count[k]);
            totals[k + 4][warp] = static_cast<unsigned short>(count[k] >> 16);
        }
        count[k] -= own;
    }
    __syncthreads();
    // A lane has the totals of four warps, of one digit; all lanes, those of all in the order of the result.
    static_assert(HIGH * WARPS == 4 * 32, "");
    const uint2 four = *reinterpret_cast<const uint2*>(&totals[lane / 4][lane % 4 * 4]);
    const unsigned two = four.x + four.y, sum = (two & 0xFFFFu) + (two >> 16);
    unsigned before_warp = scan_lanes(sum) - sum;
    if (warp % 4 > 0) before_warp += four.x & 0xFFFFu;
    if (warp % 4 > 1) before_warp += four.x >> 16;
    if (warp % 4 > 2) before_warp += four.y & 0xFFFFu;
    before_warp |= __shfl_down_sync(~0u, before_warp, 4) << 16;  // of even digits, with the next
    const auto starts = [&](int digit) { return __shfl_sync(~0u, before_warp, 4 * digit + warp / 4); };
    const uint4 start = {starts(0), starts(2), starts(4), starts(6)};
    const auto joined = [](unsigned low, unsigned high) { return static_cast<unsigned long long>(high) << 32 | low; };
    const unsigned long long lower =  // of digits 0 to 3, in quarters
        joined(start.x + __byte_perm(count[0], count[1], 0x5410), start.y + __byte_perm(count[2], count[3], 0x5410));
    const unsigned long long upper =
        joined(start.z + __byte_perm(count[0], count[1], 0x7632), start.w + __byte_perm(count[2], count[3], 0x7632));
    const auto first = [&](unsigned half) {  // place of the thread's first word with the digit in bits 13 to 15
        return static_cast<unsigned>((half & 0x8000u ? upper : lower) >> (half >> 9 & 0x30u));
    };
#pragma unroll
    for (int i = 0; i < EACH / 2; ++i) before[i] += __byte_perm(first(word[i]), first(word[i] >> 16), 0x5410);
#pragma unroll
    for (int i = 0; i < EACH / 2; ++i) {
        sorted[slot_of(before[i] & 0xFFFFu)] = static_cast<unsigned short>(word[i] & NUMBERS);
        sorted[slot_of(before[i] >> 16)] = static_cast<unsigned short>(word[i] >> 16 & NUMBERS);
    }
}

// A word of sets, which becomes that of `taps` sets from each on.
template <int STEP, int COUNT>
__device__ inline void sum_sets(unsigned* sets, int taps) {
    unsigned leaves[COUNT - 1], window = 0;
#pragma unroll
    for (int x = 0; x + 1 < COUNT; ++x) {
        leaves[x] = sets[x * STEP];
        if (x < taps) window ^= leaves[x];
    }
    for (int x = COUNT - 1; x < taps; ++x) window ^= sets[x * STEP];
    const unsigned* next = sets + taps * STEP;
    constexpr int BATCH = 8;
#pragma unroll
    for (int first = 0; first < COUNT; first += BATCH) {
        unsigned enters[BATCH];  // loads come before stores, so that they do not wait for each other
#pragma unroll
        for (int i = 0; i < BATCH && first + i + 1 < COUNT; ++i) enters[i] = next[(first + i) * STEP];
#pragma unroll
        for (int i = 0; i < BATCH && first + i + 1 < COUNT; ++i) {
            sets[(first + i) * STEP] = window;
            window ^= leaves[first + i] ^ enters[i];
        }
    }
    sets[(COUNT - 1) * STEP] = window;
}

// Of 32 columns and half of the rows, as `part` says: how many samples of the window's rows lie before each group. A lane goes
// down its column; eight counts are bytes of two words.
template <typename T>
__device__ inline void count_columns(const unsigned char* codes, unsigned* counts, int part, int columns, int taps) {
    constexpr int ROWS = BITSET_ROWS / 2, HALF = BITSET_ROWS * T::COLUMN_LINE;
    const int y = part % 2 * ROWS, x = part / 2 * 32 + threadIdx.x % 32;
    if (x >= columns) return;
    codes += y * T::PITCH + x;
    counts += y * T::COLUMN_LINE + x;
    unsigned lower = 0, upper = 0;
    const auto code = [&](int row) { return static_cast<unsigned>(codes[row * T::PITCH]); };
    const auto change = [&](unsigned shift, unsigned sign) {
        unsigned long long ones;  // a shift by 64 leaves 0
        asm("shl.b64 %0, %1, %2;" : "=l"(ones) : "l"(0x0101010101010101ull), "r"(shift));
        lower += sign * static_cast<unsigned>(ones), upper += sign * static_cast<unsigned>(ones >> 32);
    };
#pragma unroll 4
    for (int row = 0; row < taps; ++row) change(code(row), 1);
    counts[0] = lower, counts[HALF] = upper;
#pragma unroll
    for (int first = 1; first < ROWS; first += 5) {
        unsigned enters[5], leaves[5];  // loads come before stores, so that they do not wait for each other
#pragma unroll
        for (int i = 0; i < 5; ++i) enters[i] = code(first + i + taps - 1), leaves[i] = code(first + i - 1);
#pragma unroll
        for (int i = 0; i < 5; ++i) {
            change(enters[i], 1), change(leaves[i], ~0u);
            counts[(first + i) * T::COLUMN_LINE] = lower, counts[(first + i) * T::COLUMN_LINE + HALF] = upper;
        }
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
    uint2* found = reinterpret_cast<uint2*>(counts + (half * BITSET_ROWS + lane) * T::LINE + x * 2);
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
    uint2 change[PIECE];
#pragma unroll
    for (int i = 1; i < PIECE; ++i) {
        const unsigned enters = from[i + taps - 1], leaves = from[i - 1];
        change[i] = {even(enters) - even(leaves), odd(enters) - odd(leaves)};
    }
#pragma unroll
    for (int i = 1; i < PIECE; ++i) {
        sum.x += change[i].x, sum.y += change[i].y;
        found[i] = sum;
    }
}

// The place of a window's sample of a rank, counted from the first group. `counts`: before groups 0 and 2, 1 and 3; of the
// other half 4 and 6, 5 and 7.
template <typename T>
__device__ inline int place_of_result(const unsigned* counts, const unsigned* in_columns, const unsigned* in_rows, int rank) {
    const uint2 lower = *reinterpret_cast<const uint2*>(counts);
    const uint2 upper = *reinterpret_cast<const uint2*>(counts + BITSET_ROWS * T::LINE);
    const bool is_upper = (upper.x & 0xFFFFu) <= rank;
    const unsigned even = is_upper ? upper.x : lower.x, odd = is_upper ? upper.y : lower.y;
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
    const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int columns = ACROSS + task.taps_x - 1, rows = BITSET_ROWS + task.taps_y - 1, total = rows * columns;
    unsigned* sets = storage;  // of columns, then of lines; first the counters of the sort
    unsigned short* places = reinterpret_cast<unsigned short*>(storage + T::SETS);
    unsigned* counts = reinterpret_cast<unsigned*>(places) + T::PLACES;  // of windows; first words, then codes
    unsigned short* words = reinterpret_cast<unsigned short*>(counts);
    unsigned* column_counts = counts + T::COUNTS;
    Sample* raw = reinterpret_cast<Sample*>(column_counts + T::COLUMN_COUNTS);

    const int y0 = blockIdx.y * BITSET_ROWS, x0 = blockIdx.x * ACROSS;
    const unsigned plane = task.inner == 1 ? blockIdx.z : blockIdx.z / task.inner, within = blockIdx.z - plane * task.inner;
    const auto position = [&](unsigned y, unsigned x) {
        return ((plane * task.rows + y) * task.columns + x) * task.inner + within;
    };

#pragma unroll
    for (int i = 0; i < T::COUNTERS / 4; i += T::THREADS) reinterpret_cast<uint4*>(sets)[thread + i] = {0, 0, 0, 0};
    sets[T::COUNTERS + thread] = T::SAMPLES / 2 + EACH * thread;
    const int top = y0 + task.first_y, left_x = x0 + task.first_x;
    // A thread's samples. Those beyond the tile take part in the sort, but end behind all others.
    Sample sample[EACH];
    const auto number_of = [&](int i) { return warp * PITCH + lane + i / CHUNKS * WARPS * PITCH + 32 * (i % CHUNKS); };
    if (top >= 0 && left_x >= 0 && top + T::LINES <= task.rows && left_x + PITCH <= task.columns) {
        const unsigned from = position(top + warp, left_x + lane), line = WARPS * task.columns * task.inner;
#pragma unroll
        for (int i = 0; i < EACH; ++i) sample[i] = in[from + i / CHUNKS * line + 32 * (i % CHUNKS) * task.inner];
    } else {
#pragma unroll 1
        for (int j = 0; j < CHUNKS; ++j) {
            const int from_x = border_index(left_x + lane + 32 * j, task.columns, task.mode_x);
#pragma unroll 1
            for (int k = 0; k < EACH / CHUNKS; ++k) {
                const int y = warp + k * WARPS;
                const int from_y = border_index(top + y, task.rows, task.mode_y);
                const bool is_beyond = from_y < 0 || from_x < 0;
                raw[y * PITCH + lane + 32 * j] = is_beyond ? cval : in[position(from_y, from_x)];
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) sample[i] = raw[number_of(i)];
    }
    __syncthreads();
    // Counters. Bytes: lanes count apart, so that they do not wait for each other. Samples beyond the tile: the thread's own,
    // which gives them places past the last.
    char* const counters = reinterpret_cast<char*>(sets);
    unsigned counter[EACH], before[EACH];  // before: samples with the same digit
    const int lines = rows - warp;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const unsigned key = key_of(sample[i]);
        const bool is_there = i / CHUNKS * WARPS < (lane + 32 * (i % CHUNKS) < columns ? lines : 0);
        const unsigned at = T::counter_of(BYTES ? key << 5 | lane : key & ((1u << SORTED_BITS) - 1));
        counter[i] = is_there ? at : 4 * (T::COUNTERS + thread);
        before[i] = atomicAdd(reinterpret_cast<unsigned*>(counters + (counter[i] & ~3u)), counter[i] & 2 ? 0x10000u : 1u);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) raw[number_of(i)] = sample[i];
    __syncthreads();
    scan_digits<T>(sets);
    __syncthreads();
    unsigned short* const first_pass = BYTES ? places : words;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        before[i] = __byte_perm(before[i], 0, counter[i] & 2 ? 0x4432 : 0x4410) +
                    *reinterpret_cast<const unsigned short*>(counters + counter[i]);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const unsigned digit = BYTES ? 0 : key_of(sample[i]) >> SORTED_BITS;
        first_pass[BYTES ? slot_of(before[i]) : before[i]] = static_cast<unsigned short>(digit << SORTED_BITS | number_of(i));
    }
    if constexpr (!BYTES) {
#pragma unroll 1
        for (int i = total + thread; i < T::SAMPLES; i += T::THREADS) words[i] = 0xFFFF;  // last of all
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < T::SETS / 4; i += T::THREADS)
        if (i + T::THREADS <= T::SETS / 4 || i + thread < T::SETS / 4) reinterpret_cast<uint4*>(sets)[i + thread] = {0, 0, 0, 0};
    if constexpr (!BYTES) {
        sort_by_high_bits<WARPS, EACH>(counts, places);
        __syncthreads();
    }

    // Of each sample: its bits, and how far to shift ones in each byte to have those of the groups behind it.
    unsigned char* codes = reinterpret_cast<unsigned char*>(words);
    unsigned* const in_columns = sets;
    unsigned* const in_rows = sets + PITCH * STEP;
    if constexpr (BYTES) __syncthreads();
#pragma unroll 1
    for (int place = thread; place < task.rank; place += T::THREADS) codes[places[slot_of(place)]] = 0;
#pragma unroll 1
    for (int place = task.rank + 32 * T::WORDS + thread; place < total; place += T::THREADS)
        codes[places[slot_of(place)]] = 8 * GROUPS;
    // Lanes take the same bit of different words. Places past the last are of a line below the tile.
    constexpr int BITS = 32 / WARPS, TURNS = T::WORDS / 32;
    unsigned number[BITS][TURNS];
#pragma unroll
    for (int i = 0; i < BITS; ++i)
#pragma unroll
        for (int k = 0; k < TURNS; ++k) {
            const int first = task.rank + warp + i * WARPS, word = 32 * k + lane;
            number[i][k] = first + 32 * word < total ? places[slot_of(first + 32 * lane) + 1024 * k] : T::SAMPLES;
        }
#pragma unroll
    for (int i = 0; i < BITS; ++i)
#pragma unroll
        for (int k = 0; k < TURNS; ++k) {
            const unsigned word = 32 * k + lane, y = number[i][k] / PITCH, x = number[i][k] % PITCH;
            if (number[i][k] < T::SAMPLES) codes[number[i][k]] = static_cast<unsigned char>(8 * (word / (4 * QUADS) + 1));
            atomicOr(in_columns + x * STEP + word, 1u << (warp + i * WARPS));
            atomicOr(in_rows + y * T::WORDS + word, 1u << (warp + i * WARPS));
        }
    __syncthreads();
    constexpr int COLUMN_TASKS = 2 * CHUNKS;
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
    constexpr int RESULTS_EACH = BITSET_ROWS * ACROSS / T::THREADS;
    Sample found[RESULTS_EACH];
#pragma unroll
    for (int i = 0; i < RESULTS_EACH; ++i) {
        const unsigned result = threadIdx.x + i * T::THREADS, y = result / ACROSS, x = result % ACROSS;
        const int place =
            place_of_result<T>(counts + y * T::LINE + 2 * x, in_columns + x * STEP, in_rows + y * T::WORDS, task.rank);
        found[i] = raw[places[slot_of(place + task.rank)]];
    }
    __syncwarp();  // results side by side in time: the compiler would put each behind the branch of its store
#pragma unroll
    for (int i = 0; i < RESULTS_EACH; ++i) {
        const unsigned result = threadIdx.x + i * T::THREADS, y = result / ACROSS, x = result % ACROSS;
        if (y0 + y < task.out_rows && x0 + x < task.out_columns)
            out[((plane * task.out_rows + y0 + y) * task.out_columns + x0 + x) * task.inner + within] = found[i];
    }
}
