// Adjoint transform as one real matrix product on tensor cores.
//
//   image[c, row, y] = sum over m of d[c, m] e^{iφ(m, row)} e^{iθ(m) y},    y = ±1/2, ±3/2 … (or 0, ±1, …) from the middle
//
// Rows are all axes but the last, columns the last. Computing y and -y together makes the second factor real: the products
// of A = d e^{iφ} (re, im) with cos θy and sin θy, y > 0, give P and Q, and P ± iQ are the two pixels. That takes two real
// products per pair of pixel and sample, half of the complex product's four.
//
// Floor: 4 P operations over the tensor cores' rate, P = pixels × samples × coils; × 3 with three terms.
// Factors: the table of cos and sin is computed once for all coils (exact_table); each block computes A as it goes, eight
// rows of a sample from one sine and cosine by products with e^{iφ}, e^{2iφ}, e^{4iφ}.
// Blocks share rows × samples evenly, each a run of 32-sample stages that may cross tiles. A block writes its partial sums
// of a tile to its own slot, and exact_combine adds the slots in order: no two blocks add to one address, and devices with
// the same number of multiprocessors give the same bits in every run.
#pragma once

#include "exact/product.cuh"

constexpr int STAGE = 32;              // samples
constexpr int GROUP = 8;               // neighbouring rows along the axis before the last, of one coil
constexpr int TILE_GROUPS = 8;         // of a block
constexpr int CONSUMERS = 4, PRODUCERS = 2, ADJOINT_THREADS = 32 * (CONSUMERS + PRODUCERS);  // warps
constexpr int WARP_COLUMNS = 2, TILE_COLUMNS = 64 * WARP_COLUMNS;
constexpr int A_PITCH = 2 * GROUP * TILE_GROUPS + 8;  // fp16 numbers; a power of two plus 16 bytes avoids bank conflicts

struct ExactAdjoint {
    long long samples, stride;           // samples of this launch; from one coil's samples to the next coil's
    long long first_group, last_group;   // to compute, of all coils' groups
    long long stages, tiles;             // stages per tile; tiles of groups × tiles of columns
    int groups;                          // of one coil
    int column_tiles, column_pairs;      // tiles across; column pairs of a tile
    int blocks;                          // of exact_adjoint_product
    int coils, size[3];
};

__device__ inline long long first_stage_of(const ExactAdjoint& p, long long block) {
    return p.stages * p.tiles * block / p.blocks;
}

__device__ inline long long block_of(const ExactAdjoint& p, long long stage) {
    return ((stage + 1) * p.blocks - 1) / (p.stages * p.tiles);
}

// Table of cos and sin, fp16 pairs [m][column pair]; `low`: the rounding remainders. Zeros outside the image.
template <int TERMS>
__global__ void exact_table(const uint4* __restrict__ phases, uint4* __restrict__ high, uint4* __restrict__ low,
                            long long samples, long long rows, int pairs, int size) {
#ifdef EXACT_TENSOR
    const int fours = pairs / 4;
    const long long index = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x, m = index / fours;
    if (m >= rows) return;
    const int first = static_cast<int>(index % fours) * 4;
    const unsigned phase = m < samples ? phases[m].w : 0;
    unsigned whole[4], rest[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const int pair = first + n;
        const unsigned at = twice_distance(pair, size) * phase;
        float2 unit = TERMS == 1 ? fast_unit(at) : accurate_unit(at);
        if (pair >= (size + 1) / 2 || m >= samples) unit = make_float2(0, 0);
        whole[n] = pair_of(unit.x, unit.y);
        if (TERMS > 1) rest[n] = rest_of(whole[n], unit.x, unit.y);
    }
    high[index] = make_uint4(whole[0], whole[1], whole[2], whole[3]);
    if (TERMS > 1) low[index] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
#else
    __trap();
#endif
}

#ifdef EXACT_TENSOR

// A block: four consumer warps of 64 × 64 products each, two rows and two columns of them, and two producer warps, which
// prepare the next stages meanwhile. Two blocks share a multiprocessor: 4 % faster on an H200 than one of twice the width.
template <int TERMS>
struct AdjointShape {
    static constexpr int PARTS = TERMS > 1 ? 2 : 1, THREADS = ADJOINT_THREADS;
    static constexpr int B_PITCH = TILE_COLUMNS + 8, CHUNKS = TILE_COLUMNS / 8;
    static constexpr int STAGES = TERMS > 1 ? 2 : 4;  // in shared memory
    static constexpr int LAG = TERMS > 1 ? 0 : 1;     // stages that copies may still be in flight behind the computation of A
    static constexpr int B_BYTES = STAGE * B_PITCH * 2, A_BYTES = STAGE * A_PITCH * 2, STAGE_BYTES = PARTS * (A_BYTES + B_BYTES);
    // Tensor cores round sums towards zero, so after this many stages the sums are added up outside.
    static constexpr int PIECE = TERMS > 1 ? 16 : 256;

    // Named barriers: a stage is full, or empty again. Arriving does not wait.
    __device__ static void arrive(int stage, bool full) {
        __threadfence_block();
        asm volatile("bar.arrive %0, %1;" ::"r"(1 + stage + (full ? 0 : STAGES)), "n"(THREADS) : "memory");
    }
    __device__ static void wait(int stage, bool full) {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + stage + (full ? 0 : STAGES)), "n"(THREADS) : "memory");
    }
};

// Computes A of a stage and copies its part of the table: in shared memory B comes first, then A, eight real and eight
// imaginary parts for each group. Lane n handles the stage's sample n.
template <int TERMS>
struct AdjointProducer {
    using Shape = AdjointShape<TERMS>;
    static constexpr int GROUPS = TILE_GROUPS / PRODUCERS;  // per warp

    const ExactAdjoint& p;
    const uint4* table[2];
    const uint2* phases;  // halves of uint4: every other one is used
    const float2 *steps, *samples;
    int lane, warp, column_tile;
    int x[GROUPS], y[GROUPS];
    const float2* coil[GROUPS];  // its samples; null for groups beyond the last

    struct Inputs {
        uint2 phase;
        float2 step[3], sample[GROUPS];
    } next;

    __device__ void go_to(long long tile) {
        column_tile = static_cast<int>(tile % p.column_tiles);
        const int along = (p.size[1] + GROUP - 1) / GROUP;
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
            const long long group = p.first_group + tile / p.column_tiles * TILE_GROUPS + warp * GROUPS + n;
            const int of_coil = static_cast<int>(group % p.groups);
            x[n] = of_coil / along - p.size[0] / 2;
            y[n] = of_coil % along * GROUP - p.size[1] / 2;
            coil[n] = group < p.last_group ? samples + group / p.groups * p.stride : nullptr;
        }
    }

    __device__ void copy(char* to, int stage) const {
#pragma unroll
        for (int part = 0; part < Shape::PARTS; ++part)
#pragma unroll
            for (int n = 0; n < STAGE * Shape::CHUNKS / (32 * PRODUCERS); ++n) {
                const int chunk = n * 32 * PRODUCERS + warp * 32 + lane;
                const int k = chunk / Shape::CHUNKS, at = chunk % Shape::CHUNKS;
                const long long row = static_cast<long long>(stage * STAGE + k) * p.column_tiles + column_tile;
                copy_16_bytes(to + part * Shape::B_BYTES + (k * Shape::B_PITCH + at * 8) * 2,
                              table[part] + row * Shape::CHUNKS + at);
            }
        close_copies();
    }

    __device__ void fetch(int stage) {
        const int samples_here = static_cast<int>(p.samples), m = min(stage * STAGE + lane, samples_here - 1);
        next.phase = phases[2ll * m];
#pragma unroll
        for (int n = 0; n < 3; ++n) next.step[n] = steps[n * p.stride + m];
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
            next.sample[n] = make_float2(0, 0);
            if (coil[n] && stage * STAGE + lane < samples_here) next.sample[n] = coil[n][m];
        }
    }

    __device__ void make(unsigned to) const {
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
            float2 a[GROUP];
            a[0] = times(next.sample[n], fast_unit(x[n] * next.phase.x + y[n] * next.phase.y));
#pragma unroll
            for (int row = 1; row < GROUP; ++row) {
                const int step = row < 2 ? 0 : row < 4 ? 1 : 2;
                a[row] = times(a[row - (1 << step)], next.step[step]);
            }
            Fragment real, imag, real_rest, imag_rest;
#pragma unroll
            for (int row = 0; row < GROUP; row += 2) {
                real.part[row / 2] = pair_of(a[row].x, a[row + 1].x);
                imag.part[row / 2] = pair_of(a[row].y, a[row + 1].y);
                if (TERMS > 1) {
                    real_rest.part[row / 2] = rest_of(real.part[row / 2], a[row].x, a[row + 1].x);
                    imag_rest.part[row / 2] = rest_of(imag.part[row / 2], a[row].y, a[row + 1].y);
                }
            }
            const unsigned at = to + (lane * A_PITCH + (warp * GROUPS + n) * 2 * GROUP) * 2;
            store_shared(at, real);
            store_shared(at + 16, imag);
            if (TERMS > 1) {
                store_shared(at + Shape::A_BYTES, real_rest);
                store_shared(at + Shape::A_BYTES + 16, imag_rest);
            }
        }
    }

    // All stages of a block, from `begin` to `end`.
    __device__ void run(char* shared, long long begin, long long end) {
        const unsigned address = shared_address(shared);
        int slot = 0, stage = static_cast<int>(begin % p.stages);
        long long tile = begin / p.stages;
        bool fetched = false;
#pragma unroll 1
        for (long long n = 0; n < end - begin; ++n) {
            if (!fetched) go_to(tile), fetch(stage);
            if (n >= Shape::STAGES) Shape::wait(slot, false);
            copy(shared + slot * Shape::STAGE_BYTES, stage);
            make(address + slot * Shape::STAGE_BYTES + Shape::PARTS * Shape::B_BYTES);
            fetched = ++stage < p.stages;
            if (fetched)
                fetch(stage);
            else
                stage = 0, ++tile;
            wait_copies<Shape::LAG>();
            if (n >= Shape::LAG) Shape::arrive((slot + Shape::STAGES - Shape::LAG) % Shape::STAGES, true);
            slot = slot == Shape::STAGES - 1 ? 0 : slot + 1;
        }
        wait_copies<0>();
        if (Shape::LAG) Shape::arrive((slot + Shape::STAGES - 1) % Shape::STAGES, true);
    }
};

template <int TERMS>
struct AdjointConsumer {
    using Shape = AdjointShape<TERMS>;

    const ExactAdjoint& p;
    int lane, warp;
    float sum[4][8][4];

    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < 128; ++n) sum[n / 32][n / 4 % 8][n % 4] = 0;
    }

    // The warp's 64 × 64 products of 16 samples, `a` and `b` the addresses of its lane's rows.
    __device__ void multiply_part(unsigned a, unsigned b) {
        Fragment left[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) left[i] = load_transposed(a + i * 32);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const Fragment right = load_transposed(b + j * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                multiply_add(sum[i][j], left[i], right.part[0], right.part[1]);
                multiply_add(sum[i][j + 1], left[i], right.part[2], right.part[3]);
            }
        }
    }

    __device__ void multiply(unsigned stage) {
        const unsigned a = stage + Shape::PARTS * Shape::B_BYTES +
                           ((lane % 8 + lane / 16 * 8) * A_PITCH + warp / WARP_COLUMNS * 64 + lane / 8 % 2 * 8) * 2;
        const unsigned b = stage + (lane % 16 * Shape::B_PITCH + warp % WARP_COLUMNS * 64 + lane / 16 * 8) * 2;
#pragma unroll 1
        for (int term = 0; term < TERMS; ++term) {  // high × high, high × low, low × high
            const unsigned left = a + (term == 2 ? Shape::A_BYTES : 0), right = b + (term == 1 ? Shape::B_BYTES : 0);
#pragma unroll
            for (int k = 0; k < STAGE; k += 16) multiply_part(left + k * A_PITCH * 2, right + k * Shape::B_PITCH * 2);
        }
    }

    // P ± iQ into the tile's slot: stored, or added to what this thread stored before.
    __device__ void put(float2* slot, long long tile, bool add) const {
        const int size = p.size[2];
        int row = lane / 4;
        int first_pair = (static_cast<int>(tile % p.column_tiles) * TILE_COLUMNS + warp % WARP_COLUMNS * 64) / 2 + lane % 4;
        asm volatile("" : "+r"(row), "+r"(first_pair));  // keeps the compiler from computing 64 addresses in advance
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const long long group = tile / p.column_tiles * TILE_GROUPS + warp / WARP_COLUMNS * 4 + i;
            const bool any = group < p.last_group - p.first_group;
            float2* line = slot + (group * GROUP + row) * size;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int pair = first_pair + j * 4;
                float2 *up = line + size / 2 + pair, *down = line + (size - 1) / 2 - pair;
                const float* s = sum[i][j];
                if (any && pair < (size + 1) / 2) {
                    put_value(up, make_float2(s[0] - s[3], s[2] + s[1]), add);
                    if (up != down) put_value(down, make_float2(s[0] + s[3], s[2] - s[1]), add);
                }
            }
        }
    }

    // Fire-and-forget additions. Only this thread adds to this address, so their order is the program's.
    __device__ static void put_value(float2* to, float2 value, bool add) {
        if (add) {
#if __CUDA_ARCH__ >= 900
            atomicAdd(to, value);
#else
            atomicAdd(&to->x, value.x);
            atomicAdd(&to->y, value.y);
#endif
        } else {
            *to = value;
        }
    }

    __device__ void run(unsigned shared, long long begin, long long end, float2* slots) {
        const long long slot_size = (p.last_group - p.first_group) * GROUP * p.size[2];
        int slot = 0;
        for (long long at = begin; at < end;) {
            const long long tile = at / p.stages;
            const int count = static_cast<int>(min(p.stages - at % p.stages, end - at));
            float2* const found = slots + (blockIdx.x - block_of(p, tile * p.stages)) * slot_size;
            bool stored = false;
            for (int done = 0; done < count;) {
                const int until = min(count, done + Shape::PIECE);
                clear();
#pragma unroll 1
                for (; done < until; ++done) {
                    Shape::wait(slot, true);
                    multiply(shared + slot * Shape::STAGE_BYTES);
                    if (at + done + Shape::STAGES < end) Shape::arrive(slot, false);
                    slot = slot == Shape::STAGES - 1 ? 0 : slot + 1;
                }
                put(found, tile, stored);
                stored = true;
            }
            at += count;
        }
    }
};

#endif

template <int TERMS>
__global__ void __launch_bounds__(ADJOINT_THREADS, 2)
exact_adjoint_product(const uint4* __restrict__ high, const uint4* __restrict__ low, const uint4* __restrict__ phases,
                      const float2* __restrict__ steps, const float2* __restrict__ samples, float2* __restrict__ slots,
                      const __grid_constant__ ExactAdjoint p) {
#ifdef EXACT_TENSOR
    using Shape = AdjointShape<TERMS>;
    extern __shared__ uint4 memory[];
    char* const shared = reinterpret_cast<char*>(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long begin = first_stage_of(p, blockIdx.x), end = first_stage_of(p, blockIdx.x + 1ll);
    if (warp < CONSUMERS) {
        AdjointConsumer<TERMS> consumer{p, lane, warp};
        consumer.run(shared_address(shared), begin, end, slots);
    } else {
        const uint2* halves = reinterpret_cast<const uint2*>(phases);
        AdjointProducer<TERMS> producer{p, {high, low}, halves, steps, samples, lane, warp - CONSUMERS};
        producer.run(shared, begin, end);
    }
#else
    __trap();
#endif
}

// The image: slots added in order and scaled back; added to the image if `add`. A block takes a row at a time, a thread a
// column pair of each tile.
__global__ void exact_combine(const float2* __restrict__ slots, const unsigned* __restrict__ largest,
                              float2* __restrict__ image, int add, const __grid_constant__ ExactAdjoint p) {
    const int size = p.size[2], along = (p.size[1] + GROUP - 1) / GROUP;
    const long long rows = (p.last_group - p.first_group) * GROUP;
    for (long long at = blockIdx.x; at < rows; at += gridDim.x) {
        const unsigned local = static_cast<unsigned>(at / GROUP), group = static_cast<unsigned>(p.first_group) + local;
        const unsigned coil = group / p.groups, of_coil = group % p.groups;
        const int y = of_coil % along * GROUP + static_cast<int>(at % GROUP);
        if (y >= p.size[1]) continue;
        float2* const line = image + ((static_cast<long long>(coil) * p.size[0] + of_coil / along) * p.size[1] + y) * size;
        const int exponent = -exponent_of(largest[coil]);
        for (int tiles = 0; tiles < p.column_tiles; ++tiles) {
            const long long tile = static_cast<long long>(local / TILE_GROUPS) * p.column_tiles + tiles;
            const int pair = tiles * p.column_pairs + threadIdx.x;
            const int count = static_cast<int>(block_of(p, (tile + 1) * p.stages - 1) - block_of(p, tile * p.stages)) + 1;
            const int column[2] = {size / 2 + pair, (size - 1) / 2 - pair};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                if (column[1] < 0 || (n && column[1] == column[0])) continue;
                const float2* from = slots + at * size + column[n];
                float2 sum = *from;
                for (int slot = 1; slot < count; ++slot) {
                    from += rows * size;
                    sum.x += from->x, sum.y += from->y;
                }
                const float2 before = add ? line[column[n]] : make_float2(0, 0);
                line[column[n]] = make_float2(before.x + scalbnf(sum.x, exponent), before.y + scalbnf(sum.y, exponent));
            }
        }
    }
}
