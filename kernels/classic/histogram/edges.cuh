// Histograms of floats between ascending edges: bin b is edges[b] <= x < edges[b + 1]; the last includes x <= last.
#pragma once

#include "atomics.cuh"

template <typename T>
struct Edges {
    const T* at;
    int bins, top;  // top: the largest power of two below bins, or 0
    T last;         // the largest value that is counted
};

// The bin of a value within the edges, by a binary search without branches.
template <typename T>
__device__ inline int bin_of(T value, const T* edges, const Edges<T>& all) {
    int bin = 0;
    for (int step = all.top; step > 0; step /= 2)
        if (bin + step < all.bins && value >= edges[bin + step]) bin += step;
    return bin;
}

// histogram_edges: both edges and counters in shared memory.
template <typename T>
__global__ void __launch_bounds__(LANES_THREADS)
histogram_edges(const T* __restrict__ values, Count* __restrict__ counts, Samples samples, Edges<T> all) {
    extern __shared__ unsigned own[];
    const int bins = samples.channels * all.bins;
    T* edges = reinterpret_cast<T*>(own + (bins + 1) / 2 * 2);
    for (int k = threadIdx.x; k < all.bins; k += LANES_THREADS) edges[k] = all.at[k];
    clear(own, bins);
    for_each_vector<T, 2>(
        values, samples,
        [&](int channel, T value) {
            if (value >= edges[0] && value <= all.last) atomicAdd(own + channel * all.bins + bin_of(value, edges,
                all), 1u);
        },
        [] {});
    add_to(counts, own, bins, 1);
}

// histogram_edges_global: edges and counters in device memory, for any number of bins.
template <typename T>
__global__ void __launch_bounds__(LANES_THREADS)
histogram_edges_global(const T* __restrict__ values, Count* __restrict__ counts, Samples samples, Edges<T> all) {
    for_each_vector<T, 2>(
        values, samples,
        [&](int channel, T value) {
            if (value >= all.at[0] && value <= all.last)
                atomicAdd(counts + static_cast<long long>(channel) * all.bins + bin_of(value, all.at, all), Count(1));
        },
        [] {});
}
