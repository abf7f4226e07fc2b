// Sections scanned in shared memory, one per block. If `exclusive` is 1, inclusive sums are written one element later.
#pragma once

constexpr int SECTION = 1024;       // of Kogge–Stone and Brent–Kung
constexpr int RUN = 16;             // values per thread of scan_three_phase
constexpr int LONG_SECTION = RUN * THREADS;

template <typename T>
struct Section {
    const T* values;
    T* out;
    T* totals;  // of the sections; null if there is only one
    long long n;
    int exclusive;

    __device__ T load(long long i) const { return i < n ? values[i] : T(0); }

    __device__ void store(long long i, T sum) const {
        if (i + exclusive < n) out[i + exclusive] = sum;
        if (exclusive && i == 0) out[0] = T(0);
    }

    __device__ void store_total(T sum) const {
        if (totals) totals[blockIdx.x] = sum;
    }
};

// scan_kogge_stone: in round d every thread adds the sum that ends 2^d before it. All threads work in all rounds; every
// value must be read before it is overwritten, hence the second barrier.
template <typename T>
__global__ void __launch_bounds__(SECTION) scan_kogge_stone(Section<T> section) {
    __shared__ T sums[SECTION];
    const int t = threadIdx.x;
    const long long i = blockIdx.x * static_cast<long long>(SECTION) + t;
    sums[t] = section.load(i);
    for (int distance = 1; distance < SECTION; distance *= 2) {
        __syncthreads();
        const T before = t >= distance ? sums[t - distance] : T(0);
        __syncthreads();
        sums[t] += before;
    }
    section.store(i, sums[t]);
    if (t == SECTION - 1) section.store_total(sums[t]);
}

// scan_double_buffered: reads one buffer and writes the other.
template <typename T>
__global__ void __launch_bounds__(SECTION) scan_double_buffered(Section<T> section) {
    __shared__ T sums[2][SECTION];
    const int t = threadIdx.x;
    const long long i = blockIdx.x * static_cast<long long>(SECTION) + t;
    int from = 0;
    sums[0][t] = section.load(i);
    for (int distance = 1; distance < SECTION; distance *= 2) {
        __syncthreads();
        sums[1 - from][t] = t >= distance ? sums[from][t] + sums[from][t - distance] : sums[from][t];
        from = 1 - from;
    }
    section.store(i, sums[from][t]);
    if (t == SECTION - 1) section.store_total(sums[from][t]);
}

// scan_brent_kung: sums of pairs, of fours, … up the tree, then down again to the positions between. The first threads do
// the work of a round, so that whole warps are idle.
template <typename T>
__global__ void __launch_bounds__(SECTION / 2) scan_brent_kung(Section<T> section) {
    __shared__ T sums[SECTION];
    const int t = threadIdx.x;
    const long long i = blockIdx.x * static_cast<long long>(SECTION) + t;
    sums[t] = section.load(i);
    sums[t + SECTION / 2] = section.load(i + SECTION / 2);
    for (int stride = 1; stride < SECTION; stride *= 2) {
        __syncthreads();
        const int i = 2 * stride * (t + 1) - 1;
        if (i < SECTION) sums[i] += sums[i - stride];
    }
    for (int stride = SECTION / 4; stride > 0; stride /= 2) {
        __syncthreads();
        const int i = 2 * stride * (t + 1) - 1;
        if (i + stride < SECTION) sums[i + stride] += sums[i];
    }
    __syncthreads();
    section.store(i, sums[t]);
    section.store(i + SECTION / 2, sums[t + SECTION / 2]);
    if (t == 0) section.store_total(sums[SECTION - 1]);
}

// scan_three_phase: coalesced loads into shared memory, where each thread sums its own run; the runs' ends are scanned by
// Kogge–Stone; then each thread adds the prefix of its run. One word of padding for every 32 keeps runs of 16 in
// different banks.
template <typename T>
__global__ void __launch_bounds__(THREADS) scan_three_phase(Section<T> section) {
    constexpr int BANKS = 32;
    __shared__ T sums[LONG_SECTION + LONG_SECTION / BANKS];
    __shared__ T ends[THREADS];
    const int t = threadIdx.x;
    const long long first = blockIdx.x * static_cast<long long>(LONG_SECTION);
    for (int k = t; k < LONG_SECTION; k += THREADS) sums[k + k / BANKS] = section.load(first + k);
    __syncthreads();
    T sum = 0;
    for (int k = t * RUN; k < (t + 1) * RUN; ++k) sums[k + k / BANKS] = sum += sums[k + k / BANKS];
    ends[t] = sum;
    for (int distance = 1; distance < THREADS; distance *= 2) {
        __syncthreads();
        const T before = t >= distance ? ends[t - distance] : T(0);
        __syncthreads();
        ends[t] += before;
    }
    __syncthreads();
    if (t > 0)
        for (int k = t * RUN; k < (t + 1) * RUN; ++k) sums[k + k / BANKS] += ends[t - 1];
    __syncthreads();
    for (int k = t; k < LONG_SECTION; k += THREADS) section.store(first + k, sums[k + k / BANKS]);
    if (t == THREADS - 1) section.store_total(ends[t]);
}

// add_totals: adds its prefix to each section; `totals` are inclusive sums.
template <typename T>
__global__ void __launch_bounds__(THREADS)
add_totals(T* __restrict__ out, const T* __restrict__ totals, long long n, int exclusive, int section) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i >= n || i < section + exclusive) return;
    out[i] += totals[(i - exclusive) / section - 1];
}
