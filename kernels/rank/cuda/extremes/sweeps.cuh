// Minima and maxima of boxes of many rows, an axis a pass. Part of rank.cu.
//
// A window costs three comparisons a sample, however large it is (van Herk; Gil and Werman). Warps wait for no other warp.
//
//   extreme_down    a thread has a word of each row of a band, in groups of rows. Of a group it keeps one word, its extreme, in a ring in shared
//                   memory. Rows are loaded twice: as they enter windows, and, mostly from L2, as they leave them.
//
//                        leaving group  | s s s s |                              s: from each row to the group's end
//                        whole groups             | m | m | m | m |              m: of a group
//                        entering group                           | p p p p |    p: from the group's start to each row
//                        a window            [ s    m   m   m   m   p p ]
//
//                   Groups begin where windows begin, so the rows that enter with one group end the group before: its last REST rows.
//
//   extreme_along   a warp goes along two rows, 512 bytes of each a step, in words of one column of both rows.
//
//                        threads        | t0 | t1 | t2 | t3 | t4 | t5 |      s, p: from a column to its thread's end, from the start to it
//                        a window         [ s   w    w    w    w   p ]       w: whole threads, by spans of a power of two
//                             |
//                          lanes of the warp store s, p, w and spans in rings, wait for each other, read what their windows need,
//                          and wait again before the next step
//
// An erosion goes down, then along; an opening along, down twice, and along.
//
// Floors of N samples of b bytes: 2 N b bytes for each pass, so 0.5 of a copy, and 0.25 for an opening; 3 N b down the columns if L2 has lost
// the rows. Measured on an H200, 8192 x 8192 (2026-11-28): extreme_along 0.80 to 0.86 of a copy (bytes 0.64); extreme_down of u16 0.79, 0.56 and
// 0.45 for 101, 255 and 401 rows, of floats 0.81 and 0.59 for 101 and 255.
#pragma once

#include "cuda/extremes/strip.cuh"

constexpr int SWEEP_THREADS = 32;
constexpr int PREFIXES = 64;  // threads whose columns the ring of p has: those of this step and of the one before
constexpr int SPANS = 6;      // doublings of whole threads

template <typename Sample>
__device__ inline int past_of(const Sample* at, int bytes = 16) {
    return static_cast<int>(reinterpret_cast<unsigned long long>(at) % bytes / sizeof(Sample));
}

// As floats are written: all NaN alike.
template <typename Sample>
__device__ inline Word<Sample> settled(Word<Sample> word) {
    if constexpr (same<Sample, float>)
        if (is_nan(__uint_as_float(word))) return bits_of(not_a_number<float>());
    return word;
}

template <bool LEAST, typename Sample>
__device__ inline unsigned chosen_packed(unsigned a, unsigned b) {
    if constexpr (sizeof(Sample) == 1) return extreme<Sample, LEAST>(a, b);
    else return chosen<LEAST, Sample>(a, b);
}

// Of integers; and of floats whose NaN spread, without nodata. Windows have at least 2 GROUP + 1 rows, and REST more than whole groups and one.
// Rows of the output begin and end at words. ALIGNED: rows of the input too; else a thread loads the word that holds its first sample, and gets
// the rest from the next.
template <typename Sample, bool LEAST, bool ALIGNED, int REST, int GROUP>
__global__ void __launch_bounds__(SWEEP_THREADS, 12) extreme_down(
    const Sample* __restrict__ in, Sample* __restrict__ out, const __grid_constant__ BoxTask task, Sample cval) {
    constexpr int EACH = SAMPLES_A_WORD<Sample>, USED = ALIGNED ? SWEEP_THREADS : SWEEP_THREADS - 1;
    const auto best = [](unsigned a, unsigned b) { return chosen_packed<LEAST, Sample>(a, b); };
    extern __shared__ ulonglong2 vectors[];
    const int lane = threadIdx.x, groups = (task.taps_y - 1) / GROUP;
    unsigned* const ring = reinterpret_cast<unsigned*>(vectors) + lane;
    unsigned block = blockIdx.x;
    const int x = (block % task.tiles * USED + lane) * EACH;
    block /= task.tiles;
    const int number = block % task.bands, y0 = number * task.band, rows = min(task.band, task.out_rows - y0), total = rows + task.taps_y - 1;
    const long long plane = block / task.bands;
    if (rows <= 0) return;
    const bool upwards = number % 2 == 1, is_used = x < task.columns && lane < USED;
    const int on = upwards ? -1 : 1, in_y = task.first_y + y0 + (upwards ? total - 1 : 0);
    const int whole = task.rows - !ALIGNED;  // rows that may be read beyond their ends
    in += plane * task.in_plane;
    // Threads that need nothing load what others do.
    const int column = min(x, (task.columns + (ALIGNED ? -1 : EACH - 1)) & ~(EACH - 1));
    const int in_step = on * task.in_pitch, out_step = on * task.out_pitch;
    Sample* target = out + plane * task.out_plane + (y0 + (upwards ? rows - 1 : 0)) * static_cast<long long>(task.out_pitch) + x;

    const auto row_at = [&](int n) { return in + (in_y + n * on) * static_cast<long long>(task.in_pitch) + column; };
    const auto is_safe = [&](int n) {
        const int first = in_y + n * on, last = first + (GROUP - 1) * on;
        return min(first, last) >= 0 && max(first, last) < whole;
    };
    const auto fetch = [&](unsigned (&to)[GROUP], int n, bool is_last) {
        if (is_safe(n)) {
            const Sample* const first = row_at(n);
#pragma unroll
            for (int d = 0; d < GROUP; ++d) {
                const unsigned long long at = reinterpret_cast<unsigned long long>(first + static_cast<long long>(in_step) * d);
                const unsigned* const word = reinterpret_cast<const unsigned*>(ALIGNED ? at : at & ~3ull);
                to[d] = is_last ? __ldcs(word) : __ldg(word);
            }
            return;
        }
        // Each lane finds one row: by each thread for all rows, the bands at the edges took half as long again as the others.
        const int own = index_beyond(in_y + min(n + lane, total - 1) * on, task.rows, task.mode_y);
#pragma unroll
        for (int d = 0; d < GROUP; ++d) {
            const int y = __shfl_sync(~0u, own, d);
            const Sample* const line = in + y * static_cast<long long>(task.in_pitch);
            if (ALIGNED && y >= 0) {
                to[d] = __ldg(reinterpret_cast<const unsigned*>(line + column));
                continue;
            }
            to[d] = y < 0 ? filled(cval) : 0;
#pragma unroll
            for (int i = 0; i < EACH && y >= 0; ++i)
                to[d] |= bits_of(line[min(x + i, task.columns - 1)]) << i * 8 * static_cast<int>(sizeof(Sample));
        }
    };
    // The thread's samples of rows that have been fetched.
    const auto settle = [&](unsigned (&row)[GROUP], int n) {
        if constexpr (!ALIGNED) {
            const unsigned lies = is_safe(n) ? static_cast<unsigned>(reinterpret_cast<unsigned long long>(row_at(n))) : 0;
            const unsigned step = is_safe(n) ? in_step * static_cast<int>(sizeof(Sample)) : 0;
#pragma unroll
            for (int d = 0; d < GROUP; ++d)
                row[d] = __funnelshift_r(row[d], __shfl_down_sync(~0u, row[d], 1), (lies + d * step) % 4 * 8);
        }
    };
    const unsigned none = loser<Sample, LEAST>();
    unsigned coming[GROUP], going[GROUP], tail = none;
    int slot = 0;
    fetch(coming, REST, false);
#pragma unroll 1
    for (int n = REST, r = -groups * GROUP; n < total; n += GROUP, r += GROUP) {
        settle(coming, n);
        unsigned prefix = none, last = none, found[GROUP];
#pragma unroll
        for (int d = GROUP - REST; d < GROUP; ++d) last = best(last, coming[d]);
        if (r >= 0) {
            settle(going, r);
            unsigned suffix = none;
#pragma unroll 4
            for (int k = 0; k < groups - 1; ++k) suffix = best(suffix, ring[k * SWEEP_THREADS]);
            if constexpr (sizeof(Sample) == 2) {
                // Of three words at once.
                unsigned from[GROUP / 2 + 1];
                from[GROUP / 2] = suffix;
#pragma unroll
                for (int d = GROUP / 2 - 1; d >= 0; --d) from[d] = best(best(going[2 * d], going[2 * d + 1]), from[d + 1]);
#pragma unroll
                for (int d = 0; d < GROUP; d += 2) {
                    found[d] = best(best(prefix, coming[d]), from[d / 2]);
                    prefix = best(best(coming[d], coming[d + 1]), prefix);
                    found[d + 1] = best(best(going[d + 1], from[d / 2 + 1]), prefix);
                }
            } else {
#pragma unroll
                for (int d = GROUP - 1; d >= 0; --d) found[d] = suffix = best(suffix, going[d]);
#pragma unroll
                for (int d = 0; d < GROUP; ++d) prefix = best(prefix, coming[d]), found[d] = best(found[d], prefix);
            }
        } else {
#pragma unroll
            for (int d = 0; d < GROUP; ++d) prefix = best(prefix, coming[d]);
        }
        if (n + GROUP < total) {
            fetch(coming, n + GROUP, false);
            if (r >= -GROUP) fetch(going, r + GROUP, true);
        }
        ring[slot * SWEEP_THREADS] = best(tail, prefix), tail = last;
        if (++slot == groups - 1) slot = 0;
        if (r < 0) continue;
        const auto store = [&](int d) {
            __stcs(reinterpret_cast<unsigned*>(target + static_cast<long long>(out_step) * d), settled<Sample>(found[d]));
        };
        if (is_used && r + GROUP <= rows) {
#pragma unroll
            for (int d = 0; d < GROUP; ++d) store(d);
        } else if (is_used) {
#pragma unroll
            for (int d = 0; d < GROUP; ++d)
                if (r + d < rows) store(d);
        }
        target += static_cast<long long>(out_step) * GROUP;
    }
}

// Where samples beyond the ends of a row come from: one fold away, or the nearest.
struct Folds {
    int left, right, sign;  // of that at x: left + sign x, or right + sign x
    __device__ Folds(int length, int mode) {
        sign = mode == REFLECT || mode == MIRROR ? -1 : mode == WRAP ? 1 : 0;
        left = mode == REFLECT ? -1 : mode == WRAP ? length : 0;
        right = mode == REFLECT ? 2 * length - 1 : mode == MIRROR ? 2 * length - 2 : mode == WRAP ? -length : length - 1;
    }
    __device__ int at(int x, int length, int mode) const {
        if (x >= 0 && x < length) return x;
        if (mode == CONSTANT) return -1;
        return max(0, min((x < 0 ? left : right) + sign * x, length - 1));
    }
};

// Of windows of at least 3 SAMPLES + 2 columns. ALIGNED: rows of the input and the output begin at whole vectors.
template <typename Sample, bool LEAST, bool ALIGNED>
__global__ void __launch_bounds__(SWEEP_THREADS, sizeof(Sample) == 1 ? 16 : 24) extreme_along(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image, const __grid_constant__ BoxTask task,
    Sample cval) {
    using V = Vector<Sample>;
    using Each = Column<Sample>;
    constexpr int N = V::SAMPLES, PITCH = N + 1;  // so that threads use different banks
    extern __shared__ ulonglong2 vectors[];
    const int lane = threadIdx.x, slots = task.slots, mask = slots - 1;
    Each* const suffixes = reinterpret_cast<Each*>(vectors);
    Each* const prefixes = suffixes + PITCH * slots;
    Each* const wholes = prefixes + PITCH * PREFIXES;
    Each* const spans = wholes + slots;

    const long long first = 2ll * (blockIdx.x / task.tiles), lines = task.planes * task.rows;
    const int c0 = blockIdx.x % task.tiles * task.tile, c1 = min(c0 + task.tile, task.out_columns);
    const Sample *from[2], *other[2];
    Sample* to[2];
    bool may_pass[2];  // what follows the row may be read
    int past[2] = {};  // samples before the thread's results, which are stored with them
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const long long line = min(first + i, lines - 1), plane = line / task.rows;
        const int y = static_cast<int>(line - plane * task.rows);
        from[i] = in + plane * task.in_plane + y * static_cast<long long>(task.in_pitch);
        to[i] = out + plane * task.out_plane + y * static_cast<long long>(task.out_pitch);
        other[i] = image + plane * task.image_plane + y * task.image_pitch;
        may_pass[i] = line + 1 < lines;
        if constexpr (!ALIGNED) past[i] = past_of(to[i] + c0);
    }
    // A window of a thread's columns ends in it, or in the one before, and begins `back` threads before, or one less.
    const int base = c0 + (task.first_x & ~(N - 1)), ahead = task.first_x & (N - 1), reach = ahead + task.taps_x - 1;
    const int back = (reach + N - 1) / N, behind = back * N - reach, far = back - 1 - task.span;
    const Folds folds(task.columns, task.mode_x);

    const auto fetch = [&](int t, V (&row)[2]) {
        const int x = base + t * N;
        if (x >= 0 && x + N <= task.columns) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                row[i] = ALIGNED ? loaded_vector(from[i] + x) : vector_at(from[i] + x, may_pass[i] || x + 2 * N <= task.columns);
            return;
        }
        int place[N];
#pragma unroll
        for (int j = 0; j < N; ++j) place[j] = folds.at(x + j, task.columns, task.mode_x);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Word<Sample> sample[N];
#pragma unroll
            for (int j = 0; j < N; ++j) sample[j] = bits_of(place[j] < 0 ? cval : from[i][place[j]]);
            constexpr int EACH = SAMPLES_A_WORD<Sample>;
#pragma unroll
            for (int j = 0; j < N; ++j) {
                if (j % EACH == 0) row[i].word[j / EACH] = sample[j];
                else row[i].word[j / EACH] |= sample[j] << j % EACH * 8 * static_cast<int>(sizeof(Sample));
            }
        }
    };
    // What another thread has, or had the step before, `by` threads back.
    const auto before = [&](const Each& now, const Each& then, int by) {
        Each both;
#pragma unroll
        for (int w = 0; w < Each::WORDS; ++w) both.word[w] = lane >= SWEEP_THREADS - by ? then.word[w] : now.word[w];
        return from_lane(both, lane - by);
    };

    V next[2], last[2] = {};
    Each history[SPANS];  // of the spans of the step before
#pragma unroll
    for (int i = 0; i < SPANS; ++i)
#pragma unroll
        for (int w = 0; w < Each::WORDS; ++w) history[i].word[w] = loser<Sample, LEAST>();
    fetch(lane, next);
#pragma unroll 1
    for (int step = 0; step < task.steps; ++step) {
        const int t = step * SWEEP_THREADS + lane, place = c0 + (t - back) * N;
        Each x[N], found[N];
        to_columns<Sample>(widened(next[0]), widened(next[1]), x);
        if (step + 1 < task.steps) fetch(t + SWEEP_THREADS, next);
        V theirs[2] = {};
        if (task.subtracts && place >= c0) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = place - past[i];
                if (at >= 0 && at + N <= task.out_columns) theirs[i] = vector_at(other[i] + at, at + 2 * N <= task.out_columns);
                else if (at < task.out_columns) theirs[i] = some_of(other[i], at, task.out_columns);
            }
        }
        Each scan = x[N - 1], *const own_suffix = suffixes + (t & mask) * PITCH, *const own_prefix = prefixes + (t & (PREFIXES - 1)) * PITCH;
        own_suffix[N - 1] = scan;
#pragma unroll
        for (int j = N - 2; j >= 0; --j) scan = chosen<LEAST>(scan, x[j]), own_suffix[j] = scan;
        const Each whole = scan, beside = before(whole, history[0], 1);
        wholes[t & mask] = whole, history[0] = whole;
        // With the thread before, which all windows hold whose last is this one.
        scan = beside;
#pragma unroll
        for (int j = 0; j < N; ++j) scan = chosen<LEAST>(scan, x[j]), own_prefix[j] = scan;
        Each many = task.span > 1 ? chosen<LEAST>(whole, beside) : whole;
#pragma unroll
        for (int i = 1; i < SPANS; ++i) {
            if (task.span > 1 << i) {
                const Each now = many;
                many = chosen<LEAST>(many, i == SPANS - 1 ? history[i] : before(now, history[i], 1 << i)), history[i] = now;
            }
        }
        spans[t & mask] = many;
        __syncwarp();
        // Whole threads of all windows; `more`: and one before, of most.
        const Each all = chosen<LEAST>(spans[(t - 2) & mask], spans[(t - far) & mask]);
        const Each more = chosen<LEAST>(all, wholes[(t - back + 1) & mask]);
        const Each *const suffix = suffixes + ((t - back) & mask) * PITCH, *const next_suffix = suffixes + ((t - back + 1) & mask) * PITCH;
        const Each* const last_prefix = prefixes + ((t - 1) & (PREFIXES - 1)) * PITCH;
        with_constant<0, N>(ahead, [&](auto by) {
            constexpr int BY = decltype(by)::value;
#pragma unroll
            for (int j = 0; j < N; ++j)
                found[j] = j + BY < N ? chosen<LEAST>(more, suffix[(j + BY) % N]) : chosen<LEAST>(all, next_suffix[(j + BY) % N]);
        });
        with_constant<0, N>(behind, [&](auto by) {
            constexpr int BY = decltype(by)::value;
#pragma unroll
            for (int j = 0; j < N; ++j) found[j] = chosen<LEAST>(found[j], (j < BY ? last_prefix : own_prefix)[(j - BY + N) % N]);
        });
        __syncwarp();
        V result[2];
        to_rows<Sample>(found, result[0], result[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            V& own = result[i];
            if constexpr (!ALIGNED) {
                V before_it;
                const V now = own;
#pragma unroll
                for (int k = 0; k < V::WORDS; ++k)
                    before_it.word[k] = __shfl_sync(~0u, lane == SWEEP_THREADS - 1 ? last[i].word[k] : now.word[k], lane - 1);
                if (past[i] > 0) own = shifted(before_it, now, N - past[i]);
                last[i] = now;
            }
            const int at = place - past[i];
            if (place < c0 || at >= c1 || first + i >= lines) continue;
#pragma unroll
            for (int k = 0; k < V::WORDS; ++k) own.word[k] = settled<Sample>(own.word[k]);
            if (task.subtracts == 1) own = difference(theirs[i], own, 0, cval);
            if (task.subtracts == 2) own = difference(own, theirs[i], 0, cval);
            if (ALIGNED || (at >= c0 && at + N <= c1)) store_vector(to[i] + at, own);
            else store_part(to[i] + c0, at - c0, own, c1 - c0);
        }
    }
}
