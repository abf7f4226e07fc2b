// Histograms of 8- and 16-bit samples by atomic additions.
#pragma once

typedef unsigned long long Count;

constexpr int THREADS = 256, LANES_THREADS = 1024;
constexpr int BYTE_BINS = 256;

struct Samples {
    long long n;
    int channels;
    int aligned;  // whether samples can be loaded 16 bytes at a time
};

template <typename T>
struct alignas(16) Vector {
    static constexpr int COUNT = 16 / sizeof(T);
    T at[COUNT];
};

template <typename T>
constexpr int BINS = sizeof(T) == 1 ? 256 : 65536;

__device__ inline long long grid_thread() { return blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; }
__device__ inline long long grid_threads() { return gridDim.x * static_cast<long long>(blockDim.x); }

// Calls count(channel, sample) for all samples, loaded 16 bytes at a time if possible, with AT_ONCE loads in flight.
// `flush` is called after each load.
template <typename T, int AT_ONCE, typename Counter, typename Flush>
__device__ inline void for_each_vector(const T* values, const Samples& samples, Counter count, Flush flush) {
    constexpr int COUNT = Vector<T>::COUNT;
    const long long vectors = samples.aligned ? samples.n / COUNT : 0, stride = grid_threads();
    const Vector<T>* source = reinterpret_cast<const Vector<T>*>(values);
    const auto take = [&](const Vector<T>& vector, long long index) {
        int channel = samples.channels == 1 ? 0 : static_cast<int>(index * COUNT % samples.channels);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            count(channel, vector.at[k]);
            if (samples.channels > 1 && ++channel == samples.channels) channel = 0;
        }
        flush();
    };
    long long i = grid_thread();
    for (; i + (AT_ONCE - 1) * stride < vectors; i += AT_ONCE * stride) {
        Vector<T> loaded[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) loaded[k] = source[i + k * stride];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) take(loaded[k], i + k * stride);
    }
    for (; i < vectors; i += stride) take(source[i], i);
    for (long long rest = vectors * COUNT + grid_thread(); rest < samples.n; rest += stride) {
        count(static_cast<int>(rest % samples.channels), values[rest]);
        flush();
    }
}

__device__ inline void clear(unsigned* counts, int size) {
    for (int k = threadIdx.x; k < size; k += blockDim.x) counts[k] = 0;
    __syncthreads();
}

// Adds `copies` private histograms, one after another in shared memory, to the whole.
__device__ inline void add_to(Count* counts, const unsigned* own, int bins, int copies) {
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) {
        Count sum = 0;
        for (int copy = 0; copy < copies; ++copy) sum += own[copy * bins + bin];
        if (sum) atomicAdd(counts + bin, sum);
    }
}

// histogram_sections: each thread counts consecutive samples, so a warp's loads are far apart; every sample is an atomic
// addition in the L2 cache.
template <typename T>
__global__ void __launch_bounds__(THREADS)
histogram_sections(const T* __restrict__ values, Count* __restrict__ counts, Samples samples) {
    const long long length = (samples.n + grid_threads() - 1) / grid_threads(), first = grid_thread() * length;
    for (long long i = first; i < first + length && i < samples.n; ++i)
        atomicAdd(counts + i % samples.channels * BINS<T> + values[i], Count(1));
}

// histogram_strided: the same with coalesced loads.
template <typename T>
__global__ void __launch_bounds__(THREADS)
histogram_strided(const T* __restrict__ values, Count* __restrict__ counts, Samples samples) {
    for (long long i = grid_thread(); i < samples.n; i += grid_threads())
        atomicAdd(counts + i % samples.channels * BINS<T> + values[i], Count(1));
}

// histogram_shared: a block counts in shared memory; device memory gets one addition per bin and block.
__global__ void __launch_bounds__(THREADS)
histogram_shared(const unsigned char* __restrict__ values, Count* __restrict__ counts, Samples samples) {
    extern __shared__ unsigned own[];
    const int bins = samples.channels * BYTE_BINS;
    clear(own, bins);
    for (long long i = grid_thread(); i < samples.n; i += grid_threads()) {
        const int channel = samples.channels == 1 ? 0 : static_cast<int>(i % samples.channels);
        atomicAdd(own + channel * BYTE_BINS + values[i], 1u);
    }
    add_to(counts, own, bins, 1);
}

// histogram_copies: warps no longer share counters.
__global__ void __launch_bounds__(THREADS)
histogram_copies(const unsigned char* __restrict__ values, Count* __restrict__ counts, Samples samples) {
    extern __shared__ unsigned own[];
    const int bins = samples.channels * BYTE_BINS;
    clear(own, bins * (THREADS / 32));
    unsigned* mine = own + threadIdx.x / 32 * bins;
    for (long long i = grid_thread(); i < samples.n; i += grid_threads()) {
        const int channel = samples.channels == 1 ? 0 : static_cast<int>(i % samples.channels);
        atomicAdd(mine + channel * BYTE_BINS + values[i], 1u);
    }
    add_to(counts, own, bins, THREADS / 32);
}

// histogram_runs: a thread counts consecutive samples again, but loads 16 bytes at once and counts equal ones in a
// register: flat parts of an image cost almost nothing.
__global__ void __launch_bounds__(THREADS)
histogram_runs(const unsigned char* __restrict__ values, Count* __restrict__ counts, Samples samples) {
    extern __shared__ unsigned own[];
    const int bins = samples.channels * BYTE_BINS;
    clear(own, bins * (THREADS / 32));
    unsigned* mine = own + threadIdx.x / 32 * bins;
    int key = 0;
    unsigned run = 0;
    for_each_vector<unsigned char, 2>(
        values, samples,
        [&](int channel, unsigned char value) {
            const int next = channel * BYTE_BINS + value;
            if (next != key) {
                if (run) atomicAdd(mine + key, run);
                key = next, run = 0;
            }
            ++run;
        },
        [] {});
    if (run) atomicAdd(mine + key, run);
    add_to(counts, own, bins, THREADS / 32);
}

// histogram_lanes: lane l of every warp counts in bank l: 32 additions are one access for equal and different samples.
__global__ void __launch_bounds__(LANES_THREADS)
histogram_lanes(const unsigned char* __restrict__ values, Count* __restrict__ counts, Samples samples) {
    extern __shared__ unsigned own[];
    const int bins = samples.channels * BYTE_BINS;
    clear(own, bins * 32);
    unsigned* mine = own + threadIdx.x % 32;
    for_each_vector<unsigned char, 4>(
        values, samples,
        [&](int channel, unsigned char value) { atomicAdd(mine + (channel * BYTE_BINS + value) * 32, 1u); }, [] {});
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += LANES_THREADS) {
        Count sum = 0;
        for (int k = 0; k < 32; ++k) sum += own[bin * 32 + (k + threadIdx.x) % 32];
        if (sum) atomicAdd(counts + bin, sum);
    }
}

// histogram_halves: bins first … first + bins of [channels, 65536], by the blocks of one grid row. A thread that sees a
// counter reach 2^15 moves these to the result before it adds again; meanwhile 1024 threads can add 2^4 each, so no
// counter overflows.
__global__ void __launch_bounds__(LANES_THREADS)
histogram_halves(const unsigned short* __restrict__ values, Count* __restrict__ counts, Samples samples,
                 long long all, int part) {
    extern __shared__ unsigned own[];
    constexpr unsigned FULL = 1u << 15, MAX_RUN = 16;
    const long long first = blockIdx.y * static_cast<long long>(part);
    const unsigned bins = static_cast<unsigned>(all - first < part ? all - first : part);
    clear(own, (bins + 1) / 2);
    const auto add = [&](unsigned bin, unsigned run) {
        const unsigned shift = bin % 2 * 16, before = atomicAdd(own + bin / 2, run << shift) >> shift & 0xffff;
        if (before + run >= FULL && (atomicAnd(own + bin / 2, ~(FULL << shift)) >> shift & FULL))
            atomicAdd(counts + first + bin, Count(FULL));
    };
    unsigned key = 0, run = 0;
    for_each_vector<unsigned short, 4>(
        values, samples,
        [&](int channel, unsigned short value) {
            const long long bin = channel * 65536ll + value - first;
            if (bin < 0 || bin >= bins) return;
            const unsigned next = static_cast<unsigned>(bin);
            if (next != key || run == MAX_RUN) {
                if (run) add(key, run);
                key = next, run = 0;
            }
            ++run;
        },
        [] {});
    if (run) add(key, run);
    __syncthreads();
    for (unsigned bin = threadIdx.x; bin < bins; bin += LANES_THREADS) {
        const Count sum = own[bin / 2] >> bin % 2 * 16 & 0xffff;
        if (sum) atomicAdd(counts + first + bin, sum);
    }
}
