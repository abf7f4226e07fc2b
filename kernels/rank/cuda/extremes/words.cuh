// Words of several samples and their minima and maxima, and those of windows along rows of pixels with channels. Part of
// rank.cu; box.cuh and strip.cuh have those of other rows.
//
//   extreme_rows      along rows of words in shared memory, by doubling: M(2m)[i] = min(M(m)[i], M(m)[i + m]); the last
//                     step overlaps. A thread keeps its words in registers, and reads from its neighbours:
//
//                     all threads    a line -> shared memory
//                       |  barrier
//                     each thread    its words and those `m` behind -> minima, in registers      for each doubling
//                       |  barrier     all have read
//                     each thread    minima -> shared memory
//                       |  barrier     the next doubling, or the next line
//
// Floors of a pass over N samples of b bytes: 2 N b bytes of memory, 3 N b bytes of shared memory for each step of doubling.
#pragma once

#include "cuda/keys.cuh"
#include "borders.cuh"

constexpr int ROW_THREADS = 256, ROW_WORDS = 16;

struct ExtremesTask {
    long long planes, inner, pieces;  // pieces: of a line of results
    int length, out_length, first;    // first: position of the first sample of the first window
    int piece;                        // results of a piece; in extreme_rows, samples of all channels
    int taps, mode;
    int is_first, is_last;  // pass
    int omit_nan, has_nodata;
};

template <typename Sample>
struct ExtremeWord {
    using type = unsigned;
};
template <>
struct ExtremeWord<double> {
    using type = unsigned long long;
};
template <typename Sample>
using Word = typename ExtremeWord<Sample>::type;

template <typename Sample>
constexpr int SAMPLES_A_WORD = sizeof(Word<Sample>) / sizeof(Sample);

template <typename Sample, bool LEAST>
__device__ inline Word<Sample> extreme(Word<Sample> a, Word<Sample> b) {
    if constexpr (sizeof(Sample) == 1) {
        // As two pairs of 16 bits, each decided by its upper byte.
        const unsigned odd = LEAST ? __vminu2(a, b) : __vmaxu2(a, b);
        const unsigned even = LEAST ? __vminu2(a << 8, b << 8) : __vmaxu2(a << 8, b << 8);
        return __byte_perm(odd, even, 0x3715);
    } else if constexpr (same<Sample, short>) {
        return LEAST ? __vmins2(a, b) : __vmaxs2(a, b);
    } else if constexpr (sizeof(Sample) == 2) {
        return LEAST ? __vminu2(a, b) : __vmaxu2(a, b);
    } else {
        return LEAST ? min(a, b) : max(a, b);
    }
}

template <typename Sample>
__device__ inline Word<Sample> bits_of(Sample sample) {
    if constexpr (same<Sample, float>) return __float_as_uint(sample);
    else if constexpr (same<Sample, double>) return __double_as_longlong(sample);
    else if constexpr (same<Sample, short>) return static_cast<unsigned short>(sample);
    else return sample;
}

template <typename Sample>
__device__ inline Sample sample_in(Word<Sample> word, int i) {
    if constexpr (same<Sample, float>) return __uint_as_float(word);
    else if constexpr (same<Sample, double>) return __longlong_as_double(word);
    else return static_cast<Sample>(word >> i * 8 * sizeof(Sample));
}

// The word at any address of a sample. Reads no sample behind it, unless a whole word follows in the array.
template <typename Sample>
__device__ inline Word<Sample> word_at(const Sample* at, bool more_follow) {
    const unsigned past = reinterpret_cast<unsigned long long>(at) % sizeof(Word<Sample>);
    const Word<Sample>* words = reinterpret_cast<const Word<Sample>*>(reinterpret_cast<const unsigned char*>(at) - past);
    if (SAMPLES_A_WORD<Sample> == 1 || past == 0) return __ldg(words);
    if (more_follow) return __funnelshift_r(__ldg(words), __ldg(words + 1), past * 8);
    Word<Sample> word = 0;
#pragma unroll
    for (int i = 0; i < SAMPLES_A_WORD<Sample>; ++i) word |= bits_of(__ldg(at + i)) << i * 8 * static_cast<int>(sizeof(Sample));
    return word;
}

// What a word of samples becomes in the first pass, and a result in the last.
template <typename Sample, bool LEAST>
struct Coding {
    Sample nodata, empty;
    int omit_nan, has_nodata;
    static constexpr Word<Sample> SPREADS = LEAST ? 0 : ~Word<Sample>(0), IS_LEFT_OUT = ~SPREADS;

    __device__ Word<Sample> encode(Word<Sample> word) const {
        if constexpr (same<Sample, float> || same<Sample, double>) {
            const Sample sample = sample_in<Sample>(word, 0);
            if (is_nan(sample)) return omit_nan ? IS_LEFT_OUT : SPREADS;
            if (has_nodata && sample == nodata) return IS_LEFT_OUT;
            return key_of(sample);
        } else {
            return word;
        }
    }
    __device__ Word<Sample> decode(Word<Sample> word) const {
        if constexpr (same<Sample, float> || same<Sample, double>) {
            if (word == IS_LEFT_OUT) return bits_of(empty);
            return bits_of(word == SPREADS ? not_a_number<Sample>() : sample_of<Sample>(word));
        } else {
            return word;
        }
    }
};

// The same sample in all places of a word.
template <typename Sample>
__device__ inline Word<Sample> filled(Sample sample) {
    const Word<Sample> bits = bits_of(sample);
    if constexpr (sizeof(Sample) == 1) return bits * 0x01010101u;
    else if constexpr (sizeof(Sample) == 2) return bits * 0x00010001u;
    else return bits;
}

// Not inlined: rare, and long.
static __device__ __noinline__ int index_beyond(int at, int length, int mode) { return border_index(at, length, mode); }

// A word of which some samples come from beyond the edge of a row of `length` pixels; `at` is its first sample.
template <typename Sample>
__device__ __noinline__ Word<Sample> word_beyond(const Sample* row, long long at, int length, int inner, int mode, Sample cval) {
    Word<Sample> word = 0;
#pragma unroll 1
    for (int i = SAMPLES_A_WORD<Sample> - 1; i >= 0; --i) {
        int pixel = static_cast<int>((at + i) / inner), channel = static_cast<int>((at + i) % inner);
        if (channel < 0) --pixel, channel += inner;
        pixel = border_index(pixel, length, mode);
        const Sample sample = pixel < 0 ? cval : row[static_cast<long long>(pixel) * inner + channel];
        if constexpr (SAMPLES_A_WORD<Sample> > 1) word <<= 8 * sizeof(Sample);
        word |= bits_of(sample);
    }
    return word;
}

// The samples of a word that lie in begin … end of a line.
template <typename Sample>
__device__ __noinline__ void store_some(Sample* line, long long at, Word<Sample> word, long long begin, long long end) {
#pragma unroll 1
    for (int i = 0; i < SAMPLES_A_WORD<Sample>; ++i)
        if (at + i >= begin && at + i < end) line[at + i] = sample_in<Sample>(word, i);
}

template <typename Sample, bool LEAST>
__global__ void __launch_bounds__(ROW_THREADS) extreme_rows(
    const Sample* __restrict__ in, Sample* __restrict__ out, ExtremesTask task, Sample cval, Sample nodata, Sample empty) {
    constexpr int EACH = SAMPLES_A_WORD<Sample>;
    extern __shared__ unsigned long long shared[];
    Word<Sample>* line = reinterpret_cast<Word<Sample>*>(shared);
    const int threads = blockDim.x, inner = static_cast<int>(task.inner);
    const Coding<Sample, LEAST> coding = {nodata, empty, task.omit_nan, task.has_nodata};
    const long long row = task.length * task.inner, out_row = task.out_length * task.inner;
    for (long long block = blockIdx.x; block < task.planes * task.pieces; block += gridDim.x) {
        const long long begin = block % task.pieces * task.piece, plane = block / task.pieces;
        const long long end = min(begin + task.piece, out_row);
        const Sample* from = in + plane * row;
        Sample* to = out + plane * out_row;
        // Words lie as in the output, so that it is written by whole ones.
        const int before = reinterpret_cast<unsigned long long>(to + begin) % sizeof(Word<Sample>) / sizeof(Sample);
        const long long grid = begin - before;
        const int needed = static_cast<int>(end - grid + (task.taps - 1) * inner + EACH - 1) / EACH;
#pragma unroll 4
        for (int w = threadIdx.x; w < needed; w += threads) {
            const long long at = grid + w * EACH + task.first * inner;
            Word<Sample> word;
            if (at >= 0 && at + EACH <= row) word = word_at(from + at, at + 2 * EACH <= row);
            else word = word_beyond(from, at, task.length, inner, task.mode, cval);
            line[w] = task.is_first ? coding.encode(word) : word;
        }
        __syncthreads();
        Word<Sample> own[ROW_WORDS];
#pragma unroll
        for (int v = 0; v < ROW_WORDS; ++v) own[v] = line[v * threads + threadIdx.x];
        for (int span = 1; span < task.taps;) {
            const int step = min(span, task.taps - span), shift = step * inner / EACH;
            const int bits = step * inner % EACH * 8 * static_cast<int>(sizeof(Sample));
#pragma unroll
            for (int v = 0; v < ROW_WORDS; ++v) {
                const int w = v * threads + threadIdx.x + shift;
                if (w >= needed) continue;
                Word<Sample> other = line[w];
                if constexpr (EACH > 1)
                    if (bits != 0) other = __funnelshift_r(other, line[min(w + 1, needed - 1)], bits);
                own[v] = extreme<Sample, LEAST>(own[v], other);
            }
            __syncthreads();
            span += step;
            if (span < task.taps) {
#pragma unroll
                for (int v = 0; v < ROW_WORDS; ++v) line[v * threads + threadIdx.x] = own[v];
                __syncthreads();
            }
        }
#pragma unroll
        for (int v = 0; v < ROW_WORDS; ++v) {
            const long long at = grid + (v * threads + threadIdx.x) * EACH;
            const Word<Sample> word = task.is_last ? coding.decode(own[v]) : own[v];
            if (at >= begin && at + EACH <= end) *reinterpret_cast<Word<Sample>*>(to + at) = word;
            else if (at + EACH > begin && at < end) store_some(to, at, word, begin, end);
        }
        __syncthreads();  // the next line is loaded over this one
    }
}
