// Minima and maxima of boxes of two axes, in one pass over memory. Part of rank.cu. strip.cuh is faster where it applies: not for
// windows of very many rows or columns, doubles, and floats with missing samples.
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

#include "cuda/extremes/rows.cuh"

constexpr int BOX_THREADS = 256;

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

    Band<Sample> band(in, out, image, task, blockIdx.x, thread, threads, from, true);
    if (band.total == 0) return;
    band.settle(__syncthreads_or(band.is_far));
    const int total = band.total, ahead = band.ahead;
    const auto fetch = [&](V (&row)[ROWS], int n) { band.template fetch<LEAST>(row, n, from, cval); };
    const auto encode = [&](V (&row)[ROWS]) {
        if (task.is_first)
#pragma unroll
            for (int j = 0; j < ROWS; ++j)
#pragma unroll
                for (int k = 0; k < WORDS; ++k) row[j].word[k] = coding.encode(row[j].word[k]);
    };

    const bool is_direct = task.taps_x == 1 && task.aligned_out && ahead == 0;
    const int outs = task.tile / SAMPLES;  // no more: of what is beyond the tile, threads load nothing

    // The results whose windows end in rows n … of the band, by `along(place, begin)` of the rows in shared memory.
    const auto emit = [&](int n, auto along) {
        if (thread >= outs) return;
#pragma unroll 1
        for (int j = 0; j < ROWS; ++j) {
            if (n + j < task.taps_y - 1 || n + j >= total) continue;
            const auto to = band.results(n + j, thread);
            if (to.place >= task.out_columns) continue;
            V theirs = {};
            if (task.subtracts) theirs = band.image_at(to);
            V found = along(j * threads + thread, ahead - to.before);
            if (task.is_last) {
#pragma unroll
                for (int k = 0; k < WORDS; ++k) found.word[k] = coding.decode(found.word[k]);
            }
            band.store(to, found, theirs, nodata);
        }
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
        if (ends && band.fills) {
            const int x = band.x, columns = task.columns;
            if (x >= 0 && x < columns) {
#pragma unroll
                for (int j = 0; j < ROWS; ++j) left[j * threads + thread] = found[j];
            }
            __syncthreads();
            if (band.is_edge) {
#pragma unroll
                for (int j = 0; j < ROWS; ++j)
                    found[j] = completed(found[j], left + j * threads, from, x, columns, band.base, beyond);
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
