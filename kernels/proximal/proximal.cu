// Soft thresholding, differences of total variation, and sums, of complex64 values.
//
// Contract: `soft_threshold` and `magnitudes` treat [components][count] as `count` vectors. `differences` writes, for each
// axis with a bit in `axes`, a field [batch … x] of x[i + 1] − x[i], 0 at the last place, in the order of the bits;
// `differences_adjoint` sums the transposes. Images have four axes of `size`, slowest first. Sums are float64: each block
// adds its part in a fixed order, and the last block adds up the parts in order, so bits repeat.
//
// Floors on an H200, one image of 256²: soft_threshold reads and writes 1 MiB, 0.25 µs; sums read 0.5 to 1 MiB, 0.25 µs;
// fewer than 20 operations a value, 0.04 µs. A launch in a graph takes 2 µs: these are bound by launches up to 10 MiB.

#include "pdl.cuh"

constexpr int THREADS = 256, MOST_PARTS = 1024;

struct Extent {
    int size[4];
    int axes;
};

__global__ void __launch_bounds__(THREADS) soft_threshold(
    const float2* __restrict__ values, float2* __restrict__ out, const float* threshold, int components,
    long long count) {
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    const float by = *threshold;
    float square = 0;
    for (int k = 0; k < components; k++) {
        const float2 value = values[k * count + i];
        square += value.x * value.x + value.y * value.y;
    }
    const float size = sqrtf(square);
    const float factor = size > by ? (size - by) / size : size <= by ? 0.0f : size;
    for (int k = 0; k < components; k++) {
        const float2 value = values[k * count + i];
        out[k * count + i] = make_float2(value.x * factor, value.y * factor);
    }
}

// The block's sum in every thread of the first warp's lane 0, in a fixed order.
__device__ inline double block_sum(double value, double* shared) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffffu, value, step);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    double total = 0;
    if (threadIdx.x == 0)
        for (int warp = 0; warp < THREADS / 32; warp++) total += shared[warp];
    __syncthreads();
    return total;
}

// Writes the block's part; the last block adds up all parts into *sum and resets the ticket. True in that block's thread 0.
__device__ inline bool add_up(double part, double* parts, unsigned* ticket, double* sum, double* shared) {
    __shared__ bool last;
    part = block_sum(part, shared);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = part;
        __threadfence();
        last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return false;
    double total = 0;
    for (int block = threadIdx.x; block < gridDim.x; block += THREADS) total += ((volatile double*)parts)[block];
    total = block_sum(total, shared);
    if (threadIdx.x != 0) return false;
    *sum = total;
    *ticket = 0;
    return true;
}

__global__ void __launch_bounds__(THREADS) magnitudes(
    const float2* __restrict__ values, double* parts, unsigned* ticket, double* sum, int components, long long count) {
    __shared__ double shared[THREADS / 32];
    double part = 0;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += (long long)gridDim.x * THREADS) {
        float square = 0;
        for (int k = 0; k < components; k++) {
            const float2 value = values[k * count + i];
            square += value.x * value.x + value.y * value.y;
        }
        part += sqrtf(square);
    }
    add_up(part, parts, ticket, sum, shared);
}

__device__ inline double product(float2 a, float2 b) { return double(a.x) * b.x + double(a.y) * b.y; }

__global__ void __launch_bounds__(THREADS) inner(
    const float2* __restrict__ one, const float2* __restrict__ other, double* parts, unsigned* ticket, double* sum,
    long long count) {
    __shared__ double shared[THREADS / 32];
    double part = 0;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += (long long)gridDim.x * THREADS)
        part += product(one[i], other[i]);
    add_up(part, parts, ticket, sum, shared);
}

// The place of sample i along an axis, and the distance to its neighbour there.
__device__ inline int along(long long i, const Extent& extent, int axis, long long& stride) {
    stride = 1;
    for (int later = 3; later > axis; later--) stride *= extent.size[later];
    return int(i / stride % extent.size[axis]);
}

__global__ void __launch_bounds__(THREADS) differences(
    const float2* __restrict__ image, float2* __restrict__ fields, Extent extent, long long count) {
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    const float2 own = image[i];
    for (int axis = 0; axis < 4; axis++) {
        if (!(extent.axes >> axis & 1)) continue;
        long long stride;
        float2 found = make_float2(0, 0);
        if (along(i, extent, axis, stride) + 1 < extent.size[axis]) {
            const float2 next = image[i + stride];
            found = make_float2(next.x - own.x, next.y - own.y);
        }
        fields[i] = found;
        fields += count;
    }
}

__global__ void __launch_bounds__(THREADS) differences_adjoint(
    const float2* __restrict__ fields, float2* __restrict__ image, Extent extent, long long count) {
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    float2 found = make_float2(0, 0);
    for (int axis = 0; axis < 4; axis++) {
        if (!(extent.axes >> axis & 1)) continue;
        long long stride;
        const int at = along(i, extent, axis, stride);
        if (at + 1 < extent.size[axis]) found.x -= fields[i].x, found.y -= fields[i].y;
        if (at > 0) found.x += fields[i - stride].x, found.y += fields[i - stride].y;
        fields += count;
    }
    image[i] = found;
}

// The next row of a table of `rows` shifts of `axes` numbers. One thread.
__global__ void next_shift(const int* __restrict__ table, int* row, int* shift, int rows, int axes) {
    grid_dependency_synchronize();
    *row = (*row + 1) % rows;
    for (int axis = 0; axis < axes; axis++) shift[axis] = table[*row * axes + axis];
}

#include "cg.cuh"
#include "fista.cuh"
#include "low_rank.cuh"
