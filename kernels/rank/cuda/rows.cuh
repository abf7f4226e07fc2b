// Medians of 3 × 3, in one pass down rows of registers. Part of rank.cu.
//
// A lane has 16 bytes of each row, and goes down the rows of a strip, two results of each column at a time. Samples stay in
// words as they lie in memory, two halves that are compared at once; bytes are compared in the upper halves of halves. The
// samples at both sides come from the next lanes, and one more word holds both, so that columns of all are sorted alike:
//
//      rows 0 1 2 3          1 and 2 are sorted for both results; 0 joins them for the first, 3 for the second
//      columns of a result   largest of the three least, middle of the middles, smallest of the largest: the middle of these
//
// 20 minima or maxima and moves a word of two results. Rows of the next two results are on their way meanwhile; lanes wait
// for their neighbours alone, as they exchange samples.
//
// Floors of N samples of b bytes: 2 N b bytes of memory; 12 instructions a result of two lanes, of 64 a multiprocessor and
// cycle: 50 us of 8192 x 8192 on an H200, where 2 N b bytes of 16-bit samples take 64.
#pragma once

#include "gather.cuh"
#include "networks.cuh"
#include "opaque.cuh"

constexpr int ROWS_WARPS = 4;

struct RowsTask : PlanesTask {
    long long planes;
    int strip, strips, across;  // rows of a strip, an even number; strips of a plane; warps of a row
};

// Samples of 16 bytes as the halves of words, in two sets for bytes: of these the even ones come first.
template <typename Sample>
struct Halves {
    static constexpr bool BYTES = sizeof(Sample) == 1;
    static constexpr int WORDS = BYTES ? 8 : 4;
    Two word[WORDS], ends;  // ends: the samples before and after
};

template <typename Sample>
__device__ inline Two low_of(Two a, Two b) {
    if constexpr (same<Sample, short>) return {__vmins2(a.bits, b.bits)};
    else return low(a, b);
}
template <typename Sample>
__device__ inline Two high_of(Two a, Two b) {
    if constexpr (same<Sample, short>) return {__vmaxs2(a.bits, b.bits)};
    else return high(a, b);
}

// The upper half of a, then the lower one of b.
__device__ inline Two between(Two a, Two b) { return {__byte_perm(a.bits, b.bits, 0x5432)}; }

template <typename Sample>
__device__ inline Two middle_of(Two a, Two b, Two c) {
    return high_of<Sample>(low_of<Sample>(a, b), low_of<Sample>(high_of<Sample>(a, b), c));
}

// Calls use(word, left, right, k) for every word k and those of the samples to its sides.
template <typename Sample, typename Use>
__device__ inline void with_sides(const Halves<Sample> x, Use use) {
    const Two first = {x.ends.bits << 16};
    if constexpr (Halves<Sample>::BYTES) {
        // Samples 4 k and 4 k + 2, and 4 k + 1 and 4 k + 3.
        const Two last = {x.ends.bits >> 16};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const Two even = x.word[k], odd = x.word[4 + k];
            use(even, between(k == 0 ? first : x.word[k + 3], odd), odd, k);
            use(odd, even, between(even, k == 3 ? last : x.word[k + 1]), 4 + k);
        }
    } else {
        Two left = between(first, x.word[0]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const Two right = k == 3 ? Two{__byte_perm(x.word[3].bits, x.ends.bits, 0x7632)} : between(x.word[k], x.word[k + 1]);
            use(x.word[k], left, right, k);
            left = right;
        }
    }
}

// median_rows: a warp a strip. Rows are multiples of 16 bytes, aligned, and results lie at their centres; no warp has one
// lane alone. So many blocks a multiprocessor hide the time that loads take.
template <typename Sample>
__global__ void __launch_bounds__(32 * ROWS_WARPS, Halves<Sample>::BYTES ? 5 : 8) median_rows(
    const Sample* __restrict__ in, Sample* __restrict__ out, const __grid_constant__ RowsTask task, Sample cval) {
    using Row = Halves<Sample>;
    constexpr int SAMPLES = 16 / sizeof(Sample), WORDS = Row::WORDS;
    struct Raw {
        uint4 samples;
        Sample edge;
    };
    const int lane = threadIdx.x;
    long long rest = blockIdx.x * static_cast<long long>(blockDim.y) + threadIdx.y;
    if (rest >= task.planes * task.strips * task.across) return;
    const int x = (static_cast<int>(rest % task.across) * 32 + lane) * SAMPLES;
    rest /= task.across;
    const int y0 = static_cast<int>(rest % task.strips) * task.strip, y1 = min(y0 + task.strip, task.out_rows);
    const bool is_held = x < task.columns, is_last = is_held && (lane == 31 || x + SAMPLES >= task.columns);
    // The sample beside the warp's, to the left of its first lane and to the right of its last, which is another.
    const int side = border_index(lane == 0 ? x - 1 : x + SAMPLES, task.columns, task.mode_x);
    const bool loads_edge = (lane == 0 || is_last) && side >= 0;
    in += rest / task.strips * task.rows * task.columns;
    const int pitch = task.columns * static_cast<int>(sizeof(Sample));
    const char* const own = opaque(reinterpret_cast<const char*>(in + x));
    const char* const beside = opaque(reinterpret_cast<const char*>(in + side));
    char* target = reinterpret_cast<char*>(out + (rest / task.strips * task.out_rows + y0) * task.columns + x);
    const unsigned beyond = static_cast<unsigned>(cval) & ((1u << 8 * sizeof(Sample)) - 1);
    const auto fetch = [&](int y) {
        const int from_y = border_index(y + task.first_y, task.rows, task.mode_y);
        Raw raw;
        if (from_y < 0) {
            const unsigned word = beyond * (sizeof(Sample) == 1 ? 0x01010101u : 0x00010001u);
            raw.samples = {word, word, word, word};
            raw.edge = cval;
            return raw;
        }
        const long long from = static_cast<long long>(from_y) * pitch;
        if (is_held) raw.samples = __ldg(reinterpret_cast<const uint4*>(own + from));
        if (loads_edge) raw.edge = __ldg(reinterpret_cast<const Sample*>(beside + from));
        return raw;
    };
    const auto row_of = [&](const Raw& raw) {
        const unsigned words[4] = {raw.samples.x, raw.samples.y, raw.samples.z, raw.samples.w};
        unsigned first = __shfl_up_sync(~0u, words[3], 1), last = __shfl_down_sync(~0u, words[0], 1);
        constexpr int BITS = 8 * sizeof(Sample);
        const unsigned edge = static_cast<unsigned>(loads_edge ? raw.edge : cval);
        if (lane == 0) first = edge << (32 - BITS);
        if (is_last) last = edge;
        Row row;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if constexpr (Row::BYTES) row.word[k] = {words[k] << 8}, row.word[4 + k] = {words[k]};
            else row.word[k] = {words[k]};
        }
        // Bytes: the upper ones of the halves.
        row.ends = {__byte_perm(first, last, Row::BYTES ? 0x4030 : 0x5432)};
        return row;
    };
    const auto store = [&](char* to, const Row& row) {
        uint4 found;
        unsigned* words = &found.x;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            words[k] = Row::BYTES ? __byte_perm(row.word[k % WORDS].bits, row.word[(4 + k) % WORDS].bits, 0x7351)
                                  : row.word[k].bits;
        *reinterpret_cast<uint4*>(to) = found;
    };
    // Of columns of which two samples are sorted, and the third: both ends of the word are columns as well.
    const auto medians = [&](const Row& lower, const Row& upper, const Row& third) {
        Row least, middle, most, found;
        const auto column = [&](Two a, Two b, Two c, Two& x, Two& y, Two& z) {
            x = low_of<Sample>(a, c);
            y = high_of<Sample>(a, low_of<Sample>(b, c));
            z = high_of<Sample>(b, c);
        };
#pragma unroll
        for (int k = 0; k < WORDS; ++k)
            column(lower.word[k], upper.word[k], third.word[k], least.word[k], middle.word[k], most.word[k]);
        column(lower.ends, upper.ends, third.ends, least.ends, middle.ends, most.ends);
        with_sides(least, [&](Two a, Two b, Two c, int k) { least.word[k] = high_of<Sample>(high_of<Sample>(a, b), c); });
        with_sides(middle, [&](Two a, Two b, Two c, int k) { middle.word[k] = middle_of<Sample>(a, b, c); });
        with_sides(most, [&](Two a, Two b, Two c, int k) { most.word[k] = low_of<Sample>(low_of<Sample>(a, b), c); });
#pragma unroll
        for (int k = 0; k < WORDS; ++k)
            found.word[k] = middle_of<Sample>(least.word[k], middle.word[k], most.word[k]);
        return found;
    };
    Row first = row_of(fetch(y0)), second = row_of(fetch(y0 + 1));
    Raw third_raw = fetch(y0 + 2), fourth_raw = fetch(y0 + 3);
#pragma unroll 1
    for (int y = y0; y < y1; y += 2) {
        const Row third = row_of(third_raw), fourth = row_of(fourth_raw);
        third_raw = fetch(y + 4);
        fourth_raw = fetch(y + 5);
        Row lower, upper;
#pragma unroll
        for (int k = 0; k < WORDS; ++k) {
            lower.word[k] = low_of<Sample>(second.word[k], third.word[k]);
            upper.word[k] = high_of<Sample>(second.word[k], third.word[k]);
        }
        lower.ends = low_of<Sample>(second.ends, third.ends);
        upper.ends = high_of<Sample>(second.ends, third.ends);
        const Row one = medians(lower, upper, first), two = medians(lower, upper, fourth);
        if (is_held) store(target, one);
        if (is_held && y + 1 < y1) store(target + pitch, two);
        target += 2ll * pitch;
        first = third;
        second = fourth;
    }
}
