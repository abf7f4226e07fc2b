// Minima and maxima of boxes of many rows, an axis a pass. Part of rank.cu.
//
// A window costs three comparisons a sample, however large it is (van Herk; Gil and Werman). Warps wait for no other warp.
//
//   extreme_down    a thread has 8 bytes of each row of a band, and loads eight rows while it computes eight. A ring in shared memory has a
//                   window's rows: those of the run before, each with the extremes from it to the run's end; and those of this run.
//
//                        run before     | s s s s s s s s |
//                        this run                         | p p p p p p p p |      p: from the run's start to each
//                        a window               [ s . . . . . . p ]
//
//                   Where a run ends, the thread goes through its rows backwards; runs of a block end at rows of its own, so that some
//                   load while others do that. An opening pushes each result into a second ring.
//
//   extreme_along   a warp goes along two rows, 512 bytes of each a step, in words of one column of both rows.
//
//                        threads        | t0 | t1 | t2 | t3 | t4 | t5 |      s, p: from a column to its thread's end, from the start to it
//                        a window         [ s   w    w    w    w   p ]       w: whole threads, by spans of a power of two
//                             |
//                          lanes of the warp store s, p, w and spans in rings, wait for each other, read what their windows need,
//                          and wait again before the next step
//
// An erosion goes down, then along; an opening along, down twice in one pass, and along.
//
// Floors of N samples of b bytes: 2 N b bytes for each pass, so 0.5 of a copy; 0.33 for an opening. Measured on an H200, 8192 × 8192 (2026-11-27):
// extreme_along 0.83 to 0.88 of a copy (bytes 0.70); extreme_down of u16 0.85, 0.79, 0.75, 0.61, 0.38 and 0.30 for 31, 51, 65, 101, 201 and 255
// rows, of both steps 0.72, 0.55, 0.49 and 0.36 for 31, 51, 65 and 101. Rings that leave few bytes on their way slow large windows.
#pragma once

#include "cuda/extremes/strip.cuh"

constexpr int SWEEP_THREADS = 32;
constexpr int SWEEP_ROWS = 8;  // that a thread takes at once
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

// Words of a row.
template <typename Sample, int WORDS_>
struct __align__(4 * WORDS_) Piece {
    static constexpr int WORDS = WORDS_, SAMPLES = WORDS * SAMPLES_A_WORD<Sample>;
    unsigned word[WORDS];
};

template <bool LEAST, typename Sample, int WORDS>
__device__ inline Piece<Sample, WORDS> chosen(const Piece<Sample, WORDS>& a, const Piece<Sample, WORDS>& b) {
    Piece<Sample, WORDS> found;
#pragma unroll
    for (int k = 0; k < WORDS; ++k) {
        if constexpr (sizeof(Sample) == 1) found.word[k] = extreme<Sample, LEAST>(a.word[k], b.word[k]);
        else found.word[k] = chosen<LEAST, Sample>(a.word[k], b.word[k]);
    }
    return found;
}

template <typename P, typename Sample>
__device__ inline P loaded_piece(const Sample* at, bool is_last) {
    if constexpr (P::WORDS == 1) {
        const unsigned* from = reinterpret_cast<const unsigned*>(at);
        return {{is_last ? __ldcs(from) : __ldg(from)}};
    } else {
        const uint2* from = reinterpret_cast<const uint2*>(at);
        const uint2 both = is_last ? __ldcs(from) : __ldg(from);
        return {{both.x, both.y}};
    }
}

// The samples that lie `by` after those of each thread, of this one and the next.
template <typename Sample, int WORDS>
__device__ inline Piece<Sample, WORDS> from_next(const Piece<Sample, WORDS>& own, int by) {
    constexpr int EACH = SAMPLES_A_WORD<Sample>;
    unsigned word[2 * WORDS];
#pragma unroll
    for (int k = 0; k < WORDS; ++k) word[k] = own.word[k], word[WORDS + k] = __shfl_down_sync(~0u, own.word[k], 1);
    const bool is_half = WORDS == 2 && (by / EACH & 1);
    const unsigned bits = by % EACH * 8 * static_cast<int>(sizeof(Sample));
    Piece<Sample, WORDS> found;
#pragma unroll
    for (int k = 0; k < WORDS; ++k) {
        const unsigned first = is_half ? word[k + 1] : word[k];
        if constexpr (EACH == 1) found.word[k] = first;
        else found.word[k] = __funnelshift_r(first, is_half ? word[(k + 2) % (2 * WORDS)] : word[k + 1], bits);
    }
    return found;
}

// A thread goes down a band of rows, G at a time, and calls `emit(results, r)` with the windows' extremes from the one that begins in the band's
// row r. ALIGNED: rows begin at vectors of 16 bytes; else a thread loads the piece that holds its first sample, and gets the rest from the next.
// in_y: the band's first row, or its last if it goes `upwards`; ring: pieces `stride` apart.
template <typename Sample, bool LEAST, bool ALIGNED, int REST, int G, int WORDS, typename Emit>
__device__ inline void go_down(
    const Sample* in, const BoxTask& task, int in_y, int rows, bool upwards, int x, int column, Piece<Sample, WORDS>* ring, int stride,
    Sample cval, const Emit& emit) {
    using P = Piece<Sample, WORDS>;
    const int groups = (task.taps_y - 1) / G, total = rows + task.taps_y - 1, on = upwards ? -1 : 1, step = on * task.in_pitch;
    const int whole = task.rows - !ALIGNED;  // rows that may be read beyond their ends
    const auto row_at = [&](int n) { return in + (in_y + n * on) * static_cast<long long>(task.in_pitch) + column; };
    const auto is_safe = [&](int n) {
        const int first = in_y + n * on, last = first + (G - 1) * on;
        return min(first, last) >= 0 && max(first, last) < whole;
    };
    const auto fetch = [&](P (&to)[G], int n, bool is_last) {
        if (is_safe(n)) {
            const Sample* const first = row_at(n);
#pragma unroll
            for (int d = 0; d < G; ++d) {
                const Sample* const at = first + static_cast<long long>(step) * d;
                to[d] = loaded_piece<P>(at - (ALIGNED ? 0 : past_of(at, sizeof(P))), is_last);
            }
            return;
        }
        // Each lane finds one row: as each thread by itself, this took three times as long as all else.
        const int own = index_beyond(in_y + min(n + static_cast<int>(threadIdx.x) % 32, total - 1) * on, task.rows, task.mode_y);
#pragma unroll
        for (int d = 0; d < G; ++d) {
            const int y = __shfl_sync(~0u, own, d);
            const Sample* const line = in + y * static_cast<long long>(task.in_pitch);
            if (ALIGNED && y >= 0) to[d] = loaded_piece<P>(line + column, false);
#pragma unroll
            for (int k = 0; k < WORDS && (!ALIGNED || y < 0); ++k) {
                to[d].word[k] = y < 0 ? filled(cval) : 0;
                for (int i = SAMPLES_A_WORD<Sample> - 1; i >= 0 && y >= 0; --i) {
                    if constexpr (SAMPLES_A_WORD<Sample> > 1) to[d].word[k] <<= 8 * sizeof(Sample);
                    to[d].word[k] |= bits_of(line[min(x + k * SAMPLES_A_WORD<Sample> + i, task.columns - 1)]);
                }
            }
        }
    };
    // The thread's samples of rows that have been fetched.
    const auto settle = [&](P (&row)[G], int n) {
        if constexpr (!ALIGNED) {
#pragma unroll
            for (int d = 0; d < G; ++d) row[d] = from_next<Sample>(row[d], is_safe(n) ? past_of(row_at(n + d), sizeof(P)) : 0);
        }
    };
    P none;
#pragma unroll
    for (int k = 0; k < WORDS; ++k) none.word[k] = loser<Sample, LEAST>();
    P coming[G], going[G], tail = none;
    int slot = 0;
    fetch(coming, REST, false);
#pragma unroll 1
    for (int n = REST, r = -groups * G; n < total; n += G, r += G) {
        settle(coming, n);
        P prefix = none, last = none, found[G];
#pragma unroll
        for (int d = G - REST; d < G; ++d) last = chosen<LEAST>(last, coming[d]);
        if (r >= 0) {
            settle(going, r);
            P suffix = none;
#pragma unroll 4
            for (int k = 0; k < groups - 1; ++k) suffix = chosen<LEAST>(suffix, ring[k * stride]);
            if constexpr (sizeof(Sample) == 2) {
                // Of three words at once.
                P from[G / 2 + 1];
                from[G / 2] = suffix;
#pragma unroll
                for (int d = G / 2 - 1; d >= 0; --d) from[d] = chosen<LEAST>(chosen<LEAST>(going[2 * d], going[2 * d + 1]), from[d + 1]);
#pragma unroll
                for (int d = 0; d < G; d += 2) {
                    found[d] = chosen<LEAST>(chosen<LEAST>(prefix, coming[d]), from[d / 2]);
                    prefix = chosen<LEAST>(chosen<LEAST>(coming[d], coming[d + 1]), prefix);
                    found[d + 1] = chosen<LEAST>(chosen<LEAST>(going[d + 1], from[d / 2 + 1]), prefix);
                }
            } else {
#pragma unroll
                for (int d = G - 1; d >= 0; --d) found[d] = suffix = chosen<LEAST>(suffix, going[d]);
#pragma unroll
                for (int d = 0; d < G; ++d) prefix = chosen<LEAST>(prefix, coming[d]), found[d] = chosen<LEAST>(found[d], prefix);
            }
        } else {
#pragma unroll
            for (int d = 0; d < G; ++d) prefix = chosen<LEAST>(prefix, coming[d]);
        }
        if (n + G < total) {
            fetch(coming, n + G, false);
            if (r >= -G) fetch(going, r + G, true);
        }
        ring[slot * stride] = chosen<LEAST>(tail, prefix), tail = last;
        if (++slot == groups - 1) slot = 0;
        if (r >= 0) emit(found, r);
    }
}

// Of integers; and of floats whose NaN spread, without nodata. Rows of the output begin at vectors of 16 bytes, and end there.
template <typename Sample, bool LEAST, bool ALIGNED, int REST, int G, int WORDS = 1>
__global__ void __launch_bounds__(SWEEP_THREADS, 12) extreme_down(
    const Sample* __restrict__ in, Sample* __restrict__ out, const __grid_constant__ BoxTask task, Sample cval) {
    using P = Piece<Sample, WORDS>;
    constexpr int USED = ALIGNED ? SWEEP_THREADS : SWEEP_THREADS - 1;
    extern __shared__ ulonglong2 vectors[];
    const int lane = threadIdx.x;
    unsigned block = blockIdx.x;
    const int x = (block % task.tiles * USED + lane) * P::SAMPLES;
    block /= task.tiles;
    const int number = block % task.bands, y0 = number * task.band, rows = min(task.band, task.out_rows - y0);
    const long long plane = block / task.bands;
    if (rows <= 0) return;
    const bool upwards = number % 2 == 1, is_used = x < task.columns && lane < USED;
    // Threads that need nothing load what others do.
    const int column = min(x, (task.columns + (ALIGNED ? -1 : P::SAMPLES - 1)) & ~(P::SAMPLES - 1));
    const int step = upwards ? -task.out_pitch : task.out_pitch;
    Sample* target = out + plane * task.out_plane + (y0 + (upwards ? rows - 1 : 0)) * static_cast<long long>(task.out_pitch) + x;
    const int in_y = task.first_y + y0 + (upwards ? rows + task.taps_y - 2 : 0);
    go_down<Sample, LEAST, ALIGNED, REST, G, WORDS>(
        in + plane * task.in_plane, task, in_y, rows, upwards, x, column, reinterpret_cast<P*>(vectors) + lane, SWEEP_THREADS, cval,
        [&](P (&found)[G], int r) {
            const auto store = [&](int d) {
                Sample* const to = target + static_cast<long long>(step) * d;
#pragma unroll
                for (int k = 0; k < WORDS; ++k) found[d].word[k] = settled<Sample>(found[d].word[k]);
                if constexpr (WORDS == 1) __stcs(reinterpret_cast<unsigned*>(to), found[d].word[0]);
                else __stcs(reinterpret_cast<uint2*>(to), uint2{found[d].word[0], found[d].word[1]});
            };
            if (is_used && r + G <= rows) {
#pragma unroll
                for (int d = 0; d < G; ++d) store(d);
            } else if (is_used) {
#pragma unroll
                for (int d = 0; d < G; ++d)
                    if (r + d < rows) store(d);
            }
            target += static_cast<long long>(step) * G;
        });
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

// Rows of the input, the output and the image begin at whole vectors. Columns from which results come lie at most a window's half beyond an edge.
template <typename Sample, bool LEAST, bool ALIGNED, int REST_Y, int TAPS_X, int PAST, int W = 2, int BUFFERS = 2, int BLOCKS = 1, int G = 16>
__global__ void __launch_bounds__(512 / W, BLOCKS) extreme_both(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image, const __grid_constant__ BoxTask task,
    Sample cval) {
    using P = Piece<Sample, W>;
    using V = Vector<Sample>;
    using Each = Column<Sample>;
    constexpr int N = V::SAMPLES, THREADS = 512 / W, VECTORS = 4, C = VECTORS * N, COLUMNS = 32 * C, USED = ALIGNED ? 32 : 31;
    constexpr int PITCH = 32 * (VECTORS + 1), PREFIXES_ = C + 1;  // vectors of a row and words of a thread, so that threads use different banks
    extern __shared__ ulonglong2 vectors[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    V* const buffers = reinterpret_cast<V*>(vectors);
    Each* const prefixes = reinterpret_cast<Each*>(buffers + BUFFERS * G * PITCH) + warp * 32 * PREFIXES_;
    P* const ring = reinterpret_cast<P*>(reinterpret_cast<Each*>(buffers + BUFFERS * G * PITCH) + G / 2 * 32 * PREFIXES_) + thread;

    unsigned block = blockIdx.x;
    const int c0 = block % task.tiles * task.tile, c1 = min(c0 + task.tile, task.out_columns);
    block /= task.tiles;
    const int number = block % task.bands, y0 = number * task.band, rows = min(task.band, task.out_rows - y0);
    const long long plane = block / task.bands;
    if (rows <= 0) return;
    const bool upwards = number % 2 == 1;
    out += plane * task.out_plane, image += plane * task.image_plane;
    const int base = c0 + task.first_x - PAST;
    constexpr int REACH = TAPS_X - 1, LANES = REACH / C, REST = REACH % C;
    const Folds folds(task.columns, task.mode_x);
    const bool is_edge = base < 0 || base + PAST + (c1 - c0) + REACH > task.columns;
    // Threads that need nothing load what others do.
    const int piece = warp * USED + lane, x = max(0, base + piece * P::SAMPLES);
    const int loaded_x = min(x, (task.columns + (ALIGNED ? -1 : P::SAMPLES - 1)) & ~(P::SAMPLES - 1));
    const int in_y = task.first_y + y0 + (upwards ? rows + task.taps_y - 2 : 0);
    V* buffer = buffers;
    go_down<Sample, LEAST, ALIGNED, REST_Y, G, W>(
        in + plane * task.in_plane, task, in_y, rows, upwards, x, loaded_x, ring, THREADS, cval, [&](P (&found)[G], int r) {
            if (BUFFERS == 1) __syncthreads();
            P* const own = reinterpret_cast<P*>(buffer) + piece + piece / (16 / W) * (4 / W);
#pragma unroll
            for (int d = 0; d < G; ++d)
                if (lane < USED) own[d * (4 / W) * PITCH] = found[d];
            __syncthreads();
            V* const line = buffer + 2 * warp * PITCH;
            if (BUFFERS == 2) buffer = buffers + (buffer == buffers ? G * PITCH : 0);
            const int first = r + 2 * warp;
            if (warp >= G / 2 || first >= rows) return;
            if (is_edge) {
                const auto place = [&](int at) { return at + at / C * N; };
                const int before = max(-base, 0), after = max(task.columns - base, 0);
                for (int i = lane; i < before + max(min(REACH, COLUMNS - after), 0); i += 32) {
                    const int at = i < before ? i : i - before + after, from = folds.at(base + at, task.columns, task.mode_x);
                    Sample* const samples = reinterpret_cast<Sample*>(line);
                    const int to = place(at), source = place(max(0, min(from - base, COLUMNS - 1)));
                    constexpr int ROW = PITCH * N;
                    const Sample upper = from < 0 ? cval : samples[source], lower = from < 0 ? cval : samples[ROW + source];
                    samples[to] = upper, samples[ROW + to] = lower;
                }
                __syncwarp();
            }
            Each column[C];
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                const V* const from = line + lane * (VECTORS + 1) + v;
                to_columns<Sample>(widened(from[0]), widened(from[PITCH]), column + v * N);
            }
            Each all = column[0], scan = column[0];
            Each* const prefix = prefixes + lane * PREFIXES_;
            prefix[0] = scan;
#pragma unroll
            for (int j = 1; j < C; ++j) prefix[j] = scan = chosen<LEAST>(scan, column[j]);
            all = scan;
#pragma unroll
            for (int j = C - 2; j >= 0; --j) column[j] = chosen<LEAST>(column[j], column[j + 1]);
            // Whole threads between: `far` also that before the last.
            Each near, far;
#pragma unroll
            for (int w = 0; w < Each::WORDS; ++w) near.word[w] = loser<Sample, LEAST>();
#pragma unroll
            for (int k = 1; k < LANES; ++k) near = chosen<LEAST>(near, from_lane(all, lane + k));
            far = chosen<LEAST>(near, from_lane(all, lane + LANES));
            __syncwarp();
            const Each *const last = prefixes + min(lane + LANES, 31) * PREFIXES_ + REST,
                       *const after = prefixes + min(lane + LANES + 1, 31) * PREFIXES_ + REST - C;
#pragma unroll
            for (int j = 0; j < C; ++j) {
                if (j + REST < C) column[j] = chosen<LEAST>(chosen<LEAST>(column[j], last[j]), near);
                else column[j] = chosen<LEAST>(chosen<LEAST>(column[j], after[j]), far);
            }
            // Results begin at the strip's column PAST.
            Each following[PAST + 1];
#pragma unroll
            for (int j = 0; j < PAST; ++j) following[j] = from_lane(column[j], lane + 1);
#pragma unroll
            for (int j = 0; j < C; ++j) column[j] = j + PAST < C ? column[(j + PAST) % C] : following[(j + PAST) % C % (PAST + 1)];
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                V* const to = line + lane * (VECTORS + 1) + v;
                V upper, lower;
                to_rows<Sample>(column + v * N, upper, lower);
                *reinterpret_cast<uint4*>(to) = uint4{upper.word[0], upper.word[1], upper.word[2], upper.word[3]};
                *reinterpret_cast<uint4*>(to + PITCH) = uint4{lower.word[0], lower.word[1], lower.word[2], lower.word[3]};
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (first + i >= rows) continue;
                const int y = y0 + (upwards ? rows - 1 - (first + i) : first + i);
                const V* const results = line + i * PITCH;
                Sample* const to = out + y * static_cast<long long>(task.out_pitch) + c0;
                const Sample* const other = image + y * task.image_pitch + c0;
                const int before = ALIGNED ? 0 : past_of(to), left = lane - (before > 0), right = left + 1;
                const int first_place = left + (left >> 2), second_place = right + (right >> 2);
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    const int at = (lane + 32 * v) * N - before, step = v * PITCH / VECTORS;
                    if (c0 + at >= c1) continue;
                    V own = results[max(first_place + step, 0)];
                    if (!ALIGNED && before > 0) own = shifted(own, results[second_place + step], N - before);
#pragma unroll
                    for (int k = 0; k < V::WORDS; ++k) own.word[k] = settled<Sample>(own.word[k]);
                    const bool is_whole = ALIGNED || (at >= 0 && c0 + at + N <= c1);
                    if (task.subtracts) {
                        V theirs;
                        if constexpr (ALIGNED) theirs = loaded_vector(other + at);
                        else if (is_whole) theirs = vector_at(other + at, c0 + at + 2 * N <= task.out_columns);
                        else theirs = some_of(other - c0, c0 + at, task.out_columns);
                        if (task.subtracts == 1) own = difference(theirs, own, 0, cval);
                        else own = difference(own, theirs, 0, cval);
                    }
                    if (is_whole) store_vector(to + at, own);
                    else store_part(to, at, own, c1 - c0);
                }
            }
        });
}

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
