// Boxes over floats along both axes at once, in one kernel. Part of smoothing.cu.
//
// tree: a block walks down a band of rows. Its column warps sum the columns, two per thread, and hand over the sums in
// batches of a few rows; its row warps take batches in turn, and sum runs of their rows, one per lane. Both process their
// samples in order with the contract's doubling tree: every sample completes one new window of each length.
//
//   copies of the next rows .............. samples     each thread waits for its own copies only, three groups of rows ahead
//     |
//   column warps   sums down the columns -> buffer b
//     |  filled[b]   all column warps arrive; the row warp whose turn it is waits
//   a row warp     sums along the rows of b -> its stage -> results, by its lanes together
//     |  emptied[b]  this warp arrives; the column warps wait before they fill b again, BUFFERS batches later
//
// Floors for N samples and t taps: bytes 8 N / B; operations 2 N (log2 t … 2 log2 t) / F. At the speed of an H200's copy
// there are 56 instructions a sample; 31 taps take 17 additions and multiplications, and the kernel 32 instructions.
// Measured (8192 x 8192, an H200): 0.81 of a copy's speed, 159 us, for 31 x 31, and 0.83 for 15 x 15. box_columns, one of the
// two passes that filter other sizes, alone takes 176 us of 31 rows.
#pragma once

#include "bands.cuh"
#include "pdl.cuh"
#include "mbarrier.cuh"

// W(TAPS) of a stream of samples: W(2m)[i] = W(m)[i] + W(m)[i + m], and W(2m+1)[i] = W(2m)[i] + x[i + 2m]. Sums that wait for
// their partner are in rings of registers, one per level, about TAPS in all. `place` counts the samples, modulo the longest
// ring; the compiler must know it after unrolling loops.
template <int TAPS>
struct Tree {
    static constexpr int HALF = TAPS / 2, ODD = TAPS % 2, DELAY = HALF + ODD;
    static constexpr int LENGTH = DELAY <= 1 ? 1 : DELAY <= 2 ? 2 : DELAY <= 4 ? 4 : DELAY <= 8 ? 8 : DELAY <= 16 ? 16 : 32;
    static_assert(DELAY <= LENGTH, "longer rings do not fit registers");
    Tree<HALF> half;
    float ring[LENGTH];

    // The sum of the window that ends with `sample`.
    __device__ __forceinline__ float push(float sample, int place) {
        const float sum = half.push(sample, place);
        const float older = ring[(place + LENGTH - DELAY) % LENGTH];
        const float newer = ODD ? ring[(place + LENGTH - 1) % LENGTH] : sum;
        ring[place % LENGTH] = sum;
        return ODD ? older + newer + sample : older + newer;
    }
};

template <>
struct Tree<1> {
    __device__ __forceinline__ float push(float sample, int) { return sample; }
};

constexpr int TREE_CHUNK = 32;  // results of its run that a lane writes at once: a line of memory

template <int TAPS>
struct TreeShape {
    static constexpr bool LONG = TAPS > 31;
    static constexpr int PERIOD = LONG ? 32 : 16;  // of the rings
    static constexpr int COLUMNS = 2;              // of a thread
    static constexpr int COLUMN_WARPS = LONG ? 9 : 11, COLUMN_THREADS = 32 * COLUMN_WARPS;
    static constexpr int SPAN = COLUMNS * COLUMN_THREADS;
    static constexpr int ROW_WARPS = LONG ? 3 : 5, THREADS = COLUMN_THREADS + 32 * ROW_WARPS;
    static constexpr int BATCH = 8, RUNS = 32 / BATCH;  // rows; a lane for each run of each row
    static constexpr int GROUP = 4, GROUPS = 4;         // rows fetched at once; groups in shared memory or in flight
    static constexpr int BUFFERS = 6;
    static constexpr int LEAD = (TAPS - 1 + PERIOD - 1) / PERIOD * PERIOD;
    static constexpr int RUN = (SPAN - LEAD) / RUNS / TREE_CHUNK * TREE_CHUNK, OUTPUTS = RUNS * RUN;
    static constexpr int PITCH = SPAN + 36;  // words from row to row, so that lanes that read quads at once use different banks
    static constexpr int BUFFER = BATCH * PITCH, STAGE = 32 * TREE_CHUNK;
    static_assert(PERIOD % (GROUPS * GROUP) == 0, "slots are in step from period to period");
    static_assert(TREE_CHUNK % PERIOD == 0, "rings are in step from chunk to chunk");
    static_assert(PITCH / 4 % 2 == 1, "rows begin in different banks");
};

__device__ __forceinline__ void copy_4_bytes(float* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
#else
    *shared = __ldg(static_cast<const float*>(global));
#endif
}
__device__ __forceinline__ void end_of_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits for all but the last COUNT groups of the thread's copies.
template <int COUNT>
__device__ __forceinline__ void wait_for_groups_but() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
#endif
}

// A thread's columns.
template <int COLUMNS>
struct TreeColumns {
    const float* column[COLUMNS];  // row 0
    bool outside[COLUMNS];         // beyond the edge in mode CONSTANT
    unsigned row_bytes;
};

// What a block sees: no left or right edge; samples beyond one; also the constants of mode CONSTANT.
enum class Sight { INSIDE, EDGES, CONSTANTS };

// The numbers of a group's rows, in one load.
template <int GROUP>
struct __align__(4 * GROUP) GroupRows {
    unsigned row[GROUP];
};

// Fetches a group of rows, with the numbers at `from`, of a thread's own columns.
template <Sight SIGHT, int COLUMNS, int THREADS, int GROUP>
__device__ __forceinline__ void fetch_group(float* samples, const TreeColumns<COLUMNS>& sources, const unsigned* from) {
    const GroupRows<GROUP> rows = *reinterpret_cast<const GroupRows<GROUP>*>(from);
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            // Inside, columns are as far apart as their threads, so one address serves all.
            const char* column = reinterpret_cast<const char*>(sources.column[SIGHT == Sight::INSIDE ? 0 : j]);
            column += rows.row[i] * static_cast<unsigned long long>(sources.row_bytes);
            const float* at = reinterpret_cast<const float*>(column) + (SIGHT == Sight::INSIDE ? j * THREADS : 0);
            copy_4_bytes(samples + (i * COLUMNS + j) * THREADS, at);
        }
    end_of_group();
}

// Shared memory of a block.
struct TreeWorkspace {
    float *buffers, *stages, *samples;
    unsigned* from;              // the input row of each row of the band, starting with the lead
    Mbarrier *filled, *emptied;  // of each buffer: by the column warps, and by the row warp whose turn it is
    int origin, first;           // words of a buffer's row: of the first column, and of the first run
};

// The column warps: sums down the columns from input column `x` on, for `rows` rows from input position `y` on.
template <int TAPS, Sight SIGHT>
__device__ __forceinline__ void sum_columns(const float* plane, const TreeWorkspace& work, const Picture& picture, int x,
                                            int y, int rows) {
    typedef TreeShape<TAPS> Shape;
    constexpr int COLUMNS = Shape::COLUMNS, THREADS = Shape::COLUMN_THREADS, SPAN = Shape::SPAN;
    constexpr int GROUP = Shape::GROUP, GROUPS = Shape::GROUPS;
    const int thread = threadIdx.x;
    TreeColumns<COLUMNS> sources;
    sources.row_bytes = picture.row_samples * static_cast<unsigned>(sizeof(float));
    int word[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const int column = border_index(x + thread + j * THREADS, picture.columns, picture.mode_x);
        sources.column[j] = plane + max(column, 0), sources.outside[j] = column < 0;
        word[j] = work.origin + thread + j * THREADS;
    }
    Tree<TAPS> tree[COLUMNS] = {};
    float* samples = work.samples + thread;
    const unsigned* from = work.from;
#pragma unroll
    for (int i = 0; i < GROUPS - 1; ++i, from += GROUP)
        fetch_group<SIGHT, COLUMNS, THREADS, GROUP>(samples + i * GROUP * SPAN, sources, from);
    float* to = work.buffers;  // the buffer that is being filled
    int buffer = 0, turn = 0;
#pragma unroll 1
    for (int base = -Shape::LEAD; base < rows; base += Shape::PERIOD) {
#pragma unroll
        for (int part = 0; part < Shape::PERIOD; part += GROUP, from += GROUP) {
            const int row = base + part;
            wait_for_groups_but<GROUPS - 2>();
            // The next rows go to the slot that was used last.
            const int slot = part / GROUP % GROUPS, last = (slot + GROUPS - 1) % GROUPS;
            fetch_group<SIGHT, COLUMNS, THREADS, GROUP>(samples + last * GROUP * SPAN, sources, from);
            float sample[GROUP][COLUMNS];  // each loaded once, all before anything is stored
#pragma unroll
            for (int i = 0; i < GROUP; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
                    sample[i][j] = *static_cast<const volatile float*>(samples + slot * GROUP * SPAN +
                                                                       (i * COLUMNS + j) * THREADS);
            if (part % Shape::BATCH == 0 && turn > 0) wait<32>(work.emptied + buffer, turn - 1);
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const bool beyond = SIGHT == Sight::CONSTANTS && picture.mode_y == CONSTANT &&
                                    static_cast<unsigned>(y + row + i) >= static_cast<unsigned>(picture.rows);
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    if (SIGHT == Sight::CONSTANTS && (beyond || sources.outside[j]))
                        sample[i][j] = __uint_as_float(picture.fill);
                    // In the lead these are not whole windows yet; they are overwritten before the buffer counts as filled.
                    to[(part + i) % Shape::BATCH * Shape::PITCH + word[j]] = tree[j].push(sample[i][j], part + i);
                }
            }
            if ((part + GROUP) % Shape::BATCH == 0 && row >= 0) {
                arrive(work.filled + buffer);
                to += Shape::BUFFER;
                if (++buffer == Shape::BUFFERS) buffer = 0, to = work.buffers, ++turn;
            }
        }
    }
}

// Writes a chunk of each lane's results, staged in shared memory: eight lanes write a line of memory, four lines at a time.
template <int TAPS>
struct TreeResults {
    typedef TreeShape<TAPS> Shape;
    static constexpr int LINES = TREE_CHUNK / 4;  // stores, of four lines each
    const float* staged[2];  // the lane's quad in its first line, for even and for odd lines
    float* to;
    long long row_samples;
    int columns, rows;  // that the block writes: samples from `to` on, and rows from its row on
    bool aligned, whole;  // whole: all lanes write all of their results, in whole vectors

    // The lane's lines are four lanes apart: first through the rows, then through the runs.
    __device__ __forceinline__ void store(int at) const {
#pragma unroll
        for (int half = 0; half < LINES; half += 4) {
            float4 quad[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                quad[k] = *reinterpret_cast<const float4*>(staged[k % 2] + (half + k) * 4 * TREE_CHUNK);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int run = (half + k) * 4 / Shape::BATCH, row = (half + k) * 4 % Shape::BATCH;
                float* line = to + row * row_samples + run * Shape::RUN + at;
                if (whole) *reinterpret_cast<float4*>(line) = quad[k];
                else if (row < rows) store_some(line, quad[k], columns - run * Shape::RUN - at);
            }
        }
    }

    __device__ __forceinline__ void store_some(float* line, float4 quad, int left) const {
        if (aligned && left >= 4) {
            *reinterpret_cast<float4*>(line) = quad;
            return;
        }
        if (left > 0) line[0] = quad.x;
        if (left > 1) line[1] = quad.y;
        if (left > 2) line[2] = quad.z;
        if (left > 3) line[3] = quad.w;
    }
};

// A row warp's share of the batches: sums along the rows, which it writes. The block's first result goes to `line`.
template <int TAPS>
__device__ __forceinline__ void sum_rows(float* line, const TreeWorkspace& work, const Picture& picture, float scale,
                                         int columns, int rows) {
    typedef TreeShape<TAPS> Shape;
    constexpr int CHUNK = TREE_CHUNK, LEAD = Shape::LEAD, BATCH = Shape::BATCH;
    const int warp = (static_cast<int>(threadIdx.x) - Shape::COLUMN_THREADS) / 32, lane = threadIdx.x % 32;
    const int all = (rows + Shape::PERIOD - 1) / Shape::PERIOD * Shape::PERIOD;  // the column warps stop at whole periods
    const int place = work.first + lane % BATCH * Shape::PITCH + lane / BATCH * Shape::RUN;
    // The order of a lane's quads avoids bank conflicts, both in its stores and in the loads of the others.
    float* stage = work.stages + warp * Shape::STAGE;
    TreeResults<TAPS> results;
    const int out_row = lane / 8, out_at = lane % 8 * 4;
    results.staged[0] = stage + out_row * CHUNK + ((lane ^ out_row) & 7) * 4;
    results.staged[1] = stage + out_row * CHUNK + ((lane ^ out_row ^ 4) & 7) * 4;
    results.row_samples = picture.out_row_samples, results.aligned = picture.aligned_out;
    results.to = line + (warp * BATCH + out_row) * results.row_samples + out_at;
    results.columns = min(columns, Shape::OUTPUTS) - out_at;
#pragma unroll 1
    for (int row = warp * BATCH; row < all; row += BATCH * Shape::ROW_WARPS) {
        const int buffer = row / BATCH % Shape::BUFFERS;
        const float* from = work.buffers + buffer * Shape::BUFFER + place;
        results.rows = rows - row - out_row;
        results.whole = picture.aligned_out && columns >= Shape::OUTPUTS && rows - row >= BATCH;
        wait<Shape::COLUMN_THREADS>(work.filled + buffer, row / BATCH / Shape::BUFFERS);
        Tree<TAPS> tree = {};
#pragma unroll
        for (int i = 0; i < LEAD; i += 4) {
            const float4 quad = *reinterpret_cast<const float4*>(from + i);
            tree.push(quad.x, i), tree.push(quad.y, i + 1), tree.push(quad.z, i + 2), tree.push(quad.w, i + 3);
        }
        float4 next[CHUNK / 4];  // loaded a chunk ahead; after the last, that one again
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i) next[i] = *reinterpret_cast<const float4*>(from + LEAD + 4 * i);
#pragma unroll 1
        for (int at = 0; at < Shape::RUN; at += CHUNK) {
#pragma unroll
            for (int i = 0; i < CHUNK; i += 4) {
                const float4 quad = next[i / 4];
                const float sample[4] = {quad.x, quad.y, quad.z, quad.w};
                float done[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) done[k] = tree.push(sample[k], i + k) * scale;
                *reinterpret_cast<float4*>(stage + lane * CHUNK + ((i / 4 ^ lane) & 7) * 4) =
                    make_float4(done[0], done[1], done[2], done[3]);
            }
            __syncwarp();
            const float* ahead = from + LEAD + min(at + CHUNK, Shape::RUN - CHUNK);
#pragma unroll
            for (int i = 0; i < CHUNK / 4; ++i) next[i] = *reinterpret_cast<const float4*>(ahead + 4 * i);
            results.store(at);
            __syncwarp();
        }
        arrive(work.emptied + buffer);
        results.to += BATCH * Shape::ROW_WARPS * results.row_samples;
    }
}

template <int TAPS>
__global__ void __launch_bounds__(TreeShape<TAPS>::THREADS, 1)
tree(const float* __restrict__ in, float* __restrict__ out, Picture picture, BlockPartition bands, float scale) {
    typedef TreeShape<TAPS> Shape;
    extern __shared__ __align__(16) float tree_shared[];
    __shared__ Mbarrier barriers[2][Shape::BUFFERS];
    const int tile = blockIdx.x % picture.tiles, rest = blockIdx.x / picture.tiles, band = rest / picture.planes;
    const long long plane = rest % picture.planes;
    const int x = tile * Shape::OUTPUTS, y = bands.begin(band);
    const int rows = min(bands.begin(band + 1), picture.out_rows) - y;
    // Input position of the row that completes the first windows, and of the column that begins them.
    const int last_y = y + picture.centre_y - TAPS / 2 + TAPS - 1, first_x = x + picture.centre_x - TAPS / 2;
    // Columns are fetched from the start of a line of memory if there are enough, and placed so that runs start with a quad.
    constexpr int SPARE = Shape::SPAN - Shape::OUTPUTS - (TAPS - 1), SURPLUS = Shape::LEAD - (TAPS - 1);
    const int skip = (first_x & 31) <= SPARE ? first_x & 31 : (first_x & 7) <= SPARE ? first_x & 7 : 0;

    TreeWorkspace work;
    work.origin = skip >= SURPLUS ? (SURPLUS - skip) & 3 : SURPLUS - skip;
    work.first = work.origin + skip - SURPLUS;
    work.buffers = tree_shared;
    work.stages = work.buffers + Shape::BUFFERS * Shape::BUFFER;
    work.samples = work.stages + Shape::ROW_WARPS * Shape::STAGE;
    work.from = reinterpret_cast<unsigned*>(work.samples + Shape::GROUPS * Shape::GROUP * Shape::SPAN);
    work.filled = barriers[0], work.emptied = barriers[1];
    if (threadIdx.x < Shape::BUFFERS) {
        init<Shape::COLUMN_THREADS>(work.filled + threadIdx.x);
        init<32>(work.emptied + threadIdx.x);
    }
    for (int i = threadIdx.x; i < rows + Shape::LEAD + Shape::PERIOD + Shape::GROUPS * Shape::GROUP; i += Shape::THREADS)
        work.from[i] = max(border_index(last_y - Shape::LEAD + i, picture.rows, picture.mode_y), 0);
    __syncthreads();
    grid_dependency_synchronize();

    if (threadIdx.x < Shape::COLUMN_THREADS) {
        const float* in_plane = in + plane * picture.rows * picture.row_samples;
        const int left = first_x - skip;
        const bool inside = left >= 0 && left + Shape::SPAN <= picture.columns;
        if (picture.mode_x == CONSTANT && !inside ||
            picture.mode_y == CONSTANT && (last_y < Shape::LEAD || last_y + rows > picture.rows))
            sum_columns<TAPS, Sight::CONSTANTS>(in_plane, work, picture, left, last_y, rows);
        else if (inside) sum_columns<TAPS, Sight::INSIDE>(in_plane, work, picture, left, last_y, rows);
        else sum_columns<TAPS, Sight::EDGES>(in_plane, work, picture, left, last_y, rows);
    } else {
        float* line = out + (plane * picture.out_rows + y) * picture.out_row_samples + x;
        sum_rows<TAPS>(line, work, picture, scale, picture.out_row_samples - x, rows);
    }
}
