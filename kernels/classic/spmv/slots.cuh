// Matrices stored so that neighbouring threads, which have neighbouring rows, read neighbouring places.
#pragma once

#include "rows.cuh"

// ell: one thread per row, slot by slot, each slot of all rows side by side, eight slots in flight at a time. Rows shorter than
// the longest are filled up with column NONE, which is read all the same.
template <typename Value>
__global__ void __launch_bounds__(THREADS)
ell(const Value* __restrict__ values, const int* __restrict__ columns, const Value* __restrict__ x, Value* __restrict__ y,
    int rows, int slots) {
    const long long row = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (row >= rows) return;
    constexpr int BATCH = 8;
    Value sum = 0;
    for (int slot = 0; slot < slots; slot += BATCH) {
        Value value[BATCH];
        int column[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const long long i = (slot + b) * static_cast<long long>(rows) + row;
            value[b] = slot + b < slots ? read_once(values + i) : Value(0);
            column[b] = slot + b < slots ? read_once(columns + i) : NONE;
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
            if (column[b] != NONE) sum += value[b] * x[column[b]];
    }
    y[row] = sum;
}

// jds: rows sorted by length, one thread per row: a warp's rows are about as long, so that none waits for another.
template <typename Value>
__global__ void __launch_bounds__(THREADS)
jds(const Value* __restrict__ values, const int* __restrict__ columns, const long long* __restrict__ starts,
    const int* __restrict__ order, const Value* __restrict__ x, Value* __restrict__ y, int rows) {
    const long long place = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (place >= rows) return;
    Value sum = 0;
    for (long long i = starts[place]; i < starts[place + 1]; ++i) sum += values[i] * x[columns[i]];
    y[order[place]] = sum;
}

// jds_transposed: the first nonzeros of all rows side by side, then the second … of those that have one: no filling, and
// neighbouring threads read neighbours. `starts` are those of the diagonals.
template <typename Value>
__global__ void __launch_bounds__(THREADS)
jds_transposed(const Value* __restrict__ values, const int* __restrict__ columns, const long long* __restrict__ starts,
               const int* __restrict__ order, const Value* __restrict__ x, Value* __restrict__ y, int rows, int diagonals) {
    const long long place = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (place >= rows) return;
    Value sum = 0;
    long long start = starts[0];
    for (int d = 0; d < diagonals; ++d) {
        const long long next = starts[d + 1], i = start + place;
        if (i >= next) break;
        sum += read_once(values + i) * x[read_once(columns + i)];
        start = next;
    }
    y[order[place]] = sum;
}

// coo_atomic: one thread per nonzero, in any order. All threads have the same work, but every nonzero is an atomic addition to
// y (which begins as zeros), and the order of additions, so the last bits, change from run to run.
template <typename Value>
__global__ void __launch_bounds__(THREADS)
coo_atomic(const Value* __restrict__ values, const int* __restrict__ rows, const int* __restrict__ columns,
           const Value* __restrict__ x, Value* y, long long nonzeros) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i < nonzeros) atomicAdd(y + rows[i], values[i] * x[columns[i]]);
}
