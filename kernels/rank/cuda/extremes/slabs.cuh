// Openings and closings of boxes in one pass over memory, a block for each strip of columns. Part of rank.cu.
//
// A thread has a word of each row: two samples side by side (bytes as halves), or a float. A block goes down a band, a slab of rows at a
// time. Windows of t samples are found by runs of t - 1 (van Herk; Gil and Werman) in registers: a run's extremes from each row to its end,
// which those of the next run from its start complete.
//
//     each thread     rows of the slab, from memory -> extremes down its column -> shared memory          registers: a run of rows
//          |  barrier
//     each thread     goes along one row of the slab: both steps' extremes, in place                       two runs of words
//          |  barrier
//     each thread     extremes down its column -> results of this slab; then the rows of the next slab     a run of rows
//
// What a thread takes from a column of shared memory and what it puts there next are its own, so two barriers a slab are enough. Rows of
// shared memory have odd lengths in words, so threads use different banks along and down. Windows are constants of the compiler.
#pragma once

#include "cuda/extremes/columns.cuh"

// Words become the windows that begin LENGTH words before each.
template <bool LEAST, typename Sample, int LENGTH>
struct Run {
    static constexpr int MANY = LENGTH > 0 ? LENGTH : 1;
    unsigned word[MANY];  // the extreme of each and those after it, of the run before
    unsigned prefix;      // of this run
    unsigned between;     // of a row of pairs: the window of LENGTH words that begins where the next result does

    __device__ Run() {
#pragma unroll
        for (int j = 0; j < MANY; ++j) word[j] = loser<Sample, LEAST>();
    }

    // Word j. Of a row of PAIRS of samples, windows have 2 LENGTH + 1 samples.
    template <bool PAIRS>
    __device__ unsigned windows(int j, unsigned own) {
        if constexpr (LENGTH == 0) return own;
        const int k = j % MANY;
        unsigned found;
        if constexpr (PAIRS) {
            if (k == 0) between = word[0];
            prefix = k == 0 ? own : chosen<LEAST, Sample>(prefix, own);
            const unsigned next = k + 1 < MANY ? chosen<LEAST, Sample>(word[(k + 1) % MANY], prefix) : prefix;
            found = chosen<LEAST, Sample>(chosen<LEAST, Sample>(between, __byte_perm(between, next, 0x5432)), own);
            between = next;
        } else {
            prefix = k == 0 ? own : chosen<LEAST, Sample>(prefix, own);
            found = chosen<LEAST, Sample>(word[k], prefix);
        }
        word[k] = own;
        if (k == MANY - 1) {
#pragma unroll
            for (int i = MANY - 2; i >= 0; --i) word[i] = chosen<LEAST, Sample>(word[i], word[i + 1]);
        }
        return found;
    }
};

template <typename Sample, bool OPENS, bool ODD, int TAPS_Y, int TAPS_X, int THREADS, int OTHERS, int BATCHES, int AHEAD>
struct SlabShape {
    static constexpr bool IS_ODD = ODD;
    static constexpr int EACH = sizeof(Sample) == 4 ? 1 : 2;  // samples of a word
    static constexpr int DOWN = TAPS_Y - 1, ALONG = (TAPS_X - 1) / EACH, STEPS = OPENS ? 2 : 1, HALO = STEPS * DOWN;
    static constexpr int BATCH = DOWN == 0 ? 16 : DOWN < 12 ? 16 / DOWN * DOWN : DOWN, LEAD = (HALO + BATCH - 1) / BATCH * BATCH, ROWS = BATCHES * BATCH;  // of a batch, of a slab
    static constexpr int LINE = ALONG == 0 ? 1 : ALONG < 12 ? 16 / ALONG * ALONG : ALONG, LINES = (THREADS + LINE - 1) / LINE;  // words
    static constexpr int PITCH = LINES * LINE | 1, USED = THREADS - STEPS * ALONG - ODD, BEHIND = STEPS * ALONG + ODD;
    static constexpr int GROUP = 8;  // rows of an image to subtract that are on their way
    static constexpr int LATER = OTHERS > 0 ? 2 : 1;  // slabs from rows to results
    static_assert(ROWS <= (OTHERS > 0 ? OTHERS : THREADS) && BATCH % AHEAD == 0, "");
};

// Two samples as a word, or a float; beside each other if PAIR.
template <bool PAIR, typename Sample>
__device__ inline unsigned slab_word(const Sample* first, const Sample* second) {
    if constexpr (sizeof(Sample) == 4) {
        return __float_as_uint(__ldg(first));
    } else if constexpr (!PAIR) {
        return __byte_perm(static_cast<unsigned short>(__ldg(first)), static_cast<unsigned short>(__ldg(second)), 0x5410);
    } else if constexpr (sizeof(Sample) == 2) {
#if __CUDA_ARCH__ >= 800 && defined(KEEP)
        unsigned found;
        unsigned long long policy;
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
        asm("ld.global.nc.L2::cache_hint.b32 %0, [%1], %2;" : "=r"(found) : "l"(first), "l"(policy));
        return found;
#endif
        return __ldg(reinterpret_cast<const unsigned*>(first));
    } else {
        return __byte_perm(__ldg(reinterpret_cast<const unsigned short*>(first)), 0, 0x4140);
    }
}

// Again, and for the last time.
template <bool PAIR, typename Sample>
__device__ inline unsigned last_slab_word(const Sample* first, const Sample* second) {
#ifdef HINT
    if constexpr (PAIR && sizeof(Sample) == 2) return __ldcs(reinterpret_cast<const unsigned*>(first));
    if constexpr (sizeof(Sample) == 4) return __float_as_uint(__ldcs(first));
    if constexpr (PAIR && sizeof(Sample) == 1) return __byte_perm(__ldcs(reinterpret_cast<const unsigned short*>(first)), 0, 0x4140);
#endif
    return slab_word<PAIR>(first, second);
}

template <bool PAIR, typename Sample>
__device__ inline void store_slab_word(Sample* at, unsigned word, int count) {
    if constexpr (sizeof(Sample) == 4) {
        __stcs(reinterpret_cast<unsigned*>(at), word);
    } else if constexpr (!PAIR) {
        at[0] = static_cast<Sample>(word);
        if (count == 2) at[1] = static_cast<Sample>(word >> 16);
    } else if constexpr (sizeof(Sample) == 2) {
        __stcs(reinterpret_cast<unsigned*>(at), word);
    } else {
        __stcs(reinterpret_cast<unsigned short*>(at), static_cast<unsigned short>(__byte_perm(word, 0, 0x20)));
    }
}

// As it is stored; `theirs`: of the image, if one is subtracted.
template <bool LEAST, bool SUBTRACTS, typename Sample>
__device__ inline unsigned slab_result(unsigned found, unsigned theirs) {
    if constexpr (same<Sample, float>)
        if (is_nan(__uint_as_float(found))) found = bits_of(not_a_number<float>());
    if constexpr (!SUBTRACTS) return found;
    const unsigned more = LEAST ? found : theirs, less = LEAST ? theirs : found;
    if constexpr (same<Sample, float>) return __float_as_uint(__uint_as_float(more) - __uint_as_float(less));
    else if constexpr (same<Sample, short>) return __vsubss2(more, less);
    else return more - less;  // no sample of `less` is larger
}

template <typename Sample>
__device__ inline Sample* rows_on(Sample* at, int rows, unsigned pitch_bytes) {
        return reinterpret_cast<Sample*>(reinterpret_cast<unsigned long long>(at) + static_cast<unsigned long long>(pitch_bytes) * static_cast<unsigned>(rows));
}

// Bytes of a row of an image, that begin and end anywhere in it, to L2.
__device__ inline void prefetch_row(const void* begin, const void* end) {
#if __CUDA_ARCH__ >= 900 && defined(PREFETCH)
    const unsigned long long from = reinterpret_cast<unsigned long long>(begin) + 15 & ~15ull;
    const long long bytes = static_cast<long long>((reinterpret_cast<unsigned long long>(end) & ~15ull) - from);
    if (bytes > 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(static_cast<unsigned>(bytes)) : "memory");
#endif
}

template <bool LEAST, bool OPENS, typename Shape, typename Sample>
__device__ inline void along_row(unsigned* line) {
#ifndef SKIP_ROWS
    constexpr int ALONG = Shape::ALONG;
    Run<LEAST != OPENS, Sample, ALONG> along;
    Run<LEAST, Sample, OPENS ? ALONG : 1> again;
    unsigned last = 0;
#pragma unroll 1
    for (int i = 0; i < Shape::LINES; ++i, line += Shape::LINE) {
#pragma unroll
        for (int j = 0; j < Shape::LINE; ++j) {
            unsigned found = along.template windows<Shape::EACH == 2>(j, line[j]);
            if constexpr (OPENS) found = again.template windows<Shape::EACH == 2>(j, found);
            if constexpr (Shape::IS_ODD) {
                const unsigned pair = __byte_perm(last, found, 0x5432);
                last = found, found = pair;
            }
            if (i >= (Shape::BEHIND - j + Shape::LINE - 1) / Shape::LINE) line[j - Shape::BEHIND] = found;
        }
    }
#endif
}

template <typename Sample, bool LEAST, bool OPENS, bool SUBTRACTS, bool ALIGNED, bool ODD, int TAPS_Y, int TAPS_X, int THREADS, int OTHERS, int BATCHES, int AHEAD, int BLOCKS>
__global__ void __launch_bounds__(THREADS + OTHERS, BLOCKS) extreme_slabs(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image, const __grid_constant__ BoxTask task) {
    using Shape = SlabShape<Sample, OPENS, ODD, TAPS_Y, TAPS_X, THREADS, OTHERS, BATCHES, AHEAD>;
    constexpr int EACH = Shape::EACH, DOWN = Shape::DOWN, PITCH = Shape::PITCH, BATCH = Shape::BATCH;
    extern __shared__ unsigned slab[];
    const int thread = threadIdx.x;
    unsigned rest = blockIdx.x;
    const int c0 = rest % task.tiles * task.tile;
    rest /= task.tiles;
    // The last band begins earlier than its turn, and is as long as the others.
    const int y0 = min(static_cast<int>(rest % task.bands) * task.band, max(0, task.out_rows - task.band)), rows = min(task.band, task.out_rows);
    const long long plane = rest / task.bands;
    const int slabs = (rows + Shape::LEAD + Shape::ROWS - 1) / Shape::ROWS;
    if (OTHERS > 0 && thread >= THREADS) {
#pragma unroll 1
        for (int s = 0; s <= slabs; ++s) {
            if (s > 0 && thread - THREADS < Shape::ROWS)
                along_row<LEAST, OPENS, Shape, Sample>(slab + ((s - 1) % 2 * Shape::ROWS + thread - THREADS) * PITCH);
            __syncthreads();
        }
        return;
    }
    in += plane * task.in_plane, out += plane * task.out_plane, image += plane * task.image_plane;
    const unsigned in_pitch = task.in_pitch * sizeof(Sample), out_pitch = task.out_pitch * sizeof(Sample);
    const unsigned image_pitch = static_cast<unsigned>(task.image_pitch * sizeof(Sample));

    // Where the thread's columns of the input lie, and whether its warp loads both at once.
    const int x = c0 + task.first_x - ODD + thread * EACH, in_y = y0 + task.first_y + Shape::HALO - Shape::LEAD;
    const Sample *first = in + x, *second = first + EACH - 1;
    const bool is_inside = x >= 0 && x + EACH <= task.columns;
    if (!is_inside) {
        first = in + index_beyond(x, task.columns, task.mode_x);
        second = in + index_beyond(x + EACH - 1, task.columns, task.mode_x);
    }
    const bool is_pair = ALIGNED && __all_sync(~0u, is_inside) && x % EACH == 0;
    const int column = c0 + thread * EACH, count = min(EACH, min(task.out_columns, c0 + task.tile) - column);
    const bool is_used = count > 0 && thread < Shape::USED;
    // Threads without results read what the first has.
    const Sample *theirs_first = image + (is_used ? column : c0), *theirs_second = theirs_first + (is_used ? count - 1 : 0);
    // Of rows of which some lie beyond the edges: their numbers, in a column of shared memory.
    const auto find_rows = [&](unsigned* numbers, int y, int count) {
#pragma unroll 1
        for (int j = 0; j < count; ++j) numbers[j * PITCH] = index_beyond(y + j, task.rows, task.mode_y);
    };

    Run<LEAST != OPENS, Sample, DOWN> down;
    Run<LEAST, Sample, OPENS ? DOWN : 1> then;
    unsigned* const own = slab + thread;
    unsigned coming[AHEAD];
    find_rows(own, in_y, AHEAD);
#pragma unroll
    for (int j = 0; j < AHEAD; ++j)
        coming[j] = slab_word<false>(rows_on(first, own[j * PITCH], in_pitch), rows_on(second, own[j * PITCH], in_pitch));
#pragma unroll 1
    for (int s = 0;; ++s) {
#pragma unroll 1
        for (int batch = 0; batch < BATCHES; ++batch) {
            unsigned* const words = own + ((OTHERS > 0 ? s % 2 * Shape::ROWS : 0) + batch * BATCH) * PITCH;
            const int r0 = (s - Shape::LATER) * Shape::ROWS + batch * BATCH - Shape::LEAD, y = in_y + s * Shape::ROWS + batch * BATCH + AHEAD;
            if (s >= Shape::LATER && r0 >= 0 && r0 + BATCH <= rows) {
                Sample* const to = rows_on(out + column, y0 + r0, out_pitch);
                const Sample *const one = rows_on(theirs_first, y0 + r0, image_pitch), *const other = rows_on(theirs_second, y0 + r0, image_pitch);
                unsigned theirs[BATCH];
                const auto load = [&](int from, int end) {
#pragma unroll
                    for (int i = 0; i < BATCH; ++i)
                        if (i >= from && i < end) theirs[i] = last_slab_word<ALIGNED>(rows_on(one, i, image_pitch), rows_on(other, i, image_pitch));
                };
                if (SUBTRACTS) load(0, Shape::GROUP);
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    if (SUBTRACTS && j % Shape::GROUP == 0) load(j + Shape::GROUP, j + 2 * Shape::GROUP);
                    unsigned found = words[j * PITCH];
                    if constexpr (OPENS) found = then.template windows<false>(j, found);
                    found = slab_result<LEAST, SUBTRACTS, Sample>(found, theirs[j]);
                    if (is_used) store_slab_word<ALIGNED>(rows_on(to, j, out_pitch), found, count);
                }
            } else if (s >= Shape::LATER) {
                if constexpr (OPENS) {
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) words[j * PITCH] = then.template windows<false>(j, words[j * PITCH]);
                }
                const int end = is_used ? min(BATCH, rows - r0) : 0;
#pragma unroll 1
                for (int j = max(0, -r0); j < end; ++j) {
                    const int row = y0 + r0 + j;
                    unsigned theirs = 0;
                    if (SUBTRACTS) theirs = slab_word<false>(rows_on(theirs_first, row, image_pitch), rows_on(theirs_second, row, image_pitch));
                    store_slab_word<false>(rows_on(out + column, row, out_pitch), slab_result<LEAST, SUBTRACTS, Sample>(words[j * PITCH], theirs), count);
                }
            }
            if (s >= slabs) continue;
            const bool is_within = y >= 0 && y + BATCH <= task.rows;
            const Sample *const next = rows_on(first, max(y, 0), in_pitch), *const beside = rows_on(second, max(y, 0), in_pitch);
            const auto replace = [&](int j, unsigned row) {
                const unsigned found = down.template windows<false>(j, coming[j % AHEAD]);
                coming[j % AHEAD] = row;
                words[j * PITCH] = found;
            };
            if (is_within && is_pair) {
#pragma unroll
                for (int j = 0; j < BATCH; ++j) replace(j, slab_word<ALIGNED>(rows_on(next, j, in_pitch), rows_on(beside, j, in_pitch)));
            } else if (is_within) {
#pragma unroll
                for (int j = 0; j < BATCH; ++j) replace(j, slab_word<false>(rows_on(next, j, in_pitch), rows_on(beside, j, in_pitch)));
            } else {
                find_rows(words, y, BATCH);
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const unsigned row = words[j * PITCH];
                    replace(j, slab_word<false>(rows_on(first, row, in_pitch), rows_on(second, row, in_pitch)));
                }
            }
        }
        if (s == slabs - 1 + Shape::LATER) break;
        if (thread < Shape::ROWS && s < slabs - 1) {
            const int y = in_y + (s + 1) * Shape::ROWS + AHEAD + thread;
            const Sample* const row = rows_on(in, max(0, min(y, task.rows - 1)), in_pitch);
            const int from = c0 + task.first_x;
            prefetch_row(row + max(from, 0), row + min(from + THREADS * EACH, task.columns));
        }
        __syncthreads();
        if constexpr (OTHERS == 0) {
            if (thread < Shape::ROWS) along_row<LEAST, OPENS, Shape, Sample>(slab + thread * PITCH);
            __syncthreads();
        }
    }
}
