// A thread, or some lanes of a warp, a row of a CSR matrix. Floor: a value, a column and a row's start and result once.
#pragma once

constexpr int THREADS = 256;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int NONE = -1;  // the column where there is nothing

// What is read once is the first to leave the caches, so that x stays.
template <typename T>
__device__ inline T read_once(const T* at) { return __ldcs(at); }

// An address worked out here and now: else the compiler does it again before each read from it that is conditional.
template <typename T>
__device__ inline const T* settled(const T* at) {
    asm("" : "+l"(at));
    return at;
}

// csr_thread: one thread per row. Neighbouring threads read places a row apart, and a warp waits for its longest row.
template <typename Value, typename Offset>
__global__ void __launch_bounds__(THREADS)
csr_thread(const Value* __restrict__ values, const int* __restrict__ columns, const Offset* __restrict__ starts,
           const Value* __restrict__ x, Value* __restrict__ y, int rows) {
    const long long row = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (row >= rows) return;
    Value sum = 0;
    for (Offset i = starts[row]; i < starts[row + 1]; ++i) sum += values[i] * x[columns[i]];
    y[row] = sum;
}

// csr_lanes: LANES neighbouring lanes a row, which read neighbouring nonzeros, BATCH each before the first is used, so that
// memory has enough to do. <32, 1> is the classic warp a row: rows shorter than that leave lanes idle, so in <…, 4> the
// number of lanes follows the rows' mean length. Sectors that two rows share wait in L1: no read_once here (H200: 12 %).
template <typename Value, typename Offset, int LANES, int BATCH>
__global__ void __launch_bounds__(THREADS)
csr_lanes(const Value* __restrict__ values, const int* __restrict__ columns, const Offset* __restrict__ starts,
          const Value* __restrict__ x, Value* __restrict__ y, int rows) {
    const long long row = (blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x) / LANES;
    const bool exists = row < rows;
    const Offset begin = exists ? starts[row] : 0, end = exists ? starts[row + 1] : 0;
    Value sum = 0;
    for (Offset i = begin + static_cast<Offset>(threadIdx.x % LANES); i < end; i += LANES * BATCH) {
        const Value* my_values = settled(values + i);
        const int* my_columns = settled(columns + i);
        const Offset left = end - i;
        Value value[BATCH];
        int column[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            value[b] = b * LANES < left ? my_values[b * LANES] : Value(0);
            column[b] = b * LANES < left ? my_columns[b * LANES] : NONE;
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
            if (column[b] != NONE) sum += value[b] * x[column[b]];
    }
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2) sum += __shfl_down_sync(ALL_LANES, sum, apart, LANES);
    if (exists && threadIdx.x % LANES == 0) y[row] = sum;
}
