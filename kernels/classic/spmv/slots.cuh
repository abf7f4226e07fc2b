// Formats in which threads with neighbouring rows read neighbouring elements.
#pragma once

#include "rows.cuh"

// ell: one thread per row, slot by slot, eight slots in flight. Each slot is contiguous over all rows. Rows shorter than the
// longest are padded with column NONE, which is also read.
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

// jds: rows sorted by length, one thread per row: a warp's rows have about equal length, so lanes do not wait.
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

// jds_transposed: the first nonzeros of all rows, then the second nonzeros of the rows that have one, …: no padding, and
// coalesced reads. `starts` are those of the diagonals.
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

// coo_atomic: one thread per nonzero, in any order. All threads have equal work, but every nonzero is an atomic addition to
// y (initially zero), and the order of additions, and so the last bits, change from run to run.
template <typename Value>
__global__ void __launch_bounds__(THREADS)
coo_atomic(const Value* __restrict__ values, const int* __restrict__ rows, const int* __restrict__ columns,
           const Value* __restrict__ x, Value* y, long long nonzeros) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i < nonzeros) atomicAdd(y + rows[i], values[i] * x[columns[i]]);
}
