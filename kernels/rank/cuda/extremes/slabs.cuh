// Openings and closings of boxes in one pass over memory, a block for each strip of columns. Part of rank.cu.
//
// A thread has a word of each row: two samples beside each other (bytes as halves), or a float. A block goes down a band of rows, a slab of
// them at a time. Windows of t samples take runs of t - 1 (van Herk; Gil and Werman): a run in registers has the extremes from each row to
// its end, and those from the start of the next run complete them. Windows are constants of the compiler.
//
//     each thread     results: both steps' extremes down its column, of the slab before   <- shared memory    runs of both steps
//                     rows of this slab, down its column                                  -> shared memory      in registers
//          |  barrier
//     a thread a row  both steps along a row of the slab, in place                                            runs of a row in registers
//          |  barrier, the next slab
//
// A thread takes and puts words of its own column only, so two barriers a slab are enough. Rows of shared memory have odd numbers of words:
// neither columns nor rows meet in a bank. Edges are those of the first image, so windows must be symmetric, and edges mirrors.
//
// Floors of N samples of b bytes: 2 N b bytes of memory; and for a word, threads that serve others and rows before the first result
// counted, of 16 bits and windows of 31 × 31 about 44 operations of a thread: 50 us of 8192 × 8192 on an H200, where the memory takes 64.
// Measured (2026-11-27), top-hats of 15, 21, 31, 51 and 65 of 16 bits: 0.48, 0.47, 0.41, 0.30 and 0.33 of a copy's speed; of floats 0.51,
// 0.44, 0.40 and 0.28 for 15, 21, 31 and 51. Without windows along the rows 0.51 (31 × 31, 16 bits), and 0.46 if nothing is subtracted:
// the image is read again, of which L2 has lost a part.
#pragma once

#include "cuda/extremes/columns.cuh"

// Words become the windows that begin LENGTH words before each.
template <bool LEAST, typename Sample, int LENGTH>
struct Run {
    unsigned word[LENGTH];  // the extreme of each and those after it, of the run before
    unsigned prefix;        // of this run
    unsigned between;       // of a row of pairs: the window of LENGTH words that begins where the next result does

    __device__ Run() {
#pragma unroll
        for (int j = 0; j < LENGTH; ++j) word[j] = loser<Sample, LEAST>();
    }

    // Word j, where a run begins at each multiple of LENGTH. Of a row of PAIRS of samples, windows have 2 LENGTH + 1 samples.
    template <bool PAIRS>
    __device__ unsigned windows(int j, unsigned own) {
        const int k = j % LENGTH;
        prefix = k == 0 ? own : chosen<LEAST, Sample>(prefix, own);
        unsigned found;
        if constexpr (PAIRS) {
            if (k == 0) between = word[0];
            const unsigned next = k + 1 < LENGTH ? chosen<LEAST, Sample>(word[(k + 1) % LENGTH], prefix) : prefix;
            found = chosen<LEAST, Sample>(chosen<LEAST, Sample>(between, __byte_perm(between, next, 0x5432)), own);
            between = next;
        } else {
            found = chosen<LEAST, Sample>(word[k], prefix);
        }
        word[k] = own;
        if (k == LENGTH - 1) {
#pragma unroll
            for (int i = LENGTH - 2; i >= 0; --i) word[i] = chosen<LEAST, Sample>(word[i], word[i + 1]);
        }
        return found;
    }
};

template <bool LEAST, typename Sample, int LENGTH>
struct PairRun {
    unsigned suffix[LENGTH];   // the extreme of each pair and those after it, of the run before
    unsigned prefix, between;  // of this run; of the LENGTH pairs before the next

    __device__ PairRun() {
#pragma unroll
        for (int k = 0; k < LENGTH; ++k) suffix[k] = loser<Sample, LEAST>();
    }

    // Pair number k; a run begins at each multiple of LENGTH. `old`: the second word of the pair LENGTH before.
    __device__ void windows(int k, unsigned& a, unsigned& b, unsigned old) {
        k %= LENGTH;
        const unsigned both = chosen<LEAST, Sample>(a, b);
        if (k == 0) between = suffix[0];
        prefix = k == 0 ? both : chosen<LEAST, Sample>(prefix, both);
        const unsigned next = k + 1 < LENGTH ? chosen<LEAST, Sample>(suffix[(k + 1) % LENGTH], prefix) : prefix;
        a = chosen<LEAST, Sample>(between, a), b = chosen<LEAST, Sample>(old, next);
        between = next, suffix[k] = both;
        if (k == LENGTH - 1) {
#pragma unroll
            for (int i = LENGTH - 2; i >= 0; --i) suffix[i] = chosen<LEAST, Sample>(suffix[i], suffix[i + 1]);
        }
    }
};

// Pairs of rows become the windows of 2 LENGTH + 1 rows that end in each: of LENGTH pairs, and of one row more. The second rows of
// pairs are KEPT in shared memory, or in registers.
template <bool LEAST, typename Sample, int LENGTH, bool KEPT>
struct PairsOfRows {
    unsigned word[LENGTH], second[KEPT ? 1 : LENGTH], prefix, between;
    unsigned* const ring;
    const int step;

    __device__ PairsOfRows(unsigned* ring, int step) : ring(ring), step(step) {
#pragma unroll
        for (int j = 0; j < LENGTH; ++j) word[j] = loser<Sample, LEAST>();
        between = word[0];
    }

    __device__ void windows(int pair, unsigned& a, unsigned& b) {
        const int k = pair % LENGTH;
        const unsigned both = chosen<LEAST, Sample>(a, b), old = KEPT ? ring[k * step] : second[KEPT ? 0 : k];
        if (KEPT) ring[k * step] = b;
        else second[KEPT ? 0 : k] = b;
        prefix = k == 0 ? both : chosen<LEAST, Sample>(prefix, both);
        const unsigned next = k + 1 < LENGTH ? chosen<LEAST, Sample>(word[(k + 1) % LENGTH], prefix) : prefix;
        a = chosen<LEAST, Sample>(k == 0 ? word[0] : between, a), b = chosen<LEAST, Sample>(old, next);
        between = next, word[k] = both;
        if (k == LENGTH - 1) {
#pragma unroll
            for (int i = LENGTH - 2; i >= 0; --i) word[i] = chosen<LEAST, Sample>(word[i], word[i + 1]);
        }
    }
};

template <typename Sample, bool OPENING, bool ALIGNED, bool ODD, bool PAIRS, int TAPS_Y, int TAPS_X, int CHANNELS, int THREADS, int BATCHES>
struct SlabShape {
    static constexpr bool OPENS = OPENING, IS_ODD = ODD, HAS_PAIRS = PAIRS;
    static constexpr int STEPS = OPENS ? 2 : 1, EACH = sizeof(Sample) == 4 ? 1 : 2, INNER = CHANNELS;  // EACH: samples of a word of the image
    static constexpr int LANES = PAIRS ? 1 : EACH;                                   // rows of a line
    static constexpr bool IS_APART = LANES == 2 && !ALIGNED;                         // a thread's columns are THREADS apart
    static constexpr int APART = IS_APART ? THREADS : 1;
    static constexpr int DOWN = TAPS_Y - 1, ALONG = (TAPS_X - 1) / (PAIRS ? 2 : 1);  // words of a run
    static constexpr int BATCH = DOWN < 12 ? 16 / DOWN * DOWN : DOWN;                // rows that are computed at once: whole runs
    static constexpr int ROWS = BATCHES * BATCH, LINES = ROWS / LANES;               // of a slab
    static constexpr int LEAD = (STEPS * DOWN + BATCH - 1) / BATCH * BATCH;          // rows before a band's first result: whole batches
    static constexpr int PART = ALONG < 12 && INNER == 1 ? 16 / ALONG * ALONG : ALONG;  // words of a line that are computed at once
    static constexpr int WORDS = THREADS * EACH / (PAIRS ? 2 : 1) / INNER;           // of a channel of a line
    static constexpr int HALF = LANES == 1 ? 0 : IS_APART ? THREADS : THREADS + (INNER + 1) / 2, PITCH = THREADS * LANES + INNER;
    static constexpr int GROUP = 32 / INNER, TURNS = (LINES + THREADS / 32 * GROUP - 1) / (THREADS / 32 * GROUP);  // lines of a warp
};

// Word j of a thread's column, of a line of LANES rows.
template <typename Shape>
__device__ inline unsigned& slab_at(unsigned* column, int j) {
    return column[j / Shape::LANES * Shape::PITCH + j % Shape::LANES * Shape::HALF];
}

// Two samples as a word, or a float; beside each other if PAIR.
template <bool PAIR, typename Sample>
__device__ inline unsigned slab_word(const Sample* first, const Sample* second) {
    if constexpr (sizeof(Sample) == 4) return __ldg(reinterpret_cast<const unsigned*>(first));
    else if constexpr (!PAIR) return __byte_perm(static_cast<unsigned short>(__ldg(first)), static_cast<unsigned short>(__ldg(second)), 0x5410);
    else if constexpr (sizeof(Sample) == 2) return __ldg(reinterpret_cast<const unsigned*>(first));
    else return __byte_perm(__ldg(reinterpret_cast<const unsigned short*>(first)), 0, 0x4140);
}

template <bool PAIR, typename Sample>
__device__ inline void store_slab_word(Sample* at, unsigned word, bool has_first, bool has_second, int apart) {
    if (!has_first) return;
    if constexpr (sizeof(Sample) == 4) {
        __stcs(reinterpret_cast<unsigned*>(at), word);
    } else if constexpr (!PAIR) {
        at[0] = static_cast<Sample>(word);
        if (has_second) at[apart] = static_cast<Sample>(word >> 16);
    } else if constexpr (sizeof(Sample) == 2) {
        __stcs(reinterpret_cast<unsigned*>(at), word);
    } else {
        __stcs(reinterpret_cast<unsigned short*>(at), static_cast<unsigned short>(__byte_perm(word, 0, 0x20)));
    }
}

template <typename Sample>
__device__ inline unsigned raw_sample(const Sample* at) {
    if constexpr (sizeof(Sample) == 4) return __ldg(reinterpret_cast<const unsigned*>(at));
    else return static_cast<unsigned short>(__ldg(at));
}
template <typename Sample>
__device__ inline unsigned raw_pair(const Sample* at) {
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

// The windows of a channel of a line of a slab, in place: they begin where their results are put, or a sample after that.
template <bool LEAST, typename Shape, typename Sample>
__device__ inline void along_line(unsigned* line, int channel, unsigned threads) {
    constexpr bool PAIRS = Shape::HAS_PAIRS;
    constexpr int INNER = Shape::INNER, LANES = Shape::LANES, PART = Shape::PART, BACK = Shape::ALONG;
    Run<LEAST, Sample, Shape::ALONG> run;
    constexpr bool IN_TURN = LANES == 1 || Shape::IS_APART;
    const auto place = [&](int word) { return IN_TURN ? line + word : line + (word & 1) * Shape::HALF + (word >> 1); };
    unsigned *even = place(channel), *odd = place(channel + INNER);
    unsigned *even_to = place(channel - Shape::IS_ODD), *odd_to = place(channel + INNER - Shape::IS_ODD);
    if constexpr (!PAIRS && IN_TURN) {
        constexpr int RUN = Shape::ALONG / 2, PART = RUN < 6 ? 8 / RUN * RUN : RUN, PAIRS_OF = (Shape::WORDS + 1) / 2;
        PairRun<LEAST, Sample, RUN> pairs;
        line += channel;
        const auto compute = [&](int i, auto count) {
#pragma unroll
            for (int j = 0; j < decltype(count)::value; ++j) {
                const bool has_results = i >= (RUN - j + PART - 1) / PART;
                unsigned a = line[2 * j * INNER], b = line[(2 * j + 1) * INNER];
                pairs.windows(j, a, b, has_results ? line[(2 * j + 1 - BACK) * INNER] : 0);
                if (has_results) line[(2 * j - BACK) * INNER] = a, line[(2 * j + 1 - BACK) * INNER] = b;
            }
            line += 2 * PART * INNER;
        };
#pragma unroll 1
        for (int i = 0; i < PAIRS_OF / PART; ++i) compute(i, Number<PART>());
        compute(PAIRS_OF / PART, Number<PAIRS_OF % PART>());
        return;
    }
    unsigned last = 0;
    const auto compute = [&](int i, auto count) {
#pragma unroll
        for (int j = 0; j < decltype(count)::value; ++j) {
            unsigned found = IN_TURN ? even[j * INNER] : (j % 2 ? odd : even)[j / 2 * INNER];
            found = run.template windows<PAIRS>(j, found);
            const unsigned own = found;
            if constexpr (PAIRS && Shape::IS_ODD) found = __byte_perm(last, found, 0x5432);
            last = own;
            if (i < (BACK + (PAIRS && Shape::IS_ODD) - j + PART - 1) / PART) continue;
            if constexpr (IN_TURN) even_to[(j - BACK) * INNER] = found;
            else (j % 2 ? odd_to : even_to)[(j / 2 - BACK / 2) * INNER] = found;
        }
        constexpr int STEP = IN_TURN ? PART * INNER : PART / 2 * INNER;
        even += STEP, odd += STEP, even_to += STEP, odd_to += STEP;
        // Results that are a sample further go to another thread's words, which it has read by now.
        if constexpr (INNER > 1 && Shape::IS_ODD) __syncwarp(threads);
    };
#pragma unroll 1
    for (int i = 0; i < Shape::WORDS / PART; ++i) compute(i, Number<PART>());
    compute(Shape::WORDS / PART, Number<Shape::WORDS % PART>());
}

// LEAST: of the second step. ALIGNED: rows of the input, of the output and of the image to subtract begin at whole words.
// AHEAD: rows that are on their way to a thread's registers; it divides a batch.
template <typename Sample, bool LEAST, bool OPENS, bool SUBTRACTS, bool ALIGNED, bool ODD, bool PAIRS, bool KEPT, int TAPS_Y, int TAPS_X, int INNER, int THREADS,
          int BATCHES, int AHEAD, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) extreme_slabs(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image, const __grid_constant__ BoxTask task, Sample cval) {
    using Shape = SlabShape<Sample, OPENS, ALIGNED, ODD, PAIRS, TAPS_Y, TAPS_X, INNER, THREADS, BATCHES>;
    constexpr int EACH = Shape::EACH, LANES = Shape::LANES, DOWN = Shape::DOWN, BATCH = Shape::BATCH, GROUP = 8;
    static_assert(BATCH % AHEAD == 0 && BATCH % LANES == 0, "");
    extern __shared__ unsigned slab[];
    const int thread = threadIdx.x;
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

    // Where the thread's columns of the input lie, and whether its warp loads both at once.
    const int offset = Shape::IS_APART ? thread : thread * EACH, to_second = EACH == 2 ? Shape::APART : 0;
    const int x = c0 + task.first_x - ODD + offset, in_y = y0 + task.first_y + Shape::STEPS * DOWN - Shape::LEAD;
    const Sample *first = in + x, *second = first + to_second;
    const bool is_inside = x >= 0 && x + to_second < task.columns;
    unsigned kept = ~0u;  // of a word: the rest lies beyond an edge of a constant
    if (!is_inside) {
        const auto source_of = [&](int at) {
            const int pixel = at / INNER - (at % INNER < 0), source = index_beyond(pixel, task.columns / INNER, task.mode_x);
            return source < 0 ? source : source * INNER + at - pixel * INNER;
        };
        const int from = source_of(x), beside = source_of(x + to_second);
        if (from < 0) kept &= EACH == 1 ? 0 : 0xFFFF0000u;
        if (beside < 0) kept &= 0xFFFFu;
        first = in + max(from, 0), second = in + max(beside, 0);
    }
    const unsigned constant = bits_of(cval) * (EACH == 2 ? 0x00010001u : 1);
    const bool is_whole = __all_sync(~0u, is_inside);
    const int column = c0 + offset, limit = min(task.out_columns - c0, task.tile);
    const bool is_used = offset < limit, is_second_used = offset + to_second < limit;
    // Threads without results read what the first has.
    const Sample *theirs_first = image + (is_used ? column : c0), *theirs_second = theirs_first + (is_second_used ? to_second : 0);
    // Numbers of rows of which some lie beyond the edges, in a column of shared memory: a call keeps loads from being under way.
    const auto find_rows = [&](unsigned* numbers, int y, int count) {
#pragma unroll 1
        for (int j = 0; j < count; ++j) slab_at<Shape>(numbers, j) = index_beyond(y + j, task.rows, task.mode_y);
    };
    const unsigned beyond = constant & ~kept;
    // Loads as they come, so nothing waits before they are needed: a word, or two samples.
    constexpr bool IS_WORD = ALIGNED || EACH == 1;
    unsigned one[AHEAD], other[IS_WORD ? 1 : AHEAD];
    const auto fetch = [&](int k, const Sample* at, const Sample* beside, bool whole) {
        if (EACH == 1 || (IS_WORD && whole)) one[k] = raw_pair(at);
        else if (IS_WORD) one[k] = raw_sample(at) | raw_sample(beside) << 8 * sizeof(Sample);
        else one[k] = raw_sample(at), other[IS_WORD ? 0 : k] = raw_sample(beside);
    };
    const auto fetched = [&](int k, bool whole) {
        unsigned word = one[k];
        if (!IS_WORD) word = __byte_perm(word, other[IS_WORD ? 0 : k], 0x5410);
        else if (sizeof(Sample) == 1) word = __byte_perm(word, 0, 0x4140);
        return OPENS || whole ? word : (word & kept) | beyond;
    };
    const auto fetch_row = [&](int k, int row) {
        fetch(k, rows_on(first, max(row, 0), in_pitch), rows_on(second, max(row, 0), in_pitch), false);
        if (!OPENS && row < 0) {
            one[k] = IS_WORD ? bits_of(cval) * (EACH == 1 ? 1 : sizeof(Sample) == 1 ? 0x0101u : 0x00010001u) : bits_of(cval);
            if (!IS_WORD) other[IS_WORD ? 0 : k] = bits_of(cval);
        }
    };

    unsigned* const rings = slab + Shape::LINES * Shape::PITCH + thread;
    PairsOfRows<LEAST != OPENS, Sample, DOWN / 2, KEPT> down(rings, THREADS);
    PairsOfRows<LEAST, Sample, DOWN / 2, KEPT> then(rings + DOWN / 2 * THREADS, THREADS);
    unsigned* const own = slab + thread;
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
                if constexpr (LANES == 2) {
                    const unsigned left = a, right = b;
                    a = __byte_perm(left, right, 0x5410), b = __byte_perm(left, right, 0x7632);
                }
                if constexpr (OPENS) then.windows(j / 2, a, b);
            };
            if (s > 0 && r0 >= 0 && r0 + BATCH <= rows) {
                Sample* const to = rows_on(out + column, y0 + r0, out_pitch);
                const Sample *const one = rows_on(theirs_first, y0 + r0, image_pitch), *const other = rows_on(theirs_second, y0 + r0, image_pitch);
                unsigned theirs[BATCH];
                const auto load = [&](int from, int end) {
#pragma unroll
                    for (int i = 0; i < BATCH; ++i)
                        if (i >= from && i < end) theirs[i] = slab_word<ALIGNED>(rows_on(one, i, image_pitch), rows_on(other, i, image_pitch));
                };
                if (SUBTRACTS) load(0, GROUP);
#pragma unroll
                for (int j = 0; j < BATCH; j += 2) {
                    if (SUBTRACTS && j % GROUP == 0) load(j + GROUP, j + 2 * GROUP);
                    unsigned a, b;
                    results(j, a, b);
                    a = slab_result<LEAST, OPENS, SUBTRACTS, Sample>(a, SUBTRACTS ? theirs[j] : 0);
                    b = slab_result<LEAST, OPENS, SUBTRACTS, Sample>(b, SUBTRACTS ? theirs[j + 1] : 0);
                    store_slab_word<ALIGNED>(rows_on(to, j, out_pitch), a, is_used, is_second_used, Shape::APART);
                    store_slab_word<ALIGNED>(rows_on(to, j + 1, out_pitch), b, is_used, is_second_used, Shape::APART);
                }
            } else if (s > 0) {  // before the first result, or fewer rows than a batch
#pragma unroll
                for (int j = 0; j < BATCH; j += 2) {
                    unsigned a, b;
                    results(j, a, b);
                    slab_at<Shape>(words, j) = a, slab_at<Shape>(words, j + 1) = b;
                }
                const int end = is_used ? min(BATCH, rows - r0) : 0;
#pragma unroll 1
                for (int j = max(0, -r0); j < end; ++j) {
                    const int row = y0 + r0 + j;
                    unsigned theirs = 0;
                    if (SUBTRACTS) theirs = slab_word<false>(rows_on(theirs_first, row, image_pitch), rows_on(theirs_second, row, image_pitch));
                    const unsigned found = slab_result<LEAST, OPENS, SUBTRACTS, Sample>(slab_at<Shape>(words, j), theirs);
                    store_slab_word<false>(rows_on(out + column, row, out_pitch), found, is_used, is_second_used, Shape::APART);
                }
            }
            if (s == slabs) continue;
            const int y = in_y + n + AHEAD;  // of the first row to load
            const bool is_within = y >= 0 && y + BATCH <= task.rows;
            const Sample *const next = rows_on(first, max(y, 0), in_pitch), *const next_beside = rows_on(second, max(y, 0), in_pitch);
            unsigned upper = 0;  // of two rows, the first one's
            const auto replace = [&](int j, unsigned lower) {
                if (j % 2) {
                    down.windows(j / 2, upper, lower);
                    if constexpr (LANES == 2) {
                        const unsigned left = upper;
                        upper = __byte_perm(left, lower, 0x5410), lower = __byte_perm(left, lower, 0x7632);
                    }
                    slab_at<Shape>(words, j - 1) = upper, slab_at<Shape>(words, j) = lower;
                }
                upper = lower;
            };
            if (is_within && is_whole) {
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const unsigned row = fetched(j % AHEAD, true);
                    fetch(j % AHEAD, rows_on(next, j, in_pitch), rows_on(next, j, in_pitch) + to_second, true);
                    replace(j, row);
                }
            } else if (is_within) {
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const unsigned row = fetched(j % AHEAD, false);
                    fetch(j % AHEAD, rows_on(next, j, in_pitch), rows_on(next_beside, j, in_pitch), false);
                    replace(j, row);
                }
            } else {
                find_rows(words, y, BATCH);
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const unsigned row = fetched(j % AHEAD, false);
                    fetch_row(j % AHEAD, slab_at<Shape>(words, j));
                    replace(j, row);
                }
            }
        }
        if (s == slabs) break;
        __syncthreads();
        const int lane = thread % 32;
#pragma unroll 1
        for (int turn = 0; turn < Shape::TURNS; ++turn) {
            const int line = (turn * (THREADS / 32) + thread / 32) * Shape::GROUP + lane / INNER;
            const bool has_line = line < Shape::LINES && lane < Shape::GROUP * INNER;
            const unsigned threads = __ballot_sync(~0u, has_line);
            if (OPENS && has_line) along_line<!LEAST, Shape, Sample>(slab + line * Shape::PITCH, lane % INNER, threads);
            if (has_line) along_line<LEAST, Shape, Sample>(slab + line * Shape::PITCH, lane % INNER, threads);
        }
        __syncthreads();
    }
}
