// Reductions of all values of an array to one; the contract is in kernels/classic/reduce/__init__.py.
//
// `values` holds n values of type T; each launch writes one partial result per block (or tile), which the next launch
// reduces, until one is left. Floors: n sizeof(T) bytes over the bandwidth of reading; n - 1 operations.
//
// The classic ladder, sums of T in T, naive to fast:
//   reduce_pairs        a tree over neighbours: active threads are scattered, every warp diverges
//   reduce_contiguous   the first threads work, so that whole warps retire; but their strides cause bank conflicts
//   reduce_sequential   halves instead of neighbours: no bank conflicts
//   reduce_loads        a thread adds several loads before the tree starts
//   reduce_last_warp    the last 32 without barriers
//   reduce_unrolled     the whole tree unrolled, the block's size a template parameter
//   reduce_shuffles     warps add through registers
// In production, any operation:
//   reduce_tiles        blocks stride over tiles, 16 bytes per load, in an order that depends on n alone
//   finish_moments      mean and variance from the last partial
// Sources: Harris, "Optimizing parallel reduction in CUDA" (NVIDIA, 2007); Welford, Technometrics 4 (1962); Chan, Golub
// and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).

constexpr int THREADS = 256;
constexpr int LOADS = 8;  // per thread, from reduce_loads on

#include "operations.cuh"

// ---- the classic ladder -------------------------------------------------------------------------------------------

template <typename T>
__device__ inline T value_or_zero(const T* values, long long i, long long n) {
    return i < n ? values[i] : T(0);
}

// reduce_pairs: neighbours first. Each round halves the active threads, which are spread over all warps.
template <typename T>
__global__ void __launch_bounds__(THREADS)
reduce_pairs(const T* __restrict__ values, T* __restrict__ partials, long long n) {
    __shared__ T sums[THREADS];
    const int t = threadIdx.x;
    sums[t] = value_or_zero(values, blockIdx.x * static_cast<long long>(THREADS) + t, n);
    for (int stride = 1; stride < THREADS; stride *= 2) {
        __syncthreads();
        if (t % (2 * stride) == 0) sums[t] += sums[t + stride];
    }
    if (t == 0) partials[blockIdx.x] = sums[0];
}

// reduce_contiguous: the same tree by the first threads, so that the other warps retire; but the accesses of a warp are
// now two strides apart, in few banks.
template <typename T>
__global__ void __launch_bounds__(THREADS)
reduce_contiguous(const T* __restrict__ values, T* __restrict__ partials, long long n) {
    __shared__ T sums[THREADS];
    const int t = threadIdx.x;
    sums[t] = value_or_zero(values, blockIdx.x * static_cast<long long>(THREADS) + t, n);
    for (int stride = 1; stride < THREADS; stride *= 2) {
        __syncthreads();
        const int i = 2 * stride * t;
        if (i < THREADS) sums[i] += sums[i + stride];
    }
    if (t == 0) partials[blockIdx.x] = sums[0];
}

// reduce_sequential: the upper half is added to the lower: neighbouring threads, neighbouring banks.
template <typename T>
__global__ void __launch_bounds__(THREADS)
reduce_sequential(const T* __restrict__ values, T* __restrict__ partials, long long n) {
    __shared__ T sums[THREADS];
    const int t = threadIdx.x;
    sums[t] = value_or_zero(values, blockIdx.x * static_cast<long long>(THREADS) + t, n);
    for (int stride = THREADS / 2; stride > 0; stride /= 2) {
        __syncthreads();
        if (t < stride) sums[t] += sums[t + stride];
    }
    if (t == 0) partials[blockIdx.x] = sums[0];
}

// The sum of a thread's share: LOADS values, THREADS apart.
template <typename T>
__device__ inline T loaded_sum(const T* values, long long n) {
    const long long first = blockIdx.x * static_cast<long long>(THREADS * LOADS) + threadIdx.x;
    T sum = 0;
#pragma unroll
    for (int k = 0; k < LOADS; ++k) sum += value_or_zero(values, first + k * THREADS, n);
    return sum;
}

// reduce_loads: with one value per thread half the threads never add; now each has several loads in flight.
template <typename T>
__global__ void __launch_bounds__(THREADS)
reduce_loads(const T* __restrict__ values, T* __restrict__ partials, long long n) {
    __shared__ T sums[THREADS];
    const int t = threadIdx.x;
    sums[t] = loaded_sum(values, n);
    for (int stride = THREADS / 2; stride > 0; stride /= 2) {
        __syncthreads();
        if (t < stride) sums[t] += sums[t + stride];
    }
    if (t == 0) partials[blockIdx.x] = sums[0];
}

// Adds the last 64 sums with one warp, which needs no barrier of the block. (Harris's notes of 2007 use volatile instead of
// the warp's barrier; since Volta's independent thread scheduling that is a race.)
template <typename T>
__device__ inline void add_last_warp(T* sums, int t) {
#pragma unroll
    for (int stride = 32; stride > 0; stride /= 2) {
        const T sum = sums[t] + sums[t + stride];
        __syncwarp();
        sums[t] = sum;
        __syncwarp();
    }
}

// reduce_last_warp: six barriers fewer.
template <typename T>
__global__ void __launch_bounds__(THREADS)
reduce_last_warp(const T* __restrict__ values, T* __restrict__ partials, long long n) {
    __shared__ T sums[THREADS];
    const int t = threadIdx.x;
    sums[t] = loaded_sum(values, n);
    __syncthreads();
    for (int stride = THREADS / 2; stride > 32; stride /= 2) {
        if (t < stride) sums[t] += sums[t + stride];
        __syncthreads();
    }
    if (t < 32) add_last_warp(sums, t);
    if (t == 0) partials[blockIdx.x] = sums[0];
}

// reduce_unrolled: the block size is a compile-time constant, so all rounds are unrolled.
template <typename T, int SIZE>
__global__ void __launch_bounds__(SIZE)
reduce_unrolled(const T* __restrict__ values, T* __restrict__ partials, long long n) {
    __shared__ T sums[SIZE];
    const int t = threadIdx.x;
    sums[t] = loaded_sum(values, n);
    __syncthreads();
#pragma unroll
    for (int stride = SIZE / 2; stride > 32; stride /= 2) {
        if (t < stride) sums[t] += sums[t + stride];
        __syncthreads();
    }
    if (t < 32) add_last_warp(sums, t);
    if (t == 0) partials[blockIdx.x] = sums[0];
}

// reduce_shuffles: warps add up in registers; shared memory and one barrier join the warps' sums.
template <typename T>
__global__ void __launch_bounds__(THREADS)
reduce_shuffles(const T* __restrict__ values, T* __restrict__ partials, long long n) {
    __shared__ T sums[THREADS / 32];
    const int t = threadIdx.x;
    T sum = loaded_sum(values, n);
    for (int stride = 16; stride > 0; stride /= 2) sum += __shfl_down_sync(~0u, sum, stride);
    if (t % 32 == 0) sums[t / 32] = sum;
    __syncthreads();
    if (t >= 32) return;
    sum = t < THREADS / 32 ? sums[t] : T(0);
    for (int stride = THREADS / 64; stride > 0; stride /= 2) sum += __shfl_down_sync(~0u, sum, stride);
    if (t == 0) partials[blockIdx.x] = sum;
}

// ---- production ---------------------------------------------------------------------------------------------------

// A tile is ROWS × (THREADS × COUNT) values, with 16 bytes (or one longer value) per thread and row. Each column is
// reduced row by row; then the columns of a thread, the threads of a warp and the warps are joined, each by halving.
// kernels/classic/reduce/cpu.py does the same on the CPU, with the same bits.
template <typename T>
struct Columns {
    static constexpr int COUNT = sizeof(T) < 16 ? 16 / sizeof(T) : 1;
};

template <typename State>
__device__ inline State from_lane(const State& state, int distance) {
    constexpr int WORDS = (sizeof(State) + 3) / 4;
    union Bits {
        State state;
        unsigned word[WORDS];
        __device__ Bits() {}
    } bits;
    bits.state = state;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) bits.word[w] = __shfl_down_sync(~0u, bits.word[w], distance);
    return bits.state;
}

template <typename Operation, int COUNT>
__device__ inline typename Operation::State joined(typename Operation::State (&columns)[COUNT],
                                                   typename Operation::State* shared) {
    typedef typename Operation::State State;
    constexpr int WARPS = THREADS / 32;
#pragma unroll
    for (int half = COUNT / 2; half > 0; half /= 2)
#pragma unroll
        for (int c = 0; c < half; ++c) columns[c] = Operation::join(columns[c], columns[c + half]);
    State state = columns[0];
#pragma unroll
    for (int half = 16; half > 0; half /= 2) state = Operation::join(state, from_lane(state, half));
    __syncthreads();  // the previous tile's states have been read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = state;
    __syncthreads();
    if (threadIdx.x < WARPS) state = shared[threadIdx.x];
    if (threadIdx.x < 32) {
#pragma unroll
        for (int half = WARPS / 2; half > 0; half /= 2) state = Operation::join(state, from_lane(state, half));
    }
    return state;
}

// reduce_tiles: a grid that fills the device strides over the tiles. The bits do not depend on which block takes a tile.
// `aligned`: whether values can be loaded 16 bytes at a time.
template <typename Operation>
__global__ void __launch_bounds__(THREADS, Operation::BLOCKS)
reduce_tiles(const typename Operation::Value* __restrict__ values, typename Operation::State* __restrict__ partials,
             long long n, int aligned) {
    typedef typename Operation::Value Value;
    typedef typename Operation::State State;
    constexpr int COUNT = Columns<Value>::COUNT, ROW = THREADS * COUNT, TILE = ROWS * ROW;
    constexpr int PER_WORD = Operation::PER_WORD, COLUMNS = COUNT / PER_WORD,
        AT_ONCE = COLUMNS > 8 ? 2 : COLUMNS > 4 ? 4 : 8;
    struct alignas(sizeof(Value) < 16 ? 16 : alignof(Value)) Vector {
        typename Operation::Loaded at[COLUMNS];
    };
    __shared__ State shared[THREADS / 32];
    const long long tiles = (n + TILE - 1) / TILE;
    for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const long long first = tile * TILE + threadIdx.x * COUNT;
        typename Operation::Column columns[COLUMNS];
        State states[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) columns[c] = Operation::start();
        if (aligned && (tile + 1) * TILE <= n) {
#pragma unroll 1
            for (int row = 0; row < ROWS; row += AT_ONCE) {
                Vector loaded[AT_ONCE];
#pragma unroll
                for (int r = 0; r < AT_ONCE; ++r)
                    loaded[r] = *reinterpret_cast<const Vector*>(values + first + (row + r) * ROW);
#pragma unroll
                for (int r = 0; r < AT_ONCE; ++r)
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) {
                        const typename Operation::Loaded each = loaded[r].at[c];
                        if constexpr (PER_WORD > 1) columns[c] = Operation::add_word(columns[c], each);
                        else columns[c] = Operation::add(columns[c], each, row + r);
                    }
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) states[c] = Operation::state(columns[c], ROWS, first + c, ROW);
        } else {
#pragma unroll 1
            for (int row = 0; row < ROWS; ++row)
#pragma unroll
                for (int c = 0; c < COUNT; ++c) {
                    const long long i = first + row * ROW + c;
                    if (i < n) columns[c / PER_WORD] = Operation::add(columns[c / PER_WORD], values[i], row);
                }
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const long long left = n - first - c * PER_WORD;
                const int rows = left <= 0 ? 0 : static_cast<int>(min((left + ROW - 1) / ROW,
                    static_cast<long long>(ROWS)));
                states[c] = rows ? Operation::state(columns[c], rows, first + c, ROW) : Operation::none();
            }
        }
        const State state = joined<Operation>(states, shared);
        if (threadIdx.x == 0) partials[tile] = state;
    }
}

// finish_moments: (mean, variance) of one state; `ddof` is subtracted from the count.
__global__ void finish_moments(const MomentsState* __restrict__ state, double* __restrict__ result, double ddof) {
    result[0] = state->mean;
    result[1] = state->squares / (state->count - ddof);
}
