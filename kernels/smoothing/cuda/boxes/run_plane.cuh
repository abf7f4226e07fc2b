// Boxes over float32 of 65 to 128 samples along both axes at once, in runs of 16. Part of smoothing.cu, which defines Axis.
#pragma once

#include "pdl.cuh"
#include "cuda/boxes/runs.cuh"

// box_run_plane: the sums of runs.cuh, q = (taps - 1) / 16. A block goes down a band of a strip, a run of rows in a step:
//
//   a thread a column          loads of run n + 1 begin -> heads of n - q - 1 and n - q + tails of n: rows of sums -> heads of n
//   all wait
//   a thread a column          heads of run n - 2 -> shared memory
//   a warp a row, a lane a run heads, tails -> shared memory, sums of runs by shuffles -> results -> memory
//
// Heads of a run are kept until its last window is complete: those of the last HELD runs in registers, others in shared memory.
// Rows of sums take the place of the heads of run n - q - 1, which each thread has just read. The heads stored after the barrier
// take that of the rows of sums before, which all warps have read by then. So a step needs one barrier.
//
// Floors for N samples (8192 x 8192, 127 x 127) on an H200 at 4.2 TB/s, 132 multiprocessors at 1.98 GHz:
//   bytes         8 N                                    128 us (539 MB moved, by ncu)
//   instructions  45 a result (by ncu)                    90 us
//   shared        16.6 lines of 128 bytes for 32 results 133 us (by ncu, memory included)
// Measured: 209 us. The pipe of shared memory is 65 % busy, and all 16 warps are in the same phase.
template <int Q>
struct RunPlaneShape {
    static constexpr int THREADS = 32 * RUN, HELD = 2, SLOTS = Q + 2 - HELD;
    static constexpr int ROW = THREADS, STEP = RUN * ROW;  // samples of a row and of a slot in shared memory
    static constexpr int RUNS = 25;                        // of results
    static_assert(RUNS + Q <= 32, "their windows end in the strip");
};

struct RunPlane {
    int lead_y, rest_y, lead_x, rest_x;  // as in Runs
    int tiles, outputs;                  // strips, and results of a row that each writes
    int first, end, bands, height;       // runs that end windows, and how many of them a band has
};

// W(COUNT) of the sums of runs from `total` on.
template <int COUNT>
__device__ inline float run_sums(const float* total) {
    if constexpr (COUNT == 1) return total[0];
    else {
        const float sum = run_sums<COUNT / 2>(total) + run_sums<COUNT / 2>(total + COUNT / 2);
        return COUNT % 2 ? sum + total[COUNT - 1] : sum;
    }
}

// The same of the lanes from this one on.
template <int COUNT>
__device__ inline float lane_sums(float total) {
    if constexpr (COUNT == 1) return total;
    else {
        const float half = lane_sums<COUNT / 2>(total), sum = half + __shfl_down_sync(~0u, half, COUNT / 2);
        return COUNT % 2 ? sum + __shfl_down_sync(~0u, total, COUNT - 1) : sum;
    }
}

// A warp's row: window sums of the row of sums at `line`, of which the first result goes to `target`.
template <int Q>
__device__ __forceinline__ void run_plane_row(float* line, float* target, int rest, int lead, int wanted, int channels,
                                              float scale) {
    typedef RunVector<float> Vector;
    constexpr unsigned PITCH = RUN + 4, RUNS = RunPlaneShape<Q>::RUNS;  // results take the same place, a run each 20 words
    const unsigned lane = threadIdx.x % 32, place = run_place<float>(lane, 0);
    float head[RUN], sum = 0;
#pragma unroll
    for (int i = 0; i < Vector::COUNT; ++i) {
        const Vector x = *reinterpret_cast<const Vector*>(line + (place ^ i * 4));
        Vector tails;
#pragma unroll
        for (int s = 0; s < 4; ++s) head[i * 4 + s] = x.x[s], tails.x[s] = sum = i + s == 0 ? x.x[s] : sum + x.x[s];
        *reinterpret_cast<Vector*>(line + (place ^ i * 4)) = tails;
    }
#pragma unroll
    for (int j = RUN - 2; j >= 0; --j) head[j] = head[j + 1] + head[j];
    const float sums = __shfl_down_sync(~0u, lane_sums<Q - 1>(sum), 1), longer = sums + __shfl_down_sync(~0u, sum, Q);
    const unsigned last = min(lane + Q, 31u), next = min(lane + Q + 1, 31u);  // the runs of the results' tails
    __syncwarp();
    switch (rest % 4) {
        case 0: add_tails<0>(head, line, last, next, rest, sums, longer, scale); break;
        case 1: add_tails<1>(head, line, last, next, rest, sums, longer, scale); break;
        case 2: add_tails<2>(head, line, last, next, rest, sums, longer, scale); break;
        default: add_tails<3>(head, line, last, next, rest, sums, longer, scale);
    }
    __syncwarp();
    if (lane < RUNS)
#pragma unroll
        for (int i = 0; i < RUN; i += 4)
            *reinterpret_cast<Vector*>(line + lane * PITCH + i) = {head[i], head[i + 1], head[i + 2], head[i + 3]};
    __syncwarp();
    const unsigned first = lead + lane;
    const int left = wanted - static_cast<int>(lane);
    const float* results = line + first / RUN * PITCH + first % RUN;
    target += lane * channels;
#pragma unroll
    for (int i = 0; i < static_cast<int>(RUNS); i += 2)
        if (RUN * i < left) target[RUN * i * channels] = results[PITCH * i];
}

// REST: of both axes of an image of one channel; -1: of any image.
template <int Q, int REST>
__global__ void __launch_bounds__(RunPlaneShape<Q>::THREADS, 1)
box_run_plane(const float* __restrict__ in, float* __restrict__ out, Axis rows, Axis columns, RunPlane plane, float fill,
              float scale) {
    typedef RunPlaneShape<Q> Shape;
    constexpr int ROW = Shape::ROW, STEP = Shape::STEP, SLOTS = Shape::SLOTS, HELD = Shape::HELD;
    extern __shared__ __align__(16) unsigned char shared[];
    float* const ring = reinterpret_cast<float*>(shared);
    const int thread = threadIdx.x, warp = thread / 32, length = static_cast<int>(rows.out_length);
    const int rest_y = REST < 0 ? plane.rest_y : REST, rest_x = REST < 0 ? plane.rest_x : REST;
    const unsigned channels = REST < 0 ? static_cast<unsigned>(columns.inner) : 1, part = blockIdx.x / channels;
    const int x = part % plane.tiles * plane.outputs, band = part / plane.tiles % plane.bands;
    const long long outer = part / plane.tiles / plane.bands;
    const int start_y = (rows.mode == VALID ? 0 : -rows.before) - plane.lead_y;
    const int start_x = (columns.mode == VALID ? 0 : -columns.before) - plane.lead_x + x;
    const int column = border_index(start_x + thread, static_cast<int>(columns.length), columns.mode);
    const bool outside = columns.mode == CONSTANT && column < 0;
    const unsigned channel = blockIdx.x % channels;
    const float* source = in + outer * rows.length * rows.inner + max(column, 0) * channels + channel;
    out += (outer * length * columns.out_length + x) * channels + channel;
    const int first = plane.first + band * plane.height, end = min(first + plane.height, plane.end);
    const int wanted = min(plane.outputs, static_cast<int>(columns.out_length) - x);
    float* const mine = ring + run_place<float>(thread / RUN, thread % RUN);  // the thread's column in shared memory

    // total: of the runs n - Q … n - 1; before: of these but for the last, by doubling.
    float next[RUN], held[HELD][RUN] = {}, total[Q] = {}, before = 0;
    int n = first - Q - 1, oldest = SLOTS - 1, later = 0, leaving = (2 * SLOTS - HELD) % SLOTS;  // slots
    grid_dependency_synchronize();
    load_run(next, source, start_y + n * RUN, rows, fill);
#pragma unroll 1
    for (; n < end; ++n) {
        float coming[RUN];
        load_run(coming, source, start_y + min(n + 1, end - 1) * RUN, rows, fill);
        if (outside) {
#pragma unroll
            for (int j = 0; j < RUN; ++j) next[j] = fill;
        }
        const float longer = before + total[Q - 1];
        before = run_sums<Q - 1>(total + 1);
#pragma unroll
        for (int i = 0; i + 1 < Q; ++i) total[i] = total[i + 1];
        const float *early = mine + oldest * STEP + (RUN - rest_y) * ROW, *late = mine + later * STEP - rest_y * ROW;
        float head[RUN], tail = 0;
        if (later > 0) {  // the one slot follows the other
#pragma unroll
            for (int j = 0; j < RUN; ++j) head[j] = early[j * ROW];
        } else {
#pragma unroll
            for (int j = 0; j < RUN; ++j) head[j] = (j < rest_y ? early : late)[j * ROW];
        }
#pragma unroll
        for (int j = 0; j < RUN; ++j) {
            tail = j == 0 ? next[0] : tail + next[j];
            mine[oldest * STEP + j * ROW] = head[j] + tail + (j < rest_y ? longer : before);
        }
        total[Q - 1] = tail;
#pragma unroll
        for (int j = RUN - 2; j >= 0; --j) next[j] = next[j + 1] + next[j];
        if (n >= first) __syncthreads();
#pragma unroll
        for (int j = 0; j < RUN; ++j) {
            mine[leaving * STEP + j * ROW] = held[HELD - 1][j];
#pragma unroll
            for (int i = HELD - 1; i > 0; --i) held[i][j] = held[i - 1][j];
            held[0][j] = next[j], next[j] = coming[j];
        }
        const int y = (n - Q) * RUN + warp - rest_y - plane.lead_y;
        if (n >= first && y >= 0 && y < length)
            run_plane_row<Q>(ring + oldest * STEP + warp * ROW, out + y * columns.out_length * channels, rest_x, plane.lead_x,
                             wanted, channels, scale);
        oldest = later, later = later + 1 == SLOTS ? 0 : later + 1, leaving = leaving + 1 == SLOTS ? 0 : leaving + 1;
    }
}
