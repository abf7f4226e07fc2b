// Forward transform as one real matrix product on tensor cores.
//
//   s[c, m] = sum over rows of e^{-iφ(m, row)} G[(c, row), m],    G = sum over y of image[c, row, y] e^{-iθ(m) y}
//
// As for the adjoint, y and -y together make the second factor real: with E and O the sums and differences of the two
// pixels, G = sum over y > 0 of E cos θy - i O sin θy, two real products per pair of pixel and sample.
//
// Floor: 4 P operations over the tensor cores' rate; × 3 with three terms.
// Factors: a block computes cos and sin of its samples once in shared memory, for all coils and rows; exact_fragments lays
// out the image's E and O once in the layout of the matrix instructions, and every warp reads them from the caches at its
// own pace. The sum over rows follows in registers, with sines and cosines from the special-function unit.
// A sum may be split into parts by rows and by columns; exact_finish adds the parts in order.
#pragma once

#include "exact/product.cuh"

constexpr int BLOCK_GROUPS = 4;  // groups of eight rows that a warp multiplies at a time
constexpr int FORWARD_WARPS = 8;

struct ExactForward {
    long long samples;
    int coils, size[3];
    int groups;      // of eight rows, of one coil
    int along;       // groups along the axis before the last, padded to a multiple of four
    int steps;       // of 8 column pairs each, in all
    int part_steps;  // steps of one block
    int row_parts;
};

#ifdef EXACT_TENSOR
__device__ inline Fragment fragment_of(const float2 (&even)[2], const float2 (&odd)[2]) {
    Fragment f;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        f.part[2 * n] = pair_of(even[n].x, odd[n].y);
        f.part[2 * n + 1] = pair_of(even[n].y, -odd[n].x);
    }
    return f;
}
#endif

// E and O as the left operands of the products, 16 contiguous bytes per lane: [coil][group][step][lane].
template <int TERMS>
__global__ void exact_fragments(const float2* __restrict__ image, const unsigned* __restrict__ largest,
                                uint4* __restrict__ high, uint4* __restrict__ low, const __grid_constant__ ExactForward p) {
#ifdef EXACT_TENSOR
    const long long index = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    const int lane = static_cast<int>(index % 32), step = static_cast<int>(index / 32 % p.steps);
    const long long group = index / 32 / p.steps, coil = group / p.groups;
    if (coil >= p.coils) return;
    const int of_coil = static_cast<int>(group % p.groups);
    const int x = of_coil / p.along, y = of_coil % p.along * 8 + lane / 4, size = p.size[2];
    const float2* line = image + ((coil * p.size[0] + x) * p.size[1] + y) * size;
    const int exponent = exponent_of(largest[coil]);
    float2 even[2], odd[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int pair = step * 8 + n * 4 + lane % 4, up = size / 2 + pair, down = (size - 1) / 2 - pair;
        even[n] = odd[n] = make_float2(0, 0);
        if (y >= p.size[1] || down < 0) continue;
        float2 a = line[up], b = up == down ? make_float2(0, 0) : line[down];
        a = make_float2(scalbnf(a.x, exponent), scalbnf(a.y, exponent));
        b = make_float2(scalbnf(b.x, exponent), scalbnf(b.y, exponent));
        even[n] = make_float2(a.x + b.x, a.y + b.y);
        odd[n] = make_float2(a.x - b.x, a.y - b.y);
    }
    const Fragment whole = fragment_of(even, odd);
    high[index] = make_uint4(whole.part[0], whole.part[1], whole.part[2], whole.part[3]);
    if (TERMS > 1) {
        unsigned rest[4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            rest[2 * n] = rest_of(whole.part[2 * n], even[n].x, odd[n].y);
            rest[2 * n + 1] = rest_of(whole.part[2 * n + 1], even[n].y, -odd[n].x);
        }
        low[index] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
    }
#else
    __trap();
#endif
}

#ifdef EXACT_TENSOR

template <int TERMS, int WARP_ROWS>
struct ForwardBlock {
    static constexpr int WARP_COLUMNS = FORWARD_WARPS / WARP_ROWS, SAMPLES = 64 * WARP_COLUMNS;
    static constexpr int PARTS = TERMS > 1 ? 2 : 1, THREADS = 32 * FORWARD_WARPS;

    const ExactForward& p;
    // [part][sample][step][16] fp16, rows padded by 16 bytes to avoid bank conflicts; then the samples' phases along the
    // rows' axes; then e^{iφ} of eight rows.
    char* shared;
    int lane, warp, pitch;  // bytes
    long long first;        // sample
    Fragment left[4];
    float sum[4][8][4];
    float2 total[8][2];

    __device__ ForwardBlock(const ExactForward& product, char* memory) : p(product), shared(memory) {
        lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        pitch = p.part_steps * 32 + 16;
        first = blockIdx.x * static_cast<long long>(SAMPLES);
    }

    __device__ uint2* shared_phases() const { return reinterpret_cast<uint2*>(shared + PARTS * SAMPLES * pitch); }
    __device__ float2* shared_turns() const { return reinterpret_cast<float2*>(shared_phases() + SAMPLES); }

    // cos and sin of all samples; zeros outside the image.
    __device__ void make(const uint4* __restrict__ phases) const {
        for (int m = threadIdx.x; m < SAMPLES; m += THREADS) {
            const uint4 phase = first + m < p.samples ? phases[first + m] : make_uint4(0, 0, 0, 0);
            shared_phases()[m] = make_uint2(phase.x, phase.y);
            shared_turns()[m] = accurate_unit(8 * phase.y);
        }
        const unsigned base = shared_address(shared);
        for (int n = threadIdx.x; n < SAMPLES * p.part_steps * 2; n += THREADS) {
            const int m = n % SAMPLES, four = n / SAMPLES;
            const unsigned phase = first + m < p.samples ? phases[first + m].w : 0;
            Fragment whole, rest;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int pair = (blockIdx.z * p.part_steps) * 8 + four * 4 + i;
                const unsigned at = twice_distance(pair, p.size[2]) * phase;
                float2 unit = TERMS == 1 ? fast_unit(at) : accurate_unit(at);
                if (pair >= (p.size[2] + 1) / 2) unit = make_float2(0, 0);
                whole.part[i] = pair_of(unit.x, unit.y);
                if (TERMS > 1) rest.part[i] = rest_of(whole.part[i], unit.x, unit.y);
            }
            store_shared(base + m * pitch + four * 16, whole);
            if (TERMS > 1) store_shared(base + (SAMPLES + m) * pitch + four * 16, rest);
        }
    }

    // One step of the products; the first sets the sums instead of adding.
    template <bool FIRST>
    __device__ void multiply_step(const Fragment (&left)[4], unsigned b) {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const Fragment right = load_matrices(b + j * 8 * pitch);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (FIRST) {
                    multiply_to(sum[i][j], left[i], right.part[0], right.part[1]);
                    multiply_to(sum[i][j + 1], left[i], right.part[2], right.part[3]);
                } else {
                    multiply_add(sum[i][j], left[i], right.part[0], right.part[1]);
                    multiply_add(sum[i][j + 1], left[i], right.part[2], right.part[3]);
                }
            }
        }
    }

    __device__ void load(Fragment (&into)[4], const uint4* __restrict__ from) const {
        const long long apart = 32ll * p.steps;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 f = __ldg(from + i * apart);
            into[i].part[0] = f.x, into[i].part[1] = f.y, into[i].part[2] = f.z, into[i].part[3] = f.w;
        }
    }

    // The step's products; afterwards `left` holds the fragments of the next step.
    template <bool FIRST>
    __device__ void step(const uint4* high, const uint4* low, const uint4* then, unsigned b) {
        Fragment next[4];
        if (TERMS == 1) {
            load(next, then);
            multiply_step<FIRST>(left, b);
#pragma unroll
            for (int i = 0; i < 4; ++i) left[i] = next[i];
        } else {
            load(next, low);
            multiply_step<FIRST>(left, b);
            multiply_step<false>(left, b + SAMPLES * pitch);
            load(left, then);
            multiply_step<false>(next, b);
        }
    }

    // G of 32 rows and 64 samples. `high` and `low` point to the lane's fragments of the first row and step, which `left`
    // already holds; afterwards it holds those at `after`.
    __device__ void multiply(const uint4* __restrict__ high, const uint4* __restrict__ low, const uint4* __restrict__ after) {
        const int column = warp % WARP_COLUMNS * 64 + lane % 8 + lane / 16 * 8;
        unsigned b = shared_address(shared) + column * pitch + lane / 8 % 2 * 16;
        const int steps = min(p.part_steps, p.steps - static_cast<int>(blockIdx.z) * p.part_steps);
        step<true>(high, low, steps > 1 ? high + 32 : after, b);
#pragma unroll 1
        for (int n = 1; n < steps; ++n) {
            b += 32, high += 32, low += 32;
            step<false>(high, low, n + 1 < steps ? high + 32 : after, b);
        }
    }

    // total += e^{-iφ} G, over the lane's four rows, eight apart.
    __device__ void add_rows(int group) {
        const int x = group / p.along - p.size[0] / 2, y = group % p.along * 8 + lane / 4 - p.size[1] / 2;
        const int column = warp % WARP_COLUMNS * 64 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint4 phases = *reinterpret_cast<const uint4*>(shared_phases() + column + j * 8);
            const float4 turns = *reinterpret_cast<const float4*>(shared_turns() + column + j * 8);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float2 e = fast_unit(n ? x * phases.z + y * phases.w : x * phases.x + y * phases.y);
                const float2 turn = n ? make_float2(turns.z, turns.w) : make_float2(turns.x, turns.y);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float real = sum[i][j][n], imag = sum[i][j][2 + n];
                    total[j][n].x = fmaf(real, e.x, fmaf(imag, e.y, total[j][n].x));
                    total[j][n].y = fmaf(imag, e.x, fmaf(-real, e.y, total[j][n].y));
                    if (i < 3) e = times(e, turn);
                }
            }
        }
    }

    // Sums over the eight lanes that share samples, stored to the coil's samples.
    __device__ void put(float2* __restrict__ to) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float2 t = total[j][n];
#pragma unroll
                for (int step = 4; step < 32; step *= 2) {
                    t.x += __shfl_xor_sync(~0u, t.x, step);
                    t.y += __shfl_xor_sync(~0u, t.y, step);
                }
                const long long m = first + warp % WARP_COLUMNS * 64 + j * 8 + lane % 4 * 2 + n;
                if (lane < 4 && m < p.samples) to[m] = t;
                total[j][n] = make_float2(0, 0);
            }
    }
};

#endif

// A block computes its samples (x) from some of the coils' parts of rows (y) and some of the columns (z).
template <int TERMS, int WARP_ROWS>
__global__ void __launch_bounds__(32 * FORWARD_WARPS, 1)
exact_forward_product(const uint4* __restrict__ high, const uint4* __restrict__ low, const uint4* __restrict__ phases,
                      float2* __restrict__ parts, const __grid_constant__ ExactForward p) {
#ifdef EXACT_TENSOR
    using Block = ForwardBlock<TERMS, WARP_ROWS>;
    extern __shared__ uint4 memory[];
    Block block(p, reinterpret_cast<char*>(memory));
    block.make(phases);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 16; ++n) block.total[n / 2][n % 2] = make_float2(0, 0);
    const int blocks = p.groups / BLOCK_GROUPS;
#pragma unroll 1
    for (int item = blockIdx.y * WARP_ROWS + block.warp / Block::WARP_COLUMNS; item < p.coils * p.row_parts;
         item += gridDim.y * WARP_ROWS) {
        const int coil = item / p.row_parts, part = item % p.row_parts;
        const int from = static_cast<int>(static_cast<long long>(blocks) * part / p.row_parts);
        const int until = static_cast<int>(static_cast<long long>(blocks) * (part + 1) / p.row_parts);
        const long long apart = 32ll * BLOCK_GROUPS * p.steps;
        long long place = (static_cast<long long>(coil) * blocks + from) * apart + blockIdx.z * p.part_steps * 32 + block.lane;
        if (from < until) block.load(block.left, high + place);
#pragma unroll 1
        for (int at = from; at < until; ++at, place += apart) {
            block.multiply(high + place, low + place, high + place + (at + 1 < until ? apart : 0));
            block.add_rows(at * BLOCK_GROUPS);
        }
        block.put(parts + ((static_cast<long long>(blockIdx.z) * p.row_parts + part) * p.coils + coil) * p.samples);
    }
#else
    __trap();
#endif
}

// Samples: parts added up, scaled back, and turned by half a grid step if the last axis has even size.
__global__ void exact_finish(const float2* __restrict__ parts, const uint4* __restrict__ phases,
                             const unsigned* __restrict__ largest, float2* __restrict__ samples, int count,
                             const __grid_constant__ ExactShape shape) {
    const long long m = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (m >= shape.samples) return;
    const float2 turn = shape.size[2] % 2 ? make_float2(1, 0) : accurate_unit(phases[m].w);
    for (int coil = blockIdx.y; coil < shape.coils; coil += gridDim.y) {
        const int exponent = -exponent_of(largest[coil]);
        float2 sum = make_float2(0, 0);
        for (int part = 0; part < count; ++part) {
            const float2 more = parts[(part * static_cast<long long>(shape.coils) + coil) * shape.samples + m];
            sum.x += more.x, sum.y += more.y;
        }
        samples[coil * shape.samples + m] = times(make_float2(scalbnf(sum.x, exponent), scalbnf(sum.y, exponent)), turn);
    }
}
