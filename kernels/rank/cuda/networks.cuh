// Networks of compare-exchanges over arrays of registers. Part of rank.cu.
//
// What a caller does not use of a result is not computed: the compiler drops the exchanges that only lead there, and half
// of those of which one end is not used. Source: Batcher, "Sorting networks and their applications" (1968).
#pragma once

// Two samples of 16 bits side by side, each compared with the one in the same half.
struct Two {
    unsigned bits;
};
__device__ inline Two low(Two a, Two b) { return {__vminu2(a.bits, b.bits)}; }
__device__ inline Two high(Two a, Two b) { return {__vmaxu2(a.bits, b.bits)}; }

// One key of 32 bits.
struct One {
    unsigned bits;
};
__device__ inline One low(One a, One b) { return {min(a.bits, b.bits)}; }
__device__ inline One high(One a, One b) { return {max(a.bits, b.bits)}; }

template <typename Key>
__device__ inline void exchange(Key& a, Key& b) {
    const Key lower = low(a, b);
    b = high(a, b);
    a = lower;
}

constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

// Sorts, ascending.
template <int N, typename Key>
__device__ inline void sort(Key (&x)[N]) {
    constexpr int WHOLE = power_of_two(N);
#pragma unroll
    for (int run = 1; run < WHOLE; run *= 2)
#pragma unroll
        for (int apart = run; apart >= 1; apart /= 2)
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const int j = i + apart;
                // The places i that this step compares with i + apart, within one pair of runs.
                if (j < N && (i - apart % run + 2 * apart) / apart % 2 == 0 && i >= apart % run
                    && i / (2 * run) == j / (2 * run))
                    exchange(x[i], x[j]);
            }
}

// Merges two ascending arrays, of any lengths, and keeps the places FROM … FROM + KEPT - 1.
template <int FROM, int KEPT, int A, int B, typename Key>
__device__ inline void merge(const Key (&a)[A], const Key (&b)[B], Key (&kept)[KEPT]) {
    static_assert(FROM >= 0 && FROM + KEPT <= A + B, "");
    // Both halves of a network of 2 HALF places; what is missing below a and above b would stay where it is.
    constexpr int HALF = power_of_two(A > B ? A : B), BELOW = HALF - A;
    Key x[A + B];
#pragma unroll
    for (int i = 0; i < A; ++i) x[i] = a[i];
#pragma unroll
    for (int i = 0; i < B; ++i) x[A + i] = b[i];
#pragma unroll
    for (int i = 0; i < A; ++i)
        if (i + HALF < A + B) exchange(x[i], x[i + HALF]);
#pragma unroll
    for (int apart = HALF / 2; apart >= 1; apart /= 2)
#pragma unroll
        for (int i = 0; i < A + B; ++i) {
            const int j = i + apart, place = i + BELOW;
            if (j < A + B && place / apart % 2 == 1) exchange(x[i], x[j]);
        }
#pragma unroll
    for (int i = 0; i < KEPT; ++i) kept[i] = x[FROM + i];
}

// The sample of a rank, from 0, among those of two ascending arrays: of all ways to take RANK + 1 from the front of both,
// the one whose last is smallest.
template <int RANK, int A, int B, typename Key>
__device__ inline Key ranked_of(const Key (&a)[A], const Key (&b)[B]) {
    static_assert(RANK >= 0 && RANK < A + B, "");
    constexpr int LEAST = RANK + 1 > B ? RANK + 1 - B : 0, MOST = RANK + 1 < A ? RANK + 1 : A;
    Key found;
#pragma unroll
    for (int i = LEAST; i <= MOST; ++i) {
        const int j = RANK + 1 - i;
        const Key last = i == 0 ? b[j - 1] : j == 0 ? a[i - 1] : high(a[i == 0 ? 0 : i - 1], b[j == 0 ? 0 : j - 1]);
        found = i == LEAST ? last : low(found, last);
    }
    return found;
}
