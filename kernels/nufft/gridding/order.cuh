// Samples from the trajectory's order, one plane per coil, to the sorted order with coils innermost, and back; images to the
// grid and back.
#pragma once

constexpr int ORDERED_VALUES = 1024, ORDER_THREADS = 256;  // values of all coils of a chunk, per block

// Value i of a block, with points or lanes running fastest.
struct OrderedValue {
    int point, lane, place;  // place: in shared memory, with a gap after each lane's points

    __device__ OrderedValue(int i, int lanes, bool points_fastest) {
        const int shift = __ffs(lanes) - 1, points = ORDERED_VALUES >> shift;
        point = points_fastest ? i & (points - 1) : i >> shift;
        lane = points_fastest ? i >> (10 - shift) : i & (lanes - 1);
        place = lane * (points + 1) + point;
    }
};

// Reads are whole lines of a coil, writes whole rows of a point's coils.
template <bool WEIGHTED>
__global__ void __launch_bounds__(ORDER_THREADS)
order_samples(const float2* __restrict__ samples, const float* __restrict__ weights, const int* __restrict__ rank_of,
              float2* __restrict__ ordered, Gridding g) {
    __shared__ float2 tile[ORDERED_VALUES + 32];
    const int chunk = blockIdx.y;
    const long long first = blockIdx.x * static_cast<long long>(ORDERED_VALUES / g.lanes);
#pragma unroll
    for (int i = threadIdx.x; i < ORDERED_VALUES; i += ORDER_THREADS) {
        const OrderedValue at(i, g.lanes, true);
        const int coil = chunk * g.lanes + at.lane;
        const long long m = first + at.point;
        float2 value = make_float2(0, 0);
        if (m < g.points && coil < g.coils) value = samples[coil * g.points + m];
        const float weight = WEIGHTED && m < g.points ? weights[m] : 1;
        tile[at.place] = make_float2(value.x * weight, value.y * weight);
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < ORDERED_VALUES; i += ORDER_THREADS) {
        const OrderedValue at(i, g.lanes, false);
        const long long m = first + at.point;
        if (m < g.points) ordered[(chunk * g.points + rank_of[m]) * g.lanes + at.lane] = tile[at.place];
    }
}

__global__ void __launch_bounds__(ORDER_THREADS)
restore_samples(const float2* __restrict__ ordered, const int* __restrict__ rank_of, float2* __restrict__ samples,
                Gridding g) {
    __shared__ float2 tile[ORDERED_VALUES + 32];
    const int chunk = blockIdx.y;
    const long long first = blockIdx.x * static_cast<long long>(ORDERED_VALUES / g.lanes);
#pragma unroll
    for (int i = threadIdx.x; i < ORDERED_VALUES; i += ORDER_THREADS) {
        const OrderedValue at(i, g.lanes, false);
        const long long m = first + at.point;
        if (m < g.points) tile[at.place] = ordered[(chunk * g.points + rank_of[m]) * g.lanes + at.lane];
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < ORDERED_VALUES; i += ORDER_THREADS) {
        const OrderedValue at(i, g.lanes, true);
        const int coil = chunk * g.lanes + at.lane;
        const long long m = first + at.point;
        if (m < g.points && coil < g.coils) samples[coil * g.points + m] = tile[at.place];
    }
}

// The image's pixel in a cell of the grid, or -1: pixel i lies at r = i - N / 2, in cell r mod G.
__device__ inline int pixel_of(int cell, int image, int size) {
    const int pixel = cell < image - image / 2 ? cell + image / 2 : cell - size + image / 2;
    return pixel < image ? pixel : -1;  // negative for cells outside the image
}

// Images into the grid's low frequencies, zeros elsewhere, divided by the spreading kernel's transform. A thread a cell.
__global__ void pad_images(const float2* __restrict__ images, const float* __restrict__ per_x, const float* __restrict__ per_y,
                           const float* __restrict__ per_z, float2* __restrict__ grid, Gridding g) {
    const int z = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y + gridDim.y * blockIdx.z;  // the host limits the number of rows
    if (z >= g.size[2] || row >= g.coils * g.size[0] * g.size[1]) return;
    const int y = row % g.size[1], x = row / g.size[1] % g.size[0], coil = row / g.size[1] / g.size[0];
    const int px = pixel_of(x, g.image[0], g.size[0]), py = pixel_of(y, g.image[1], g.size[1]), pz = pixel_of(z, g.image[2], g.size[2]);
    float2 value = make_float2(0, 0);
    if (px >= 0 && py >= 0 && pz >= 0) {
        value = images[((static_cast<long long>(coil) * g.image[0] + px) * g.image[1] + py) * g.image[2] + pz];
        const float scale = per_x[px] * per_y[py] * per_z[pz];
        value = make_float2(value.x * scale, value.y * scale);
    }
    grid[static_cast<long long>(row) * g.size[2] + z] = value;
}

// The reverse. A thread a pixel.
__global__ void crop_images(const float2* __restrict__ grid, const float* __restrict__ per_x, const float* __restrict__ per_y,
                            const float* __restrict__ per_z, float2* __restrict__ images, Gridding g) {
    const int pz = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y + gridDim.y * blockIdx.z;
    if (pz >= g.image[2] || row >= g.coils * g.image[0] * g.image[1]) return;
    const int py = row % g.image[1], px = row / g.image[1] % g.image[0], coil = row / g.image[1] / g.image[0];
    const int x = px - g.image[0] / 2, y = py - g.image[1] / 2, z = pz - g.image[2] / 2;
    const float2 value =
        grid[cell_index(coil, x < 0 ? x + g.size[0] : x, y < 0 ? y + g.size[1] : y, z < 0 ? z + g.size[2] : z, g)];
    const float scale = per_x[px] * per_y[py] * per_z[pz];
    images[static_cast<long long>(row) * g.image[2] + pz] = make_float2(value.x * scale, value.y * scale);
}
