// Segmented sums by row, and the sums of rows that several blocks or warps share.
#pragma once

#include "rows.cuh"

// The inclusive segmented sum over a warp; `begins`: whether a segment begins at this lane.
template <typename Value>
__device__ inline Value segment_sum(Value value, bool begins) {
    const int lane = threadIdx.x % 32;
    const unsigned first = __ballot_sync(ALL_LANES, begins) & (0xffffffffu >> (31 - lane));
    const int since = lane - (first ? 31 - __clz(first) : 0);  // lanes of the segment before this one
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const Value other = __shfl_up_sync(ALL_LANES, value, apart);
        if (since >= apart) value += other;
    }
    return value;
}

// coo_segments: nonzeros sorted by rows, CHUNK per warp. A row that begins and ends inside is added to y at once, since no
// other warp has it; the first and the last may extend further and become carries. No atomics: the same bits every time.
template <typename Value>
__global__ void __launch_bounds__(THREADS)
coo_segments(const Value* __restrict__ values, const int* __restrict__ rows, const int* __restrict__ columns,
             const Value* __restrict__ x, Value* y, long long nonzeros, int* carry_rows, Value* carries) {
    constexpr int CHUNK = 512;
    const long long warp = (blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x) / 32;
    const long long begin = warp * CHUNK;
    if (begin >= nonzeros) return;
    const int lane = threadIdx.x % 32, count = static_cast<int>(min(nonzeros - begin, static_cast<long long>(CHUNK)));
    const int first_row = rows[begin];
    int open_row = first_row;  // the current row, and its sum so far
    Value open = 0, of_first = 0;
    for (int done = 0; done < count; done += 32) {
        const bool exists = done + lane < count;
        const long long i = begin + done + lane;
        const int last = min(count - done, 32) - 1;
        const int mine = exists ? read_once(rows + i) : 0x7fffffff;
        const Value product = exists ? read_once(values + i) * x[read_once(columns + i)] : Value(0);
        int before = __shfl_up_sync(ALL_LANES, mine, 1);
        if (lane == 0) before = open_row;
        const int begun = __ballot_sync(ALL_LANES, mine != before) & (0xffffffffu >> (31 - lane));
        Value sum = segment_sum(product, mine != before);
        if (begun == 0) sum += open;
        // The current row ends if the first lane begins another.
        if (lane == 0 && mine != before) {
            if (open_row == first_row) of_first = open;
            else y[open_row] += open;
        }
        const int after = __shfl_down_sync(ALL_LANES, mine, 1);
        if (lane < last && mine != after) {
            if (mine == first_row) of_first = sum;
            else y[mine] += sum;
        }
        open_row = __shfl_sync(ALL_LANES, mine, last);
        open = __shfl_sync(ALL_LANES, sum, last);
    }
    // If the first row has ended, one lane holds its sum.
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) of_first += __shfl_xor_sync(ALL_LANES, of_first, apart);
    if (lane != 0) return;
    carry_rows[2 * warp] = first_row;
    carries[2 * warp] = of_first;
    carry_rows[2 * warp + 1] = open_row;
    carries[2 * warp + 1] = open;
}

// add_carries: adds the carries, sorted by rows, to y. The thread at a row's first carry adds all of the row; if there are
// many, its warp does.
template <typename Value>
__global__ void __launch_bounds__(THREADS)
add_carries(const int* __restrict__ carry_rows, const Value* __restrict__ carries, Value* y, int rows, long long count) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    const int lane = threadIdx.x % 32, row = i < count ? carry_rows[i] : rows;
    const bool heads = row < rows && (i == 0 || carry_rows[i - 1] != row);
    long long end = i + 1;
    if (heads && end < count && carry_rows[end] == row) {
        long long high = count;  // bisection for the first carry of another row
        while (end < high) {
            const long long middle = (end + high) / 2;
            if (carry_rows[middle] == row) end = middle + 1;
            else high = middle;
        }
    }
    const bool many = heads && end - i > 8;
    if (heads && !many) {
        Value sum = 0;
        for (long long j = i; j < end; ++j) sum += carries[j];
        y[row] += sum;
    }
    for (unsigned left = __ballot_sync(ALL_LANES, many); left; left &= left - 1) {
        const int head = __ffs(left) - 1;
        const long long from = __shfl_sync(ALL_LANES, i, head), to = __shfl_sync(ALL_LANES, end, head);
        Value sum = 0;
        for (long long j = from + lane; j < to; j += 32) sum += carries[j];
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_down_sync(ALL_LANES, sum, apart);
        sum = __shfl_sync(ALL_LANES, sum, 0);
        if (lane == head) y[row] += sum;
    }
}
