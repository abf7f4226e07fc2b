// One thread, or some lanes of a warp, per row of a CSR matrix. Floor: values, columns, row starts and results once.
#pragma once

constexpr int THREADS = 256;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int NONE = -1;  // the column of an empty slot

// Reads data that is used once with an evict-first hint, so that x stays in the caches.
template <typename T>
__device__ inline T read_once(const T* at) { return __ldcs(at); }

// An address that is computed here: otherwise the compiler computes it again before each conditional read.
template <typename T>
__device__ inline const T* materialized(const T* at) {
    asm("" : "+l"(at));
    return at;
}

// csr_thread: one thread per row. Reads of neighbouring threads are a row apart, and a warp waits for its longest row.
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

// csr_lanes: LANES lanes per row read neighbouring nonzeros, BATCH each before the first is used, so that enough loads are
// in flight. <32, 1> is the classic warp per row: shorter rows leave lanes idle, so in <…, 4> the number of lanes follows
// the mean row length. Sectors shared by two rows stay in L1, so read_once is not used (H200: 12 %).
template <typename Value, typename Offset, int LANES, int BATCH>
__global__ void __launch_bounds__(THREADS)
csr_lanes(const Value* __restrict__ values, const int* __restrict__ columns, const Offset* __restrict__ starts,
          const Value* __restrict__ x, Value* __restrict__ y, int rows) {
    const long long row = (blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x) / LANES;
    const bool exists = row < rows;
    const Offset begin = exists ? starts[row] : 0, end = exists ? starts[row + 1] : 0;
    Value sum = 0;
    for (Offset i = begin + static_cast<Offset>(threadIdx.x % LANES); i < end; i += LANES * BATCH) {
        const Value* my_values = materialized(values + i);
        const int* my_columns = materialized(columns + i);
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
