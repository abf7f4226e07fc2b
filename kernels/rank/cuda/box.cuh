// Minima and maxima of boxes of two axes, in one pass over memory. Part of rank.cu.
//
// A block goes down a band of rows of one tile of columns, eight rows at a time. A thread has 16 bytes of each row, whose
// samples lie side by side in words and are compared at once. Cut an axis into runs: a window begins in one run and ends in
// another, so its minimum is that of three values, however large it is (after van Herk; Gil and Werman):
//
//        | x x x x | x x x x | x x x x | x x x x |       suffix of the run it begins in, minimum to the run's end
//              [ - - - - - - - - - - - - - ]             middle of the whole runs between
//               suffix | middle . . . . |prefix          prefix of the run it ends in, minimum from its start
//
//   down the columns   runs of eight rows (two, for windows of less than nine). The suffixes of the rows that a window has
//                      yet to leave lie in shared memory, a ring for each thread; a run's first suffix is its minimum. No
//                      barriers.
//   along the rows     runs of 16 bytes, a thread's own; it reads the others' from shared memory, after the first of two
//                      barriers for each four rows. Windows shorter than two runs are doubled in registers instead:
//                      M(2m)[i] = min(M(m)[i], M(m)[i + m]). Where a row begins, in the input and in the output, only
//                      changes by how many samples both are shifted.
//
// Windows whose rings leave too few threads take two passes: the second over the results of the first, every `step`-th row
// of them, and the larger or smaller of two that lie `pair` samples apart.
//
// Floats become integers of the same order (keys.cuh) in the first pass, and floats again in the last; a NaN is the least
// or the largest of them, depending on whether it spreads to its windows or is left out.
//
// Floors of N samples of b bytes: 2 N b bytes of memory (3 N b if an image is subtracted); about 10 N b bytes of shared
// memory; of 16 bits about 19 operations for each two samples, of 64 a multiprocessor and cycle (15 T/s of an H200).
#pragma once

#include "extremes.cuh"

constexpr int BOX_THREADS = 256, GROUP = 8, HALF = 4, SHORT_RUN = 2;  // GROUP and HALF: rows

struct BoxTask {
    long long planes, in_plane, out_plane, in_pitch, out_pitch;  // samples from plane to plane, and from row to row
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

// The extremes of windows of `taps` samples, fewer than two vectors, that begin at the first vector of x.
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

// Down the columns: eight rows become the results whose windows they end. `head` is the slot of the first.
template <int RUN, bool LEAST, typename Sample>
__device__ inline void run_down(Vector<Sample> (&row)[GROUP], Vector<Sample>* ring, int& head, const BoxTask& task) {
    using Many = Lanes<Sample>;
    const int threads = blockDim.x, slots = task.slots;
    const int runs = (task.taps_y - 1 + RUN - 1) / RUN;              // a window begins as many runs before that of its end
    const int within = (runs * RUN - (task.taps_y - 1)) % RUN;       // the first row's window begins at this row of its run
    const auto wrapped = [&](int slot) { return slot >= slots ? slot - slots : slot; };
#pragma unroll
    for (int base = 0; base < GROUP; base += RUN) {
        Many many = widened(row[base + RUN - 1]);
        ring[(head + RUN - 1) * threads] = row[base + RUN - 1];
#pragma unroll
        for (int j = RUN - 2; j >= 0; --j) {
            many = extreme<LEAST>(many, widened(row[base + j]));
            ring[(head + j) * threads] = narrowed(many);
        }
        const int begin = wrapped(head + slots - (task.taps_y - 1));
        int slot = wrapped(begin - within + 2 * RUN);
        Many middle = widened(splat<Sample>(neutral<Sample, LEAST>()));
#pragma unroll 2
        for (int k = 2; k < runs; ++k) {
            middle = extreme<LEAST>(middle, widened(ring[slot * threads]));
            slot = wrapped(slot + RUN);
        }
        Many all = middle;
        if (runs >= 2) all = extreme<LEAST>(middle, widened(ring[wrapped(begin - within + RUN) * threads]));
        Many prefix;
#pragma unroll
        for (int j = 0; j < RUN; ++j) {
            prefix = j == 0 ? widened(row[base]) : extreme<LEAST>(prefix, widened(row[base + j]));
            if (j > 0 && within + j == RUN) all = middle;
            const Many left = widened(ring[wrapped(begin + j) * threads]);
            row[base + j] = narrowed(extreme<LEAST>(extreme<LEAST>(prefix, left), all));
        }
        head = wrapped(head + RUN);
    }
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

// Samples of a line from beyond its ends; `from` holds where each comes from, a negative one from outside.
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

// Results begin + … of a line of `count`, or their difference from an image.
template <typename Sample>
__device__ inline void store_vector(Sample* line, const Sample* image, long long begin, long long count,
                                    Vector<Sample> found, const BoxTask& task, Sample nodata) {
    constexpr int SAMPLES = Vector<Sample>::SAMPLES, EACH = SAMPLES_A_WORD<Sample>;
    const bool whole = begin >= 0 && begin + SAMPLES <= count;
    if (task.subtracts) {
        const Sample* other = image + begin;
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
    }
    if (whole) {
        *reinterpret_cast<Vector<Sample>*>(line + begin) = found;
        return;
    }
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) store_some<Sample>(line, begin + k * EACH, found.word[k], 0, count);
}

template <typename Sample, bool LEAST>
__global__ void __launch_bounds__(BOX_THREADS, 2) extreme_box(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image,
    const __grid_constant__ BoxTask task, Sample cval, Sample nodata, Sample empty) {
    using V = Vector<Sample>;
    constexpr int SAMPLES = V::SAMPLES, WORDS = V::WORDS;
    extern __shared__ ulonglong2 vectors[];
    const int threads = blockDim.x, thread = threadIdx.x;
    V* const ring = reinterpret_cast<V*>(vectors) + thread;
    V* const left = reinterpret_cast<V*>(vectors) + task.slots * threads;
    V* const right = left + HALF * threads;
    Word<Sample>* const whole = reinterpret_cast<Word<Sample>*>(right + HALF * threads);
    const bool is_short = task.taps_x < 2 * SAMPLES;  // then there are no `right` and `whole`
    int* const from = (is_short ? reinterpret_cast<int*>(right) : reinterpret_cast<int*>(whole + HALF * threads)) + thread;
    const Coding<Sample, LEAST> coding = {nodata, empty, task.omit_nan, task.has_nodata};
    if (!task.is_first) cval = sample_in<Sample>(coding.encode(filled(cval)), 0);  // as the samples are by then

    // This block's tile, phase of the rows, band and plane.
    long long rest = blockIdx.x;
    const int tile = static_cast<int>(rest % task.tiles);
    rest /= task.tiles;
    const int phase = static_cast<int>(rest % task.step);
    rest /= task.step;
    const int y0 = static_cast<int>(rest % task.bands) * task.band;
    const long long plane = rest / task.bands;
    const int y1 = min(y0 + task.band, (task.out_rows - phase + task.step - 1) / task.step);
    if (y0 >= y1) return;
    in += plane * task.in_plane, out += plane * task.out_plane;
    if (task.subtracts) image += plane * task.out_plane;

    // The thread's samples of a row begin at x. Vectors of results begin at up to `slack` samples before the tile.
    const long long c0 = tile * task.tile, slack = task.aligned_out ? 0 : SAMPLES - 1;
    long long base = c0 + task.first_x - slack;
    base -= (base % SAMPLES + SAMPLES) % SAMPLES;
    const long long x = base + thread * SAMPLES;
    const int ahead = static_cast<int>(c0 + task.first_x - base);
    const bool is_inside = x >= 0 && x + SAMPLES <= task.columns;
    const bool is_idle = x >= min(c0 + task.tile, task.out_columns) + task.first_x + task.taps_x - 1;
    if (!is_inside && !is_idle)
        for (int i = 0; i < SAMPLES; ++i)
            from[i * threads] = border_index(static_cast<int>(x) + i, static_cast<int>(task.columns), task.mode_x);

    const bool is_plain = is_inside && !is_idle && task.aligned_in && task.pair == 0;
    const int total = y1 - y0 + task.taps_y - 1;
    const auto load = [&](int n) {
        int y = task.first_y + phase + (y0 + min(n, total - 1)) * task.step;
        if (y < 0 || y >= task.rows) y = index_beyond(y, task.rows, task.mode_y);
        if (is_idle || y < 0) return splat<Sample>(filled(cval));
        const Sample* line = in + y * task.in_pitch;
        if (!is_inside) return gathered(line, from, cval);
        V found;
        if (task.aligned_in) found = loaded_vector<Sample>(line + x);
        else
#pragma unroll
            for (int k = 0; k < WORDS; ++k) found.word[k] = word_at(line + x + k * SAMPLES_A_WORD<Sample>);
        if (task.pair > 0 && x + task.pair + SAMPLES <= task.columns)
            found = extreme<LEAST>(found, loaded_vector<Sample>(line + x + task.pair));
        return found;
    };

    const bool is_direct = task.taps_x == 1 && task.aligned_out && ahead == 0;
    const int outs = static_cast<int>(task.tile / SAMPLES);  // no more: of what is beyond the tile, threads load nothing

    // The results whose windows end in row n of the band, the j-th of those in shared memory.
    const auto store = [&](int n, int j) {
        const long long y = phase + static_cast<long long>(y0 + n - task.taps_y + 1) * task.step;
        Sample* line = out + y * task.out_pitch;
        const int before = task.aligned_out ? 0 : static_cast<int>(reinterpret_cast<unsigned long long>(line + c0) % 16 / sizeof(Sample));
        const long long place = c0 + thread * SAMPLES - before;
        if (place >= task.out_columns) return;
        const int begin = ahead - before, end = begin + task.taps_x - 1;
        const V* lefts = left + j * threads + thread + begin / SAMPLES;
        V found;
        if (is_direct) {
            found = lefts[0];
        } else if (is_short) {
            Word<Sample> many[4 * WORDS], own[3 * WORDS];
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const V each = lefts[v];
#pragma unroll
                for (int k = 0; k < WORDS; ++k) many[v * WORDS + k] = each.word[k];
            }
            shift<Sample>(many, begin % SAMPLES, own);
            found = of_short<LEAST, Sample>(own, task.taps_x);
        } else {
            const V* rights = right + j * threads + thread + end / SAMPLES;
            const Word<Sample>* wholes = whole + j * threads + thread;
            const int first = begin / SAMPLES + 1, last = end / SAMPLES;
            Word<Sample> middle = neutral<Sample, LEAST>();
#pragma unroll 4
            for (int v = first + 1; v < last; ++v) middle = extreme<Sample, LEAST>(middle, wholes[v]);
            const V of_left = shifted<Sample>(extreme<LEAST>(lefts[0], splat<Sample>(wholes[first])), lefts[1], begin % SAMPLES);
            const V of_right = shifted<Sample>(rights[0], extreme<LEAST>(rights[1], splat<Sample>(wholes[last])), end % SAMPLES);
            found = extreme3<LEAST>(of_left, of_right, splat<Sample>(middle));
        }
        if (task.is_last) {
#pragma unroll
            for (int k = 0; k < WORDS; ++k) found.word[k] = coding.decode(found.word[k]);
        }
        store_vector(line, image + y * task.out_pitch, place, task.out_columns, found, task, nodata);
    };

    V next[GROUP];
    int head = 0;
    for (int group = -GROUP; group < total; group += GROUP) {
        V row[GROUP];
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
#pragma unroll
            for (int k = 0; k < WORDS; ++k)
                row[j].word[k] = task.is_first ? coding.encode(next[j].word[k]) : next[j].word[k];
        }
        const int ahead_of = group + GROUP, y = task.first_y + phase + (y0 + ahead_of) * task.step;
        if (ahead_of + GROUP <= total && y >= 0 && y + (GROUP - 1) * task.step < task.rows && is_plain) {
            const Sample* line = in + y * task.in_pitch + x;
            const long long stride = task.step * task.in_pitch;
#pragma unroll
            for (int j = 0; j < GROUP; ++j) next[j] = loaded_vector<Sample>(line + j * stride);
        } else if (ahead_of < total) {
#pragma unroll
            for (int j = 0; j < GROUP; ++j) next[j] = load(ahead_of + j);
        }
        if (group < 0) continue;
        if (task.taps_y > GROUP) run_down<GROUP, LEAST>(row, ring, head, task);
        else if (task.taps_y > 1) run_down<SHORT_RUN, LEAST>(row, ring, head, task);
#pragma unroll
        for (int half = 0; half < GROUP; half += HALF) {
            if (group + half + HALF < task.taps_y) continue;  // no window ends here
#pragma unroll
            for (int j = 0; j < HALF; ++j) {
                const V own = row[half + j];
                if (is_short) {
                    left[j * threads + thread] = own;
                } else {
                    const V suffix = scanned<LEAST, false>(own);
                    left[j * threads + thread] = suffix;
                    right[j * threads + thread] = scanned<LEAST, true>(own);
                    whole[j * threads + thread] = first_of<Sample>(suffix.word[0]);
                }
            }
            if (!is_direct) __syncthreads();
            if (thread < outs) {
#pragma unroll 1
                for (int j = 0; j < HALF; ++j) {
                    const int n = group + half + j;
                    if (n >= task.taps_y - 1 && n < total) store(n, j);
                }
            }
            if (!is_direct) __syncthreads();
        }
    }
}
