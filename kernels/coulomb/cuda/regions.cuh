// The sum within a cutoff, the steps before production: a block a region of 8 × 8 × 8 points, a thread four of them along
// z. The block stages the atoms of all cells within reach in shared memory; each thread first tests an atom's distance from
// the row (the cylinder test), then adds it to its four points. Two of three computed pairs lie outside the cutoff.
// Atoms: float4 (x, y, z from the grid's origin, charge from prepared_charge), lengths in units of the cutoff.
#pragma once

#include "cuda/cells.cuh"
#include "cuda/terms.cuh"

constexpr int REGION = 8, REGION_THREADS = 128, REGION_EACH = 4;
constexpr int SLOTS = 8;  // atoms per bin

struct Region {
    float x, y, z[REGION_EACH], sum[REGION_EACH];
    int corner[3], point[3];  // in the whole grid
    float low[3], high[3];    // of the region's points

    __device__ explicit Region(const Points& points) {
        unsigned rest = blockIdx.x;
#pragma unroll
        for (int axis = 2; axis >= 0; --axis) {
            const int first = points.first[axis] / REGION;
            const int regions = (points.first[axis] + points.shape[axis] - 1) / REGION - first + 1;
            corner[axis] = (first + static_cast<int>(rest % regions)) * REGION;
            rest /= regions;
            low[axis] = static_cast<float>(corner[axis] * points.step[axis]);
            high[axis] = static_cast<float>((corner[axis] + REGION - 1) * points.step[axis]);
        }
        point[0] = corner[0] + threadIdx.x / 16;
        point[1] = corner[1] + threadIdx.x / 2 % 8;
        point[2] = corner[2] + threadIdx.x % 2 * REGION_EACH;
        x = static_cast<float>(point[0] * points.step[0]);
        y = static_cast<float>(point[1] * points.step[1]);
#pragma unroll
        for (int k = 0; k < REGION_EACH; ++k) z[k] = static_cast<float>((point[2] + k) * points.step[2]), sum[k] = 0;
    }

    // The cells along an axis within the cutoff of the region.
    __device__ void neighbours(int axis, const Cells& cells, int& first, int& count) const {
        const double reach = 1.00001;
        first = max(static_cast<int>(floor((low[axis] - reach) / cells.edge[axis])) - cells.first[axis], 0);
        const int last = static_cast<int>(floor((high[axis] + reach) / cells.edge[axis])) - cells.first[axis];
        count = max(min(last, cells.shape[axis] - 1) - first + 1, 0);
    }

    // Whether a cell lies within the cutoff of the region, judged on the first `axes` axes.
    __device__ bool near(int axes, const int* cell, const Cells& cells) const {
        float square = 0;
        for (int axis = 0; axis < axes; ++axis) {
            const float left = static_cast<float>((cells.first[axis] + cell[axis]) * cells.edge[axis]);
            const float away = fmaxf(fmaxf(left - high[axis], low[axis] - left - static_cast<float>(cells.edge[axis])), 0.0f);
            square = fmaf(away, away, square);
        }
        return square < 1.0001f;
    }

    template <int SCHEME, bool BY_DISTANCE>
    __device__ void add(const float4* staged, int count, const Points& points) {
        for (int a = 0; a < count; ++a) {
            const float4 atom = staged[a];
            const float across = across_of(x, y, atom, points.softening);
            if (across > 1.0f) continue;
#pragma unroll
            for (int k = 0; k < REGION_EACH; ++k) 
                add_term<SCHEME, BY_DISTANCE>(sum[k], z[k] - atom.z, across, atom.w, points.split);
        }
    }

    __device__ void store(float* map, const Points& points) const {
        const int px = point[0] - points.first[0], py = point[1] - points.first[1];
        if (px < 0 || px >= points.shape[0] || py < 0 || py >= points.shape[1]) return;
        float* to = map + (px * static_cast<long long>(points.shape[1]) + py) * points.shape[2];
#pragma unroll
        for (int k = 0; k < REGION_EACH; ++k) {
            const int pz = point[2] + k - points.first[2];
            if (pz >= 0 && pz < points.shape[2]) to[pz] = sum[k] * points.scale;
        }
    }
};

// fill_slots: atoms into bins of eight slots, by atomics; the rest go into an overflow list.
template <typename Real>
__global__ void fill_slots(const Real* __restrict__ atoms, const int* __restrict__ multiples, int* __restrict__ counts,
                           float4* __restrict__ bins, float4* __restrict__ overflow, int* __restrict__ overflowed,
                           Cells cells) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= cells.atoms || atoms[4 * i + 3] == 0) return;
    for (int image = 0; image < cells.images; ++image) {
        double at[3];
        if (!image_position(at, atoms + 4 * i, multiples + 3 * image, cells)) continue;
        const int cell = cell_of(at, cells);
        if (cell < 0) continue;
        const int slot = atomicAdd(counts + cell, 1);
        const float4 atom = make_float4(static_cast<float>(at[0] / cells.unit), static_cast<float>(at[1] / cells.unit),
                                        static_cast<float>(at[2] / cells.unit), prepared_charge(atoms[4 * i + 3], cells.scheme));
        if (slot < SLOTS) bins[static_cast<long long>(cell) * SLOTS + slot] = atom;
        else overflow[atomicAdd(overflowed, 1)] = atom;
    }
}

// regions_slots: 16 bins at a time, a thread a slot. Empty slots have charge zero.
template <int SCHEME, bool BY_DISTANCE>
__global__ void __launch_bounds__(REGION_THREADS)
regions_slots(const float4* __restrict__ bins, float* __restrict__ map, Points points, Cells cells) {
    __shared__ float4 staged[REGION_THREADS];
    Region region(points);
    int first[3], count[3];
    for (int axis = 0; axis < 3; ++axis) region.neighbours(axis, cells, first[axis], count[axis]);
    const int all = count[0] * count[1] * count[2];
    for (int base = 0; base < all; base += REGION_THREADS / SLOTS) {
        const int n = base + threadIdx.x / SLOTS;
        const int cell[3] = {first[0] + n / count[2] / count[1], first[1] + n / count[2] % count[1], first[2] + n % count[2]};
        float4 atom = make_float4(0, 0, 0, 0);
        if (n < all && region.near(3, cell, cells))
            atom = bins[((cell[0] * cells.shape[1] + cell[1]) * static_cast<long long>(cells.shape[2]) + cell[2]) * SLOTS +
                        threadIdx.x % SLOTS];
        if (atom.w == 0) atom.x = 100.0f;  // fails the cylinder test
        __syncthreads();
        staged[threadIdx.x] = atom;
        __syncthreads();
        region.add<SCHEME, BY_DISTANCE>(staged, REGION_THREADS, points);
    }
    region.store(map, points);
}

// add_overflow: a block an overflow atom, added by atomics to the points it reaches.
template <int SCHEME, bool BY_DISTANCE>
__global__ void __launch_bounds__(REGION_THREADS)
add_overflow(const float4* __restrict__ overflow, const int* __restrict__ overflowed, float* __restrict__ map, Points points) {
    for (int n = blockIdx.x; n < *overflowed; n += gridDim.x) {
        const float4 atom = overflow[n];
        const float at[3] = {atom.x, atom.y, atom.z};
        int first[3], count[3];
        for (int axis = 0; axis < 3; ++axis) {
            const float step = static_cast<float>(points.step[axis]);
            first[axis] = max(static_cast<int>(floorf((at[axis] - 1) / step)) - points.first[axis], 0);
            const int last = static_cast<int>(ceilf((at[axis] + 1) / step)) - points.first[axis];
            count[axis] = max(min(last, points.shape[axis] - 1) - first[axis] + 1, 0);
        }
        const long long total = count[0] * static_cast<long long>(count[1]) * count[2];
        for (long long m = threadIdx.x; m < total; m += REGION_THREADS) {
            const int x = first[0] + static_cast<int>(m / count[2] / count[1]);
            const int y = first[1] + static_cast<int>(m / count[2] % count[1]), z = first[2] + static_cast<int>(m % count[2]);
            const float across = across_of(place(points, 0, x), place(points, 1, y), atom, points.softening);
            float term = 0;
            add_term<SCHEME, BY_DISTANCE>(term, place(points, 2, z) - atom.z, across, atom.w, points.split);
            if (term != 0) atomicAdd(map + (x * static_cast<long long>(points.shape[1]) + y) * points.shape[2] + z, term * points.scale);
        }
    }
}

// regions_sorted: atoms sorted by cell, a column of cells at a time: no empty slots, no overflow.
template <int SCHEME, bool BY_DISTANCE>
__global__ void __launch_bounds__(REGION_THREADS)
regions_sorted(const float4* __restrict__ atoms, const int* __restrict__ starts, float* __restrict__ map, Points points,
               Cells cells) {
    __shared__ float4 staged[REGION_THREADS];
    Region region(points);
    int first[3], count[3];
    for (int axis = 0; axis < 3; ++axis) region.neighbours(axis, cells, first[axis], count[axis]);
    for (int n = 0; n < count[0] * count[1] && count[2] > 0; ++n) {
        const int column[2] = {first[0] + n / count[1], first[1] + n % count[1]};
        if (!region.near(2, column, cells)) continue;
        const int* of = starts + (column[0] * cells.shape[1] + column[1]) * cells.shape[2] + first[2];
        const int end = of[count[2]];
        for (int base = of[0]; base < end; base += REGION_THREADS) {
            __syncthreads();
            if (base + threadIdx.x < end) staged[threadIdx.x] = atoms[base + threadIdx.x];
            __syncthreads();
            region.add<SCHEME, BY_DISTANCE>(staged, min(end - base, REGION_THREADS), points);
        }
    }
    region.store(map, points);
}
