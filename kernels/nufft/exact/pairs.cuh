// The adjoint transform pair by pair, as first done on GPUs: FᴴD, the image of weighted samples, and with SPREAD Q, the
// point spread of the weights alone on a grid of twice the size, from which the Toeplitz kernel is computed.
// Image [coil][x][y][z], samples [coil][m], one row of blocks per coil. Floor: a sine and a cosine per pair over the
// special-function unit's rate; the steps before exact_special use sincospif, some 40 instructions.
// Source: Stone et al., "Accelerating advanced MRI reconstructions on GPUs", J. Parallel Distrib. Comput. 68 (2008).
#pragma once

#include "exact/phases.cuh"

constexpr int LADDER_THREADS = 256;
constexpr int COARSE_POINTS = 8;      // of a row, per thread
constexpr int CONSTANT_SAMPLES = 192;  // of one launch: parameters are limited to 4 KB
constexpr int STAGED_SAMPLES = 128;

struct SampleArrays {
    unsigned kx[CONSTANT_SAMPLES], ky[CONSTANT_SAMPLES], kz[CONSTANT_SAMPLES];
    float real[CONSTANT_SAMPLES], imag[CONSTANT_SAMPLES];
};

struct Sample {
    unsigned kx, ky, kz;
    float real, imag;
};

struct SampleStructures {
    Sample sample[CONSTANT_SAMPLES];
};

// A point of the image, counted from the centre.
struct Point {
    long long index;
    int x, y, z;

    __device__ Point(long long at, const ExactShape& shape) : index(at) {
        z = static_cast<int>(at % shape.size[2]) - shape.size[2] / 2;
        const long long row = at / shape.size[2];
        y = static_cast<int>(row % shape.size[1]) - shape.size[1] / 2;
        x = static_cast<int>(row / shape.size[1]) - shape.size[0] / 2;
    }

    __device__ unsigned phase(unsigned kx, unsigned ky, unsigned kz) const { return x * kx + y * ky + z * kz; }
};

__device__ inline long long points_of(const ExactShape& shape) {
    return static_cast<long long>(shape.size[0]) * shape.size[1] * shape.size[2];
}

template <bool SPREAD>
__device__ inline void add_term(float2& sum, float2 value, float2 unit) {
    sum.x = fmaf(value.x, unit.x, sum.x), sum.y = fmaf(value.x, unit.y, sum.y);
    if (!SPREAD) sum.x = fmaf(-value.y, unit.y, sum.x), sum.y = fmaf(value.y, unit.x, sum.y);
}

// exact_scatter: a thread a sample, which is weighted and added to every point; each term is two atomic additions.
template <bool SPREAD>
__global__ void exact_scatter(const float2* __restrict__ samples, const float* __restrict__ weights,
                              const uint4* __restrict__ phases, float2* __restrict__ image,
                              const __grid_constant__ ExactShape shape) {
    const long long m = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x, points = points_of(shape);
    if (m >= shape.samples) return;
    const float weight = weights ? weights[m] : 1.0f;
    const float2 sample = SPREAD ? make_float2(1, 0) : samples[blockIdx.y * shape.samples + m];
    const float2 value = make_float2(sample.x * weight, sample.y * weight);
    const uint4 k = phases[m];
    float2* to = image + blockIdx.y * points;
    for (long long i = 0; i < points; ++i) {
        float2 term = make_float2(0, 0);
        add_term<SPREAD>(term, value, accurate_unit(Point(i, shape).phase(k.x, k.y, k.z)));
        atomicAdd(&to[i].x, term.x);
        atomicAdd(&to[i].y, term.y);
    }
}

// exact_weigh: the loop's first half separately (fission), so that the loops of the second can be interchanged.
template <bool SPREAD>
__global__ void exact_weigh(const float2* __restrict__ samples, const float* __restrict__ weights,
                            float2* __restrict__ weighted, const __grid_constant__ ExactShape shape) {
    const long long m = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (m >= shape.samples) return;
    const float weight = weights ? weights[m] : 1.0f;
    const float2 sample = SPREAD ? make_float2(1, 0) : samples[blockIdx.y * shape.samples + m];
    weighted[blockIdx.y * shape.samples + m] = make_float2(sample.x * weight, sample.y * weight);
}

// exact_gather: a thread a point, which sums all samples (interchange): no atomics, but every term still goes to memory and
// back, since the compiler must assume that the arrays alias.
template <bool SPREAD>
__global__ void __launch_bounds__(LADDER_THREADS)
exact_gather(const float2* weighted, const uint4* phases, float2* image, const __grid_constant__ ExactShape shape) {
    const long long at = blockIdx.x * static_cast<long long>(LADDER_THREADS) + threadIdx.x, points = points_of(shape);
    if (at >= points) return;
    const Point point(at, shape);
    float2* to = image + blockIdx.y * points + at;
    *to = make_float2(0, 0);
    for (long long m = 0; m < shape.samples; ++m) {
        const unsigned phase = point.phase(phases[m].x, phases[m].y, phases[m].z);
        add_term<SPREAD>(*to, weighted[blockIdx.y * shape.samples + m], accurate_unit(phase));
    }
}

// exact_registers: the sum stays in registers: one write per point.
template <bool SPREAD>
__global__ void __launch_bounds__(LADDER_THREADS)
exact_registers(const float2* __restrict__ weighted, const uint4* __restrict__ phases, float2* __restrict__ image,
                const __grid_constant__ ExactShape shape) {
    const long long at = blockIdx.x * static_cast<long long>(LADDER_THREADS) + threadIdx.x, points = points_of(shape);
    if (at >= points) return;
    const Point point(at, shape);
    float2 sum = make_float2(0, 0);
    for (long long m = 0; m < shape.samples; ++m) {
        const uint4 k = phases[m];
        add_term<SPREAD>(sum, weighted[blockIdx.y * shape.samples + m], accurate_unit(point.phase(k.x, k.y, k.z)));
    }
    image[blockIdx.y * points + at] = sum;
}

// exact_constant: samples from constant memory (launch parameters), which a warp reads in one access without competing
// with the point's loads; one launch per 192 samples, which adds to the image. One coil.
template <bool SPREAD>
__global__ void __launch_bounds__(LADDER_THREADS)
exact_constant(const __grid_constant__ SampleArrays samples, int count, float2* __restrict__ image,
               const __grid_constant__ ExactShape shape) {
    const long long at = blockIdx.x * static_cast<long long>(LADDER_THREADS) + threadIdx.x;
    if (at >= points_of(shape)) return;
    const Point point(at, shape);
    float2 sum = make_float2(0, 0);
    for (int m = 0; m < count; ++m)
        add_term<SPREAD>(sum, make_float2(samples.real[m], samples.imag[m]),
                         accurate_unit(point.phase(samples.kx[m], samples.ky[m], samples.kz[m])));
    image[at] = make_float2(image[at].x + sum.x, image[at].y + sum.y);
}

// exact_structures: a sample's five numbers side by side: one cache line and wide loads instead of five of each.
template <bool SPREAD>
__global__ void __launch_bounds__(LADDER_THREADS)
exact_structures(const __grid_constant__ SampleStructures samples, int count, float2* __restrict__ image,
                 const __grid_constant__ ExactShape shape) {
    const long long at = blockIdx.x * static_cast<long long>(LADDER_THREADS) + threadIdx.x;
    if (at >= points_of(shape)) return;
    const Point point(at, shape);
    float2 sum = make_float2(0, 0);
    for (int m = 0; m < count; ++m) {
        const Sample& s = samples.sample[m];
        add_term<SPREAD>(sum, make_float2(s.real, s.imag), accurate_unit(point.phase(s.kx, s.ky, s.kz)));
    }
    image[at] = make_float2(image[at].x + sum.x, image[at].y + sum.y);
}

// A thread's eight points of a row, strided so that neighbouring threads have neighbouring points.
struct PointRow {
    int x, y, first, stride;
    long long row;
    float2 sum[COARSE_POINTS];

    __device__ PointRow(long long thread, const ExactShape& shape) {
        stride = (shape.size[2] + COARSE_POINTS - 1) / COARSE_POINTS;
        row = thread / stride;
        first = static_cast<int>(thread % stride);
        y = static_cast<int>(row % shape.size[1]) - shape.size[1] / 2;
        x = static_cast<int>(row / shape.size[1]) - shape.size[0] / 2;
        clear();
    }

    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < COARSE_POINTS; ++n) sum[n] = make_float2(0, 0);
    }

    template <bool SPREAD, bool FAST>
    __device__ void add(const Sample& s, int half) {
        unsigned phase = x * s.kx + y * s.ky + (first - half) * s.kz;
#pragma unroll
        for (int n = 0; n < COARSE_POINTS; ++n, phase += stride * s.kz)
            add_term<SPREAD>(sum[n], make_float2(s.real, s.imag), FAST ? fast_unit(phase) : accurate_unit(phase));
    }

    // Adds the sums to the image.
    __device__ void put(float2* __restrict__ image, const ExactShape& shape) const {
        if (row >= static_cast<long long>(shape.size[0]) * shape.size[1]) return;
        float2* to = image + row * shape.size[2];
#pragma unroll
        for (int n = 0; n < COARSE_POINTS; ++n) {
            const int z = first + n * stride;
            if (z < shape.size[2]) to[z] = make_float2(to[z].x + sum[n].x, to[z].y + sum[n].y);
        }
    }
};

// exact_coarsened: a thread eight points, which share a sample's loads and the row's phase; with FAST sines and cosines come
// from the special-function unit (absolute error 6e-7, since phases stay within one turn).
template <bool SPREAD, bool FAST>
__global__ void __launch_bounds__(LADDER_THREADS)
exact_coarsened(const __grid_constant__ SampleStructures samples, int count, float2* __restrict__ image,
                const __grid_constant__ ExactShape shape) {
    PointRow row(blockIdx.x * static_cast<long long>(LADDER_THREADS) + threadIdx.x, shape);
    for (int m = 0; m < count; ++m) row.add<SPREAD, FAST>(samples.sample[m], shape.size[2] / 2);
    row.put(image, shape);
}

// exact_staged: samples from device memory through shared memory: one launch, nothing through the host. Sums of 128 samples
// are kept apart from the total, so that rounding does not grow with their number.
template <bool SPREAD>
__global__ void __launch_bounds__(STAGED_SAMPLES)
exact_staged(const float2* __restrict__ weighted, const uint4* __restrict__ phases, float2* __restrict__ image,
             const __grid_constant__ ExactShape shape) {
    __shared__ Sample stage[STAGED_SAMPLES];
    PointRow row(blockIdx.x * static_cast<long long>(STAGED_SAMPLES) + threadIdx.x, shape);
    float2 total[COARSE_POINTS] = {};
    for (long long begin = 0; begin < shape.samples; begin += STAGED_SAMPLES) {
        const long long m = begin + threadIdx.x;
        Sample mine = {};
        if (m < shape.samples) {
            const uint4 k = phases[m];
            const float2 value = weighted[blockIdx.y * shape.samples + m];
            mine = Sample{k.x, k.y, k.z, value.x, value.y};
        }
        __syncthreads();
        stage[threadIdx.x] = mine;
        __syncthreads();
        row.clear();
        for (int n = 0; n < STAGED_SAMPLES; ++n) row.add<SPREAD, true>(stage[n], shape.size[2] / 2);
#pragma unroll
        for (int n = 0; n < COARSE_POINTS; ++n) total[n].x += row.sum[n].x, total[n].y += row.sum[n].y;
    }
#pragma unroll
    for (int n = 0; n < COARSE_POINTS; ++n) row.sum[n] = total[n];
    row.put(image + blockIdx.y * points_of(shape), shape);
}

// exact_forward_staged: the forward transform, a thread a sample, points of the image through shared memory.
__global__ void __launch_bounds__(STAGED_SAMPLES)
exact_forward_staged(const float2* __restrict__ image, const uint4* __restrict__ phases, float2* __restrict__ samples,
                     const __grid_constant__ ExactShape shape) {
    __shared__ float2 stage[STAGED_SAMPLES];
    const long long m = blockIdx.x * static_cast<long long>(STAGED_SAMPLES) + threadIdx.x, points = points_of(shape);
    const uint4 k = m < shape.samples ? phases[m] : make_uint4(0, 0, 0, 0);
    float2 total = make_float2(0, 0);
    for (long long begin = 0; begin < points; begin += STAGED_SAMPLES) {
        __syncthreads();
        stage[threadIdx.x] = begin + threadIdx.x < points ? image[blockIdx.y * points + begin + threadIdx.x] : make_float2(0, 0);
        __syncthreads();
        Point point(begin, shape);
        float2 sum = make_float2(0, 0);
        for (int n = 0; n < STAGED_SAMPLES; ++n) {
            add_term<false>(sum, stage[n], fast_unit(0u - point.phase(k.x, k.y, k.z)));
            if (++point.z >= shape.size[2] - shape.size[2] / 2) {
                point.z = -(shape.size[2] / 2);
                if (++point.y >= shape.size[1] - shape.size[1] / 2) point.y = -(shape.size[1] / 2), ++point.x;
            }
        }
        total.x += sum.x, total.y += sum.y;
    }
    if (m < shape.samples) samples[blockIdx.y * shape.samples + m] = total;
}
