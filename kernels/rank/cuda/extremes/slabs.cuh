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

template <typename Sample, int TAPS_Y, int TAPS_X, int THREADS, int BATCHES>
struct SlabShape {
    static constexpr int EACH = sizeof(Sample) == 4 ? 1 : 2;                  // samples of a word
    static constexpr int DOWN = TAPS_Y - 1, ALONG = (TAPS_X - 1) / EACH;      // words of a run
    static constexpr int BATCH = DOWN < 12 ? 16 / DOWN * DOWN : DOWN;         // rows that are computed at once: whole runs
    static constexpr int ROWS = BATCHES * BATCH;                              // of a slab
    static constexpr int LEAD = (2 * DOWN + BATCH - 1) / BATCH * BATCH;       // rows before a band's first result: whole batches
    static constexpr int LINE = ALONG < 12 ? 16 / ALONG * ALONG : ALONG;      // words of a row that are computed at once
    static constexpr int LINES = (THREADS + LINE - 1) / LINE, PITCH = LINES * LINE | 1, USED = THREADS - 2 * ALONG;
    static_assert(ROWS <= THREADS, "");
};

// Two samples as a word, or a float; beside each other if PAIR.
template <bool PAIR, typename Sample>
__device__ inline unsigned slab_word(const Sample* first, const Sample* second) {
    if constexpr (sizeof(Sample) == 4) return __ldg(reinterpret_cast<const unsigned*>(first));
    else if constexpr (!PAIR) return __byte_perm(static_cast<unsigned short>(__ldg(first)), static_cast<unsigned short>(__ldg(second)), 0x5410);
    else if constexpr (sizeof(Sample) == 2) return __ldg(reinterpret_cast<const unsigned*>(first));
    else return __byte_perm(__ldg(reinterpret_cast<const unsigned short*>(first)), 0, 0x4140);
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

// As it is stored; `theirs`: of the image that SUBTRACTS needs.
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
    return reinterpret_cast<Sample*>(reinterpret_cast<unsigned long long>(at) + static_cast<unsigned long long>(pitch_bytes) * rows);
}

// Both steps' windows along a row of a slab, in place: they begin where their results are put.
template <bool LEAST, typename Shape, typename Sample>
__device__ inline void along_row(unsigned* line) {
    Run<!LEAST, Sample, Shape::ALONG> first;
    Run<LEAST, Sample, Shape::ALONG> then;
#pragma unroll 1
    for (int i = 0; i < Shape::LINES; ++i, line += Shape::LINE) {
#pragma unroll
        for (int j = 0; j < Shape::LINE; ++j) {
            const unsigned found = then.template windows<Shape::EACH == 2>(j, first.template windows<Shape::EACH == 2>(j, line[j]));
            if (i >= (2 * Shape::ALONG - j + Shape::LINE - 1) / Shape::LINE) line[j - 2 * Shape::ALONG] = found;
        }
    }
}

// LEAST: of the second step. ALIGNED: rows of the input, of the output and of the image to subtract begin at whole words.
// AHEAD: rows that are on their way to a thread's registers; it divides a batch.
template <typename Sample, bool LEAST, bool SUBTRACTS, bool ALIGNED, int TAPS_Y, int TAPS_X, int THREADS, int BATCHES, int AHEAD, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) extreme_slabs(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image, const __grid_constant__ BoxTask task) {
    using Shape = SlabShape<Sample, TAPS_Y, TAPS_X, THREADS, BATCHES>;
    constexpr int EACH = Shape::EACH, DOWN = Shape::DOWN, PITCH = Shape::PITCH, BATCH = Shape::BATCH, GROUP = 8;
    static_assert(BATCH % AHEAD == 0, "");
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
    const int x = c0 + task.first_x + thread * EACH, in_y = y0 + task.first_y + 2 * DOWN - Shape::LEAD;
    const Sample *first = in + x, *second = first + EACH - 1;
    const bool is_inside = x >= 0 && x + EACH <= task.columns;
    if (!is_inside) {
        first = in + index_beyond(x, task.columns, task.mode_x);
        second = in + index_beyond(x + EACH - 1, task.columns, task.mode_x);
    }
    const bool is_pair = ALIGNED && __all_sync(~0u, is_inside);
    const int column = c0 + thread * EACH, count = min(EACH, min(task.out_columns, c0 + task.tile) - column);
    const bool is_used = count > 0 && thread < Shape::USED;
    // Threads without results read what the first has.
    const Sample *theirs_first = image + (is_used ? column : c0), *theirs_second = theirs_first + (is_used ? count - 1 : 0);
    // Numbers of rows of which some lie beyond the edges, in a column of shared memory: a call keeps loads from being under way.
    const auto find_rows = [&](unsigned* numbers, int y, int count) {
#pragma unroll 1
        for (int j = 0; j < count; ++j) numbers[j * PITCH] = index_beyond(y + j, task.rows, task.mode_y);
    };

    Run<!LEAST, Sample, DOWN> down;
    Run<LEAST, Sample, DOWN> then;
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
            unsigned* const words = own + batch * BATCH * PITCH;
            const int n = s * Shape::ROWS + batch * BATCH, r0 = n - Shape::ROWS - Shape::LEAD;  // the first row, and result
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
                for (int j = 0; j < BATCH; ++j) {
                    if (SUBTRACTS && j % GROUP == 0) load(j + GROUP, j + 2 * GROUP);
                    const unsigned found = slab_result<LEAST, SUBTRACTS, Sample>(then.template windows<false>(j, words[j * PITCH]), theirs[j]);
                    if (is_used) store_slab_word<ALIGNED>(rows_on(to, j, out_pitch), found, count);
                }
            } else if (s > 0) {  // before the first result, or fewer rows than a batch
#pragma unroll
                for (int j = 0; j < BATCH; ++j) words[j * PITCH] = then.template windows<false>(j, words[j * PITCH]);
                const int end = is_used ? min(BATCH, rows - r0) : 0;
#pragma unroll 1
                for (int j = max(0, -r0); j < end; ++j) {
                    const int row = y0 + r0 + j;
                    unsigned theirs = 0;
                    if (SUBTRACTS) theirs = slab_word<false>(rows_on(theirs_first, row, image_pitch), rows_on(theirs_second, row, image_pitch));
                    store_slab_word<false>(rows_on(out + column, row, out_pitch), slab_result<LEAST, SUBTRACTS, Sample>(words[j * PITCH], theirs), count);
                }
            }
            if (s == slabs) continue;
            const int y = in_y + n + AHEAD;  // of the first row to load
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
        if (s == slabs) break;
        __syncthreads();
        if (thread < Shape::ROWS) along_row<LEAST, Shape, Sample>(slab + thread * PITCH);
        __syncthreads();
    }
}
