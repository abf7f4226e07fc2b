// Boxes over floats of more than 255 samples, one axis per pass. Part of smoothing.cu, which defines Axis.
#pragma once

#include "async_copy.cuh"
#include "borders.cuh"
#include "cuda/boxes/streamed.cuh"

// The contract sums these windows in runs of 16 samples: (head + tail) + whole runs, so a result takes four additions at any
// size. Place 0 of a line is where the first run begins, at most 15 samples before the first window:
//
//   place     16 k     first                16 (k + 1)  …  16 (k + q)      last
//             |        |----- head ------>|             …  |----- tail ---->|
//   sums                                     M[k + 1]          (+ T[k + q] if last - first passes into another run)
//
// N samples of b bytes: rows move 2 N b, columns 4 N b (1 to sum T, 2 for heads and tails, 1 for results). 8192 x 8192 floats,
// 1023 x 1023, on an H200: 242 us along rows and 364 down columns, where 4.2 TB/s would allow 128 and 256.
constexpr int RUN = 16;

// Two neighbouring columns, where rows have an even number of them: more bytes in flight.
struct __align__(8) Pair {
    float a, b;
};
__device__ inline Pair operator+(Pair x, Pair y) { return {x.a + y.a, x.b + y.b}; }
__device__ inline Pair operator*(Pair x, Pair y) { return {x.a * y.a, x.b * y.b}; }
__device__ inline Pair __ldg(const Pair* from) {
    const float2 x = __ldg(reinterpret_cast<const float2*>(from));
    return {x.x, x.y};
}

struct Runs {
    int lead;            // samples of the first run before the first window
    int steps, rest;     // taps - 1 = 16 * steps + rest
    int count;           // runs of a line
    int bands, height;   // box_runs: in how many parts a column is cut, and runs of each
    int outputs;         // box_run_rows: results of a block, a multiple of 16
};

// The position along the axis of the line's place 0.
__device__ inline long long origin(const Axis& axis, const Runs& runs) {
    return (axis.mode == VALID ? 0 : -axis.before) - runs.lead;
}

// box_run_totals: T of every run, [outer, runs, inner]. The first and the last may take samples of no window, and are not used.
template <typename Real>
__global__ void __launch_bounds__(256)
box_run_totals(const Real* __restrict__ in, Real* __restrict__ totals, Axis axis, Runs runs, Real fill) {
    const long long i = blockIdx.x * 256LL + threadIdx.x, column = i % axis.inner, row = i / axis.inner;
    if (row >= axis.outer * runs.count) return;
    Real x[RUN];
    const Real* line = in + row / runs.count * axis.length * axis.inner + column;
    load_batch(x, line, origin(axis, runs) + row % runs.count * RUN, axis, fill);
    Real total = x[0];
#pragma unroll
    for (int j = 1; j < RUN; ++j) total = total + x[j];
    totals[i] = total;
}

// box_runs: a thread goes down a band of a column, a run of results at a time, whose heads it sums from the end of their run.
// whole: the sums of `steps - 1` runs, [outer, whole_rows, inner].
template <typename Real>
__global__ void __launch_bounds__(256)
box_runs(const Real* __restrict__ in, const Real* __restrict__ totals, const Real* __restrict__ whole, Real* __restrict__ out,
         Axis axis, Runs runs, long long whole_rows, Real fill, Real scale) {
    const long long i = blockIdx.x * 256LL + threadIdx.x, column = i % axis.inner, row = i / axis.inner;
    const long long outer = row / runs.bands;
    if (outer >= axis.outer) return;
    const Real* line = in + outer * axis.length * axis.inner + column;
    const int first_run = static_cast<int>(row % runs.bands) * runs.height;
    const int end_run = min(first_run + runs.height, static_cast<int>((runs.lead + axis.out_length + RUN - 1) / RUN));
    Real tail{};
    for (int j = 0; j < runs.rest; ++j) {
        const long long place = (first_run + runs.steps) * static_cast<long long>(RUN) + j;
        const long long from = border_index(origin(axis, runs) + place, axis.length, axis.mode);
        const Real x = from < 0 ? fill : __ldg(line + from * axis.inner);
        tail = j == 0 ? x : tail + x;
    }
#pragma unroll 1
    for (int k = first_run; k < end_run; ++k) {
        Real head[RUN], entering[RUN];
        const long long start = origin(axis, runs) + k * static_cast<long long>(RUN);
        load_batch(entering, line, start + runs.steps * RUN + runs.rest, axis, fill);
        load_batch(head, line, start, axis, fill);
        const Real sums = whole[(outer * whole_rows + k + 1) * axis.inner + column];
        const Real longer = sums + totals[(outer * runs.count + k + runs.steps) * axis.inner + column];
#pragma unroll
        for (int j = RUN - 2; j >= 0; --j) head[j] = head[j + 1] + head[j];
        const long long y = static_cast<long long>(k) * RUN - runs.lead;  // of the run's first result
        Real* target = out + (outer * axis.out_length + y) * axis.inner + column;
#pragma unroll
        for (int j = 0; j < RUN; ++j, target += axis.inner) {
            tail = (j + runs.rest) % RUN == 0 ? entering[j] : tail + entering[j];
            if (y + j < 0 || y + j >= axis.out_length) continue;
            *target = (head[j] + tail + (j + runs.rest < RUN ? sums : longer)) * scale;
        }
    }
}

// box_run_rows: a block loads the samples of `outputs` results of a line, sums every run forwards and backwards, then adds the
// three parts of each result:
//   copy samples -> barrier -> heads, tails, totals of runs -> barrier -> whole: a barrier a level -> results
// In shared memory, where each channel has a plane, sample j of a run lies at (j + turn) % 16, so that neither threads of
// neighbouring runs nor those of neighbouring samples meet in a bank. The turn is the same 32 runs further on, which is the
// step of a block's threads: so they only add to their addresses.
constexpr int RUN_THREADS = 512;
static_assert(RUN_THREADS == 32 * RUN, "a step leaves the turn and the place in a run as they are");

template <typename Real>
__device__ inline unsigned run_place(unsigned run, unsigned j) {
    return run * RUN + (j + (run >> (sizeof(Real) == 4))) % RUN;
}

template <typename Real>
__global__ void __launch_bounds__(RUN_THREADS, 2)
box_run_rows(const Real* __restrict__ in, Real* __restrict__ out, Axis axis, Runs runs, Real fill, Real scale) {
    extern __shared__ __align__(16) unsigned char shared[];
    const unsigned inner = static_cast<unsigned>(axis.inner), thread = threadIdx.x;
    const long long tiles = (axis.out_length + runs.outputs - 1) / runs.outputs;
    const long long line = blockIdx.x / tiles, begin = blockIdx.x % tiles * runs.outputs;
    const unsigned wanted = static_cast<unsigned>(min(static_cast<long long>(runs.outputs), axis.out_length - begin));
    const unsigned count = (runs.lead + wanted + axis.taps - 2) / RUN + 1, all = count * inner;  // runs of all channels
    Real* tails = reinterpret_cast<Real*>(shared);
    Real* heads = tails + all * RUN;
    Real* totals = heads + all * RUN;
    const Real* source = in + line * axis.length * inner;
    // The samples, of which those of low to high are in the image. Positions fit 31 bits.
    const int first = static_cast<int>(origin(axis, runs) + begin), length = static_cast<int>(axis.length);
    const int samples = count * RUN, low = min(max(-first, 0), samples), high = max(min(length - first, samples), low);
    const int start = low + static_cast<int>((thread - low) % RUN_THREADS);  // the thread's first in the image
    for (unsigned channel = 0; channel < inner; ++channel) {
        const Real* from = source + static_cast<long long>(first + start) * inner + channel;
        Real* to = tails + run_place<Real>(channel * count + start / RUN, start % RUN);
#pragma unroll 4
        for (int i = start; i < high; i += RUN_THREADS, from += RUN_THREADS * inner, to += RUN_THREADS) copy_word(to, from);
        for (int i = thread; i < low + samples - high; i += RUN_THREADS) {
            const int at = i < low ? i : i - low + high, inside = border_index(first + at, length, axis.mode);
            tails[run_place<Real>(channel * count + at / RUN, at % RUN)] =
                inside < 0 ? fill : __ldg(source + static_cast<long long>(inside) * inner + channel);
        }
    }
    wait_for_copies();
    __syncthreads();
    for (unsigned run = thread; run < all; run += RUN_THREADS) {
        Real x[RUN];
#pragma unroll
        for (int j = 0; j < RUN; ++j) x[j] = tails[run_place<Real>(run, j)];
        Real sum = x[0];
#pragma unroll
        for (int j = 1; j < RUN; ++j) tails[run_place<Real>(run, j)] = sum = sum + x[j];
        totals[run] = sum;
        sum = x[RUN - 1];
        heads[run_place<Real>(run, RUN - 1)] = sum;
#pragma unroll
        for (int j = RUN - 2; j >= 0; --j) heads[run_place<Real>(run, j)] = sum = sum + x[j];
    }
    __syncthreads();
    // Sums of more and more runs, by turns in two arrays; those past a line's end are not used.
    const Real* whole = totals;
    for (int bit = 30 - __clz(runs.steps - 1); bit >= 0; --bit) {
        const unsigned reach = (runs.steps - 1) >> (bit + 1);
        Real* next = totals + (whole == totals + all ? 2 * all : all);
        for (unsigned i = thread; i < all; i += RUN_THREADS) {
            Real sum = whole[i] + whole[min(i + reach, all - 1)];
            if ((runs.steps - 1) >> bit & 1) sum = sum + totals[min(i + 2 * reach, all - 1)];
            next[i] = sum;
        }
        __syncthreads();
        whole = next;
    }
    const unsigned place = runs.lead + thread, last = place + axis.taps - 1;
    const bool longer = place % RUN + runs.rest >= RUN;
    for (unsigned channel = 0; channel < inner; ++channel) {
        const unsigned run = channel * count + place / RUN;
        const Real *head = heads + run_place<Real>(run, place % RUN), *sums = whole + run + 1;
        const Real* further = totals + run + runs.steps;
        const Real* tail = tails + run_place<Real>(channel * count + last / RUN, last % RUN);
        Real* target = out + (line * axis.out_length + begin + thread) * inner + channel;
#pragma unroll 4
        for (unsigned i = thread; i < wanted; i += RUN_THREADS, target += RUN_THREADS * inner) {
            *target = (*head + *tail + (longer ? *sums + *further : *sums)) * scale;
            head += RUN_THREADS, tail += RUN_THREADS, sums += RUN_THREADS / RUN, further += RUN_THREADS / RUN;
        }
    }
}
