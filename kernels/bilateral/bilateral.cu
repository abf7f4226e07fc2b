// The bilateral filter, as kernels/bilateral/__init__.py defines it.
//
// Arrays are C-contiguous, [planes, three axes, inner]; the windows lie along the axes. Border modes are numbered in
// borders.cuh.
//
// Floors of N samples of b bytes with w taps, on a device with bandwidth B that starts C operations a second (one a lane
// and cycle: 33 T/s of an H200 at 1.98 GHz). A weight takes 8 operations, a tap 2 more for its two sums.
//   bytes       2 N b / B            each sample is read once and written once
//   strips      (8 p + 2 w) N / C    p weights a result: 4.4, 13.9, 29.3 and 62.5 for squares of 3, 5, 7 and 9
//   tiles       10 w N / C
// Measured for 8192 × 8192 of 16 bits (H200, 2026-11-27): 3 × 3 0.26 ms, 5 × 5 0.53 of 0.32, 7 × 7 1.1 of 0.67, 9 × 9 2.0 of
// 1.3. For 5 × 5, 196 operations a result are started, 3.0 of 4 a cycle: docs/notes/smoothing/bilateral.md.
//
//   bilateral_strips  squares of 3 to 9. A thread computes 8 (9 × 9: 4) results side by side and walks down a band of rows.
//                     The samples and sums of a row and of the rows below that its windows reach are in registers. A pair of
//                     samples has one weight, which is added to both sums; pairs across strips are weighed twice. Sums get
//                     their taps in the order of memory, however rows are cut. Two blocks of warps that are kept together
//                     by a barrier a row share the loop's instructions, 24 to 45 KiB; 7 × 7 and 9 × 9 have one block.
//
//                       |  barrier     the block's warps begin the row together; they exchange nothing
//                     each thread    its next row of samples <- device memory; pairs of this row; results
//
//   bilateral_tiles   all other windows, and float64. A block computes 32 × 32 results; its samples with their halo lie in
//                     shared memory, plane by plane of the window. A thread computes four results eight rows apart, whose
//                     centres and sums stay in registers.
//
//                       |  barrier     the plane before has been read; no block waits for another
//                     all threads    a plane of the window -> shared memory
//                       |  barrier     the plane is complete
//                     each thread    its taps of this plane -> sums; after the last plane, results

#include "borders.cuh"
#include "samples.cuh"

constexpr int ACROSS = 32, DOWN = 8, EACH = 4, SIDE = DOWN * EACH;
constexpr int NUMBERS = 8;  // of a tap
// Of bilateral_strips: threads of a block, blocks of a multiprocessor, and results of a thread side by side.
template <int RADIUS>
constexpr int strip_threads = RADIUS < 3 ? 256 : 384;
template <int RADIUS>
constexpr int strip_blocks = RADIUS < 3 ? 2 : 1;
template <int RADIUS>
constexpr int strip_width = RADIUS < 4 ? 8 : 4;

struct BilateralAxis {
    int length, out_length, first, taps, mode, unused;
};

struct BilateralTask {
    BilateralAxis axis[3];
    long long planes, inner, tiles_y, tiles_x, blocks, rows;
    double scale, inverse;
};

template <typename Real>
struct alignas(8 * sizeof(float)) Tap {
    float number[NUMBERS];  // tap_numbers of kernels/bilateral/__init__.py
};

template <>
struct Tap<double> {
    double exponent;
};

template <int RADIUS>
struct Quadrant {
    Tap<float> taps[RADIUS + 1][RADIUS + 1];  // by the distance along each axis
};

// fma(a, b, c), at least 0 and at most 1; 0 for NaN.
__device__ inline float fma_saturated(float a, float b, float c) {
    float result;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
}

__device__ inline float weight_of(float apart, const Tap<float>& tap) {
    const float s = fma_saturated(-apart, apart, 1.0f);
    const float v1 = fma_rn(s, tap.number[0], tap.number[1]);
    const float v2 = fma_rn(s, v1, tap.number[2]);
    const float v3 = fma_rn(v1, v2, tap.number[3]);
    const float v4 = fma_rn(v2, v3, tap.number[4]);
    const float v5 = fma_rn(v4, v4, tap.number[5]);
    return fma_saturated(v5, v5, tap.number[6]);
}

__device__ inline double weight_of(double apart, const Tap<double>& tap) { return exp2(-(apart * apart + tap.exponent)); }

// a / b to nearest, for b from 1 to 1e6 and a from 1e-20 to 1e20 or 0: a division without its special cases.
__device__ inline float divided(float a, float b) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
    inverse = fma_rn(fma_rn(-b, inverse, 1.0f), inverse, inverse);
    float result = a * inverse;
    result = fma_rn(fma_rn(-b, result, a), inverse, result);
    return fma_rn(fma_rn(-b, result, a), inverse, result);
}

// `centre` is scaled; `sample` is what it was before.
template <typename Sample, typename Real>
__device__ inline Sample result_of(Real total, Real weights, Real centre, Sample sample, Real inverse) {
    if constexpr (same<Sample, Real>) return fma_rn(total / weights, inverse, sample);
    else return static_cast<Sample>(__float2int_rn((divided(total, weights) + centre) * inverse));
}

// Not inlined: divisions are long.
static __device__ __noinline__ int source_of(int at, const BilateralAxis& axis) {
    return border_index(at + axis.first, axis.length, axis.mode);
}

__device__ inline long long index_of(
    const BilateralTask& task, long long plane, int z, int y, int x, int BilateralAxis::*length) {
    const auto at = [&](long long before, int axis, int i) { return before * task.axis[axis].*length + i; };
    return at(at(at(plane, 0, z), 1, y), 2, x) * task.inner;
}

template <typename Sample, typename Real>
__global__ void __launch_bounds__(ACROSS * DOWN) bilateral_tiles(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Tap<Real>* __restrict__ taps,
    const __grid_constant__ BilateralTask task, Sample cval) {
    extern __shared__ double shared[];
    Real* tile = reinterpret_cast<Real*>(shared);
    const int taps_y = task.axis[1].taps, taps_x = task.axis[2].taps;
    const int rows = SIDE + taps_y - 1, columns = ACROSS + taps_x - 1;
    const Real scale = static_cast<Real>(task.scale), inverse = static_cast<Real>(task.inverse);
    const int middle = task.axis[0].taps * taps_y * taps_x / 2;
    for (long long block = blockIdx.x; block < task.blocks; block += gridDim.x) {
        long long rest = block;
        const long long within = rest % task.inner;
        rest /= task.inner;
        const int x0 = static_cast<int>(rest % task.tiles_x) * ACROSS;
        rest /= task.tiles_x;
        const int y0 = static_cast<int>(rest % task.tiles_y) * SIDE;
        rest /= task.tiles_y;
        const int z0 = static_cast<int>(rest % task.axis[0].out_length);
        const long long plane = rest / task.axis[0].out_length;
        Sample sample[EACH];
        Real centre[EACH], total[EACH], weights[EACH];
        const int x = threadIdx.x, y = threadIdx.y;
        const int from_x[] = {source_of(x0 + x, task.axis[2]), source_of(x0 + x + ACROSS, task.axis[2])};
        const auto load = [&](int dz) {
            const int z = source_of(z0 + dz, task.axis[0]);
            __syncthreads();
            for (int row = y; row < rows; row += DOWN) {
                const int from_y = source_of(y0 + row, task.axis[1]);
                const Sample* const line = in + index_of(task, plane, z, from_y, 0, &BilateralAxis::length) + within;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (x + i * ACROSS >= columns) break;
                    const bool is_beyond = z < 0 || from_y < 0 || from_x[i] < 0;
                    const Sample value = is_beyond ? cval : line[from_x[i] * task.inner];
                    tile[row * columns + x + i * ACROSS] = static_cast<Real>(value) * scale;
                }
            }
            __syncthreads();
        };
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int at_y = min(y0 + y + e * DOWN, task.axis[1].out_length - 1);
            const int at_x = min(x0 + x, task.axis[2].out_length - 1);
            sample[e] = in[index_of(
                task, plane, z0 + task.axis[0].first + task.axis[0].taps / 2, at_y + task.axis[1].first + taps_y / 2,
                at_x + task.axis[2].first + taps_x / 2, &BilateralAxis::length) + within];
            total[e] = 0;
            weights[e] = 1;
        }
        for (int dz = 0; dz < task.axis[0].taps; ++dz) {
            load(dz);
#pragma unroll
            for (int e = 0; e < EACH; ++e) centre[e] = static_cast<Real>(sample[e]) * scale;
            for (int dy = 0; dy < taps_y; ++dy)
                for (int dx = 0; dx < taps_x; ++dx) {
                    const int at = (dz * taps_y + dy) * taps_x + dx;
                    if (at == middle) continue;
                    const Tap<Real> tap = taps[at];
#pragma unroll
                    for (int e = 0; e < EACH; ++e) {
                        const Real apart = tile[(y + e * DOWN + dy) * columns + x + dx] - centre[e];
                        const Real weight = weight_of(apart, tap);
                        total[e] = fma_rn(weight, apart, total[e]);
                        weights[e] = weights[e] + weight;
                    }
                }
        }
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int at_y = y0 + y + e * DOWN, at_x = x0 + x;
            if (at_y < task.axis[1].out_length && at_x < task.axis[2].out_length)
                out[index_of(task, plane, z0, at_y, at_x, &BilateralAxis::out_length) + within] =
                    result_of(total[e], weights[e], centre[e], sample[e], inverse);
        }
    }
}

template <typename Sample, int RADIUS>
__global__ void __launch_bounds__(strip_threads<RADIUS>, strip_blocks<RADIUS>) bilateral_strips(
    const Sample* __restrict__ in, Sample* __restrict__ out, const __grid_constant__ Quadrant<RADIUS> quadrant,
    const __grid_constant__ BilateralTask task, Sample cval) {
    constexpr int WIDTH = strip_width<RADIUS>, SPAN = WIDTH + 2 * RADIUS, ROWS = RADIUS + 1;
    __shared__ int source_columns[SPAN][strip_threads<RADIUS>];  // of threads at an edge
    const BilateralAxis &down = task.axis[1], &across = task.axis[2];
    const float scale = static_cast<float>(task.scale), inverse = static_cast<float>(task.inverse);
    long long rest = blockIdx.x * static_cast<long long>(strip_threads<RADIUS>) + threadIdx.x;
    const long long within = rest % task.inner;
    rest /= task.inner;
    const int x0 = static_cast<int>(rest % task.tiles_x) * WIDTH;
    rest /= task.tiles_x;
    const int y0 = static_cast<int>(rest % task.tiles_y * task.rows);
    rest /= task.tiles_y;
    const long long plane = min(rest, task.planes - 1);
    // Threads beyond the last result only take part in barriers.
    const int y1 = rest > plane ? 0 : min(y0 + static_cast<int>(task.rows), down.out_length), left = x0 + across.first;
    const bool is_inside = left >= 0 && left + SPAN <= across.length;
    if (!is_inside)
        for (int i = 0; i < SPAN; ++i) source_columns[i][threadIdx.x] = source_of(x0 + i, across);

    Sample next[SPAN];
    const auto load = [&](int y) {
        const int row = source_of(y, down);
        const Sample* const line = in + index_of(task, plane, 0, row, 0, &BilateralAxis::length) + within;
        if (row < 0 || !is_inside) {
#pragma unroll
            for (int i = 0; i < SPAN; ++i) {
                const int x = row < 0 ? -1 : source_columns[i][threadIdx.x];
                next[i] = x < 0 ? cval : __ldg(line + x * task.inner);
            }
        } else if (task.inner == 1) {
#pragma unroll
            for (int i = 0; i < SPAN; ++i) next[i] = __ldg(line + left + i);
        } else {
#pragma unroll
            for (int i = 0; i < SPAN; ++i) next[i] = __ldg(line + (left + i) * task.inner);
        }
    };

    float sample[ROWS][SPAN], total[ROWS][WIDTH], weights[ROWS][WIDTH];  // of rows y … y + RADIUS
    const auto enter = [&](int r) {
#pragma unroll
        for (int i = 0; i < SPAN; ++i) sample[r][i] = static_cast<float>(next[i]) * scale;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            total[r][i] = 0;
            weights[r][i] = 1;
        }
    };
    const auto store = [&](int y) {
        constexpr int PACKED = WIDTH * sizeof(Sample) < 16 ? WIDTH : 16 / sizeof(Sample);
        struct alignas(PACKED * sizeof(Sample)) Pack {
            Sample of[PACKED];
        };
        const long long centres = index_of(task, plane, 0, y + down.first + RADIUS, left + RADIUS, &BilateralAxis::length);
        Sample* const to = out + index_of(task, plane, 0, y, x0, &BilateralAxis::out_length) + within;
        Pack results[WIDTH / PACKED];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            Sample centre = 0;
            if (same<Sample, float> && x0 + i < across.out_length) centre = __ldg(in + centres + within + i * task.inner);
            results[i / PACKED].of[i % PACKED] =
                result_of(total[0][i], weights[0][i], sample[0][RADIUS + i], centre, inverse);
        }
        if (task.inner == 1 && x0 + WIDTH <= across.out_length && reinterpret_cast<size_t>(to) % sizeof(Pack) == 0) {
#pragma unroll
            for (int i = 0; i < WIDTH / PACKED; ++i) reinterpret_cast<Pack*>(to)[i] = results[i];
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (x0 + i < across.out_length) to[i * task.inner] = results[i / PACKED].of[i % PACKED];
        }
    };
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        load(y0 + r);
        enter(r);
    }
#pragma unroll 1
    for (int step = -RADIUS; step < task.rows; ++step) {
        const int y = y0 + step;
        __syncthreads();
        load(y + RADIUS + ROWS);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int i = 0; i < SPAN; ++i) {
#pragma unroll
                for (int j = r == 0 ? i + 1 : i - RADIUS; j <= i + RADIUS; ++j) {
                    const int a = i - RADIUS, b = j - RADIUS;  // the results of the two samples
                    const bool has_a = a >= 0 && a < WIDTH, has_b = b >= 0 && b < WIDTH;
                    if (j < 0 || j >= SPAN || !(has_a || has_b)) continue;
                    const float apart = sample[r][j] - sample[0][i];
                    const float weight = weight_of(apart, quadrant.taps[r][j < i ? i - j : j - i]);
                    if (has_a) {
                        total[0][a] = fma_rn(weight, apart, total[0][a]);
                        weights[0][a] = weights[0][a] + weight;
                    }
                    if (has_b) {
                        total[r][b] = fma_rn(weight, -apart, total[r][b]);
                        weights[r][b] = weights[r][b] + weight;
                    }
                }
            }
        }
        if (step >= 0 && y < y1) store(y);
#pragma unroll
        for (int r = 0; r < RADIUS; ++r) {
#pragma unroll
            for (int i = 0; i < SPAN; ++i) sample[r][i] = sample[r + 1][i];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                total[r][i] = total[r + 1][i];
                weights[r][i] = weights[r + 1][i];
            }
        }
        enter(RADIUS);
    }
}
