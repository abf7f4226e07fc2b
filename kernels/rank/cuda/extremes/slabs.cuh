// Minima, maxima, openings and closings of boxes in one pass over memory, a block for each strip of columns. Part of rank.cu.
//
// A thread has a word of each row: a float, or two samples (bytes as halves). A block goes down a band of rows, a slab of them at a time.
// Windows of 2 n + 1 rows are n pairs and a row more, and pairs take runs of n (van Herk; Gil and Werman): a run in registers has the
// extremes from each pair to its end, and those from the start of the next run complete them. Windows are constants of the compiler.
//
//     each thread     of an opening, the second step down its column, of the slab before    <- shared memory    a run of pairs in registers, second
//                     rows of this slab, down its column                                    -> shared memory    rows there or in shared memory
//          |  barrier
//     a thread for    along a row, or a channel of two rows, in place; of an opening twice                      a run of pairs
//     each line
//          |  barrier, the next slab
//
// Two samples of a word lie side by side, and are a pair along their row; if rows begin at whole words, one load takes a word. Pixels with
// channels have lines of two rows instead, whose words are one sample of both: the next of its channel is as many words further as there
// are channels. Their samples are loaded THREADS apart, or as words, whose second ones then have the second half of a line.
//
// A thread takes and puts words of its own columns only, so two barriers a slab are enough. Lines begin as many banks after each other as
// there are channels: neither columns nor lines meet in a bank. Edges of an opening are those of the first image, so its windows must be
// symmetric, and edges mirrors.
//
// Floors of N samples of b bytes: 2 N b bytes of memory; and for a word, threads that serve others and rows before the first result
// counted, of 16 bits and windows of 31 × 31 about 24 operations of a thread, of openings 44: 25 us of 8192 × 8192 on an H200, and 50,
// where the memory takes 64. Measured (2026-11-28), erosions of 31, 51, 65 and 101 of 16 bits: 0.72, 0.58, 0.52 and 0.43 of a copy's speed,
// of floats 0.64, 0.61, 0.57 and 0.43, of RGB of 16 bits 0.63, 0.55, 0.43 and 0.37; top-hats of 21, 31, 51 and 65 of 16 bits 0.46, 0.42,
// 0.33 and 0.37, whose image is read again, of which L2 has lost a part. Windows of many rows leave registers and shared memory for
// 6 to 16 warps.
#pragma once

#include "cuda/extremes/columns.cuh"

// Pairs of words become the windows of 2 LENGTH + 1 words that end in each of a pair: LENGTH pairs, and a word more.
template <bool LEAST, typename Sample, int LENGTH>
struct Run {
    unsigned suffix[LENGTH];   // the extreme of each pair and those after it, of the run before
    unsigned prefix, between;  // of this run; of LENGTH pairs

    __device__ Run() {
#pragma unroll
        for (int k = 0; k < LENGTH; ++k) suffix[k] = loser<Sample, LEAST>();
    }

    // The LENGTH pairs that end in `pair`, which is number `at`; runs begin at multiples of LENGTH. `between` are those before.
    __device__ unsigned next(int at, unsigned pair) {
        const int k = at % LENGTH;
        if (k == 0) between = suffix[0];
        prefix = k == 0 ? pair : chosen<LEAST, Sample>(prefix, pair);
        const unsigned found = k + 1 < LENGTH ? chosen<LEAST, Sample>(suffix[(k + 1) % LENGTH], prefix) : prefix;
        suffix[k] = pair;
        if (k == LENGTH - 1) {
#pragma unroll
            for (int i = LENGTH - 2; i >= 0; --i) suffix[i] = chosen<LEAST, Sample>(suffix[i], suffix[i + 1]);
        }
        return found;
    }

    // `old`: the second word of the pair that is LENGTH pairs before.
    __device__ void windows(int at, unsigned& a, unsigned& b, unsigned old) {
        const unsigned found = next(at, chosen<LEAST, Sample>(a, b));
        a = chosen<LEAST, Sample>(between, a), b = chosen<LEAST, Sample>(old, found);
        between = found;
    }

    // The same if a word is a pair, of two samples: windows that begin at both samples, LENGTH words before.
    __device__ unsigned windows(int at, unsigned word) {
        const unsigned found = next(at, word), both = chosen<LEAST, Sample>(between, __byte_perm(between, found, 0x5432));
        between = found;
        return chosen<LEAST, Sample>(both, word);
    }
};

// The second words of the pairs of a run, in shared memory or in registers.
template <int LENGTH, int STEP, bool SHARED>
struct Seconds {
    unsigned* const shared;
    unsigned own[SHARED ? 1 : LENGTH];

    // What is put in place of the word of LENGTH pairs before.
    __device__ unsigned replaced(int at, unsigned word) {
        unsigned& second = SHARED ? shared[at % LENGTH * STEP] : own[SHARED ? 0 : at % LENGTH];
        const unsigned old = second;
        second = word;
        return old;
    }
};

// How the samples of 8 and 16 bits of a word lie: THREADS samples from each other, or side by side. If rows begin at whole words, they
// are loaded at once; windows that begin at odd samples then begin at a word's second one.
enum SlabRows { APART, BESIDE, WORDS, ODD_WORDS };

template <typename Sample, bool OPENS, int ROWS_ARE, int TAPS_Y, int TAPS_X, int CHANNELS, int BLOCK, int BATCHES>
struct SlabShape {
    static constexpr int STEPS = OPENS ? 2 : 1, INNER = CHANNELS, THREADS = BLOCK;
    static constexpr int EACH = sizeof(Sample) == 4 ? 1 : 2;                        // samples of a word
    static constexpr bool IS_APART = ROWS_ARE == APART, IS_ODD = ROWS_ARE == ODD_WORDS;
    static constexpr bool LOADS_WORDS = EACH == 1 || ROWS_ARE >= WORDS;
    static constexpr bool IS_SPLIT = EACH == 2 && INNER > 1 && !IS_APART;           // words of even samples of a line, then those of odd ones
    static constexpr int LANES = IS_APART || IS_SPLIT ? EACH : 1;                   // rows of a line; two rows' words are of one column
    static constexpr int DOWN = TAPS_Y / 2, ALONG = TAPS_X / 2;                     // pairs of a run
    static constexpr int BATCH = DOWN < 6 ? 8 / DOWN * 2 * DOWN : 2 * DOWN;         // rows that are computed at once: whole runs
    static constexpr int PART = ALONG < 6 && INNER == 1 ? 8 / ALONG * ALONG : ALONG;  // pairs that are computed at once
    static constexpr int ROWS = BATCHES * BATCH, LINES = ROWS / LANES;              // of a slab
    static constexpr int LEAD = (STEPS * 2 * DOWN + BATCH - 1) / BATCH * BATCH;     // rows before a band's first result: whole batches
    static constexpr int HALF = THREADS + (IS_SPLIT ? (INNER + 1) / 2 : 0), PITCH = THREADS * LANES + INNER;  // words of a line
    static constexpr int PAIRS = IS_APART || IS_SPLIT ? (THREADS * LANES / INNER + 1) / 2 : THREADS;  // of a channel of a line
    static constexpr int GROUP = 32 / INNER;                                        // lines of a warp
};

// Where a thread's word of row j of a slab lies; with two rows of a line, one of two samples.
template <typename Shape>
__device__ inline unsigned& slab_at(unsigned* column, int j) {
    return column[j / Shape::LANES * Shape::PITCH + j % Shape::LANES * Shape::HALF];
}

// Two rows of two samples each <-> two columns of two.
template <typename Shape>
__device__ inline void exchange(unsigned& a, unsigned& b) {
    if constexpr (Shape::LANES == 2) {
        const unsigned first = a;
        a = __byte_perm(first, b, 0x5410), b = __byte_perm(first, b, 0x7632);
    }
}

// A float, one sample, or two as they lie.
template <typename Sample>
__device__ inline unsigned loaded_sample(const Sample* at) {
    if constexpr (sizeof(Sample) == 4) return __ldg(reinterpret_cast<const unsigned*>(at));
    else return static_cast<unsigned short>(__ldg(at));
}
template <typename Sample>
__device__ inline unsigned loaded_pair(const Sample* at) {
    if constexpr (sizeof(Sample) == 1) return __ldg(reinterpret_cast<const unsigned short*>(at));
    else return __ldg(reinterpret_cast<const unsigned*>(at));
}

// As it is stored; `theirs`: of the image that SUBTRACTS needs.
template <bool LEAST, bool OPENS, bool SUBTRACTS, typename Sample>
__device__ inline unsigned slab_result(unsigned found, unsigned theirs) {
    if constexpr (same<Sample, float>)
        if (is_nan(__uint_as_float(found))) found = bits_of(not_a_number<float>());
    if constexpr (!SUBTRACTS) return found;
    const unsigned more = LEAST ? found : theirs, less = LEAST ? theirs : found;
    if constexpr (same<Sample, float>) return __float_as_uint(__uint_as_float(more) - __uint_as_float(less));
    else if constexpr (same<Sample, short>) return __vsubss2(more, less);
    else if constexpr (OPENS) return more - less;  // no sample of `less` is larger
    else return __vsubus2(more, less);
}

template <typename Sample>
__device__ inline Sample* rows_on(Sample* at, int rows, unsigned pitch_bytes) {
    return reinterpret_cast<Sample*>(reinterpret_cast<unsigned long long>(at) + static_cast<unsigned long long>(pitch_bytes) * rows);
}

// The windows of a channel of a line of a slab, in place: results lie where their windows begin, or a sample before that.
template <bool LEAST, typename Shape, typename Sample>
__device__ inline void along_line(unsigned* line, int channel, unsigned threads) {
    constexpr int INNER = Shape::INNER, PART = Shape::PART, ALONG = Shape::ALONG, ODD = Shape::IS_ODD;
    constexpr bool IS_PAIRED = Shape::IS_APART || Shape::IS_SPLIT, TURNS = Shape::IS_SPLIT && ODD;
    constexpr int STEP = IS_PAIRED ? (Shape::IS_SPLIT ? 1 : 2) * INNER : 1;
    const auto place = [&](int sample) { return Shape::IS_SPLIT ? line + (sample & 1) * Shape::HALF + (sample >> 1) : line + sample; };
    unsigned *first = place(channel), *second = place(channel + INNER), *first_to = place(channel - ODD), *second_to = place(channel + INNER - ODD);
    Run<LEAST, Sample, ALONG> run;
    Seconds<ALONG, 1, false> seconds{nullptr};
    unsigned last = 0;
    const auto compute = [&](int i, auto count) {
#pragma unroll
        for (int j = 0; j < decltype(count)::value; ++j) {
            const bool has_results = i >= (ALONG + (ODD && !IS_PAIRED) - j + PART - 1) / PART;
            unsigned a = first[j * STEP];
            if constexpr (IS_PAIRED) {
                unsigned b = second[j * STEP];
                // A line's second words are there until their results are, unless those go to another channel's words.
                const unsigned old = TURNS ? seconds.replaced(j, b) : has_results ? second[(j - ALONG) * STEP] : 0;
                run.windows(j, a, b, old);
                if (has_results) first_to[(j - ALONG) * STEP] = a, second_to[(j - ALONG) * STEP] = b;
            } else {
                a = run.windows(j, a);
                if (has_results) first_to[j - ALONG] = ODD ? __byte_perm(last, a, 0x5432) : a;
                last = a;
            }
        }
        first += PART * STEP, second += PART * STEP, first_to += PART * STEP, second_to += PART * STEP;
        if constexpr (TURNS) __syncwarp(threads);  // all have read the words that results of the next part replace
    };
#pragma unroll 1
    for (int i = 0; i < Shape::PAIRS / PART; ++i) compute(i, Number<PART>());
    compute(Shape::PAIRS / PART, Number<Shape::PAIRS % PART>());
}

// LEAST: of the second step. SHARED: second rows of pairs. AHEAD: rows that are on their way to a thread's registers; it divides a batch.
template <typename Sample, bool LEAST, bool OPENS, bool SUBTRACTS, int ROWS_ARE, bool SHARED, int TAPS_Y, int TAPS_X, int INNER, int THREADS, int BATCHES,
          int AHEAD, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) extreme_slabs(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image, const __grid_constant__ BoxTask task, Sample cval) {
    using Shape = SlabShape<Sample, OPENS, ROWS_ARE, TAPS_Y, TAPS_X, INNER, THREADS, BATCHES>;
    constexpr int EACH = Shape::EACH, LANES = Shape::LANES, DOWN = Shape::DOWN, BATCH = Shape::BATCH, FETCHED = 8;
    constexpr int TO_SECOND = EACH == 1 ? 0 : Shape::IS_APART ? THREADS : 1;
    constexpr bool LOADS_WORDS = Shape::LOADS_WORDS;
    static_assert(BATCH % AHEAD == 0 && TAPS_X > 1, "");
    extern __shared__ unsigned slab[];
    const int thread = threadIdx.x, lane = thread % 32;
    unsigned rest = blockIdx.x;
    const int c0 = rest % task.tiles * task.tile;
    rest /= task.tiles;
    // The last band begins earlier than its turn, so it is as long as the others.
    const int y0 = min(static_cast<int>(rest % task.bands) * task.band, max(0, task.out_rows - task.band)), rows = min(task.band, task.out_rows);
    const long long plane = rest / task.bands;
    const int slabs = (rows + Shape::LEAD + Shape::ROWS - 1) / Shape::ROWS;
    in += plane * task.in_plane, out += plane * task.out_plane, image += plane * task.image_plane;
    const unsigned in_pitch = task.in_pitch * sizeof(Sample), out_pitch = task.out_pitch * sizeof(Sample);
    const unsigned image_pitch = static_cast<unsigned>(task.image_pitch * sizeof(Sample));

    // Where the thread's columns of the input lie, and whether those of its warp lie within.
    const int offset = Shape::IS_APART ? thread : thread * EACH, column = c0 + offset;
    const int x = column + task.first_x - Shape::IS_ODD, in_y = y0 + task.first_y + Shape::STEPS * 2 * DOWN - Shape::LEAD;
    const Sample *first = in + x, *second = first + TO_SECOND;
    const bool is_inside = x >= 0 && x + TO_SECOND < task.columns, is_whole = __all_sync(~0u, is_inside);
    unsigned kept = ~0u;  // of a word: the rest lies beyond an edge of a constant
    if (!is_inside) {
        const auto source_of = [&](int at) {
            const int pixel = at / INNER - (at % INNER < 0), source = index_beyond(pixel, task.columns / INNER, task.mode_x);
            return source < 0 ? source : source * INNER + at - pixel * INNER;
        };
        const int from = source_of(x), beside = source_of(x + TO_SECOND);
        if (from < 0) kept &= EACH == 1 ? 0 : 0xFFFF0000u;
        if (beside < 0) kept &= 0xFFFFu;
        first = in + max(from, 0), second = in + max(beside, 0);
    }
    const unsigned beyond = bits_of(cval) * (EACH == 2 ? 0x00010001u : 1) & ~kept;
    // Loads as they come: no row waits for the one before.
    unsigned one[AHEAD], other[LOADS_WORDS ? 1 : AHEAD];
    const auto fetch = [&](int k, const Sample* at, const Sample* beside, bool whole) {
        if (EACH == 1 || (LOADS_WORDS && whole)) one[k] = loaded_pair(at);
        else if (LOADS_WORDS) one[k] = loaded_sample(at) | loaded_sample(beside) << 8 * sizeof(Sample);
        else one[k] = loaded_sample(at), other[LOADS_WORDS ? 0 : k] = loaded_sample(beside);
    };
    const auto fetch_row = [&](int k, int row) {
        fetch(k, rows_on(first, max(row, 0), in_pitch), rows_on(second, max(row, 0), in_pitch), false);
        if (!OPENS && row < 0) {
            one[k] = bits_of(cval), other[LOADS_WORDS ? 0 : k] = one[k];
            if (LOADS_WORDS && EACH == 2) one[k] |= one[k] << 8 * sizeof(Sample);
        }
    };
    const auto fetched = [&](int k, bool whole) {
        unsigned word = one[k];
        if (!LOADS_WORDS) word = __byte_perm(word, other[LOADS_WORDS ? 0 : k], 0x5410);
        else if (sizeof(Sample) == 1) word = __byte_perm(word, 0, 0x4140);
        return OPENS || whole ? word : (word & kept) | beyond;
    };
    // Numbers of rows of which some lie beyond the edges, in a column of shared memory: a call keeps loads from being under way.
    const auto find_rows = [&](unsigned* numbers, int y, int count) {
#pragma unroll 1
        for (int j = 0; j < count; ++j) slab_at<Shape>(numbers, j) = index_beyond(y + j, task.rows, task.mode_y);
    };

    const int limit = min(task.out_columns - c0, task.tile);
    const bool is_used = offset < limit, is_second_used = offset + TO_SECOND < limit;
    // Threads without results read what the first has.
    const Sample *theirs_first = image + (is_used ? column : c0), *theirs_second = theirs_first + (is_second_used ? TO_SECOND : 0);
    const auto load_theirs = [&](int row) {
        const Sample* const at = rows_on(theirs_first, row, image_pitch);
        if constexpr (EACH == 1) return loaded_pair(at);
        else if constexpr (!LOADS_WORDS) return __byte_perm(loaded_sample(at), loaded_sample(rows_on(theirs_second, row, image_pitch)), 0x5410);
        else return sizeof(Sample) == 1 ? __byte_perm(loaded_pair(at), 0, 0x4140) : loaded_pair(at);
    };
    const auto store = [&](Sample* to, unsigned found) {
        if (!is_used) return;
        if constexpr (EACH == 1 || (LOADS_WORDS && sizeof(Sample) == 2)) {
            __stcs(reinterpret_cast<unsigned*>(to), found);
        } else if constexpr (LOADS_WORDS) {
            __stcs(reinterpret_cast<unsigned short*>(to), static_cast<unsigned short>(__byte_perm(found, 0, 0x20)));
        } else {
            to[0] = static_cast<Sample>(found);
            if (is_second_used) to[TO_SECOND] = static_cast<Sample>(found >> 16);
        }
    };

    unsigned *const own = slab + thread, *const after = own + Shape::LINES * Shape::PITCH;
    Run<LEAST != OPENS, Sample, DOWN> down;
    Run<LEAST, Sample, DOWN> then;
    Seconds<DOWN, THREADS, SHARED> down_seconds{after}, then_seconds{after + DOWN * THREADS};
    find_rows(own, in_y, AHEAD);
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) fetch_row(j, slab_at<Shape>(own, j));
#pragma unroll 1
    for (int s = 0;; ++s) {
#pragma unroll 1
        for (int batch = 0; batch < BATCHES; ++batch) {
            unsigned* const words = own + batch * (BATCH / LANES) * Shape::PITCH;
            const int n = s * Shape::ROWS + batch * BATCH, r0 = n - Shape::ROWS - Shape::LEAD;  // the first row, and result
            const auto results = [&](int j, unsigned& a, unsigned& b) {
                a = slab_at<Shape>(words, j), b = slab_at<Shape>(words, j + 1);
                exchange<Shape>(a, b);
                if constexpr (OPENS) then.windows(j / 2, a, b, then_seconds.replaced(j / 2, b));
            };
            if (s > 0 && r0 >= 0 && r0 + BATCH <= rows) {
                Sample* const to = rows_on(out + column, y0 + r0, out_pitch);
                unsigned theirs[BATCH];
                const auto load = [&](int from) {
#pragma unroll
                    for (int i = 0; i < FETCHED; ++i)
                        if (from + i < BATCH) theirs[from + i] = load_theirs(y0 + r0 + from + i);
                };
                if (SUBTRACTS) load(0);
#pragma unroll
                for (int j = 0; j < BATCH; j += 2) {
                    if (SUBTRACTS && j % FETCHED == 0) load(j + FETCHED);
                    unsigned a, b;
                    results(j, a, b);
                    store(rows_on(to, j, out_pitch), slab_result<LEAST, OPENS, SUBTRACTS, Sample>(a, SUBTRACTS ? theirs[j] : 0));
                    store(rows_on(to, j + 1, out_pitch), slab_result<LEAST, OPENS, SUBTRACTS, Sample>(b, SUBTRACTS ? theirs[j + 1] : 0));
                }
            } else if (s > 0) {  // before the first result, or fewer rows than a batch
#pragma unroll
                for (int j = 0; j < BATCH; j += 2) {
                    unsigned a, b;
                    results(j, a, b);
                    slab_at<Shape>(words, j) = a, slab_at<Shape>(words, j + 1) = b;
                }
                const int end = min(BATCH, rows - r0);
#pragma unroll 1
                for (int j = max(0, -r0); j < end; ++j) {
                    const int row = y0 + r0 + j;
                    const unsigned theirs = SUBTRACTS ? load_theirs(row) : 0;
                    store(rows_on(out + column, row, out_pitch), slab_result<LEAST, OPENS, SUBTRACTS, Sample>(slab_at<Shape>(words, j), theirs));
                }
            }
            if (s == slabs) continue;
            const int y = in_y + n + AHEAD;  // of the first row to load
            const bool is_within = y >= 0 && y + BATCH <= task.rows;
            const Sample *const next = rows_on(first, max(y, 0), in_pitch), *const beside = rows_on(second, max(y, 0), in_pitch);
            unsigned a = 0;  // the first of two rows
            const auto compute = [&](int j, unsigned b) {
                if (j % 2) {
                    down.windows(j / 2, a, b, down_seconds.replaced(j / 2, b));
                    exchange<Shape>(a, b);
                    slab_at<Shape>(words, j - 1) = a, slab_at<Shape>(words, j) = b;
                }
                a = b;
            };
            if (is_within && is_whole) {
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const unsigned row = fetched(j % AHEAD, true);
                    fetch(j % AHEAD, rows_on(next, j, in_pitch), rows_on(next, j, in_pitch) + TO_SECOND, true);
                    compute(j, row);
                }
            } else if (is_within) {
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const unsigned row = fetched(j % AHEAD, false);
                    fetch(j % AHEAD, rows_on(next, j, in_pitch), rows_on(beside, j, in_pitch), false);
                    compute(j, row);
                }
            } else {
                find_rows(words, y, BATCH);
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const unsigned row = fetched(j % AHEAD, false);
                    fetch_row(j % AHEAD, slab_at<Shape>(words, j));
                    compute(j, row);
                }
            }
        }
        if (s == slabs) break;
        __syncthreads();
#pragma unroll 1
        for (int begin = 0; begin < Shape::LINES; begin += THREADS / 32 * Shape::GROUP) {
            const int line = begin + thread / 32 * Shape::GROUP + lane / INNER;
            const bool has_line = line < Shape::LINES && lane < Shape::GROUP * INNER;
            const unsigned threads = __ballot_sync(~0u, has_line);
            if (!has_line) continue;
            if (OPENS) along_line<!LEAST, Shape, Sample>(slab + line * Shape::PITCH, lane % INNER, threads);
            along_line<LEAST, Shape, Sample>(slab + line * Shape::PITCH, lane % INNER, threads);
        }
        __syncthreads();
    }
}
