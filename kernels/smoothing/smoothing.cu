// Box and Gaussian smoothing. The arithmetic is defined to the bit in kernels/smoothing/__init__.py.
//
// Arrays are C-contiguous. A pass filters one axis of an array seen as [outer, length, inner] and writes
// [outer, out_length, inner]; passes run in ascending order of axes. The arrays between the passes hold, for a box over
// integers, the exact sums (in 32 bits if they fit, otherwise 64); for a Gaussian, the unrounded float sums.
// Border modes are numbered in borders.cuh; `fill` is the value beyond the edge in mode CONSTANT.
//
// Floors of a two-dimensional filter of N samples of b bytes, t taps per axis, on a device with bandwidth B, rate F:
//   bytes       2 N b / B           each sample is read once and written once
//   operations  box N (2 log2 t … 4) / F;  Gaussian N (2 t) / F: an addition and a multiply-add a pair of taps, twice
//
// Kernels, naive to fast:
//   box_gather, tiled, gather, …    the classic steps: every tap from global memory, a shared tile, padded pixels, … (ladder/)
//   box_separable, gauss_separable  one axis per pass, taps from a tile in shared memory
//   box_columns, box_rows           boxes of floats, one axis per pass at the speed of memory (streamed.cuh)
//   box_run_rows, box_runs          boxes of floats past 64 samples, one axis per pass, in runs of 16 (runs.cuh)
//   box_run_plane (run_plane.cuh)   the same of 65 to 128 samples: both axes at once
//   tree (tree.cuh)                 square boxes of float32: both axes at once, by doubling sums in registers
//   box_running (running.cuh)       boxes of integers, any size: both axes at once, by running sums
//   box_column_sums (columns.cuh)   the same for bytes, if windows are not too wide: by sums down the columns
//   box_extend, box_double          boxes of integers past 255 samples, one axis per pass, by doubling in device memory (far.cuh)
//   box_starts, box_sweep           boxes of integers past 255 samples, both axes at once, along wide strips (sweep.cuh)
//   gauss_far                       Gaussians past 255 taps that are not decimated: gauss_gather with weights in memory
//   decimate, interpolate           wide Gaussians on a coarse grid (resample.cuh)
//   decimate_plane, …               the same along two axes at once (planes.cuh)
//   wide (wide.cuh)                 Gaussians of medium reach: both axes at once, along strips of rows
//   fused (fused.cuh)               short windows: both axes at once, from registers
//   words_down, words_across, …     Gaussians of bytes and 16 bits in exact sums, one axis per pass, every tap from global memory
//   words (words.cuh)               the same, both axes at once, by products on tensor cores
//   tensor (tensor.cuh)             Gaussians of bytes: both axes at once, by products on tensor cores
// Source of the doubling sums: Blelloch, "Prefix sums and their applications" (1990), applied to windows of any length.

#include "borders.cuh"
#include "cuda/boxes/columns.cuh"
#include "cuda/fused.cuh"
#include "cuda/ladder/steps.cuh"
#include "cuda/coarse/resample.cuh"
#include "cuda/coarse/planes.cuh"
#include "cuda/boxes/running.cuh"
#include "samples.cuh"
#include "cuda/boxes/sweep.cuh"
#include "cuda/gaussians/tensor.cuh"
#include "cuda/boxes/tree.cuh"
#include "cuda/gaussians/wide.cuh"

constexpr int MAX_HALF = 128;  // weights at distances 0 … 127
constexpr int THREADS = 256;

struct Axis {
    long long outer, length, inner, out_length;
    int before, taps, mode, columns;  // columns: samples of `inner` in a tile of a separable pass
};

#include "cuda/far.cuh"
#include "cuda/boxes/streamed.cuh"
#include "cuda/boxes/runs.cuh"
#include "cuda/boxes/run_plane.cuh"
#include "cuda/gaussians/words.cuh"

template <typename Work>
struct Weights {
    Work half[MAX_HALF];
};

// Input position of the first tap of output 0.
__device__ inline int first_tap(const Axis& axis) { return axis.mode == VALID ? 0 : -axis.before; }

// One sample of one line of an axis: `line` points to its first sample.
template <typename Sum, typename In>
__device__ inline Sum tap(const In* line, long long at, const Axis& axis, Sum fill) {
    const long long from = border_index(at, axis.length, axis.mode);
    if constexpr (same<In, Sum>) return from < 0 ? fill : line[from * axis.inner];
    else return from < 0 ? fill : to_sum<Sum>(line[from * axis.inner]);
}

template <typename In, typename Work>
__device__ inline Work weighed_tap(const In* line, long long at, const Axis& axis, Work fill) {
    const long long from = border_index(at, axis.length, axis.mode);
    return from < 0 ? fill : static_cast<Work>(line[from * axis.inner]);
}

#include "cuda/ladder/naive.cuh"

// A tile of a separable pass: TILE values in shared memory, [positions along the axis, columns of `inner`].
template <typename Sum>
constexpr int PER_THREAD = 64 / sizeof(Sum);
template <typename Sum>
constexpr int TILE = THREADS * PER_THREAD<Sum>;

struct Tile {
    long long input, output, position;  // offsets of its first column; position of its first output along the axis
    int columns;                        // number of columns inside the array
};

__device__ inline Tile tile_at(long long index, const Axis& axis, int outputs) {
    const long long chunks = (axis.inner + axis.columns - 1) / axis.columns;
    const long long segments = (axis.out_length + outputs - 1) / outputs;
    const long long chunk = index % chunks, outer = index / chunks / segments;
    const long long column = chunk * axis.columns, position = index / chunks % segments * outputs;
    return {outer * axis.length * axis.inner + column, (outer * axis.out_length + position) * axis.inner + column,
            position, static_cast<int>(min(static_cast<long long>(axis.columns), axis.inner - column))};
}

// box_separable: windows by doubling in a tile, as in the contract: log2(taps) steps instead of `taps` loads.
// A thread keeps its window sums in registers; shared memory passes them to the threads `m` positions before:
//
//   all threads    samples -> shared memory
//     |  barrier     and again once all have read, for each doubling
//   each thread    its sums + those of `m` positions later -> shared memory
//     |
//   each thread    sums -> results; a barrier before the next tile is loaded
template <typename In, typename Sum, typename Out>
__global__ void __launch_bounds__(THREADS)
box_separable(const In* __restrict__ in, Out* __restrict__ out, Axis axis, Sum fill, Sum divisor, long long tiles) {
    constexpr int PER = PER_THREAD<Sum>, SIZE = TILE<Sum>;
    __shared__ Sum samples[SIZE], windows[SIZE];
    const int outputs = SIZE / axis.columns - axis.taps + 1;
    for (long long index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_at(index, axis, outputs);
        Sum window[PER];
        __syncthreads();
        for (int k = 0; k < PER; ++k) {
            const int at = threadIdx.x + k * THREADS, row = at / axis.columns, column = at % axis.columns;
            const long long position = tile.position + row + first_tap(axis);
            const bool needed = column < tile.columns && position < axis.out_length + axis.taps - 1 + first_tap(axis);
            window[k] = needed ? tap<Sum>(in + tile.input + column, position, axis, fill) : Sum(0);
            samples[at] = windows[at] = window[k];
        }
        for (int bit = 30 - __clz(axis.taps); bit >= 0; --bit) {
            const int reach = (axis.taps >> (bit + 1)) * axis.columns;
            __syncthreads();
            for (int k = 0; k < PER; ++k) {
                const int at = threadIdx.x + k * THREADS;
                if (at + reach < SIZE) window[k] = window[k] + windows[at + reach];
                if ((axis.taps >> bit & 1) && at + 2 * reach < SIZE) window[k] = window[k] + samples[at + 2 * reach];
            }
            __syncthreads();
            for (int k = 0; k < PER; ++k) windows[threadIdx.x + k * THREADS] = window[k];
        }
        for (int k = 0; k < PER; ++k) {
            const int at = threadIdx.x + k * THREADS, row = at / axis.columns, column = at % axis.columns;
            if (row >= outputs || tile.position + row >= axis.out_length || column >= tile.columns) continue;
            const long long to = tile.output + row * axis.inner + column;
            if constexpr (same<Sum, Out> && !same<Sum, float> && !same<Sum, double>) out[to] = window[k];
            else out[to] = to_mean<Out>(window[k], divisor);
        }
    }
}

// gauss_separable: each sample is loaded once per tile; the taps come from shared memory. The threads of a block wait for each
// other before and after a tile is loaded.
template <typename In, typename Work, typename Out>
__global__ void __launch_bounds__(THREADS)
gauss_separable(const In* __restrict__ in, Out* __restrict__ out, Axis axis, Work fill, Weights<Work> weights,
                long long tiles) {
    constexpr int PER = PER_THREAD<Work>, SIZE = TILE<Work>;
    __shared__ Work samples[SIZE];
    const int outputs = SIZE / axis.columns - axis.taps + 1;
    for (long long index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_at(index, axis, outputs);
        __syncthreads();
        for (int k = 0; k < PER; ++k) {
            const int at = threadIdx.x + k * THREADS, row = at / axis.columns, column = at % axis.columns;
            const long long position = tile.position + row + first_tap(axis);
            const bool needed = column < tile.columns && position < axis.out_length + axis.taps - 1 + first_tap(axis);
            samples[at] = needed ? weighed_tap(in + tile.input + column, position, axis, fill) : Work(0);
        }
        __syncthreads();
        for (int k = 0; k < PER; ++k) {
            const int at = threadIdx.x + k * THREADS, row = at / axis.columns, column = at % axis.columns;
            if (row >= outputs || tile.position + row >= axis.out_length || column >= tile.columns) continue;
            const int centre = at + axis.before * axis.columns;
            Work sum = weights.half[0] * samples[centre];
            for (int j = 1, reach = axis.columns; j <= axis.before; ++j, reach += axis.columns)
                sum = fma_rn(weights.half[j], samples[centre - reach] + samples[centre + reach], sum);
            out[tile.output + row * axis.inner + column] = to_sample<Out>(sum);
        }
    }
}
