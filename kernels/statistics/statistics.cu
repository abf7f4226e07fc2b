// Extremes, exact sums and counts of an image's channels.
//
// Contract: samples [outer][channels][inner] of uint8, uint16, int16, float32 or float64, at most 2^30 per channel. The
// partial [channels][words] of 64-bit words, initially zero, has the layout of totals.py: the two extremes combine by
// maximum, every other word by addition modulo 2^64. All are integers, so the order of additions does not matter.
//
// Floors on an H200: the samples once over 4.3 TB/s; about 12 operations a sample (index, extremes, sums, bin) over
// 33 T/s. Two bytes a sample: 0.47 ps for the bytes, 0.36 ps for the operations. It has to keep up with the bus alone:
// 50 GB/s, 40 ps for the same sample.
//
// Kernels, naive to fast:
//   integers_atomic, floats_atomic : every sample adds to the partial in global memory
//   integers_shared                : sums in registers, a histogram for each warp in shared memory
//   floats_slotted                 : the first four powers of two that a warp encounters, in registers
//
// One block works on one channel (blockIdx.y): interleaved channels are read again for each, from the L2 cache.

using i64 = long long;
using u64 = unsigned long long;

constexpr int LEAST = 0, MOST = 1, SUM = 2, SQUARES = 3;
constexpr int NANS = 2, MINUS_INFINITE = 3, INFINITE = 4;
constexpr int INTEGER_HEAD = 4, FLOAT_HEAD = 5;
constexpr int POSITIVE = 0, NEGATIVE = 1, PARTS = 2;
constexpr int BINS = 256, THREADS = 256, WARPS = THREADS / 32, SLOTS = 4;
constexpr unsigned ALL = 0xffffffffu;

template <typename T>
struct Integer {
    static constexpr int LEAST_VALUE = T(-1) < T(0) ? -(1 << (8 * sizeof(T) - 1)) : 0;
    static constexpr unsigned TOP = (1u << (8 * sizeof(T))) - 1;
    static constexpr int SHIFT = 8 * sizeof(T) - 8;
};

// A float's parts: value = ± m × 2^(max(exponent, 1) − bias − bits of the fraction).
template <typename T>
struct Float;

template <>
struct Float<float> {
    using Bits = unsigned;
    static constexpr int FRACTION = 23, EXPONENTS = 256, SUMS = 1, WORDS = 5;
    __device__ static void parts(u64 m, bool negative, u64 (&out)[WORDS - PARTS]) {
        u64 square = m * m;
        out[0] = negative ? 0 - m : m;
        out[1] = square & 0xffffff;
        out[2] = square >> 24;
    }
};

template <>
struct Float<double> {
    using Bits = u64;
    static constexpr int FRACTION = 52, EXPONENTS = 2048, SUMS = 2, WORDS = 8;
    __device__ static void parts(u64 m, bool negative, u64 (&out)[WORDS - PARTS]) {
        constexpr u64 LOW = (u64(1) << 27) - 1;
        u64 a = m >> 27, b = m & LOW, aa = a * a, ab = 2 * a * b, bb = b * b;
        out[0] = negative ? 0 - b : b;
        out[1] = negative ? 0 - a : a;
        out[2] = bb & LOW;
        out[3] = (bb >> 27) + (ab & LOW);
        out[4] = (ab >> 27) + (aa & LOW);
        out[5] = aa >> 27;
    }
};

template <typename Bits>
__device__ u64 key_of(Bits bits, bool negative) {
    return Bits(bits ^ (negative ? Bits(~Bits(0)) : Bits(Bits(1) << (8 * sizeof(Bits) - 1))));
}

// Index of sample k of a channel.
__device__ i64 place(i64 k, int channel, int channels, i64 inner) {
    if (inner == 1) return k * channels + channel;
    i64 outer = k / inner;
    return (outer * channels + channel) * inner + (k - outer * inner);
}

__device__ u64 warp_sum(u64 value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(ALL, value, step);
    return value;
}

__device__ u64 warp_most(u64 value) {
    for (int step = 16; step > 0; step /= 2) {
        u64 other = __shfl_down_sync(ALL, value, step);
        value = other > value ? other : value;
    }
    return value;
}

__device__ void add(u64* word, u64 value) {
    if (value != 0) atomicAdd(word, value);
}

// One atomic addition per sample and word.
template <typename T>
__global__ void integers_atomic(const T* samples, i64 count, int channels, i64 inner, u64* partial, i64 words) {
    using I = Integer<T>;
    u64* row = partial + blockIdx.y * words;
    for (i64 k = i64(blockIdx.x) * blockDim.x + threadIdx.x; k < count; k += i64(gridDim.x) * blockDim.x) {
        unsigned u = unsigned(int(samples[place(k, blockIdx.y, channels, inner)]) - I::LEAST_VALUE);
        atomicMax(row + LEAST, u64(I::TOP - u) + 1);
        atomicMax(row + MOST, u64(u) + 1);
        atomicAdd(row + SUM, u64(u));
        atomicAdd(row + SQUARES, u64(u) * u);
        atomicAdd(row + INTEGER_HEAD + (u >> I::SHIFT), u64(1));
    }
}

template <typename T>
__global__ void floats_atomic(const T* samples, i64 count, int channels, i64 inner, u64* partial, i64 words) {
    using F = Float<T>;
    using Bits = typename F::Bits;
    u64* row = partial + blockIdx.y * words;
    for (i64 k = i64(blockIdx.x) * blockDim.x + threadIdx.x; k < count; k += i64(gridDim.x) * blockDim.x) {
        Bits bits = reinterpret_cast<const Bits*>(samples)[place(k, blockIdx.y, channels, inner)];
        bool negative = bits >> (8 * sizeof(Bits) - 1);
        int exponent = int(bits >> F::FRACTION) & (F::EXPONENTS - 1);
        u64 fraction = bits & ((Bits(1) << F::FRACTION) - 1);
        if (exponent == F::EXPONENTS - 1) {
            atomicAdd(row + (fraction ? NANS : negative ? MINUS_INFINITE : INFINITE), u64(1));
            continue;
        }
        u64 key = key_of(bits, negative), parts[F::WORDS - PARTS];
        atomicMax(row + LEAST, u64(Bits(~Bits(0))) - key + 1);
        atomicMax(row + MOST, key + 1);
        u64* bin = row + FLOAT_HEAD + exponent * F::WORDS;
        F::parts(fraction | (exponent ? u64(1) << F::FRACTION : 0), negative, parts);
        atomicAdd(bin + (negative ? NEGATIVE : POSITIVE), u64(1));
        for (int part = 0; part < F::WORDS - PARTS; ++part) add(bin + PARTS + part, parts[part]);
    }
}

// Sums and extremes stay in registers and are combined once per warp; equal neighbours collide only in their warp's
// histogram in shared memory. Saves the 5 global atomic additions a sample.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    integers_shared(const T* samples, i64 count, int channels, i64 inner, u64* partial, i64 words) {
    using I = Integer<T>;
    __shared__ unsigned histogram[WARPS][BINS];
    for (int bin = threadIdx.x; bin < WARPS * BINS; bin += THREADS) histogram[0][bin] = 0;
    __syncthreads();
    unsigned* mine = histogram[threadIdx.x / 32];
    unsigned least = 0, most = 0;
    u64 sum = 0, squares = 0;
    for (i64 k = i64(blockIdx.x) * THREADS + threadIdx.x; k < count; k += i64(gridDim.x) * THREADS) {
        unsigned u = unsigned(int(samples[place(k, blockIdx.y, channels, inner)]) - I::LEAST_VALUE);
        least = max(least, I::TOP - u + 1);
        most = max(most, u + 1);
        sum += u;
        squares += u64(u) * u;
        atomicAdd(mine + (u >> I::SHIFT), 1u);
    }
    u64* row = partial + blockIdx.y * words;
    u64 least_of_warp = warp_most(least), most_of_warp = warp_most(most);
    sum = warp_sum(sum);
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) {
        atomicMax(row + LEAST, least_of_warp);
        atomicMax(row + MOST, most_of_warp);
        add(row + SUM, sum);
        add(row + SQUARES, squares);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        u64 total = 0;
        for (int warp = 0; warp < WARPS; ++warp) total += histogram[warp][bin];
        add(row + INTEGER_HEAD + bin, total);
    }
}

// Each warp keeps the first four powers of two that it encounters in registers, one sum per lane; samples with another go
// to global memory. In images few are common. Saves the atomic additions of nearly every sample.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    floats_slotted(const T* samples, i64 count, int channels, i64 inner, u64* partial, i64 words) {
    using F = Float<T>;
    using Bits = typename F::Bits;
    constexpr int SUMMED = F::WORDS - PARTS;
    u64* row = partial + blockIdx.y * words;
    int slots[SLOTS];
    unsigned counts[SLOTS][PARTS];
    u64 sums[SLOTS][SUMMED];
    for (int slot = 0; slot < SLOTS; ++slot) {
        slots[slot] = -1;
        for (int part = 0; part < PARTS; ++part) counts[slot][part] = 0;
        for (int part = 0; part < SUMMED; ++part) sums[slot][part] = 0;
    }
    u64 least = 0, most = 0;
    i64 step = i64(gridDim.x) * THREADS;
    i64 rounds = (count + step - 1) / step;  // the same for every lane
    for (i64 round = 0; round < rounds; ++round) {
        i64 k = round * step + i64(blockIdx.x) * THREADS + threadIdx.x;
        bool there = k < count;
        Bits bits = there ? reinterpret_cast<const Bits*>(samples)[place(k, blockIdx.y, channels, inner)] : Bits(0);
        bool negative = bits >> (8 * sizeof(Bits) - 1);
        int exponent = int(bits >> F::FRACTION) & (F::EXPONENTS - 1);
        u64 fraction = bits & ((Bits(1) << F::FRACTION) - 1);
        if (there && exponent == F::EXPONENTS - 1) {
            atomicAdd(row + (fraction ? NANS : negative ? MINUS_INFINITE : INFINITE), u64(1));
            there = false;
        }
        u64 parts[SUMMED];
        F::parts(fraction | (exponent ? u64(1) << F::FRACTION : 0), negative, parts);
        if (there) {
            u64 key = key_of(bits, negative);
            u64 from_top = u64(Bits(~Bits(0))) - key + 1;
            least = from_top > least ? from_top : least;
            most = key + 1 > most ? key + 1 : most;
        }
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) {
            if (slots[slot] < 0) {  // the same in every lane
                unsigned waiting = __ballot_sync(ALL, there);
                if (waiting) slots[slot] = __shfl_sync(ALL, exponent, __ffs(waiting) - 1);
            }
            if (there && exponent == slots[slot]) {
                counts[slot][POSITIVE] += !negative;
                counts[slot][NEGATIVE] += negative;
#pragma unroll
                for (int part = 0; part < SUMMED; ++part) sums[slot][part] += parts[part];
                there = false;
            }
        }
        if (there) {
            u64* bin = row + FLOAT_HEAD + exponent * F::WORDS;
            atomicAdd(bin + (negative ? NEGATIVE : POSITIVE), u64(1));
            for (int part = 0; part < SUMMED; ++part) add(bin + PARTS + part, parts[part]);
        }
    }
    bool first = threadIdx.x % 32 == 0;
    least = warp_most(least);
    most = warp_most(most);
    if (first && most) {
        atomicMax(row + LEAST, least);
        atomicMax(row + MOST, most);
    }
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
        if (slots[slot] < 0) continue;
        u64* bin = row + FLOAT_HEAD + slots[slot] * F::WORDS;
        for (int part = 0; part < PARTS; ++part) {
            u64 total = warp_sum(counts[slot][part]);
            if (first) add(bin + part, total);
        }
        for (int part = 0; part < SUMMED; ++part) {
            u64 total = warp_sum(sums[slot][part]);
            if (first) add(bin + PARTS + part, total);
        }
    }
}
