// Boxes over floats of more than 64 samples, one axis per pass. Part of smoothing.cu, which defines Axis.
#pragma once

#include "async_copy.cuh"
#include "borders.cuh"

// The contract sums these windows in runs of 16 samples: (head + tail) + whole runs, so a result takes four additions at any
// size. Place 0 of a line is where the first run begins, at most 15 samples before the first window:
//
//   place     16 k     first                16 (k + 1)  …  16 (k + q)      last
//             |        |----- head ------>|             …  |----- tail ---->|
//   sums                                     M[k + 1]          (+ T[k + q] if last - first passes into another run)
//
// Floors for N samples of b bytes: rows move 2 N b, columns 3 N b (samples, samples again for heads, results). 8192 x 8192
// floats on an H200 at 4.1 TB/s, us of columns + rows, beside the floors 195 + 130:
//   257 x 257   194 + 172     511 x 511   230 + 190     1023 x 1023   252 + 197
// The assembly has about 40 (columns) and 36 (rows) instructions a sample; the device issues 56 while it copies one.
constexpr int RUN = 16;

struct Runs {
    int lead;            // samples of the first run before the first window
    int steps, rest;     // taps - 1 = 16 * steps + rest
    int bands, height;   // box_run_columns: in how many parts a column is cut, and runs of each
    int outputs;         // box_run_rows: results of a tile
};

// The position along the axis of the line's place 0.
__device__ inline long long origin(const Axis& axis, const Runs& runs) {
    return (axis.mode == VALID ? 0 : -axis.before) - runs.lead;
}

// A sample's index along the axis, as border_index; faster one reflection away.
__device__ inline int run_index(int at, int length, int mode) {
    if (mode > MIRROR || at <= -length || at >= 2 * length - 1) return border_index(at, length, mode);
    const int twice = mode == REFLECT;
    return at < 0 ? -at - twice : at < length ? at : 2 * length - 2 + twice - at;
}

// box_run_columns: a block goes down a band of 32 columns, RUNS runs in a step, each by a warp. In a step, warp by warp:
//   tails and T of run n -> shared memory     | all wait |  levels of M, a lane one run of a column  | all wait |
//   results of run n - q - 1
// Loads of the next step's samples, and of those of its heads, begin before the waits. Each level of M keeps its latest sums
// in a ring: W(2m) = W(m) + W(m) of m runs later, and W(2m + 1) = W(2m) + T.
template <int RUNS>
struct RunSteps {
    static constexpr int SLOTS = RUNS + 1;         // runs of tails: the last of the step before, and the step's
    static constexpr int LANES = 32 / RUNS;        // columns of a warp that doubles
    static constexpr int PITCH = 32 + LANES;       // of a ring, so that a warp's sums lie in different banks
    static constexpr int LEAST = 4 * RUNS;         // runs of a ring: a power of two; T are written a step ahead
};

// A run's samples of each lane's column. All lanes take part.
template <typename Real>
__device__ inline void load_run(Real (&x)[RUN], const Real* column, int position, const Axis& axis, Real fill) {
    const int length = static_cast<int>(axis.length);
    if (position >= 0 && position + RUN <= length) {
        const Real* from = column + position * axis.inner;
#pragma unroll
        for (int j = 0; j < RUN; ++j, from += axis.inner) x[j] = __ldg(from);
        return;
    }
    const int mine = run_index(position + static_cast<int>(threadIdx.x % RUN), length, axis.mode);
#pragma unroll
    for (int j = 0; j < RUN; ++j) {
        const int from = __shfl_sync(~0u, mine, j);
        x[j] = from < 0 ? fill : __ldg(column + from * axis.inner);
    }
}

template <typename Real, int RUNS, int BLOCKS>
__global__ void __launch_bounds__(32 * RUNS, BLOCKS)
box_run_columns(const Real* __restrict__ in, Real* __restrict__ out, Axis axis, Runs runs, Real fill, Real scale) {
    typedef RunSteps<RUNS> Steps;
    constexpr int PITCH = Steps::PITCH, LANES = Steps::LANES, LAST = Steps::LEAST - 1;
    extern __shared__ __align__(16) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = runs.steps;
    const unsigned tiles = static_cast<unsigned>((axis.inner + 31) / 32);
    const long long wanted = blockIdx.x % tiles * 32LL + lane;
    const long long column = min(wanted, axis.inner - 1), outer = blockIdx.x / tiles / runs.bands;
    const int first_run = static_cast<int>(blockIdx.x / tiles % runs.bands) * runs.height;
    const int out_length = static_cast<int>(axis.out_length);
    const int end_run = min(first_run + runs.height, (runs.lead + out_length + RUN - 1) / RUN);
    Real* tails = reinterpret_cast<Real*>(shared);
    Real* totals = tails + 2 * Steps::SLOTS * RUN * 32;
    const Real* source = in + outer * axis.length * axis.inner + column;
    const int start = static_cast<int>(origin(axis, runs));
    Real next[RUN], head[RUN];
    // The warp's run; steps by turns have other tails. A step before the first results loads their heads.
    int n = first_run + 1 + warp - max(RUNS - q, 0), turn = 0;
    load_run(next, source, start + n * RUN, axis, fill);
#pragma unroll 1
    for (; n - warp - q - 1 < end_run; n += RUNS, turn ^= 1) {
        Real* before = tails + (turn * Steps::SLOTS + warp) * RUN * 32 + lane;  // tails of run n - 1
        Real* tail = before + RUN * 32;
        Real sum = next[0];
        tail[0] = sum;
#pragma unroll
        for (int j = 1; j < RUN; ++j) tail[j * 32] = sum = sum + next[j];
        totals[(n & LAST) * PITCH + lane] = sum;
        if (n + RUNS - q - 1 < end_run) load_run(next, source, start + (n + RUNS) * RUN, axis, fill);
        __syncthreads();
        if (warp == RUNS - 1) {  // the last tails, before those of the next step
            Real* copy = tails + (turn ^ 1) * Steps::SLOTS * RUN * 32 + lane;
#pragma unroll
            for (int j = 0; j < RUN; ++j) copy[j * 32] = tail[j * 32];
        }
        const int run = n - warp + lane / LANES;
        Real* ring = totals + warp * LANES + lane % LANES;
        Real window = ring[(run & LAST) * PITCH];
        const Real total = window;
        int size = Steps::LEAST;
#pragma unroll 1
        for (int bit = 30 - __clz(q - 1); bit >= 0; --bit) {
            const int reach = (q - 1) >> (bit + 1);
            if (size <= reach + RUNS) size *= 2;
            ring[(run & size - 1) * PITCH] = window;
            __syncwarp();
            if ((q - 1) >> bit & 1)
                window = ring[(run - 1 - reach & size - 1) * PITCH] + ring[(run - 1 & size - 1) * PITCH] + total;
            else window = ring[(run - reach & size - 1) * PITCH] + window;
            ring += size * PITCH;
        }
        ring[(run & LAST) * PITCH] = window;
        ring += lane - warp * LANES - lane % LANES;
        __syncthreads();
        const int k = n - q - 1;
        if (k >= first_run && k < end_run) {
            const Real sums = ring[(n - 2 & LAST) * PITCH], longer = sums + totals[(n - 1 & LAST) * PITCH + lane];
#pragma unroll
            for (int j = RUN - 2; j >= 0; --j) head[j] = head[j + 1] + head[j];
            const int y = k * RUN - runs.lead;  // of the run's first result
            Real* target = out + (outer * axis.out_length + y) * axis.inner + column;
            const Real* from = before + runs.rest * 32;
#pragma unroll
            for (int j = 0; j < RUN; ++j)
                head[j] = (head[j] + from[j * 32] + (j + runs.rest < RUN ? sums : longer)) * scale;
            if (wanted < axis.inner) {
                if (y >= 0 && y + RUN <= out_length) {
#pragma unroll
                    for (int j = 0; j < RUN; ++j, target += axis.inner) __stcs(target, head[j]);
                } else {
#pragma unroll
                    for (int j = 0; j < RUN; ++j, target += axis.inner)
                        if (y + j >= 0 && y + j < out_length) __stcs(target, head[j]);
                }
            }
        }
        if (k + RUNS >= first_run && k + RUNS < end_run) load_run(head, source, start + (k + RUNS) * RUN, axis, fill);
    }
}

// box_run_rows: a block filters tiles of lines, of one channel, a thread each run; heads stay in its registers:
//   copies of the next tile begin; tails and T -> shared memory | all wait | levels of M: all wait after each |
//   results in registers | all wait | results -> shared memory -> whole lines of memory
// Vectors of 16 bytes of a run change places, so that those of neighbouring runs lie in different banks.
template <typename Real>
struct __align__(16) RunVector {
    static constexpr int SAMPLES = 16 / sizeof(Real), COUNT = RUN / SAMPLES;
    Real x[SAMPLES];
};

template <typename Real>
__device__ inline unsigned run_place(unsigned run, unsigned j) {
    typedef RunVector<Real> Vector;
    const unsigned turn = sizeof(Real) == 4 ? run >> 1 : run;
    return run * RUN + (j / Vector::SAMPLES ^ turn % Vector::COUNT) * Vector::SAMPLES + j % Vector::SAMPLES;
}

// A block's tile of each line: its first result, how many, its first sample's position, and which samples are in the image.
struct RunTile {
    int begin, wanted, first, low, high, needed;
    __device__ RunTile(unsigned tile, const Axis& axis, const Runs& runs) {
        begin = tile * runs.outputs, wanted = min(runs.outputs, static_cast<int>(axis.out_length) - begin);
        first = static_cast<int>(origin(axis, runs)) + begin, needed = runs.lead + wanted + axis.taps - 1;
        low = min(max(-first, 0), needed), high = max(min(static_cast<int>(axis.length) - first, needed), low);
    }
};

// Where a sample that is not in the image comes from (its first channel; -1: the constant), and where it goes.
struct RunBorder {
    int from, to;
};

// The results of a thread's run, in place of its heads. Its tails are those of two runs; AHEAD: how far they begin inside of
// a vector.
template <int AHEAD, typename Real>
__device__ inline void add_tails(Real (&head)[RUN], const Real* tails, unsigned run, unsigned next_run, int rest, Real sums,
                                 Real longer, Real scale) {
    typedef RunVector<Real> Vector;
    const unsigned here = run_place<Real>(run, 0), there = run_place<Real>(next_run, 0);
    const auto load = [&](int i) {
        const unsigned vector = rest / Vector::SAMPLES + i;
        return *reinterpret_cast<const Vector*>(
            tails + ((vector < Vector::COUNT ? here : there) ^ vector % Vector::COUNT * Vector::SAMPLES));
    };
    Vector vector = load(0);
#pragma unroll
    for (int i = 0; i < Vector::COUNT; ++i) {
        const Vector next = AHEAD > 0 || i + 1 < Vector::COUNT ? load(i + 1) : vector;
#pragma unroll
        for (int s = 0; s < Vector::SAMPLES; ++s) {
            const int j = i * Vector::SAMPLES + s, at = s + AHEAD;
            const Real tail = at < Vector::SAMPLES ? vector.x[at % Vector::SAMPLES] : next.x[at % Vector::SAMPLES];
            head[j] = (head[j] + tail + (j + rest < RUN ? sums : longer)) * scale;
        }
        vector = next;
    }
}

template <typename Real, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
box_run_rows(const Real* __restrict__ in, Real* __restrict__ out, Axis axis, Runs runs, Real fill, Real scale) {
    typedef RunVector<Real> Vector;
    constexpr int SAMPLES = Vector::SAMPLES;
    extern __shared__ __align__(16) unsigned char shared[];
    const unsigned all = blockDim.x, run = threadIdx.x, lane = run % 32, q = runs.steps, pitch = all + q + 1;
    const int inner = static_cast<int>(axis.inner);
    Real* const buffers = reinterpret_cast<Real*>(shared);
    Real* const totals = buffers + 2 * all * RUN + run;
    RunBorder* const borders = reinterpret_cast<RunBorder*>(buffers + 2 * all * RUN + 3 * pitch + pitch % 2);
    const unsigned parts = static_cast<unsigned>((axis.out_length + runs.outputs - 1) / runs.outputs) * inner;
    const unsigned part = blockIdx.x % parts, channel = part % inner, lines = gridDim.x / parts;
    const RunTile tile(part / inner, axis, runs);
    const bool vectors = inner == 1 && axis.length % SAMPLES == 0 && tile.first % SAMPLES == 0 &&
                         reinterpret_cast<unsigned long long>(in) % 16 == 0;
    const int copied = vectors ? tile.high - (tile.high - tile.low) % SAMPLES : tile.high;
    const int outside = tile.low + tile.needed - copied;
    for (int i = run; i < outside; i += all) {
        const int at = i < tile.low ? i : i - tile.low + copied;
        const int from = run_index(tile.first + at, static_cast<int>(axis.length), axis.mode);
        borders[i] = {from < 0 ? -1 : from * inner, static_cast<int>(run_place<Real>(at / RUN, at % RUN))};
    }
    // The warp's samples, 32 at a time, lie at i * 32 + (mine ^ i % 4 * 4); vectors of its lanes from `mine_16` on.
    const unsigned mine = run_place<Real>(run - lane + lane / RUN, lane % RUN);
    const unsigned mine_16 = run_place<Real>(run - lane + lane / Vector::COUNT, lane % Vector::COUNT * SAMPLES);
    const int first = static_cast<int>(run - lane) * RUN;
    int turn = 1;
#pragma unroll 1
    for (long long line = static_cast<long long>(blockIdx.x / parts) - lines; line < axis.outer; line += lines, turn ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (line + lines < axis.outer) {  // each warp copies its samples in the image, and all threads share the others
            Real* to = buffers + (turn ^ 1) * all * RUN;
            const Real* source = in + (line + lines) * axis.length * inner + channel;
            if (vectors) {
                const int at = first + static_cast<int>(lane) * SAMPLES;
                const Real* from = source + (tile.first + at);
#pragma unroll
                for (int i = 0; i < Vector::COUNT; ++i) {
                    const int ahead = i * 32 * SAMPLES, turned = sizeof(Real) == 8 ? i % 2 * 4 * SAMPLES : 0;
                    if (at + ahead >= tile.low && at + ahead < copied) copy_16_bytes(to + (mine_16 ^ turned) + ahead, from + ahead);
                }
            } else {
                const int at = first + static_cast<int>(lane);
                const Real* from = source + static_cast<long long>(tile.first + at) * inner;
#pragma unroll
                for (int i = 0; i < RUN; ++i, from += 32 * inner)
                    if (at + 32 * i >= tile.low && at + 32 * i < copied) copy_word(to + (mine ^ i % 4 * 4) + 32 * i, from);
            }
            for (int i = run; i < outside; i += all) {
                const RunBorder border = borders[i];
                if (border.from < 0) to[border.to] = fill;
                else copy_word(to + border.to, source + border.from);
            }
        }
        if (line < 0) continue;
        Real* samples = buffers + turn * all * RUN;
        const unsigned place = run_place<Real>(run, 0);
        Real head[RUN];
#pragma unroll
        for (int i = 0; i < Vector::COUNT; ++i) {
            const Vector x = *reinterpret_cast<const Vector*>(samples + (place ^ i * SAMPLES));
#pragma unroll
            for (int s = 0; s < SAMPLES; ++s) head[i * SAMPLES + s] = x.x[s];
        }
        Real sum{};
#pragma unroll
        for (int i = 0; i < Vector::COUNT; ++i) {
            Vector tails;
#pragma unroll
            for (int s = 0; s < SAMPLES; ++s) tails.x[s] = sum = i + s == 0 ? head[0] : sum + head[i * SAMPLES + s];
            *reinterpret_cast<Vector*>(samples + (place ^ i * SAMPLES)) = tails;
        }
        *totals = sum;
#pragma unroll
        for (int j = RUN - 2; j >= 0; --j) head[j] = head[j + 1] + head[j];
        __syncthreads();
        // Sums of more and more runs, by turns in two arrays; those past the tile's end are not used.
        Real *whole = totals, *free = totals + pitch, *other = free + pitch;
#pragma unroll 1
        for (int bit = 30 - __clz(q - 1); bit >= 0; --bit) {
            const unsigned reach = (q - 1) >> (bit + 1);
            sum = sum + whole[reach];
            if ((q - 1) >> bit & 1) sum = sum + totals[2 * reach];
            *free = sum;
            __syncthreads();
            whole = free, free = other, other = whole;
        }
        const Real sums = whole[1], longer = sums + totals[q];
        const unsigned last = min(run + q, all - 2);  // the run of the first result's tail
        switch (runs.rest % SAMPLES) {
            case 0: add_tails<0>(head, samples, last, last + 1, runs.rest, sums, longer, scale); break;
            case 1: add_tails<1>(head, samples, last, last + 1, runs.rest, sums, longer, scale); break;
            case 2: add_tails<2 % SAMPLES>(head, samples, last, last + 1, runs.rest, sums, longer, scale); break;
            default: add_tails<3 % SAMPLES>(head, samples, last, last + 1, runs.rest, sums, longer, scale);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < Vector::COUNT; ++i) {
            Vector results;
#pragma unroll
            for (int s = 0; s < SAMPLES; ++s) results.x[s] = head[i * SAMPLES + s];
            *reinterpret_cast<Vector*>(samples + (place ^ i * SAMPLES)) = results;
        }
        __syncwarp();
        const int begin = first - runs.lead;  // the warp's first result
        Real* target = out + (line * axis.out_length + tile.begin + begin + static_cast<int>(lane)) * inner + channel;
        if (inner == 1 && begin >= 0 && begin + 32 * RUN <= tile.wanted) {
#pragma unroll
            for (int i = 0; i < RUN; ++i) __stcs(target + 32 * i, samples[(mine ^ i % 4 * 4) + 32 * i]);
        } else {
#pragma unroll
            for (int i = 0; i < RUN; ++i, target += 32 * inner) {
                const int at = begin + static_cast<int>(lane) + 32 * i;
                if (at >= 0 && at < tile.wanted) __stcs(target, samples[(mine ^ i % 4 * 4) + 32 * i]);
            }
        }
    }
}

// Any other size: box_run_totals sums every run, box_double (far.cuh) makes `whole` of these, and box_runs adds each result's
// head and tail.
template <typename Real>
__device__ inline Real run_sample(const Real* column, long long position, const Axis& axis, Real fill) {
    const long long from = border_index(position, axis.length, axis.mode);
    return from < 0 ? fill : __ldg(column + from * axis.inner);
}

// totals: [outer, count, inner]. The first and the last may take samples of no window, and are not used.
template <typename Real>
__global__ void __launch_bounds__(256)
box_run_totals(const Real* __restrict__ in, Real* __restrict__ totals, Axis axis, Runs runs, Real fill, long long count) {
    const long long i = blockIdx.x * 256LL + threadIdx.x, column = i % axis.inner, row = i / axis.inner;
    if (row >= axis.outer * count) return;
    const Real* line = in + row / count * axis.length * axis.inner + column;
    const long long position = origin(axis, runs) + row % count * RUN;
    Real total = run_sample(line, position, axis, fill);
    for (int j = 1; j < RUN; ++j) total = total + run_sample(line, position + j, axis, fill);
    totals[i] = total;
}

template <typename Real>
__global__ void __launch_bounds__(256)
box_runs(const Real* __restrict__ in, const Real* __restrict__ totals, const Real* __restrict__ whole, Real* __restrict__ out,
         Axis axis, Runs runs, Real fill, Real scale, long long count) {
    const long long i = blockIdx.x * 256LL + threadIdx.x, column = i % axis.inner, row = i / axis.inner;
    const long long outer = row / axis.out_length;
    if (outer >= axis.outer) return;
    const Real* line = in + outer * axis.length * axis.inner + column;
    const auto at = [&](long long place) { return run_sample(line, origin(axis, runs) + place, axis, fill); };
    const long long first = runs.lead + row % axis.out_length, last = first + axis.taps - 1, run = first / RUN;
    Real head = at(run * RUN + RUN - 1), tail = at(last / RUN * RUN);
    for (long long place = run * RUN + RUN - 2; place >= first; --place) head = head + at(place);
    for (long long place = last / RUN * RUN + 1; place <= last; ++place) tail = tail + at(place);
    const long long of = outer * count;
    Real sums = whole[(of + run + 1) * axis.inner + column];
    if (last / RUN - run > runs.steps) sums = sums + totals[(of + run + runs.steps) * axis.inner + column];
    out[i] = (head + tail + sums) * scale;
}
