// The bilateral filter, as kernels/bilateral/__init__.py defines it.
//
// Arrays are C-contiguous, [planes, three axes, inner]; the windows lie along the axes. Border modes are numbered in
// borders.cuh.
//
// Floors of N samples of b bytes with w taps, on a device with bandwidth B that starts C operations a second (one a lane
// and cycle: 28 T/s of an H200 at 1.755 GHz):
//   bytes       2 N b / B    each sample is read once and written once
//   operations  15 w N / C   difference, square, exponent, its whole part, polynomial, two sums; fused where the CPU fuses
// Measured for 8192 × 8192 of 16 bits (H200, 2026-11-27): 5 × 5 1.76 ms of 0.90, 9 × 9 4.30 ms of 2.9.
//
//   bilateral_tiles   a block computes 32 × 32 results; its samples with their halo lie in shared memory, plane by plane
//                     of the window. A thread computes four results eight rows apart, whose centres and sums stay in registers.
//
//                       |  barrier     the plane before has been read; no block waits for another
//                     all threads    a plane of the window -> shared memory
//                       |  barrier     the plane is complete
//                     each thread    its taps of this plane -> sums; after the last plane, results

#include "borders.cuh"
#include "samples.cuh"

constexpr int ACROSS = 32, DOWN = 8, EACH = 4, SIDE = DOWN * EACH;

struct BilateralAxis {
    int length, out_length, first, taps, mode, unused;
};

struct BilateralTask {
    BilateralAxis axis[3];
    long long planes, inner, tiles_y, tiles_x, blocks;
    double scale;
};

// The weight of a binary exponent -power, 0 from 127 on. 2**-f is a polynomial, the numbers of kernels/bilateral/__init__.py;
// the nearest whole number is in the lowest bits of `shifted`, and goes to the exponent's.
__device__ inline float weight_of(float power) {
    constexpr float WHOLE = 12582912.0f;  // 1.5 · 2²³
    power = fminf(power, 127.0f);
    const float shifted = WHOLE - power;
    const float f = power + (shifted - WHOLE);
    float sum = fma_rn(-0.0013274633092805743f, f, 0.009671961888670921f);
    sum = fma_rn(sum, f, -0.055506784468889236f);
    sum = fma_rn(sum, f, 0.24022234976291656f);
    sum = fma_rn(sum, f, -0.6931470632553101f);
    sum = fma_rn(sum, f, 1.0f);
    return __int_as_float(__float_as_int(sum) + (__float_as_int(shifted) << 23));
}

__device__ inline double weight_of(double power) { return exp2(-power); }

template <typename Sample, typename Real>
__device__ inline Sample rounded(Real value) {
    if constexpr (same<Sample, Real>) return value;
    else return static_cast<Sample>(__float2int_rn(value));
}

// Not inlined: divisions are long.
static __device__ __noinline__ int source_of(int at, const BilateralAxis& axis) {
    return border_index(at + axis.first, axis.length, axis.mode);
}

template <typename Sample, typename Real>
__global__ void __launch_bounds__(ACROSS * DOWN) bilateral_tiles(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Real* __restrict__ spatial,
    const __grid_constant__ BilateralTask task, Sample cval) {
    extern __shared__ double shared[];
    Real* tile = reinterpret_cast<Real*>(shared);
    const int taps_y = task.axis[1].taps, taps_x = task.axis[2].taps;
    const int rows = SIDE + taps_y - 1, columns = ACROSS + taps_x - 1;
    const Real scale = static_cast<Real>(task.scale);
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
        Real centre[EACH], total[EACH], weights[EACH];
        const int x = threadIdx.x, y = threadIdx.y;
        const auto load = [&](int dz) {
            const int z = source_of(z0 + dz, task.axis[0]);
            __syncthreads();
            for (int i = y * ACROSS + x; i < rows * columns; i += ACROSS * DOWN) {
                const int from_y = source_of(y0 + i / columns, task.axis[1]);
                const int from_x = source_of(x0 + i % columns, task.axis[2]);
                Sample sample = cval;
                if (z >= 0 && from_y >= 0 && from_x >= 0)
                    sample = in[(((plane * task.axis[0].length + z) * task.axis[1].length + from_y) * task.axis[2].length +
                                 from_x) * task.inner + within];
                tile[i] = static_cast<Real>(sample);
            }
            __syncthreads();
        };
        load(task.axis[0].taps / 2);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            centre[e] = tile[(y + e * DOWN + taps_y / 2) * columns + x + taps_x / 2];
            total[e] = weights[e] = 0;
        }
        for (int dz = 0; dz < task.axis[0].taps; ++dz) {
            if (task.axis[0].taps > 1) load(dz);
            for (int dy = 0; dy < taps_y; ++dy)
                for (int dx = 0; dx < taps_x; ++dx) {
                    const Real exponent = __ldg(spatial + (dz * taps_y + dy) * taps_x + dx);
#pragma unroll
                    for (int e = 0; e < EACH; ++e) {
                        const Real value = tile[(y + e * DOWN + dy) * columns + x + dx];
                        const Real apart = value - centre[e];
                        const Real weight = weight_of(fma_rn(apart * apart, scale, exponent));
                        total[e] = fma_rn(weight, value, total[e]);
                        weights[e] = weights[e] + weight;
                    }
                }
        }
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int at_y = y0 + y + e * DOWN, at_x = x0 + x;
            if (at_y < task.axis[1].out_length && at_x < task.axis[2].out_length)
                out[(((plane * task.axis[0].out_length + z0) * task.axis[1].out_length + at_y) * task.axis[2].out_length +
                     at_x) * task.inner + within] = rounded<Sample>(total[e] / weights[e]);
        }
    }
}
