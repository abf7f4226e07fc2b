// Minima and maxima of boxes of two axes, in one pass over memory. Part of rank.cu.
//
// A block goes through a band of rows of one tile of columns, four or eight rows at a time; every other band goes upwards, so
// that neighbours read the rows that both need at the same time. A thread has 16 bytes of each row, whose samples lie side
// by side in words and are compared at once. A window's minimum is that of three values, however large it is (after van
// Herk; Gil and Werman):
//
//        | x x x x | x x x x | x x x x | x x x x |       suffix of the run it begins in, minimum to the run's end
//              [ - - - - - - - - - - - - - ]             middle of the whole runs between
//               suffix | middle . . . . |prefix          prefix of the run it ends in, minimum from its start
//
//   each thread      down the columns. Windows of up to eight rows: runs of two, whose suffixes lie in shared memory, a
//                    ring for each thread. Larger ones: the rows at which the windows of these four or eight begin are
//                    loaded once more, and the middle is the same for all; the ring has two vectors for each four or
//                    eight rows, so that a thread's memory is half or a quarter of the window.
//        |           The next rows are on their way from here on.
//        |  barrier    each waits for all others of the block
//   each thread      along the rows. Runs of 16 bytes, a thread's own; it reads the others' from shared memory. Windows
//                    shorter than two runs are doubled in registers instead: M(2m)[i] = min(M(m)[i], M(m)[i + m]).
//                    Where a row begins, in the input and in the output, only changes by how many samples both are
//        |           shifted.
//        |  barrier    before the next rows take their place
//
// The largest windows take two passes: the second over the results of the first, every `step`-th row of them, and the
// larger or smaller of two that lie `pair` samples apart.
//
// Floats become integers of the same order (keys.cuh) in the first pass, and floats again in the last; a NaN is the least
// or the largest of them, depending on whether it spreads to its windows or is left out.
//
// Floors of N samples of b bytes: 2 N b bytes of memory, 3 N b if more than eight rows are loaded twice and L2 has lost them,
// and N b more if an image is subtracted; of 16 bits about 110 instructions for each eight samples, of 4 a multiprocessor
// and cycle: 40 us of 8192 x 8192 on an H200, where 2 N b bytes take 65.
#pragma once

#include "extremes.cuh"

constexpr int BOX_THREADS = 256;

struct BoxTask {
    long long planes, in_plane, out_plane, in_pitch, out_pitch;  // samples from plane to plane, and from row to row
    long long image_plane, image_pitch;                         // of an image that is subtracted
    long long columns, out_columns;
    long long tile;                    // results of a tile
    int rows, out_rows, tiles, bands;  // bands of each phase
    int band;                          // rows of results of a band
    int first_y, first_x, mode_y, mode_x;
    int taps_y, taps_x, step, pair;
    int slots;  // of a ring
    int is_first, is_last, omit_nan, has_nodata;
    int aligned_in, aligned_out;
    int subtracts;  // 1: the results from an image, 2: an image from the results
};

template <typename Sample>
struct __align__(16) Vector {
    static constexpr int WORDS = 16 / sizeof(Word<Sample>), SAMPLES = 16 / sizeof(Sample);
    Word<Sample> word[WORDS];
};

// A vector as it is compared: bytes as two words, each of which decides by the upper bytes of its halves.
template <typename Sample>
struct Lanes {
    Word<Sample> word[Vector<Sample>::WORDS];
};
template <>
struct Lanes<unsigned char> {
    unsigned odd[4], even[4];
};

template <typename Sample>
__device__ inline Lanes<Sample> widened(const Vector<Sample>& vector) {
    Lanes<Sample> lanes;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
        if constexpr (sizeof(Sample) == 1) lanes.odd[k] = vector.word[k], lanes.even[k] = vector.word[k] << 8;
        else lanes.word[k] = vector.word[k];
    }
    return lanes;
}

template <typename Sample>
__device__ inline Vector<Sample> narrowed(const Lanes<Sample>& lanes) {
    Vector<Sample> vector;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
        if constexpr (sizeof(Sample) == 1) vector.word[k] = __byte_perm(lanes.odd[k], lanes.even[k], 0x3715);
        else vector.word[k] = lanes.word[k];
    }
    return vector;
}

template <bool LEAST>
__device__ inline unsigned extreme_halves(unsigned a, unsigned b) {
    return LEAST ? __vminu2(a, b) : __vmaxu2(a, b);
}

template <bool LEAST, typename Sample>
__device__ inline Lanes<Sample> extreme(const Lanes<Sample>& a, const Lanes<Sample>& b) {
    Lanes<Sample> found;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
        if constexpr (sizeof(Sample) == 1) {
            found.odd[k] = extreme_halves<LEAST>(a.odd[k], b.odd[k]);
            found.even[k] = extreme_halves<LEAST>(a.even[k], b.even[k]);
        } else {
            found.word[k] = extreme<Sample, LEAST>(a.word[k], b.word[k]);
        }
    }
    return found;
}

template <bool LEAST, typename Sample>
__device__ inline Vector<Sample> extreme(const Vector<Sample>& a, const Vector<Sample>& b) {
    return narrowed(extreme<LEAST>(widened(a), widened(b)));
}

// The word that loses every comparison.
template <typename Sample, bool LEAST>
__device__ inline Word<Sample> neutral() {
    if constexpr (same<Sample, short>) return LEAST ? 0x7FFF7FFFu : 0x80008000u;
    else return LEAST ? ~Word<Sample>(0) : 0;
}

template <int N>
struct Number {
    static constexpr int value = N;
};

// The words that begin `by` samples after x, fewer than a vector has. `by` is the same for all threads.
template <typename Sample, int N, int M>
__device__ inline void shift(const Word<Sample> (&x)[N], int by, Word<Sample> (&found)[M]) {
    constexpr int EACH = SAMPLES_A_WORD<Sample>;
    static_assert(N - M >= Vector<Sample>::WORDS, "");
    const int bits = by % EACH * 8 * static_cast<int>(sizeof(Sample));
    const auto take = [&](auto words) {
#pragma unroll
        for (int k = 0; k < M; ++k) {
            const int at = k + words.value;
            if constexpr (EACH == 1) found[k] = x[at];
            else found[k] = __funnelshift_r(x[at], x[at + 1 < N ? at + 1 : at], bits);
        }
    };
    switch (by / EACH) {
        case 0: return take(Number<0>());
        case 1: return take(Number<1>());
        case 2: return take(Number<Vector<Sample>::WORDS == 2 ? 1 : 2>());
        default: return take(Number<Vector<Sample>::WORDS == 2 ? 1 : 3>());
    }
}

template <typename Sample>
__device__ inline Vector<Sample> shifted(const Vector<Sample>& a, const Vector<Sample>& b, int by) {
    constexpr int WORDS = Vector<Sample>::WORDS;
    Word<Sample> x[2 * WORDS];
#pragma unroll
    for (int k = 0; k < WORDS; ++k) x[k] = a.word[k], x[WORDS + k] = b.word[k];
    Vector<Sample> found;
    shift<Sample>(x, by, found.word);
    return found;
}

// Of each sample of a vector, the extreme of it and those after it; with FORWARDS, of it and those before it.
template <bool LEAST, bool FORWARDS, typename Sample>
__device__ inline Vector<Sample> scanned(const Vector<Sample>& vector) {
    constexpr int WORDS = Vector<Sample>::WORDS, EACH = SAMPLES_A_WORD<Sample>;
    constexpr int FIRST = FORWARDS ? 0 : WORDS - 1, ON = FORWARDS ? 1 : -1;
    const Word<Sample> none = neutral<Sample, LEAST>();
    if constexpr (EACH == 4) {
        // Chains of each byte's place; `both` of neighbouring bytes; then the words to the side.
        Lanes<Sample> chain = widened(vector), found;
        unsigned before = none;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int k = FIRST + i * ON;
            if (i > 0) {
                chain.odd[k] = extreme_halves<LEAST>(chain.odd[k], chain.odd[k - ON]);
                chain.even[k] = extreme_halves<LEAST>(chain.even[k], chain.even[k - ON]);
            }
            const unsigned both = extreme_halves<LEAST>(chain.odd[k], chain.even[k]);
            const unsigned aside = FORWARDS ? __byte_perm(before, both, 0x5432) : __byte_perm(both, before, 0x5432);
            const unsigned near = extreme_halves<LEAST>(both, aside);
            const unsigned far = extreme_halves<LEAST>(aside, before);
            found.odd[k] = FORWARDS ? near : extreme_halves<LEAST>(chain.odd[k], far);
            found.even[k] = FORWARDS ? extreme_halves<LEAST>(chain.even[k], far) : near;
            before = both;
        }
        return narrowed(found);
    } else {
        Vector<Sample> found = vector;
        Word<Sample> before = none;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int k = FIRST + i * ON;
            const Word<Sample> chain = i == 0 ? vector.word[k] : extreme<Sample, LEAST>(vector.word[k], before);
            if constexpr (EACH == 1) {
                found.word[k] = chain;
            } else {
                const unsigned aside = FORWARDS ? __byte_perm(before, chain, 0x5432) : __byte_perm(chain, before, 0x5432);
                found.word[k] = extreme<Sample, LEAST>(chain, aside);
            }
            before = chain;
        }
        return found;
    }
}

template <bool LEAST, typename Sample>
__device__ inline Vector<Sample> extreme3(const Vector<Sample>& a, const Vector<Sample>& b, const Vector<Sample>& c) {
    return narrowed(extreme<LEAST>(extreme<LEAST>(widened(a), widened(b)), widened(c)));
}

// The first sample of a word in all its places.
template <typename Sample>
__device__ inline Word<Sample> first_of(Word<Sample> word) {
    if constexpr (SAMPLES_A_WORD<Sample> == 4) return __byte_perm(word, 0, 0x0000);
    else if constexpr (SAMPLES_A_WORD<Sample> == 2) return __byte_perm(word, 0, 0x1010);
    else return word;
}

template <typename Sample>
__device__ inline Vector<Sample> splat(Word<Sample> word) {
    Vector<Sample> vector;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) vector.word[k] = word;
    return vector;
}

// One step of doubling over words: x[i] = the extreme of x[i] and what is BY samples after it.
template <int BY, bool LEAST, typename Sample, int N>
__device__ inline void doubled(Word<Sample> (&x)[N]) {
    constexpr int EACH = SAMPLES_A_WORD<Sample>;
#pragma unroll
    for (int k = 0; k < N; ++k) {
        if constexpr (BY >= EACH) {
            if (k + BY / EACH < N) x[k] = extreme<Sample, LEAST>(x[k], x[k + BY / EACH]);
        } else {
            const Word<Sample> next = x[k + 1 < N ? k + 1 : k];
            x[k] = extreme<Sample, LEAST>(x[k], __byte_perm(x[k], next, EACH == 2 || BY == 2 ? 0x5432 : 0x4321));
        }
    }
}

// The extremes of windows of `taps` samples that begin at the first vector of x and end in its last.
template <bool LEAST, typename Sample, int N>
__device__ inline Vector<Sample> of_short(Word<Sample> (&x)[N], int taps) {
    constexpr int SAMPLES = Vector<Sample>::SAMPLES;
    int span = 1;
    if (taps >= 2) doubled<1, LEAST, Sample>(x), span = 2;
    if constexpr (SAMPLES >= 4)
        if (taps >= 4) doubled<2, LEAST, Sample>(x), span = 4;
    if constexpr (SAMPLES >= 8)
        if (taps >= 8) doubled<4, LEAST, Sample>(x), span = 8;
    if constexpr (SAMPLES >= 16)
        if (taps >= 16) doubled<8, LEAST, Sample>(x), span = 16;
    Vector<Sample> found;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) found.word[k] = x[k];
    Vector<Sample> last;
    shift<Sample>(x, taps - span, last.word);
    return extreme<LEAST>(found, last);
}

// Down the columns, windows of up to SHORT rows: `head` is the slot of the first row. A ring holds the suffixes of runs.
template <bool LEAST, typename Sample, int ROWS>
__device__ inline void few_down(Vector<Sample> (&row)[ROWS], Vector<Sample>* ring, int& head, const BoxTask& task) {
    using Many = Lanes<Sample>;
    const int threads = blockDim.x, slots = task.slots;
    const int runs = task.taps_y / 2;  // of two rows; a window begins as many runs before that of its end
    const bool within = task.taps_y % 2 == 0;  // the first row's window begins at the second row of its run
    const auto wrapped = [&](int slot) { return slot >= slots ? slot - slots : slot; };
#pragma unroll
    for (int base = 0; base < ROWS; base += 2) {
        const Many first = widened(row[base]), second = widened(row[base + 1]), both = extreme<LEAST>(first, second);
        ring[head * threads] = narrowed(both);
        ring[(head + 1) * threads] = row[base + 1];
        const int begin = wrapped(head + slots - (task.taps_y - 1));
        int slot = wrapped(begin - within + 4);
        Many middle = widened(splat<Sample>(neutral<Sample, LEAST>()));
#pragma unroll 1
        for (int k = 2; k < runs; ++k) {
            middle = extreme<LEAST>(middle, widened(ring[slot * threads]));
            slot = wrapped(slot + 2);
        }
        Many all = middle;
        if (runs >= 2) all = extreme<LEAST>(middle, widened(ring[wrapped(begin - within + 2) * threads]));
        const Many left = widened(ring[begin * threads]), right = widened(ring[wrapped(begin + 1) * threads]);
        row[base] = narrowed(extreme<LEAST>(extreme<LEAST>(first, left), all));
        row[base + 1] = narrowed(extreme<LEAST>(extreme<LEAST>(both, right), within ? middle : all));
        head = wrapped(head + 2);
    }
}

// The same for windows of more than ROWS rows: `old` are the rows at which the windows of `row` begin, and become the results
// if any window ends here. The ring has two vectors of each whole group: that of all its rows, and of those from
// `within` on.
template <bool LEAST, typename Sample, int ROWS>
__device__ inline void many_down(const Vector<Sample> (&row)[ROWS], Vector<Sample> (&old)[ROWS], bool ends, Vector<Sample>* ring,
                                 int& head, const BoxTask& task) {
    using Many = Lanes<Sample>;
    const int threads = blockDim.x, groups = task.slots, within = groups * ROWS - (task.taps_y - 1);
    if (ends) {
        Many suffix = widened(splat<Sample>(neutral<Sample, LEAST>()));
        int slot = head, part = 1;
#pragma unroll 4
        for (int k = 1; k < groups; ++k) {
            if (++slot == groups) slot = 0;
            suffix = extreme<LEAST>(suffix, widened(ring[(2 * slot + part) * threads]));
            part = 0;
        }
#pragma unroll
        for (int j = ROWS - 1; j >= 0; --j) {
            suffix = extreme<LEAST>(suffix, widened(old[j]));
            old[j] = narrowed(suffix);
        }
    }
    Many last = widened(row[ROWS - 1]), prefix = widened(row[0]);
#pragma unroll
    for (int j = ROWS - 2; j >= 0; --j)
        if (j >= within) last = extreme<LEAST>(last, widened(row[j]));
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
        if (j > 0) prefix = extreme<LEAST>(prefix, widened(row[j]));
        old[j] = narrowed(extreme<LEAST>(widened(old[j]), prefix));
    }
    ring[2 * head * threads] = narrowed(prefix);
    ring[(2 * head + 1) * threads] = narrowed(last);
    if (++head == groups) head = 0;
}

template <typename Sample>
__device__ inline Vector<Sample> loaded_vector(const Sample* at) {
    Vector<Sample> found;
    if constexpr (sizeof(Word<Sample>) == 8) {
        const ulonglong2 both = __ldg(reinterpret_cast<const ulonglong2*>(at));
        found.word[0] = both.x, found.word[1] = both.y;
    } else {
        const uint4 all = __ldg(reinterpret_cast<const uint4*>(at));
        found.word[0] = all.x, found.word[1] = all.y, found.word[2] = all.z, found.word[3] = all.w;
    }
    return found;
}

// The vector at any address of a sample: of both vectors that hold a part of it if samples follow, or word by word.
template <typename Sample>
__device__ inline Vector<Sample> vector_at(const Sample* at, bool more_follow) {
    const int past = static_cast<int>(reinterpret_cast<unsigned long long>(at) % 16 / sizeof(Sample));
    if (past == 0) return loaded_vector(at);
    if (more_follow) return shifted(loaded_vector(at - past), loaded_vector(at - past + Vector<Sample>::SAMPLES), past);
    Vector<Sample> found;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) found.word[k] = word_at(at + k * SAMPLES_A_WORD<Sample>);
    return found;
}

template <typename Sample>
__device__ inline void store_vector(Sample* at, const Vector<Sample>& found) {
    if constexpr (sizeof(Word<Sample>) == 8) *reinterpret_cast<ulonglong2*>(at) = {found.word[0], found.word[1]};
    else *reinterpret_cast<uint4*>(at) = {found.word[0], found.word[1], found.word[2], found.word[3]};
}

// The vector at x of a line, of samples from beyond its ends. `from` holds where each comes from, a negative one from outside.
template <typename Sample>
__device__ __noinline__ Vector<Sample> gathered(const Sample* line, const int* from, Sample cval) {
    Vector<Sample> found;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
        Word<Sample> word = 0;
#pragma unroll
        for (int i = SAMPLES_A_WORD<Sample> - 1; i >= 0; --i) {
            const int at = from[(k * SAMPLES_A_WORD<Sample> + i) * blockDim.x];
            if constexpr (SAMPLES_A_WORD<Sample> > 1) word <<= 8 * sizeof(Sample);
            word |= bits_of(at < 0 ? cval : line[at]);
        }
        found.word[k] = word;
    }
    return found;
}

// The vector at x of a row of results, whose samples from beyond the ends come from others of the row in shared memory.
template <typename Sample>
__device__ __noinline__ Vector<Sample> completed(Vector<Sample> own, const Vector<Sample>* row, const int* from, int x, int columns,
                                                 long long base, Word<Sample> beyond) {
    constexpr int EACH = SAMPLES_A_WORD<Sample>;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = x + k * EACH + i, source = from[(k * EACH + i) * blockDim.x];
            const long long place = source - base;
            if ((at >= 0 && at < columns) || (source >= 0 && (place < 0 || place >= blockDim.x * Vector<Sample>::SAMPLES))) continue;
            if constexpr (EACH == 1) {
                own.word[k] = source < 0 ? beyond : reinterpret_cast<const Word<Sample>*>(row)[place];
            } else {
                const int by = i * 8 * static_cast<int>(sizeof(Sample));
                const Word<Sample> bits = source < 0 ? beyond : bits_of(reinterpret_cast<const Sample*>(row)[place]);
                own.word[k] = (own.word[k] & ~(((1u << 8 * sizeof(Sample)) - 1) << by)) | bits << by;
            }
        }
    }
    return own;
}

template <typename Sample>
__device__ inline Sample difference_of(Sample a, Sample b) {
    if constexpr (same<Sample, float> || same<Sample, double>) {
        return a - b;
    } else {
        constexpr int LOW = same<Sample, short> ? -32768 : 0;
        constexpr int HIGH = same<Sample, short> ? 32767 : sizeof(Sample) == 1 ? 255 : 65535;
        return static_cast<Sample>(min(max(static_cast<int>(a) - static_cast<int>(b), LOW), HIGH));
    }
}

// The difference of results begin + … of a line of `count` from an image.
template <typename Sample>
__device__ __noinline__ Vector<Sample> subtracted(const Sample* image, long long begin, long long count, Vector<Sample> found,
                                                  const BoxTask& task, Sample nodata) {
    constexpr int EACH = SAMPLES_A_WORD<Sample>;
    const Sample* other = image + begin;
    const bool whole = begin >= 0 && begin + Vector<Sample>::SAMPLES <= count;
    const bool together = whole && reinterpret_cast<unsigned long long>(other) % 16 == 0;
    Vector<Sample> theirs = {};
    if (together) theirs = *reinterpret_cast<const Vector<Sample>*>(other);
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
        Word<Sample> word = 0;
#pragma unroll
        for (int i = EACH - 1; i >= 0; --i) {
            const long long at = begin + k * EACH + i;
            Sample a = sample_in<Sample>(theirs.word[k], i), b = sample_in<Sample>(found.word[k], i);
            if (!together && at >= 0 && at < count) a = other[k * EACH + i];
            const bool missing = task.has_nodata && (a == nodata || b == nodata);
            const Sample apart = missing ? nodata : task.subtracts == 1 ? difference_of(a, b) : difference_of(b, a);
            if constexpr (EACH > 1) word <<= 8 * sizeof(Sample);
            word |= bits_of(apart);
        }
        found.word[k] = word;
    }
    return found;
}

// ROWS: of a group, 4 or 8. MANY: a window has more rows than that.
template <typename Sample, bool LEAST, int ROWS, bool MANY>
__global__ void __launch_bounds__(BOX_THREADS, ROWS == 8 ? 2 : 3) extreme_box(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image,
    const __grid_constant__ BoxTask task, Sample cval, Sample nodata, Sample empty) {
    using V = Vector<Sample>;
    constexpr int SAMPLES = V::SAMPLES, WORDS = V::WORDS, EACH = SAMPLES_A_WORD<Sample>;
    extern __shared__ ulonglong2 vectors[];
    const int threads = blockDim.x, thread = threadIdx.x;
    V* const ring = reinterpret_cast<V*>(vectors) + thread;
    V* const left = reinterpret_cast<V*>(vectors) + (MANY ? 2 : 1) * task.slots * threads;
    V* const right = left + ROWS * threads;
    Word<Sample>* const whole = reinterpret_cast<Word<Sample>*>(right + ROWS * threads);
    const bool is_short = task.taps_x < 2 * SAMPLES;  // then there are no `right` and `whole`
    int* const from = (is_short ? reinterpret_cast<int*>(right) : reinterpret_cast<int*>(whole + ROWS * threads)) + thread;
    const Coding<Sample, LEAST> coding = {nodata, empty, task.omit_nan, task.has_nodata};
    const Word<Sample> key = coding.encode(filled(cval));
    const Word<Sample> beyond = SAMPLES_A_WORD<Sample> == 1 ? key : bits_of(cval);  // the constant as the first pass leaves it
    if (!task.is_first) cval = sample_in<Sample>(key, 0);

    // This block's tile, phase of the rows, band and plane.
    long long rest = blockIdx.x;
    const int tile = static_cast<int>(rest % task.tiles);
    rest /= task.tiles;
    const int phase = static_cast<int>(rest % task.step);
    rest /= task.step;
    const int number = static_cast<int>(rest % task.bands), y0 = number * task.band;
    const long long plane = rest / task.bands;
    const int y1 = min(y0 + task.band, (task.out_rows - phase + task.step - 1) / task.step);
    if (y0 >= y1) return;
    in += plane * task.in_plane, out += plane * task.out_plane;
    if (task.subtracts) image += plane * task.image_plane;
    // Every other band goes upwards, so that neighbours read the rows that both need at the same time.
    const int total = y1 - y0 + task.taps_y - 1;
    const bool upwards = number % 2 == 1;
    const int on = upwards ? -task.step : task.step;
    const int in_y = task.first_y + phase + (upwards ? y0 + total - 1 : y0) * task.step;
    const int out_y = phase + (upwards ? y1 - 1 : y0) * task.step - (task.taps_y - 1) * on;

    // The thread's samples of a row begin at x. Vectors of results begin at up to `slack` samples before the tile.
    const long long c0 = tile * task.tile, slack = task.aligned_out ? 0 : SAMPLES - 1;
    long long base = c0 + task.first_x - slack;
    base -= (base % SAMPLES + SAMPLES) % SAMPLES;
    const long long x = base + thread * SAMPLES;
    const int ahead = static_cast<int>(c0 + task.first_x - base);
    const int columns = static_cast<int>(task.columns);
    const long long end = min(c0 + task.tile, task.out_columns) + task.first_x + task.taps_x - 1;  // of what is needed
    const bool is_inside = x >= 0 && x + SAMPLES <= columns, is_idle = x >= end, is_edge = !is_inside && !is_idle;
    // Threads beyond an edge take results of columns from the others, if all that they need is in the block.
    bool is_far = false;
    if (is_edge) {
        for (int i = 0; i < SAMPLES; ++i) {
            const int at = static_cast<int>(x) + i, source = border_index(at, columns, task.mode_x);
            from[i * threads] = source;
            const bool is_needed = at >= c0 + task.first_x && at < end && source >= 0;
            if (columns < SAMPLES || (is_needed && (source < base || source >= min(base + threads * SAMPLES, end)))) is_far = true;
        }
    }
    const bool gathers = __syncthreads_or(is_far), fills = !gathers && (base < 0 || end > columns);

    // Rows n … of the band.
    const bool is_plain = is_inside && !is_idle && task.aligned_in && task.pair == 0;
    const auto fetch = [&](V (&row)[ROWS], int n) {
        const int first = in_y + n * on, last = first + (ROWS - 1) * on;
        if (is_plain && min(first, last) >= 0 && max(first, last) < task.rows) {
            const Sample* line = in + first * task.in_pitch + x;
            const long long stride = on * task.in_pitch;
#pragma unroll
            for (int j = 0; j < ROWS; ++j) row[j] = loaded_vector<Sample>(line + j * stride);
            return;
        }
        long long place[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            int y = first + j * on;
            if (y < 0 || y >= task.rows) y = index_beyond(y, task.rows, task.mode_y);
            place[j] = is_idle || y < 0 ? -1 : y * task.in_pitch;
            row[j] = splat<Sample>(filled(cval));
        }
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            if (place[j] < 0) continue;
            const Sample* line = in + place[j];
            if (is_inside) {
                row[j] = task.aligned_in ? loaded_vector<Sample>(line + x) : vector_at(line + x, place[j] < (task.rows - 1) * task.in_pitch);
                if (task.pair > 0 && x + task.pair + SAMPLES <= columns)
                    row[j] = extreme<LEAST>(row[j], loaded_vector<Sample>(line + x + task.pair));
            } else if (gathers) {
                row[j] = gathered(line, from, cval);
            } else if (x >= 0 && x < columns) {  // the row ends within the vector
                const V last = vector_at(line + columns - SAMPLES, false);
                row[j] = shifted(last, last, static_cast<int>(x) + SAMPLES - columns);
            }
        }
    };
    const auto encode = [&](V (&row)[ROWS]) {
        if (task.is_first)
#pragma unroll
            for (int j = 0; j < ROWS; ++j)
#pragma unroll
                for (int k = 0; k < WORDS; ++k) row[j].word[k] = coding.encode(row[j].word[k]);
    };

    const bool is_direct = task.taps_x == 1 && task.aligned_out && ahead == 0;
    const int outs = static_cast<int>(task.tile / SAMPLES);  // no more: of what is beyond the tile, threads load nothing

    // The results whose windows end in rows n … of the band, by `along(place, begin)` of the rows in shared memory.
    const auto emit_rows = [&](int n, auto along, auto before_of) {
#pragma unroll 1
        for (int j = 0; j < ROWS; ++j) {
            if (n + j < task.taps_y - 1 || n + j >= total) continue;
            const long long y = out_y + (n + j) * on;
            Sample* line = out + y * task.out_pitch;
            const int before = before_of(line);
            const long long place = c0 + thread * SAMPLES - before;
            if (place >= task.out_columns) continue;
            V found = along(j * threads + thread, ahead - before);
            if (task.is_last) {
#pragma unroll
                for (int k = 0; k < WORDS; ++k) found.word[k] = coding.decode(found.word[k]);
            }
            if (task.subtracts)
                found = subtracted(image + y * task.image_pitch, place, task.out_columns, found, task, nodata);
            if (place >= 0 && place + SAMPLES <= task.out_columns) {
                store_vector(line + place, found);
            } else {
#pragma unroll
                for (int k = 0; k < WORDS; ++k) store_some<Sample>(line, place + k * EACH, found.word[k], 0, task.out_columns);
            }
        }
    };
    const auto emit = [&](int n, auto along) {
        if (thread >= outs) return;
        if (task.aligned_out) emit_rows(n, along, [](Sample*) { return 0; });
        else
            emit_rows(n, along, [&](Sample* line) {
                return static_cast<int>(reinterpret_cast<unsigned long long>(line + c0) % 16 / sizeof(Sample));
            });
    };
    const auto by_doubling = [&](auto count, int at, int begin) {
        constexpr int VECTORS = decltype(count)::value;
        Word<Sample> many[(VECTORS + 1) * WORDS], own[VECTORS * WORDS];
#pragma unroll
        for (int v = 0; v <= VECTORS; ++v) {
            const V each = left[at + begin / SAMPLES + v];
#pragma unroll
            for (int k = 0; k < WORDS; ++k) many[v * WORDS + k] = each.word[k];
        }
        shift<Sample>(many, begin % SAMPLES, own);
        return of_short<LEAST, Sample>(own, task.taps_x);
    };
    const auto by_runs = [&](int at, int begin) {
        const int end = begin + task.taps_x - 1, first = begin / SAMPLES + 1, last = end / SAMPLES;
        const V *lefts = left + at + first - 1, *rights = right + at + last;
        const Word<Sample>* wholes = whole + at;
        Word<Sample> middle = neutral<Sample, LEAST>();
#pragma unroll 4
        for (int v = first + 1; v < last; ++v) middle = extreme<Sample, LEAST>(middle, wholes[v]);
        const V of_left = shifted<Sample>(extreme<LEAST>(lefts[0], splat<Sample>(wholes[first])), lefts[1], begin % SAMPLES);
        const V of_right = shifted<Sample>(rights[0], extreme<LEAST>(rights[1], splat<Sample>(wholes[last])), end % SAMPLES);
        return extreme3<LEAST>(of_left, of_right, splat<Sample>(middle));
    };

    V row[ROWS], old[ROWS];
    V(&found)[ROWS] = MANY ? old : row;
    int head = 0;
    fetch(row, 0);
#pragma unroll 1
    for (int group = 0; group < total; group += ROWS) {
        const bool ends = group + ROWS >= task.taps_y;  // a window
        encode(row);
        if constexpr (MANY) {
            encode(old);
            many_down<LEAST>(row, old, ends, ring, head, task);
        } else if (task.taps_y > 1) {
            few_down<LEAST>(row, ring, head, task);
        }
        if (ends && fills) {
            if (x >= 0 && x < columns) {
#pragma unroll
                for (int j = 0; j < ROWS; ++j) left[j * threads + thread] = found[j];
            }
            __syncthreads();
            if (is_edge) {
#pragma unroll
                for (int j = 0; j < ROWS; ++j)
                    found[j] = completed(found[j], left + j * threads, from, static_cast<int>(x), columns, base, beyond);
            }
            __syncthreads();
        }
        if (ends) {
#pragma unroll
            for (int j = 0; j < ROWS; ++j) {
                const V& own = found[j];
                if (is_short) {
                    left[j * threads + thread] = own;
                } else {
                    const V suffix = scanned<LEAST, false>(own);
                    left[j * threads + thread] = suffix;
                    right[j * threads + thread] = scanned<LEAST, true>(own);
                    whole[j * threads + thread] = first_of<Sample>(suffix.word[0]);
                }
            }
        }
        const int next = group + ROWS;
        if (next < total) fetch(row, next);
        if constexpr (MANY)
            if (next < total && next + ROWS >= task.taps_y) fetch(old, next - task.taps_y + 1);
        if (!ends) continue;
        if (!is_direct) __syncthreads();
        if (is_direct) emit(group, [&](int at, int) { return left[at]; });
        else if (task.taps_x <= SAMPLES) emit(group, [&](int at, int begin) { return by_doubling(Number<2>(), at, begin); });
        else if (is_short) emit(group, [&](int at, int begin) { return by_doubling(Number<3>(), at, begin); });
        else emit(group, by_runs);
        if (!is_direct) __syncthreads();
    }
}
